"""Checkpoints of a training whose model and optimizers are spread over processes."""

import io

import torch
import torch.distributed as dist
from common import checkpoint
from torch import optim
from torch.distributed import rpc


class SGD(optim.SGD):
    """The same, but `DistributedOptimizer` does not know it.

    What it knows it compiles to TorchScript, which takes a tenth off the time of a step; but then nobody can fetch the
    optimizer's state. Of a class that it does not know it makes ordinary optimizers.
    """


class Adam(optim.Adam):
    """See `SGD`."""


OPTIMIZERS_WITH_STATE = {"sgd": SGD, "adam": Adam}


def save(model, opt, epochs, initial_val_loss, language, args):
    """Write the whole model and the optimizers' states, from wherever they are, on the first trainer's machine."""
    states = [rpc.rpc_sync(local.owner(), _optimizer_state, args=(local,)) for local in opt.remote_optimizers]
    checkpoint.save(args, {"model": model.weights(), "optimizers": states, "epochs": epochs,
                           "initial_val_loss": initial_val_loss, "vocabulary": language.vocabulary})


def restore(model, opt, rank, args):
    """Put a checkpoint back to where its parts belong; the epochs so far and the loss before them."""
    message = [checkpoint.load(args) if rank == 1 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(message)  # the other trainers may be on machines without the file
    state = message[0]
    model.load_weights(state["model"])  # the same on all trainers
    # The server's optimizer comes first, the LSTM's last, and only the first trainer has both.
    for local, saved in zip(reversed(opt.remote_optimizers), reversed(state["optimizers"]), strict=False):
        rpc.rpc_sync(local.owner(), _load_optimizer_state, args=(local, saved, args.lr))
    if dist.is_initialized():
        dist.barrier()  # or one trainer's backward could find that another has just loaded the tables
    return state["epochs"], state["initial_val_loss"]


def _optimizer_state(optimizer_rref):
    """Where the optimizer is: its state as bytes, since it may hold tensors on a GPU, which RPC does not carry."""
    buffer = io.BytesIO()
    torch.save(optimizer_rref.local_value().optim.state_dict(), buffer)
    return buffer.getvalue()


def _load_optimizer_state(optimizer_rref, saved, lr):
    """The opposite, with the learning rate of this run."""
    optimizer = optimizer_rref.local_value().optim
    optimizer.load_state_dict(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True))
    optimizer.param_groups[0]["lr"] = lr
