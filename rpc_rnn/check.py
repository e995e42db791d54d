"""The check of main.py: its own training run, compared with a single process.

`single_process` knows only the flags, the tokens and the first weights. It has its own columns, its
own loop, and PyTorch's ordinary autograd and optimizer. `record` runs the program's `run_worker`
for two short epochs in its own processes. The trainer keeps the tokens it reads and its losses, and
after each step the gradients and the weights, also of the two parts on the server.

Both compute in float64, so rounding cannot hide a mistake. Dropout is matched: the server and the
trainer draw from seeded generators, and so do the two `Draws` of the single process.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, Draws, verdict
from common.recorder import Recorder, named_gradients, named_weights
from common.session import device_for

import torch
from torch import nn
from torch.distributed import rpc

from rpc_rnn import main as tutorial
from rpc_rnn.data import Language, load_language

EPOCHS = 2
DROPOUT = 0.25  # replaces a --dropout of 0, which would show no mistake
TOLERANCE = 1e-9
BECAUSE = "float64, sums in another order"
PARTS = ("table", "LSTM", "decoder")
OfParts = dict[str, dict[str, torch.Tensor]]  # tensors by name, of each part


# --- the single process


class WholeModel(nn.Module):
    """Embedding table, LSTM and decoder in one process, with the dropout of two processes."""

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
        """Return `named` of each part; it is `named_weights` or `named_gradients`."""
        return {part: named(getattr(self, part)) for part in PARTS}


def single_process(args: Namespace, weights: OfParts, language: Language) -> dict:
    """Train as the lesson should, in this process.

    Args:
        args: Flags of the run.
        weights: Weights before the first step.
        language: Tokens of the run.

    Returns:
        "steps" and "pieces" (of the validation), in order, as `record` keeps them, and "metrics".
    """
    device = device_for(args.device)
    model = WholeModel(language.ntoken, args)
    for part, tensors in weights.items():
        getattr(model, part).load_state_dict(tensors)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    entries = {True: [], False: []}

    def read(tokens, training):
        """Read all columns, a piece at a time; return the mean loss per token."""
        model.train(training)
        length = len(tokens) // args.batch_size
        text = torch.stack([tokens[i * length : (i + 1) * length]
                            for i in range(args.batch_size)], dim=1).long()
        hidden = torch.zeros(2, args.nlayers, args.batch_size, args.nhid, device=device)
        total = 0.0
        for start in range(0, length - 1, args.bptt):
            end = min(start + args.bptt, length - 1)
            inputs, targets = text[start:end], text[start + 1 : end + 1].flatten()
            before = hidden.detach()
            scores, hidden = model(inputs.to(device), before)
            loss = nn.functional.cross_entropy(scores.reshape(-1, language.ntoken),
                                               targets.to(device))
            entry = {"data": inputs, "target": targets, "hidden": before.cpu(), "loss": loss.item()}
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                entry |= {"gradients": model.parts(named_gradients),
                          "weights": model.parts(named_weights)}
            entries[training].append(entry)
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
    return {"steps": entries[True], "pieces": entries[False], "metrics": metrics}


def first_weights(ntoken: int, args: Namespace) -> OfParts:
    """Draw the weights before the first step from the seed."""
    def uniform(*shape, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)

    torch.manual_seed(3 * args.seed + 1)
    return {"LSTM": dict(nn.LSTM(args.ninp, args.nhid, args.nlayers).named_parameters()),
            "table": {"encoder.weight": uniform(ntoken, args.ninp, seed=3 * args.seed)},
            "decoder": {"decoder.weight": uniform(ntoken, args.nhid, seed=3 * args.seed + 2),
                        "decoder.bias": torch.zeros(ntoken)}}


# --- what is recorded


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program and record it; the trainer returns the findings.

    An entry of the training or the validation has the tokens ("data"), the state before them
    ("hidden"), the targets and the loss. A step of the training also has its gradients and weights.
    """
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.enabled = False  # its LSTM draws dropout from a sequence of its own
    model, first, entries = None, None, []

    def before_forward(module, inputs):
        if isinstance(module, tutorial.RNNModel):
            tokens, hidden = inputs
            entries.append({
                "training": torch.is_grad_enabled(), "data": tokens.clone(),
                "hidden": torch.stack([state.detach().cpu() for state in hidden]),
                "with history": any(state.requires_grad for state in hidden)})

    def after_forward(module, inputs, output):
        if isinstance(module, nn.CrossEntropyLoss):
            entries[-1] |= {"target": inputs[1].cpu().flatten(), "loss": output.item()}

    def after_step(context_id, _):
        if entries:
            entries[-1] |= state_of(model, context_id)

    with Recorder() as recorder:
        recorder.on_forward(before_forward, after_forward)
        recorder.on_context(after=after_step)  # the context still holds the gradients

        @recorder.around(tutorial, "load_language")
        def load(original, args):
            return shortened(original(args), args)

        @recorder.around(tutorial.RNNModel, "__init__")
        def make(original, made, *sizes):
            nonlocal model, first
            original(made, *sizes)
            model, first = made, state_of(made)["weights"]

        metrics = tutorial.run_worker(rank, world_size, args)
    return compare(first, entries, metrics, args) if rank == 1 else None


def shortened(language: Language, args: Namespace) -> Language:
    """Keep the first tokens of a language: four steps an epoch and two pieces of validation.

    The last step and the last piece are shorter, and a few tokens fill no row.
    """
    last = args.bptt // 2 + 1
    train, val = ((n * args.bptt + last + 1) * args.batch_size + args.batch_size // 2
                  for n in (3, 1))
    return language._replace(train=language.train[:train], val=language.val[:val])


def state_of(model: tutorial.RNNModel, context_id: int | None = None) -> dict[str, OfParts]:
    """Copy the "gradients" in a context and the "weights" of all parts, from their owners."""
    states = {"LSTM": state_here(model.rnn, context_id)}
    for part, rref in (("table", model.emb_table_rref), ("decoder", model.decoder_rref)):
        states[part] = rpc.rpc_sync(rref.owner(), state_there, args=(rref, context_id))
    return {what: {part: state[what] for part, state in states.items()}
            for what in ("gradients", "weights")}


def state_there(part_rref: rpc.RRef, context_id: int | None) -> OfParts:
    """Return `state_here` of a part, on the server."""
    return state_here(part_rref.local_value(), context_id)


def state_here(module: nn.Module, context_id: int | None) -> OfParts:
    """Copy the gradients and the weights of a module in this process."""
    return {"gradients": named_gradients(module, context_id), "weights": named_weights(module)}


# --- what is compared


def compare(first: OfParts, entries: list[dict], metrics: dict, args: Namespace) -> dict:
    """Compare the recorded run and its metrics with the single process; return the findings."""
    found, language = Comparison(f"{args.world_size} processes"), load_language(args)
    if found.equal("first weights, drawn", [first], [first_weights(language.ntoken, args)],
                   "the seed gives them; those of table and decoder between -0.1 and 0.1",
                   "model") == math.inf:
        return found.as_dict()  # the sizes are wrong
    alone = single_process(args, first, shortened(language, args))
    steps, pieces = ([entry for entry in entries if "loss" in entry and entry["training"] == kind]
                     for kind in (True, False))
    for title, ours, theirs, unit in (("training", steps, alone["steps"], "step"),
                                      ("validation", pieces, alone["pieces"], "piece")):
        for key, what in (("data", "tokens"), ("target", "targets"),
                          ("hidden", "state carried over"), ("loss", "loss")):
            numbers = [entry[key] for entry in ours], [entry[key] for entry in theirs]
            if key in ("data", "target"):
                found.equal(f"{title}, {what}", *numbers,
                            "the text in columns side by side, each target the next token", unit)
            else:
                found.close(f"{title}, {what}", *numbers, TOLERANCE, BECAUSE, unit)
    history = sum(step["with history"] for step in steps)
    found.holds("training, states without history", history == 0,
                f"{history} of {len(steps)} states carry the graph of the step before")
    for what, title in (("gradients", "gradients in the context"),
                        ("weights", "weights after each step")):
        for part in PARTS:
            found.close(f"{title}, {part}", [step.get(what, {}).get(part, {}) for step in steps],
                        [step[what][part] for step in alone["steps"]], TOLERANCE, BECAUSE)
    expected, once = alone["metrics"], ("initial_val_loss", "perplexity")
    found.close("metrics, losses of the epochs", metrics["epochs"], expected["epochs"], TOLERANCE,
                BECAUSE, "epoch")
    found.close("metrics, loss before and perplexity after", [{key: metrics[key] for key in once}],
                [{key: expected[key] for key in once}], TOLERANCE, BECAUSE, "run")
    return found.as_dict()


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Compare a short training run with a single process.

    Returns:
        `{what: difference}` on the reporting process, None elsewhere.

    Raises:
        SystemExit: Status 1 if a comparison does not hold.
    """
    args.epochs, args.checkpoint, args.resume = EPOCHS, None, False
    args.dropout, args.nlayers = args.dropout or DROPOUT, max(2, args.nlayers)
    return verdict(launch(record, args, program.role_name))
