"""The oracle of `main.py --check`: the lesson's own training, held against a program of one process.

The lesson's `run_worker` trains two short epochs in its own processes while hooks record what each trainer reads, its
losses, and after every step all gradients and weights, also those on the server. `single_process` knows only the flags
and the first weights. It has its own columns, its own loop, and PyTorch's ordinary autograd and optimizers.

Both compute in float64, so that a mistake cannot hide behind rounding. Dropout is matched: the server and the trainer
draw from seeded generators, and so do the two `Stream`s here. A check of two processes is followed by one of three,
where two trainers share the tables. There dropout is off: the server draws in the order in which the trainers call.
"""

import contextlib
import copy
import itertools
import math
import tempfile
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common.launch import launch
from common.oracle import Comparison, verdict
from common.session import device_for
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import data
from rpc_rnn import main as lesson

EPOCHS = 2
DROPOUT = 0.25  # where --dropout is 0, which would leave no mark
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
EVALUATION_S = 0.5  # that each evaluation is made to last: the time of the training must not have it
STEP_S = 0.02  # that the first trainer waits before its step: who does not wait for it sees old tables
ROUND_TRIPS = {1: 7, 2: 9}  # 2 forward, 3 backward, the step, the context's end; with several trainers 2 to average


# --- the lesson's run, recorded


def shortened(language, args):
    """The first tokens of a language: four steps an epoch and two of validation, the last ones shorter."""
    n_columns = args.batch_size * (args.world_size - 1)
    last = args.bptt // 2 + 1
    train, val = ((n * args.bptt + last + 1) * n_columns + n_columns // 2 for n in (3, 1))
    return language._replace(train=language.train[:train], val=language.val[:val])


class Recorder:
    """Writes down what the trainer of this process does.

    `steps` has a dict for each step of the training, `evaluations` one for each piece of validation text: the tokens
    read, the state before them, the targets, the loss, and for steps the gradients and the weights afterwards.
    """

    def __init__(self, rank, args):
        self.rank, self.args = rank, args
        self.initial, self.model, self.entries, self.everyones = None, None, [], None

    @contextlib.contextmanager
    def installed(self):
        """Record what the lesson does inside; the names of the lesson that are replaced come back afterwards."""
        recorder = self

        class RNNModel(lesson.RNNModel):
            def __init__(self, *args):
                super().__init__(*args)
                recorder.model = weakref.proxy(self)  # a DDP must not outlive its group
                recorder.initial = recorder.look("weights")

            def forward(self, data, hidden):
                recorder.entries.append({
                    "training": torch.is_grad_enabled(), "data": data.clone(),
                    "hidden": torch.stack([state.detach().cpu() for state in hidden]),
                    "with history": any(state.requires_grad for state in hidden)})
                return super().forward(data, hidden)

        class Context(dist_autograd.context):
            def __enter__(self):
                self.started = time.perf_counter()
                self.id = super().__enter__()
                return self.id

            def __exit__(self, *error):
                if error[0] is None and recorder.entries:
                    recorder.entries[-1]["span"] = (self.started, time.perf_counter())
                    for what in ("gradients", "weights"):
                        recorder.entries[-1][what] = recorder.look(what, self.id)
                super().__exit__(*error)

        def after_a_loss(module, inputs, loss):
            if isinstance(module, nn.CrossEntropyLoss):
                recorder.entries[-1] |= {"target": inputs[1].cpu().flatten(), "loss": loss.item()}

        def step(opt, context_id, honest=DistributedOptimizer.step):
            if self.rank == 1 and self.args.world_size > 2:
                time.sleep(STEP_S)
            return honest(opt, context_id)

        def evaluate(*args, honest=lesson.evaluate):
            time.sleep(EVALUATION_S)
            return honest(*args)

        def run_trainer(*args, honest=lesson.run_trainer):
            metrics = honest(*args)
            mine = {"initial": self.initial, "entries": self.entries}
            self.everyones = [mine]
            if dist.is_initialized():
                self.everyones = [None] * dist.get_world_size() if self.rank == 1 else None
                dist.gather_object(mine, self.everyones)
            return metrics

        hook = nn.modules.module.register_module_forward_hook(after_a_loss)
        with contextlib.ExitStack() as replaced:
            replaced.callback(hook.remove)
            for owner, name, value in (
                    (lesson, "RNNModel", RNNModel), (lesson, "run_trainer", run_trainer),
                    (lesson, "evaluate", evaluate), (dist_autograd, "context", Context),
                    (DistributedOptimizer, "step", step),
                    (lesson, "load_language", lambda args: shortened(data.load_language(args), args))):
                replaced.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield

    def look(self, what, context_id=None):
        """The "weights", or the "gradients" in a context, of the LSTM here, and for the first trainer of the tables."""
        lstm = getattr(self.model.rnn, "module", self.model.rnn)
        found = {"LSTM": _of(lstm, what, context_id)}
        if self.rank == 1:
            for part, rref in (("table", self.model.emb_table_rref), ("decoder", self.model.decoder_rref)):
                found[part] = rpc.rpc_sync(rref.owner(), _look, args=(rref, what, context_id))
        return found


def _look(part_rref, what, context_id):
    """On the server."""
    return _of(part_rref.local_value(), what, context_id)


def _of(module, what, context_id):
    gradients = dist_autograd.get_gradients(context_id) if what == "gradients" else {}
    found = ((name, gradients.get(param) if what == "gradients" else param)
             for name, param in module.named_parameters())
    return {name: tensor.detach().cpu().clone() for name, tensor in found if tensor is not None}


@contextlib.contextmanager
def in_float64():
    """New tensors and modules are of float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def record(rank, world_size, args):
    """Run the lesson's worker and record it; the first trainer returns the findings."""
    with in_float64():
        recorder = Recorder(rank, args)
        with recorder.installed():
            metrics = lesson.run_worker(rank, world_size, args)
        return compare(recorder.everyones, metrics, args).as_dict() if rank == 1 else None


# --- one process


class Stream:
    """A sequence of random numbers of its own, as another process has one: drawn from inside of `with stream:`."""

    def __init__(self, device):
        self.device, self.state = device, None

    def seed(self, seed):
        """Begin the sequence that a process has after `torch.manual_seed(seed)`."""
        with self:
            torch.manual_seed(seed)

    def __enter__(self):
        self.others = self._states()
        if self.state:
            self._set(self.state)

    def __exit__(self, *_):
        self.state = self._states()
        self._set(self.others)

    def _states(self):
        on_gpu = self.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if on_gpu else None

    def _set(self, states):
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self.device)


class WholeModel(nn.Module):
    """Embedding, LSTM and decoder in one process, with the dropout of the two processes."""

    def __init__(self, ntoken, args):
        super().__init__()
        self.table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, args.ninp)})
        self.LSTM = nn.LSTM(args.ninp, args.nhid, args.nlayers, dropout=args.dropout if args.nlayers > 1 else 0)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(args.nhid, ntoken)})
        self.drop = nn.Dropout(args.dropout)

    def forward(self, tokens, hidden, server, trainer):
        """Tokens (T, B), a state (2, nlayers, B, nhid); scores (T, B, ntoken) and the next state."""
        with server:
            embeddings = self.drop(self.table["encoder"](tokens))
        with trainer:
            states, hidden = self.LSTM(embeddings, (hidden[0], hidden[1]))
        with server:
            return self.decoder["decoder"](self.drop(states)), torch.stack(hidden)

    def parts(self, what):
        """`{part: {name: tensor}}` of the weights or gradients."""
        return {part: {name: (param.grad if what == "gradients" else param).detach().cpu().clone()
                       for name, param in getattr(self, part).named_parameters()}
                for part in ("LSTM", "table", "decoder")}


def single_process(args, weights, language):
    """Train as the lesson should have done; what a `Recorder` writes down, and the metrics.

    Args:
        args: the flags.
        weights: `{part: {name: tensor}}`, the first ones.
        language: the tokens.

    Returns:
        `steps` and `evaluations`, each a list of dicts with an entry for each trainer, and `metrics`.
    """
    device, n_trainers, loss_of = device_for(args.device), args.world_size - 1, nn.functional.cross_entropy
    model = WholeModel(language.ntoken, args)
    for part, tensors in weights.items():
        getattr(model, part).load_state_dict(tensors)
    model.to(device)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[args.optimizer](model.parameters(), lr=args.lr)
    server, trainer = Stream(device), Stream(device)
    n_columns = args.batch_size * n_trainers
    steps, evaluations = [], []

    def read(tokens, entries, training):
        """Read all columns of the global batch, a piece at a time; the mean loss of a token."""
        model.train(training)
        length = len(tokens) // n_columns
        text = torch.stack([tokens[i * length : (i + 1) * length] for i in range(n_columns)], dim=1)
        hidden, total, start = torch.zeros(2, args.nlayers, n_columns, args.nhid, device=device), 0.0, 0
        while start < length - 1:
            end = min(start + args.bptt, length - 1)
            tokens_in, tokens_out = text[start:end], text[start + 1 : end + 1]
            hidden = hidden.detach()
            before = hidden
            scores, hidden = model(tokens_in.to(device), hidden, server, trainer)
            loss = loss_of(scores.reshape(-1, language.ntoken), tokens_out.reshape(-1).to(device))
            entry = {"data": {}, "target": {}, "hidden": {}, "loss": {}}
            for i, name in enumerate(trainers(args)):
                own = slice(i * args.batch_size, (i + 1) * args.batch_size)
                entry["data"][name], entry["target"][name] = tokens_in[:, own], tokens_out[:, own].flatten()
                entry["hidden"][name] = before[:, :, own].cpu()
                entry["loss"][name] = loss_of(scores[:, own].reshape(-1, language.ntoken),
                                              tokens_out[:, own].reshape(-1).to(device)).item()
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                entry |= {what: model.parts(what) for what in ("gradients", "weights")}
            entries.append(entry)
            total += loss.item() * (end - start)
            start = end
        return total / (length - 1)

    with torch.no_grad():
        metrics = {"initial_val_loss": read(language.val, evaluations, training=False), "epochs": []}
    for epoch in range(args.epochs):
        seed = 1_000_000 * args.seed + 1000 * epoch
        trainer.seed(seed + 2)
        server.seed(seed + 3)
        loss = read(language.train, steps, training=True)
        with torch.no_grad():
            metrics["epochs"].append({"loss": loss, "val_loss": read(language.val, evaluations, training=False)})
    metrics["perplexity"] = math.exp(metrics["epochs"][-1]["val_loss"])
    sample = write(model, language, args, server, trainer) if args.corpus else None
    return {"steps": steps, "evaluations": evaluations, "metrics": metrics, "sample": sample}


def write(model, language, args, server, trainer):
    """A text from the model: the vocabulary's numbers of its characters."""
    model.eval()
    trainer.seed(args.seed)
    device = next(model.parameters()).device
    token, hidden, sample = language.val[0], torch.zeros(2, args.nlayers, 1, args.nhid, device=device), []
    with torch.no_grad():
        for _ in range(200):
            scores, hidden = model(token.view(1, 1).to(device), hidden, server, trainer)
            with trainer:
                token = torch.multinomial(scores.flatten().softmax(dim=0).cpu(), 1)
            sample.append(int(token))
    return sample


def trainers(args):
    """Their names."""
    return [lesson.role_name(rank, args.world_size) for rank in range(1, args.world_size)]


# --- compared


def compare(recordings, metrics, args):
    """Hold the recordings of all trainers, and the metrics, against `single_process`: a `Comparison`."""
    found = Comparison(f"{args.world_size} processes")
    whole = data.load_language(args)
    language, names = shortened(whole, args), trainers(args)
    first = recordings[0]["initial"]
    shapes = {f"{part} {name}": list(tensor.shape) for part, tensors in first.items()
              for name, tensor in tensors.items()}
    expected = {f"{part} {name}": list(tensor.shape)
                for part, tensors in WholeModel(language.ntoken, args).parts("weights").items()
                for name, tensor in tensors.items()}
    found.holds("sizes", shapes == expected, f"{len(shapes)} tensors of the sizes that the flags say"
                if shapes == expected else f"{shapes} in {{run}}, {expected} in {{oracle}}")
    if shapes != expected:
        return found
    hold_first_weights(found, recordings, names, args)
    alone = single_process(args, first, language)
    # A resumed training begins with the second epoch, and does not measure the loss before the first one again.
    resumed = EPOCHS - 1 if args.resume else 0
    for what, title, epochs in (("steps", "training", args.epochs), ("evaluations", "validation", args.epochs + 1)):
        entries = alone[what][len(alone[what]) // epochs * (resumed + (what == "evaluations" and resumed)) :]
        of_each = [[entry for entry in recording["entries"] if "loss" in entry
                    and entry["training"] == (what == "steps")] for recording in recordings]
        of_all = [dict(zip(names, same, strict=True)) for same in zip(*of_each, strict=False)]

        def ours(key, of_all=of_all):
            return [{name: entry.get(key, []) for name, entry in same.items()} for same in of_all]

        unit = "step" if what == "steps" else "piece"
        for key, of_key in (("data", "tokens"), ("target", "targets")):
            found.equal(f"{title}, {of_key}", ours(key), [entry[key] for entry in entries],
                        "the text in columns side by side, each target the next token", unit)
        found.close(f"{title}, state carried over", ours("hidden"), [entry["hidden"] for entry in entries], TOLERANCE,
                    BECAUSE, unit)
        found.close(f"{title}, loss", ours("loss"), [entry["loss"] for entry in entries], TOLERANCE, BECAUSE, unit)
        if what == "steps":
            history = sum(entry["with history"] for same in of_all for entry in same.values())
            found.holds("training, states without history", history == 0,
                        f"{history} of {len(of_all) * len(names)} states carry the graph of the step before")
            hold_parameters(found, of_all, entries, names)
            hold_speed(found, of_each[0], metrics, args)
    hold_metrics(found, metrics, alone, whole, args)
    return found


def hold_first_weights(found, recordings, names, args):
    """The weights before the first step: uniform, as the seed says, of independent draws, alike on all trainers."""
    table, decoder, lstm = (recordings[0]["initial"][part] for part in ("table", "decoder", "LSTM"))
    ntoken = len(decoder["decoder.bias"])
    torch.manual_seed(3 * args.seed + 1)
    drawn = {"LSTM": dict(nn.LSTM(args.ninp, args.nhid, args.nlayers).named_parameters()),
             "table": {"encoder.weight": uniform((ntoken, args.ninp), 3 * args.seed)},
             "decoder": {"decoder.weight": uniform((ntoken, args.nhid), 3 * args.seed + 2),
                         "decoder.bias": torch.zeros(ntoken)}}
    found.equal("first weights, drawn", [recordings[0]["initial"]], [drawn],
                "the seed says them; those of table and decoder between -0.1 and 0.1", "model")
    # Scaled to -1 .. 1, the same generator gives the same numbers.
    drawn = {"table": table["encoder.weight"] / 0.1, "decoder": decoder["decoder.weight"] / 0.1,
             "LSTM": lstm["weight_ih_l0"] * math.sqrt(args.nhid)}
    alike = [f"{one} and {other}" for one, other in itertools.combinations(drawn, 2)
             if all(abs(a - b) < 1e-6 for a, b in zip(drawn[one].flatten()[:8].tolist(),
                                                      drawn[other].flatten()[:8].tolist(), strict=False))]
    found.holds("first weights, independent", not alike,
                f"alike: {', '.join(alike)}" if alike else "table, LSTM and decoder have drawn other numbers")
    if len(recordings) > 1:
        found.equal("first weights, replicas", [{name: recording["initial"]["LSTM"] for name, recording in
                                                 zip(names, recordings, strict=True)}],
                    [dict.fromkeys(names, lstm)], "DDP sends those of the first trainer to all", "model")


def uniform(shape, seed):
    """Numbers between -0.1 and 0.1."""
    return torch.empty(shape).uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))


def hold_parameters(found, of_all, entries, names):
    """Gradients and weights after each step: of the first trainer all, of the others their LSTMs."""
    for what in ("gradients", "weights"):
        title = "gradients in the context" if what == "gradients" else "weights after each step"
        for part in ("table", "LSTM", "decoder"):
            owners = names if part == "LSTM" else names[:1]
            found.close(f"{title}, {part}",
                        [{name: same[name].get(what, {}).get(part, {}) for name in owners} for same in of_all],
                        [{name: entry[what][part] for name in owners} for entry in entries], TOLERANCE, BECAUSE)


def hold_speed(found, steps, metrics, args):
    """The steps per second that the run says, by the clock of the recorder; and its round trips."""
    spans = [step["span"] for step in steps if "span" in step]
    of_epoch = max(1, len(spans) // (EPOCHS if not args.resume else 1))
    epochs = [spans[i : i + of_epoch] for i in range(0, len(spans), of_epoch)]
    measured = len(spans) / sum(epoch[-1][1] - epoch[0][0] for epoch in epochs) if spans else 0.0
    ratio = (metrics["steps_per_s"] or 0.0) / measured if measured else 0.0
    found.holds("metrics, steps per second", 0.5 < ratio < 1.01,
                f"{ratio:.2f} of those between the first and the last step of each epoch, 0.5 to 1.01 expected: "
                "no validation, no start")
    expected = ROUND_TRIPS[min(2, args.world_size - 1)]
    found.holds("metrics, round trips", metrics["rpc_round_trips_per_step"] == expected,
                f"{metrics['rpc_round_trips_per_step']} RPCs of a step, {expected} expected")


def hold_metrics(found, metrics, alone, whole, args):
    """What the run reports."""
    theirs = alone["metrics"]
    found.close("metrics, losses of the epochs", metrics["epochs"], theirs["epochs"], TOLERANCE, BECAUSE, "epoch")
    found.close("metrics, loss before and perplexity after",
                [{key: metrics[key] for key in ("initial_val_loss", "perplexity")}],
                [{key: theirs[key] for key in ("initial_val_loss", "perplexity")}], TOLERANCE, BECAUSE, "run")
    if args.corpus:
        text = "".join(whole.vocabulary[token] for token in [*whole.train.tolist(), *whole.val.tolist()])
        found.holds("text", text == args.corpus.read_text(encoding="utf-8"),
                    f"{len(text)} characters for training and validation, the corpus in order, each once")
        ours = [whole.vocabulary.find(character) for character in metrics["sample"]]
        found.equal("sample", [ours], [alone["sample"]], "drawn from seeded generators", "text")
        return
    tokens, chain = whole.train.numpy(), data.MarkovChain(args.seed).next_token
    surprise = -torch.as_tensor(chain[tokens[:-2], tokens[1:-1], tokens[2:]]).log().mean().item()
    pairs = torch.zeros(10, 10).index_put((whole.train[:-1], whole.train[1:]), torch.tensor(1.0), accumulate=True)
    with_one = (torch.special.entr(pairs / pairs.sum()).sum()
                - torch.special.entr(pairs.sum(dim=1) / pairs.sum()).sum()).item()
    # The standard error of such a mean over 200,000 tokens is 0.2%.
    for key, counted, how in (("entropy_floor", surprise, "the chain's own surprise"),
                              ("floor_without_memory", with_one, "the entropy of a token after one token")):
        found.holds(f"metrics, {key}", abs(metrics[key] / counted - 1) < 0.02,
                    f"{metrics[key]:.4f} nats; {how}, counted in {len(tokens)} tokens, is {counted:.4f}; "
                    "2% is allowed, 10 standard errors")
    n = min(len(whole.val), len(whole.train))
    same = (whole.val[:n] == whole.train[:n]).double().mean().item()
    found.holds("validation tokens", same < 0.5, f"{same:.0%} of them stand at the same place of the training's")


# --- the command


def plans(args, folder):
    """The runs of a check: `{title: flags}`."""
    args = copy.copy(args)
    local = args.rank is None and not dist.is_torchelastic_launched()
    saved, args.resume, args.checkpoint, args.epochs = args.checkpoint, False, None, EPOCHS
    if saved is not None:
        args.checkpoint = folder / "run.pt"  # a check leaves the user's alone
    one = copy.copy(args)
    if args.world_size == 2:
        one.dropout, one.nlayers = args.dropout or DROPOUT, max(2, args.nlayers)
    else:
        one.dropout = 0.0
    runs = {"": one}
    if local and saved is not None:
        stopped, resumed = copy.copy(one), copy.copy(one)
        stopped.epochs, resumed.resume = EPOCHS - 1, True
        runs = {"stopped, ": stopped, "resumed, ": resumed}
    if local and args.world_size == 2:
        two = copy.copy(args)
        two.world_size, two.dropout, two.batch_size = 3, 0.0, max(1, args.batch_size // 2)
        runs["two trainers, "] = two
    return runs


def check(args):
    """Hold short trainings against a single process; `{what: difference}`, None where nothing is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    with tempfile.TemporaryDirectory() if args.checkpoint else contextlib.nullcontext(".") as folder:
        compared = {title: launch(record, flags, lesson.role_name)
                    for title, flags in plans(args, Path(folder)).items()}
    if None in compared.values():
        return verdict(None)
    findings = [{**finding, "what": title + finding["what"]}
                for title, of_run in compared.items() for finding in of_run["findings"]]
    run = " and ".join(dict.fromkeys(of_run["run"] for of_run in compared.values()))
    return verdict({"run": run, "oracle": "one process", "findings": findings})
