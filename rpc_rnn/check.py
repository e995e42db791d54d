"""The oracle of main.py and its variants: the program's own training, held against one process.

`recording.py` runs the program's `run_worker` for two short epochs in its own processes.
`single_process` knows only the flags and the first weights. It has its own columns, its own loop,
and PyTorch's ordinary autograd and optimizers. `comparison.py` holds one against the other.

Both compute in float64, so that a mistake cannot hide behind rounding. Dropout is matched: the
server and the trainer draw from seeded generators, and so do the two `Stream`s here. With several
trainers dropout is off: the server draws in the order in which they call.
"""

import argparse
import contextlib
import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, verdict
from common.session import device_for
from torch import nn

from rpc_rnn import comparison, data
from rpc_rnn.main import role_name
from rpc_rnn.recording import record_run, shortened

EPOCHS = 2
DROPOUT = 0.25  # where --dropout is 0, which would leave no mark


# --- one process


def single_process(args, weights, language):
    """Train as the lesson should have done.

    Args:
        args: the flags.
        weights: `{part: {name: tensor}}`, the first ones.
        language: the tokens.

    Returns:
        What a `Recorder` writes down, with an entry for each trainer: lists of dicts, `steps` of
        each epoch, `evaluations` before the first and after each. `metrics`. `sample`: the text.
    """
    names, n_columns = trainer_names(args), args.batch_size * (args.world_size - 1)
    device = device_for(args.device)
    model = WholeModel(language.ntoken, args)
    for part, tensors in weights.items():
        getattr(model, part).load_state_dict(tensors)
    model.to(device)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[args.optimizer]
    optimizer = optimizer_class(model.parameters(), lr=args.lr)
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
                entry |= {what: model.parts(what) for what in ("gradients", "weights")}
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
    """Embedding, LSTM and decoder in one process, with the dropout of the two processes."""

    def __init__(self, ntoken, args):
        super().__init__()
        between_layers = args.dropout if args.nlayers > 1 else 0
        self.table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, args.ninp)})
        self.LSTM = nn.LSTM(args.ninp, args.nhid, args.nlayers, dropout=between_layers)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(args.nhid, ntoken)})
        self.drop = nn.Dropout(args.dropout)
        self.server, self.trainer = (Stream(device_for(args.device)) for _ in range(2))

    def forward(self, tokens, hidden):
        """Tokens (T, B), a state (2, nlayers, B, nhid); scores (T, B, ntoken), the next state."""
        with self.server.drawing():
            embeddings = self.drop(self.table["encoder"](tokens))
        with self.trainer.drawing():
            states, hidden = self.LSTM(embeddings, (hidden[0], hidden[1]))
        with self.server.drawing():
            return self.decoder["decoder"](self.drop(states)), torch.stack(hidden)

    def parts(self, what):
        """`{part: {name: tensor}}` of the weights or gradients."""
        return {part: {name: (param.grad if what == "gradients" else param).detach().cpu().clone()
                       for name, param in getattr(self, part).named_parameters()}
                for part in comparison.PARTS}


class Stream:
    """A sequence of random numbers of its own, as another process has one."""

    def __init__(self, device):
        self.gpus, self.states = [device] if device.type == "cuda" else [], None

    @contextlib.contextmanager
    def drawing(self):
        """Let what is inside draw from this sequence, and what is outside not notice."""
        with torch.random.fork_rng(self.gpus):
            if self.states:
                torch.set_rng_state(self.states[0])
                for gpu, state in zip(self.gpus, self.states[1:], strict=True):
                    torch.cuda.set_rng_state(state, gpu)
            yield
            self.states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)]

    def seed(self, seed):
        """Begin the sequence that a process has after `torch.manual_seed(seed)`."""
        with self.drawing():
            torch.manual_seed(seed)


def write(model, language, args):
    """A text from the model: the vocabulary's numbers of its characters."""
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


def trainer_names(args):
    """Those of ranks 1, 2, ..."""
    return [role_name(rank, args.world_size) for rank in range(1, args.world_size)]


# --- what is held against it


def record(rank, world_size, args):
    """Run the program's worker, recorded; the first trainer returns the findings."""
    torch.set_default_dtype(torch.float64)
    recorded = record_run(rank, world_size, args)
    return compare(*recorded, args) if rank == 1 else None


def compare(recordings, metrics, args):
    """Hold the recordings of all trainers, and the metrics, against `single_process`."""
    found, names = Comparison(f"{args.world_size} processes"), trainer_names(args)
    language, weights = data.load_language(args), recordings[0]["initial"]
    expected = WholeModel(language.ntoken, args).parts("weights")
    if comparison.hold_sizes(found, weights, expected):
        comparison.hold_first_weights(found, recordings, names, args)
        alone = single_process(args, weights, shortened(language, args))
        if args.resume:
            # It begins with the second epoch; the loss before the first one is in the checkpoint.
            del alone["steps"][: EPOCHS - 1], alone["evaluations"][:EPOCHS]
        comparison.hold_training(found, recordings, names, alone["steps"])
        comparison.hold_speed(found, recordings[0], metrics, len(alone["steps"]), args)
        comparison.hold_validation(found, recordings, names, alone["evaluations"])
        comparison.hold_metrics(found, metrics, alone, language, args)
    return found.as_dict()


# --- the command


def check(program, args):
    """Hold short trainings against a single process.

    Returns:
        `{what: difference}`, None where nothing is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.program = program.__name__
    with tempfile.TemporaryDirectory() as folder:
        compared = {title: launch(record, flags, role_name)
                    for title, flags in plans(args, Path(folder)).items()}
    if None in compared.values():
        return verdict(None)
    findings = [{**finding, "what": title + finding["what"]}
                for title, of_run in compared.items() for finding in of_run["findings"]]
    run = " and ".join(dict.fromkeys(of_run["run"] for of_run in compared.values()))
    return verdict({"run": run, "oracle": "one process", "findings": findings})


def plans(args, folder):
    """The runs of a check: `{title: flags}`."""
    checkpoint = folder / "run.pt" if args.checkpoint else None  # the user's is left alone

    def flags(**others):
        fixed = {"epochs": EPOCHS, "resume": False, "checkpoint": checkpoint}
        return argparse.Namespace(**{**vars(args), **fixed, **others})

    one = {"dropout": 0.0}
    if args.world_size == 2:  # one trainer
        one = {"dropout": args.dropout or DROPOUT, "nlayers": max(2, args.nlayers)}
    runs = {"": flags(**one)}
    local = args.rank is None and not dist.is_torchelastic_launched()
    if local and args.checkpoint:
        runs = {"stopped, ": flags(**one, epochs=EPOCHS - 1),
                "resumed, ": flags(**one, resume=True)}
    return runs
