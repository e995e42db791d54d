"""Checkpoints of a model and optimizers on several processes: save, refuse, restore."""

import io
from argparse import Namespace

from common import checkpoint

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn.data import Language
from rpc_rnn.results import History

PARTS = ("emb_table", "rnn", "decoder")  # prefixes of the names of the weights


class LocalRNNModel(nn.Module):
    """The whole model in one process, without RPC; it loads the "model" of a checkpoint.

    Args:
        ntoken, ninp, nhid, nlayers: Sizes, as in `RNNModel`.
    """

    def __init__(self, ntoken: int, ninp: int, nhid: int, nlayers: int) -> None:
        super().__init__()
        self.emb_table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, ninp)})
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(nhid, ntoken)})

    def forward(self, input: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor] | None = None,
                ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute scores (T, B, ntoken) and the next state from tokens (T, B), without dropout."""
        output, hidden = self.rnn(self.emb_table["encoder"](input), hidden)
        return self.decoder["decoder"](output), hidden


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Fetch all parameters of an `RNNModel` from their owners, named as in `LocalRNNModel`."""
    table, decoder = model.emb_table_rref, model.decoder_rref
    parts = {"emb_table": rpc.rpc_sync(table.owner(), _weights_of, args=(table,)),
             "rnn": _on_cpu(model.rnn.state_dict()),
             "decoder": rpc.rpc_sync(decoder.owner(), _weights_of, args=(decoder,))}
    return {f"{part}.{name}": tensor for part in PARTS for name, tensor in parts[part].items()}


def require_checkpoint(args: Namespace, language: Language | None) -> None:
    """Refuse a checkpoint that `args` cannot continue, before any process starts.

    Args:
        args: Parsed flags.
        language: Language to learn; None if only the server starts here.

    Raises:
        SystemExit: Status 2, after one line.
    """
    if language is None:
        return
    state = checkpoint.inspect(
        args, lambda: LocalRNNModel(language.ntoken, args.ninp, args.nhid, args.nlayers))
    if state is None:
        return
    if state["vocabulary"] != language.vocabulary:
        checkpoint.reject(args, "is of another text; give its --corpus, or another file")
    checkpoint.require_epochs(args, len(state["epochs"]))


def save(model: nn.Module, opt: DistributedOptimizer, history: History, language: Language,
         args: Namespace) -> None:
    """Fetch the model and the optimizers' states, and write them to `--checkpoint` if given."""
    if not args.checkpoint:
        return
    states = [rpc.rpc_sync(local.owner(), _optimizer_state, args=(local,))
              for local in opt.remote_optimizers]
    checkpoint.save(args, {
        "model": weights(model), "optimizers": states, "epochs": history.epochs,
        "initial_val_loss": history.initial_val_loss, "vocabulary": language.vocabulary})


def restore(model: nn.Module, opt: DistributedOptimizer,
            args: Namespace) -> tuple[list[dict[str, float]], float]:
    """Send the parts of a checkpoint to their owners; return its epochs and its initial loss."""
    state = checkpoint.load(args)
    parts = {part: {name.removeprefix(f"{part}."): tensor
                    for name, tensor in state["model"].items() if name.startswith(f"{part}.")}
             for part in PARTS}
    model.rnn.load_state_dict(parts["rnn"])
    for part, rref in (("emb_table", model.emb_table_rref), ("decoder", model.decoder_rref)):
        rpc.rpc_sync(rref.owner(), _load_weights, args=(rref, parts[part]))
    for local, saved in zip(opt.remote_optimizers, state["optimizers"], strict=True):
        rpc.rpc_sync(local.owner(), _load_optimizer_state, args=(local, saved))
    return state["epochs"], state["initial_val_loss"]


def _on_cpu(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state_dict.items()}


def _weights_of(part_rref: rpc.RRef) -> dict[str, torch.Tensor]:
    return _on_cpu(part_rref.local_value().state_dict())


def _load_weights(part_rref: rpc.RRef, weights: dict[str, torch.Tensor]) -> None:
    part_rref.local_value().load_state_dict(weights)


def _optimizer_state(optimizer_rref: rpc.RRef) -> bytes:
    """Return an optimizer's state, on its owner, as bytes, because RPC sends no GPU tensors."""
    buffer = io.BytesIO()
    torch.save(optimizer_rref.local_value().optim.state_dict(), buffer)
    return buffer.getvalue()


def _load_optimizer_state(optimizer_rref: rpc.RRef, saved: bytes) -> None:
    """Load that state into an optimizer, on its owner."""
    state = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    optimizer_rref.local_value().optim.load_state_dict(state)
