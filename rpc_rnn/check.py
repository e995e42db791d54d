"""The oracle of main.py: the program's own training, held against one process.

`record` runs the program's `run_worker` for two short epochs in its own processes, in which the
trainer keeps what it reads, its losses, and after every step the gradients and weights, also those
of the tables on the server. `single_process` knows only the flags and the first weights. It has its
own columns, its own loop, and PyTorch's ordinary autograd and optimizers.

Both compute in float64, so that a mistake cannot hide behind rounding. Dropout is matched: the
server and the trainer draw from seeded generators, and so do the two `Draws` here.
"""

import math
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

from common.launch import launch
from common.oracle import Comparison, Draws, verdict
from common.recorder import Recorder, named_gradients, named_weights
from common.session import device_for

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from rpc_rnn import data
from rpc_rnn import main as tutorial
from rpc_rnn.main import role_name

EPOCHS = 2
DROPOUT = 0.25  # where --dropout is 0, which would leave no mark
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
PARTS = ("table", "LSTM", "decoder")
FIRST = 1000  # tokens that are drawn again
OfParts = dict[str, dict[str, torch.Tensor]]  # of each part, tensors by name
ROUND_TRIPS = 7  # 2 forward, 3 backward, the step, the context's end


# --- one process


def single_process(args: Namespace, weights: OfParts, language: data.Language) -> dict:
    """Train as the lesson should have done.

    Args:
        args: the flags.
        weights: the first ones.
        language: the tokens.

    Returns:
        What a `Seen` has: lists of dicts, `steps` of each epoch, `evaluations` before the first
        and after each. `metrics`. `sample`: the text.
    """
    n_columns = args.batch_size
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
        """Read all columns, a piece at a time; the mean loss of a token."""
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
            entry = {"data": inputs, "target": targets.flatten(), "hidden": before.cpu(),
                     "loss": loss.item()}
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


# --- what is held against it


class Seen:
    """Keeps what the trainer does.

    `initial`: its first weights. `entries`: a dict for each piece of text, of the training and of
    the validation: the tokens read, the state before them, the targets, the loss, and in training
    the gradients and the weights after the step. `seconds`: of its clock, on which a backward takes
    1, and 1000 what is between two epochs.
    """

    def __init__(self) -> None:
        self.model, self.initial, self.entries, self.seconds = None, None, [], 0

    def begin(self, model: tutorial.RNNModel) -> None:
        """Look at a model that has just been made."""
        self.model = model
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
        """Return the `state_of` the LSTM here, and of the tables on the server."""
        states = {"LSTM": state_of(self.model.rnn, context_id)}
        tables = ("table", self.model.emb_table_rref), ("decoder", self.model.decoder_rref)
        for part, rref in tables:
            states[part] = rpc.rpc_sync(rref.owner(), state_there, args=(rref, context_id))
        return {what: {part: state[what] for part, state in states.items()}
                for what in ("gradients", "weights")}


def state_of(module: nn.Module, context_id: int | None) -> OfParts:
    """Copy the "gradients", which are in the context, and the "weights" of a part."""
    return {"gradients": named_gradients(module, context_id), "weights": named_weights(module)}


def state_there(part_rref: rpc.RRef, context_id: int | None) -> OfParts:
    """Return, on the server, the `state_of` a part."""
    return state_of(part_rref.local_value(), context_id)


def shortened(language: data.Language, args: Namespace) -> data.Language:
    """Return the first tokens of a language: four steps an epoch, and two of validation.

    The last ones are shorter, and a few tokens fill no row.
    """
    n_columns = args.batch_size
    last = args.bptt // 2 + 1
    train, val = ((n * args.bptt + last + 1) * n_columns + n_columns // 2 for n in (3, 1))
    return language._replace(train=language.train[:train], val=language.val[:val])


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; the trainer returns the findings."""
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.enabled = False  # its LSTM draws dropout from a sequence of its own
    seen = Seen()
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

        @recorder.around(tutorial, "load_language")
        def load_language(load, args):
            return shortened(load(args), args)

        @recorder.around(tutorial.RNNModel, "__init__")
        def make(init, model, *sizes):
            init(model, *sizes)
            seen.begin(model)

        metrics = tutorial.run_worker(rank, world_size, args)
    return compare(seen, metrics, args) if rank == 1 else None


def compare(seen: Seen, metrics: dict, args: Namespace) -> dict:
    """Hold what the trainer has done, and the metrics, against `single_process`."""
    found, language = Comparison(f"{args.world_size} processes"), data.load_language(args)
    if hold_first_weights(found, seen.initial, language.ntoken, args):
        alone = single_process(args, seen.initial, shortened(language, args))
        if args.resume:
            # It begins with the second epoch; the loss before the first one is in the checkpoint.
            del alone["steps"][: EPOCHS - 1], alone["evaluations"][:EPOCHS]
        hold_training(found, seen, alone["steps"])
        hold_reading(found, "validation", recorded(seen, training=False),
                     sum(alone["evaluations"], []), "piece")
        hold_metrics(found, metrics, alone, language, args)
    return found.as_dict()


def hold_first_weights(found: Comparison, weights: OfParts, ntoken: int, args: Namespace) -> bool:
    """Hold the weights before the first step against those that the seed gives.

    Returns:
        Whether they have the sizes that the flags give.
    """
    torch.manual_seed(3 * args.seed + 1)
    drawn = {"LSTM": dict(nn.LSTM(args.ninp, args.nhid, args.nlayers).named_parameters()),
             "table": {"encoder.weight": uniform((ntoken, args.ninp), 3 * args.seed)},
             "decoder": {"decoder.weight": uniform((ntoken, args.nhid), 3 * args.seed + 2),
                         "decoder.bias": torch.zeros(ntoken)}}
    difference = found.equal(
        "first weights, drawn", [weights], [drawn],
        "the seed gives them; those of table and decoder between -0.1 and 0.1", "model")
    return difference < math.inf


def uniform(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Draw numbers between -0.1 and 0.1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)


def hold_training(found: Comparison, seen: Seen, epochs: list[list[dict]]) -> None:
    """Hold every step: what it reads, its losses, the gradients and weights that come of it."""
    steps, expected = recorded(seen, training=True), sum(epochs, [])
    hold_reading(found, "training", steps, expected, "step")
    history = sum(step["with history"] for step in steps)
    found.holds("training, states without history", history == 0,
                f"{history} of {len(steps)} states carry the graph of the step before")
    for what, title in (("gradients", "gradients in the context"),
                        ("weights", "weights after each step")):
        for part in PARTS:
            found.close(f"{title}, {part}",
                        [step.get(what, {}).get(part, {}) for step in steps],
                        [step[what][part] for step in expected],
                        TOLERANCE, BECAUSE)


def recorded(seen: Seen, training: bool) -> list[dict]:
    """Return the entry of each finished step or piece of validation text."""
    return [entry for entry in seen.entries if "loss" in entry and entry["training"] == training]


def hold_reading(found: Comparison, title: str, pieces: list[dict], expected: list[dict],
                 unit: str) -> None:
    """Hold the tokens of each piece of text, the state before it, and its loss."""
    def ours(key):
        return [piece.get(key, []) for piece in pieces]

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
                [[ROUND_TRIPS, 1]],
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
    """Hold short trainings against a single process.

    Returns:
        `{what: difference}`, None where nothing is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.epochs = EPOCHS
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
