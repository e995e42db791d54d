"""Checkpoints of a model and optimizers that are spread over processes: save, refuse, restore."""

import io

import torch
import torch.distributed as dist
from common import checkpoint
from common.cli import given, refuse
from torch import nn, optim
from torch.distributed import rpc


class SGD(optim.SGD):
    """An SGD that `DistributedOptimizer` does not know.

    What it knows it compiles to TorchScript, which takes a tenth off the time of a step; but then
    nobody can fetch the optimizer's state. Of a class that it does not know it makes ordinary
    optimizers.
    """


class Adam(optim.Adam):
    """See `SGD`."""


PARTS = ("emb_table", "rnn", "decoder")  # the first word of a weight's name
OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}
OPTIMIZERS_WITH_STATE = {"sgd": SGD, "adam": Adam}


def optimizer_class(args):
    """What `--optimizer` names; with `--checkpoint`, one whose state can be fetched."""
    return (OPTIMIZERS_WITH_STATE if args.checkpoint else OPTIMIZERS)[args.optimizer]


class LocalRNNModel(nn.Module):
    """The whole model in one process, without RPC: it loads the "model" of a checkpoint.

    Args:
        ntoken, ninp, nhid, nlayers: the sizes, as `RNNModel` has them.
    """

    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.emb_table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, ninp)})
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(nhid, ntoken)})

    def forward(self, input, hidden=None):
        """Tokens (T, B) and a state to scores (T, B, ntoken) and the next state; no dropout."""
        output, hidden = self.rnn(self.emb_table["encoder"](input), hidden)
        return self.decoder["decoder"](output), hidden


def weights(model):
    """All parameters of an `RNNModel`, from wherever they are, by their name in `LocalRNNModel`."""
    table, decoder = model.emb_table_rref, model.decoder_rref
    parts = {"emb_table": rpc.rpc_sync(table.owner(), _weights_of, args=(table,)),
             "rnn": _on_cpu(_lstm(model).state_dict()),
             "decoder": rpc.rpc_sync(decoder.owner(), _weights_of, args=(decoder,))}
    return {f"{part}.{name}": tensor for part in PARTS for name, tensor in parts[part].items()}


def require_checkpoint(args, language):
    """Before any process starts: refuse a checkpoint from which `args` cannot go on.

    Args:
        args: the parsed flags.
        language: what is learned; None where only the server starts.

    Raises:
        SystemExit: 2 after one line.
    """
    if language is None:
        return
    state = checkpoint.inspect(
        args, needs=("epochs", "vocabulary"),
        make_model=lambda: LocalRNNModel(language.ntoken, args.ninp, args.nhid, args.nlayers))
    if state is None:
        return
    if state["vocabulary"] != language.vocabulary:
        checkpoint.reject(args, "is of another text; give its --corpus, or another file")
    seed = state.get("seed", args.seed)  # earlier versions did not save it
    if language.vocabulary is None and seed != args.seed:
        checkpoint.reject(args, f"is of --seed {seed}, and {given(args, 'seed')} makes another "
                                "language; give that seed, or another file")
    optimizer = _optimizer_of(state)
    if optimizer not in (None, args.optimizer):
        checkpoint.reject(args, f"is of --optimizer {optimizer}, whose state "
                                f"{given(args, 'optimizer')} cannot use; give that optimizer, or "
                                "another file")
    if len(state["epochs"]) > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {len(state['epochs'])}: the checkpoint "
               "has so many behind it", rank=1)


def save(model, opt, history, language, args):
    """With `--checkpoint`, write the model and the optimizers' states, from wherever they are."""
    if not args.checkpoint:
        return
    states = [rpc.rpc_sync(local.owner(), _optimizer_state, args=(local,))
              for local in opt.remote_optimizers]
    checkpoint.save(args, {
        "model": weights(model), "optimizers": states, "epochs": history.epochs, "seed": args.seed,
        "initial_val_loss": history.initial_val_loss, "vocabulary": language.vocabulary})


def restore(model, opt, rank, args):
    """Put a checkpoint back to where its parts belong; the epochs so far, the loss before them."""
    message = [checkpoint.load(args) if rank == 1 else None]
    if dist.is_initialized():
        # The other trainers may be on machines without the file.
        dist.broadcast_object_list(message)
    state = message[0]
    parts = {part: {name.removeprefix(f"{part}."): tensor
                    for name, tensor in state["model"].items() if name.startswith(f"{part}.")}
             for part in PARTS}
    _lstm(model).load_state_dict(parts["rnn"])
    for part, rref in (("emb_table", model.emb_table_rref), ("decoder", model.decoder_rref)):
        # All trainers send the same.
        rpc.rpc_sync(rref.owner(), _load_weights, args=(rref, parts[part]))
    # The server's optimizer comes first, the LSTM's last, and only the first trainer has both.
    last_first = zip(reversed(opt.remote_optimizers), reversed(state["optimizers"]), strict=False)
    for local, saved in last_first:
        rpc.rpc_sync(local.owner(), _load_optimizer_state, args=(local, saved, args.lr))
    if dist.is_initialized():
        # Or one trainer's backward could find that another has just loaded the tables.
        dist.barrier()
    return state["epochs"], state["initial_val_loss"]


def _lstm(model):
    """The LSTM of an `RNNModel`, without the DDP around it."""
    return getattr(model.rnn, "module", model.rnn)


def _on_cpu(state_dict):
    return {name: tensor.cpu() for name, tensor in state_dict.items()}


def _weights_of(part_rref):
    return _on_cpu(part_rref.local_value().state_dict())


def _load_weights(part_rref, weights):
    part_rref.local_value().load_state_dict(weights)


def _optimizer_of(state):
    """Whose state a checkpoint has: "sgd", "adam", or None if it has none."""
    if not state.get("optimizers"):
        return None
    return "adam" if "betas" in _unpacked(state["optimizers"][0])["param_groups"][0] else "sgd"


def _optimizer_state(optimizer_rref):
    """Where the optimizer is: its state, as bytes: RPC carries no tensors on a GPU."""
    buffer = io.BytesIO()
    torch.save(optimizer_rref.local_value().optim.state_dict(), buffer)
    return buffer.getvalue()


def _unpacked(saved):
    """The opposite, on the CPU."""
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)


def _load_optimizer_state(optimizer_rref, saved, lr):
    """Where the optimizer is: go on from that state, with the learning rate of this run."""
    optimizer = optimizer_rref.local_value().optim
    optimizer.load_state_dict(_unpacked(saved))
    optimizer.param_groups[0]["lr"] = lr
