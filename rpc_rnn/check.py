"""The oracle of main.py and its variants: the program's own training, held against one process.

`record` runs the program's `run_worker` for two short epochs in its own processes, in which each
trainer keeps what it reads, its losses, and after every step its gradients and weights; the first
one also those of the tables on the server. `single_process` knows only the flags and the first
weights. It has its own columns, its own loop, and PyTorch's ordinary autograd and optimizers.

Both compute in float64, so that a mistake cannot hide behind rounding. Dropout is matched: the
server and the trainer draw from seeded generators, and so do the two `Draws` here. With several
trainers the server draws in the order in which they call: dropout lets all pass, and what is held
is how often each process has called it, and with what probability.
"""

import importlib
import math
import tempfile
import time
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, Draws, verdict
from common.recorder import Barriers, Recorder, gathered, named_gradients, named_weights
from common.session import device_for
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import data, saving
from rpc_rnn import main as tutorial
from rpc_rnn.main import role_name

EPOCHS = 2
DROPOUT = 0.25  # where --dropout is 0, which would leave no mark
STEP_S = 0.02  # that the first trainer waits before its step: who does not wait sees old tables
PART_S = 0.5  # that it takes to make a table: meanwhile, another trainer asks for it
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
PARTS = ("table", "LSTM", "decoder")
FIRST = 1000  # tokens that are drawn again
OfParts = dict[str, dict[str, torch.Tensor]]  # of each part, tensors by name
# 2 forward, 3 backward, the step, the context's end; with several trainers 2 to average. In
# prefetch.py, the step brings and takes the embeddings.
ROUND_TRIPS = {"main": 7, "several_trainers": 9, "prefetch": 5}
dropped = []  # in this process: the probability of each dropout, where it lets all pass


# --- one process


def single_process(args: Namespace, weights: OfParts, language: data.Language) -> dict:
    """Train as the lesson should have done.

    Args:
        args: the flags.
        weights: the first ones.
        language: the tokens.

    Returns:
        What a `Seen` has, with an entry for each trainer: lists of dicts, `steps` of each epoch,
        `evaluations` before the first and after each. `metrics`. `sample`: the text.
    """
    names, n_columns = trainer_names(args), args.batch_size * (args.world_size - 1)
    if len(names) > 1:
        args = Namespace(**{**vars(args), "dropout": 0.0})
    device = device_for(args.device)
    model = WholeModel(language.ntoken, args)
    for part, tensors in weights.items():
        getattr(model, part).load_state_dict(tensors)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps, evaluations = [], []

    def loss_of(scores, targets):
        return nn.functional.cross_entropy(scores.reshape(-1, language.ntoken),
                                           targets.reshape(-1).to(device))

    def read(tokens, training):
        """Read all columns of the global batch, a piece at a time; the mean loss of a token."""
        model.train(training)
        entries = []
        (steps if training else evaluations).append(entries)
        length = len(tokens) // n_columns
        text = torch.stack([tokens[i * length : (i + 1) * length] for i in range(n_columns)], dim=1)
        hidden = torch.zeros(2, args.nlayers, n_columns, args.nhid, device=device)
        total = 0.0
        for start in range(0, length - 1, args.bptt):
            end = min(start + args.bptt, length - 1)
            inputs, targets = text[start:end], text[start + 1 : end + 1]
            before = hidden.detach()
            scores, hidden = model(inputs.to(device), before)
            loss = loss_of(scores, targets)
            entry = {"data": {}, "target": {}, "hidden": {}, "loss": {}}
            for i, name in enumerate(names):
                own = slice(i * args.batch_size, (i + 1) * args.batch_size)
                entry["data"][name] = inputs[:, own]
                entry["target"][name] = targets[:, own].flatten()
                entry["hidden"][name] = before[:, :, own].cpu()
                entry["loss"][name] = loss_of(scores[:, own], targets[:, own]).item()
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                entry |= {"gradients": model.parts(named_gradients),
                          "weights": model.parts(named_weights)}
            entries.append(entry)
            total += loss.item() * (end - start)
        return total / (length - 1)

    with torch.no_grad():
        metrics = {"initial_val_loss": read(language.val, training=False), "epochs": []}
    for epoch in range(args.epochs):
        seed = 1_000_000 * args.seed + 1000 * epoch
        model.trainer.seed(seed + 2)
        model.server.seed(seed + 3)
        loss = read(language.train, training=True)
        with torch.no_grad():
            val_loss = read(language.val, training=False)
        metrics["epochs"].append({"loss": loss, "val_loss": val_loss})
    metrics["perplexity"] = math.exp(val_loss)
    sample = write(model, language, args) if args.corpus else None
    return {"steps": steps, "evaluations": evaluations, "metrics": metrics, "sample": sample}


class WholeModel(nn.Module):
    """Has embedding, LSTM and decoder in one process, with the dropout of the two processes."""

    def __init__(self, ntoken: int, args: Namespace) -> None:
        super().__init__()
        between_layers = args.dropout if args.nlayers > 1 else 0
        self.table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, args.ninp)})
        self.LSTM = nn.LSTM(args.ninp, args.nhid, args.nlayers, dropout=between_layers)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(args.nhid, ntoken)})
        self.drop = nn.Dropout(args.dropout)
        self.server, self.trainer = (Draws(device_for(args.device)) for _ in range(2))

    def forward(self, tokens: torch.Tensor,
                hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute scores (T, B, ntoken) and the next state (2, nlayers, B, nhid)."""
        with self.server.drawing():
            embeddings = self.drop(self.table["encoder"](tokens))
        with self.trainer.drawing():
            states, hidden = self.LSTM(embeddings, (hidden[0], hidden[1]))
        with self.server.drawing():
            return self.decoder["decoder"](self.drop(states)), torch.stack(hidden)

    def parts(self, named: Callable[[nn.Module], dict[str, torch.Tensor]]) -> OfParts:
        """Return `named` of each part: `named_weights` or `named_gradients`."""
        return {part: named(getattr(self, part)) for part in PARTS}


def write(model: WholeModel, language: data.Language, args: Namespace) -> list[int]:
    """Write a text with the model; return the vocabulary's numbers of its characters."""
    model.eval()
    model.trainer.seed(args.seed)
    device, token, sample = device_for(args.device), language.val[0], []
    hidden = torch.zeros(2, args.nlayers, 1, args.nhid, device=device)
    with torch.no_grad():
        for _ in range(200):
            scores, hidden = model(token.view(1, 1).to(device), hidden)
            with model.trainer.drawing():
                token = torch.multinomial(scores.flatten().softmax(dim=0).cpu(), 1)
            sample.append(int(token))
    return sample


def trainer_names(args: Namespace) -> list[str]:
    """Return the names of ranks 1, 2, ..."""
    return [role_name(rank, args.world_size) for rank in range(1, args.world_size)]


# --- what is held against it


class Seen:
    """Keeps what the trainer of this process does.

    `initial`: its first weights. `entries`: a dict for each piece of text, of the training and of
    the validation: the tokens read, the state before them, the targets, the loss, and in training
    the gradients and the weights after the step. `together`: whether all trainers had loaded a
    checkpoint before this one went on. `seconds`: of its clock, on which a backward takes 1, and
    1000 what is between two epochs.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.model, self.initial, self.entries = rank, None, None, []
        self.together, self.seconds = False, 0

    def begin(self, model: tutorial.RNNModel) -> None:
        """Look at a model that has just been made."""
        self.model = weakref.proxy(model)  # a DDP must not outlive its group
        self.initial = self.look()["weights"]

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        """Begin an entry where the model reads a piece of text."""
        if isinstance(module, tutorial.RNNModel):
            tokens, hidden = inputs
            self.entries.append({
                "training": torch.is_grad_enabled(), "data": tokens.clone(),
                "hidden": torch.stack([state.detach().cpu() for state in hidden]),
                "with history": any(state.requires_grad for state in hidden)})

    def after_forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Add the targets and the loss."""
        if isinstance(module, nn.CrossEntropyLoss):
            self.entries[-1] |= {"target": inputs[1].cpu().flatten(), "loss": output.item()}

    def after_step(self, context_id: int, _: tuple[float, float]) -> None:
        """Add the gradients and the weights, while the context is there."""
        if self.entries:
            self.entries[-1] |= self.look(context_id)

    def look(self, context_id: int | None = None) -> dict[str, OfParts]:
        """Return the `state_of` the LSTM here, and for the first trainer of the tables."""
        states = {"LSTM": state_of(getattr(self.model.rnn, "module", self.model.rnn), context_id)}
        if self.rank == 1:
            tables = ("table", self.model.emb_table_rref), ("decoder", self.model.decoder_rref)
            for part, rref in tables:
                states[part] = rpc.rpc_sync(rref.owner(), state_there, args=(rref, context_id))
        return {what: {part: state[what] for part, state in states.items()}
                for what in ("gradients", "weights")}


def state_of(module: nn.Module, context_id: int | None) -> OfParts:
    """Copy the "gradients" and "weights" of a part.

    Gradients are in the context; with `prefetch.py`, those of the table are in `.grad`.
    """
    return {"gradients": named_gradients(module, context_id), "weights": named_weights(module)}


def state_there(part_rref: rpc.RRef, context_id: int | None) -> OfParts:
    """Return, on the server, the `state_of` a part."""
    return state_of(part_rref.local_value(), context_id)


def let_all_pass(recorder: Recorder) -> None:
    """Let dropout change nothing, and keep its probabilities in the training."""

    @recorder.around(nn.Dropout, "forward")
    def of_part(_, module, input):
        if module.training:
            dropped.append(module.p)
        return input

    @recorder.around(nn.LSTM, "forward")
    def between_layers(forward, module, *inputs):
        if module.training:
            dropped.append(module.dropout)
        with mock.patch.object(module, "dropout", 0.0):
            return forward(module, *inputs)


def dropped_there() -> list[float]:
    """Return, on the server, the probability of each dropout there."""
    return dropped


def shortened(language: data.Language, args: Namespace) -> data.Language:
    """Return the first tokens of a language: four steps an epoch, and two of validation.

    The last ones are shorter, and a few tokens fill no row.
    """
    n_columns = args.batch_size * (args.world_size - 1)
    last = args.bptt // 2 + 1
    train, val = ((n * args.bptt + last + 1) * n_columns + n_columns // 2 for n in (3, 1))
    return language._replace(train=language.train[:train], val=language.val[:val])


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program `args.program`, recorded; the first trainer returns the findings."""
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.enabled = False  # its LSTM draws dropout from a sequence of its own
    program, seen, everyone = importlib.import_module(args.program), Seen(rank), []
    with Recorder() as recorder:
        recorder.on_forward(seen.before_forward, seen.after_forward)
        recorder.on_context(after=seen.after_step)
        recorder.put(tutorial.results, "time", SimpleNamespace(perf_counter=lambda: seen.seconds))

        @recorder.around(tutorial.dist_autograd, "backward")
        def backward_in_a_second(original, *step):
            seen.seconds += 1
            original(*step)

        @recorder.around(tutorial.RNNModel, "set_mode")
        def set_mode_slowly(original, *place, **mode):
            seen.seconds += 1000
            original(*place, **mode)

        if world_size > 2:
            let_all_pass(recorder)

        for part in (tutorial.EmbeddingTable, tutorial.Decoder):
            @recorder.around(part, "__init__")
            def make_slowly(init, *place):
                time.sleep(PART_S)
                init(*place)

        @recorder.around(tutorial, "load_language")
        def load_language(load, args):
            return shortened(load(args), args)

        @recorder.around(tutorial, "run_trainer")
        def run_trainer(train, rank, world_size, args, model_class=tutorial.RNNModel, *how):
            @recorder.around(model_class, "__init__")
            def make(init, model, *sizes):
                init(model, *sizes)
                seen.begin(model)

            metrics = train(rank, world_size, args, model_class, *how)
            mine = {name: getattr(seen, name) for name in ("initial", "entries", "together")}
            mine["dropped"] = {"trainer": dropped, "server": rpc.rpc_sync("ps", dropped_there)}
            everyone.extend(gathered(mine) if dist.is_initialized() else [mine])
            return metrics

        barriers = Barriers(recorder)

        @recorder.around(saving, "restore")
        def restore(original, *place):
            restored = original(*place)
            seen.together = dist.is_initialized() and barriers.all_had_come()
            return restored

        @recorder.around(DistributedOptimizer, "step")
        def late_step(step, opt, context_id):
            if rank == 1 and world_size > 2:
                time.sleep(STEP_S)
            return step(opt, context_id)

        metrics = program.run_worker(rank, world_size, args)
    return compare(everyone, metrics, args) if rank == 1 else None


def compare(recordings: list[dict], metrics: dict, args: Namespace) -> dict:
    """Hold the recordings of all trainers, and the metrics, against `single_process`."""
    found, names = Comparison(f"{args.world_size} processes"), trainer_names(args)
    language, weights = data.load_language(args), recordings[0]["initial"]
    if hold_first_weights(found, recordings, names, language.ntoken, args):
        alone = single_process(args, weights, shortened(language, args))
        if args.resume and len(names) > 1:
            together = [recording["together"] for recording in recordings]
            found.holds("restored", all(together), "all trainers had loaded the checkpoint before "
                        f"one of them went on: {together}")
        if args.resume:
            # It begins with the second epoch; the loss before the first one is in the checkpoint.
            del alone["steps"][: EPOCHS - 1], alone["evaluations"][:EPOCHS]
        hold_training(found, recordings, names, alone["steps"])
        if len(names) > 1:
            hold_dropout(found, recordings, names, len(sum(alone["steps"], [])), args)
        hold_reading(found, "validation", recorded(recordings, names, training=False),
                     sum(alone["evaluations"], []), "piece")
        hold_metrics(found, metrics, alone, language, args)
    return found.as_dict()


def hold_first_weights(found: Comparison, recordings: list[dict], names: list[str],
                       ntoken: int, args: Namespace) -> bool:
    """Hold the weights before the first step: by the seed, and alike on all trainers.

    Returns:
        Whether they have the sizes that the flags give.
    """
    weights = recordings[0]["initial"]
    torch.manual_seed(3 * args.seed + 1)
    drawn = {"LSTM": dict(nn.LSTM(args.ninp, args.nhid, args.nlayers).named_parameters()),
             "table": {"encoder.weight": uniform((ntoken, args.ninp), 3 * args.seed)},
             "decoder": {"decoder.weight": uniform((ntoken, args.nhid), 3 * args.seed + 2),
                         "decoder.bias": torch.zeros(ntoken)}}
    difference = found.equal(
        "first weights, drawn", [weights], [drawn],
        "the seed gives them; those of table and decoder between -0.1 and 0.1", "model")
    if len(recordings) > 1:
        replicas = {name: recording["initial"]["LSTM"]
                    for name, recording in zip(names, recordings, strict=True)}
        found.equal("first weights, replicas", [replicas], [dict.fromkeys(names, weights["LSTM"])],
                    "DDP sends those of the first trainer to all", "model")
    return difference < math.inf


def uniform(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Draw numbers between -0.1 and 0.1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)


def hold_training(found: Comparison, recordings: list[dict], names: list[str],
                  epochs: list[list[dict]]) -> None:
    """Hold every step: what it reads, its losses, the gradients and weights that come of it."""
    steps, expected = recorded(recordings, names, training=True), sum(epochs, [])
    hold_reading(found, "training", steps, expected, "step")
    history = sum(entry["with history"] for step in steps for entry in step.values())
    found.holds("training, states without history", history == 0,
                f"{history} of {len(steps) * len(names)} states carry the graph of the step before")
    for what, title in (("gradients", "gradients in the context"),
                        ("weights", "weights after each step")):
        for part in PARTS:
            owners = names if part == "LSTM" else names[:1]  # only the first one fetches the tables
            found.close(f"{title}, {part}",
                        [{name: step[name].get(what, {}).get(part, {}) for name in owners}
                         for step in steps],
                        [{name: step[what][part] for name in owners} for step in expected],
                        TOLERANCE, BECAUSE)


def hold_dropout(found: Comparison, recordings: list[dict], names: list[str], n_steps: int,
                 args: Namespace) -> None:
    """Hold the calls of dropout: the LSTM's on each trainer, those of both parts on the server."""
    counted = {name: Counter(map(str, recording["dropped"]["trainer"]))
               for name, recording in zip(names, recordings, strict=True)}
    counted["ps"] = Counter(map(str, recordings[0]["dropped"]["server"]))
    expected = dict.fromkeys(names, n_steps) | {"ps": 2 * n_steps * len(names)}
    found.equal("training, dropout", [counted],
                [{name: {str(args.dropout): n} for name, n in expected.items()}],
                f"--dropout {args.dropout} in each of {n_steps} steps", "run")


def recorded(recordings: list[dict], names: list[str], training: bool) -> list[dict[str, dict]]:
    """Return the entry of each trainer, for each finished step or piece of validation text."""
    of_each = [[entry for entry in recording["entries"]
                if "loss" in entry and entry["training"] == training] for recording in recordings]
    return [dict(zip(names, entries, strict=True)) for entries in zip(*of_each, strict=False)]


def hold_reading(found: Comparison, title: str, pieces: list[dict[str, dict]],
                 expected: list[dict], unit: str) -> None:
    """Hold the tokens of each piece of text, the state before it, and its loss."""
    def ours(key):
        return [{name: entry.get(key, []) for name, entry in piece.items()} for piece in pieces]

    def theirs(key):
        return [piece[key] for piece in expected]

    for key, tokens in (("data", "tokens"), ("target", "targets")):
        found.equal(f"{title}, {tokens}", ours(key), theirs(key),
                    "the text in columns side by side, each target the next token", unit)
    for key, numbers in (("hidden", "state carried over"), ("loss", "loss")):
        found.close(f"{title}, {numbers}", ours(key), theirs(key), TOLERANCE, BECAUSE, unit)


def hold_metrics(found: Comparison, metrics: dict, alone: dict, language: data.Language,
                 args: Namespace) -> None:
    """Hold what else the run reports."""
    expected, once = alone["metrics"], ("initial_val_loss", "perplexity")
    found.close("metrics, losses of the epochs", metrics["epochs"], expected["epochs"], TOLERANCE,
                BECAUSE, "epoch")
    found.close("metrics, loss before and perplexity after", [{key: metrics[key] for key in once}],
                [{key: expected[key] for key in once}], TOLERANCE, BECAUSE, "run")
    found.equal("metrics, round trips and speed",
                [[metrics["rpc_round_trips_per_step"], metrics["steps_per_s"]]],
                [[ROUND_TRIPS[args.program.split(".")[1]], 1]],
                "RPCs of a step, which takes a second on the clock of the check", "run")
    if args.corpus:
        hold_text(found, metrics["sample"], alone["sample"], language, args)
    else:
        hold_floors(found, metrics, language, args)


def hold_text(found: Comparison, sample: str, expected: list[int], language: data.Language,
              args: Namespace) -> None:
    """Hold the corpus, and a text from the model."""
    tokens = [*language.train.tolist(), *language.val.tolist()]
    text = "".join(language.vocabulary[token] for token in tokens)
    found.holds("text", text == args.corpus.read_text(encoding="utf-8"),
                f"{len(text)} characters for training and validation, the corpus in order, each "
                "once")
    found.equal("sample", [[language.vocabulary.find(character) for character in sample]],
                [expected], "drawn from seeded generators", "text")


def hold_floors(found: Comparison, metrics: dict, language: data.Language, args: Namespace) -> None:
    """Hold the entropies of the synthetic language against its tokens."""
    rng, train = np.random.default_rng(args.seed), language.train
    chain = torch.from_numpy(rng.dirichlet([0.2] * 10, size=(10, 10)))
    surprise = -chain[train[:-2], train[1:-1], train[2:]].log().mean().item()
    pairs = torch.zeros(10, 10).index_put((train[:-1], train[1:]), torch.tensor(1.0),
                                          accumulate=True) / (len(train) - 1)
    with_one = (torch.special.entr(pairs).sum() - torch.special.entr(pairs.sum(dim=1)).sum()).item()
    # The standard error of such a mean over 200,000 tokens is 0.2%.
    for key, counted, how in (
            ("entropy_floor", surprise, "the chain's own surprise"),
            ("floor_without_memory", with_one, "the entropy of a token after one token")):
        found.holds(f"metrics, {key}", abs(metrics[key] / counted - 1) < 0.02,
                    f"{metrics[key]:.4f} nats; {how}, counted in {len(train)} tokens, is "
                    f"{counted:.4f}; 2% is allowed, 10 standard errors")
    parts = {"training": (train, args.seed + 1), "validation": (language.val, args.seed + 2)}
    found.equal("tokens", [{part: tokens[:FIRST].tolist() for part, (tokens, _) in parts.items()}],
                [{part: drawn(chain, seed) for part, (_, seed) in parts.items()}],
                f"the first {FIRST}, drawn from the seed", "language")


def drawn(chain: torch.Tensor, seed: int) -> list[int]:
    """Draw the first tokens of a chain by its probabilities (10, 10, 10)."""
    tokens = [0, 0]
    for number in np.random.default_rng(seed).random(FIRST):
        below = chain[tokens[-2], tokens[-1]].cumsum(0) <= number
        tokens.append(min(9, int(below.sum())))
    return tokens[2:]


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Hold short trainings of a program against a single process.

    Returns:
        `{what: difference}`, None where nothing is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.program, args.epochs = program.__name__, EPOCHS
    args.dropout, args.nlayers = args.dropout or DROPOUT, max(2, args.nlayers)
    local = args.rank is None and not dist.is_torchelastic_launched()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "run.pt") if args.checkpoint else None  # the user's is left alone
        runs = {"": {"resume": False}}
        if local and args.checkpoint:
            runs = {"stopped, ": {"resume": False, "epochs": EPOCHS - 1},
                    "resumed, ": {"resume": True}}
        compared = {title: launch(record, Namespace(**{**vars(args), "checkpoint": own, **flags}),
                                  role_name) for title, flags in runs.items()}
    if None in compared.values():
        return verdict(None)
    findings = [{**finding, "what": title + finding["what"]}
                for title, of_run in compared.items() for finding in of_run["findings"]]
    return verdict({**next(iter(compared.values())), "findings": findings})
