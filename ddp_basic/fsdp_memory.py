"""What a rank holds and sends: measured here, and by the formulas."""

import argparse
import os
import socket
import stat
import struct
import sys

import torch
import torch.distributed as dist
from common.cli import ranks_here, require_memory
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

BYTES_SENT = 200  # where tcpi_bytes_sent stands in struct tcp_info of linux/tcp.h, since Linux 4.19
KINDS = ("parameters", "gradients", "optimizer")
HELD = {  # of N ranks, in sizes of the model: parameters, gradients, Adam's two moments
    "replicas": lambda n: (1, 1, 2),
    "optimizer": lambda n: (1, 1, 2 / n),
    "full": lambda n: (1 / n, 1 / n, 2 / n),
}
SENT = {  # by each rank in a step, in shares (N-1)/N of the model's size
    "replicas": 2,  # a ring all-reduce: reduce-scatter and all-gather
    "optimizer": 3,  # and a broadcast of each parameter, from the rank that has stepped it
    "full": 3,  # all-gather in forward, again in backward; reduce-scatter
}
# gloo's reduce-scatter is an all-reduce, of whose result each rank keeps a part.
SENT_BY_GLOO = {**SENT, "full": 4}


def bytes_held(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, int]:
    """Count the bytes of this rank's parameters, gradients and optimizer state after a step.

    Of what is sharded, only the shard of this rank counts.

    Returns:
        `{"parameters": bytes, "gradients": bytes, "optimizer": bytes}`.
    """
    parameters = list(model.parameters())
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim  # its own part; the state of the whole is with all ranks
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = parameters, [parameter.grad for parameter in parameters], states
    return {kind: sum(local(tensor).nbytes for tensor in of_kind)
            for kind, of_kind in zip(KINDS, tensors, strict=True)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_sent() -> int | None:
    """Return the bytes that this process has sent over TCP so far, by the kernel's count.

    That is what gloo really sends, its headers included. None where it cannot be known: nccl has
    other ways, and other systems count differently.
    """
    if sys.platform != "linux" or dist.get_backend() != "gloo":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the descriptor of the listing itself, closed by now
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) < BYTES_SENT + 8:
                    return None  # an older kernel
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


def require_room(args: argparse.Namespace, layers: int) -> None:
    """Refuse a `--width` whose weights, gradients and moments this machine cannot hold."""
    ways = HELD if args.sharding == "all" else [args.sharding]
    # At least 1: at first, each rank makes the whole network.
    sizes = max(1, *(sum(HELD[way](args.world_size)) for way in ways))
    n_bytes = 4 * sizes * count(args.width, layers) * len(ranks_here(args))
    require_memory(args, ["width"], n_bytes)


def count(width: int, layers: int) -> int:
    """Return the number of parameters of a network with hidden layers, without making it."""
    return 10 * width + width + (layers - 1) * (width + 1) * width + 5 * width + 5


def formula(sharding: str, model_bytes: int, world_size: int) -> dict[str, float]:
    """Compute what a rank holds, and sends in a step, by the formulas.

    Rajbhandari et al., "ZeRO", 2020, sections 5 and 7: `optimizer` is its first stage, `full` its
    third. In the paper they send 2 and 3 sizes in a step; the first sends 3 here, because DDP
    all-reduces the gradients where a reduce-scatter would do.

    Returns:
        Bytes: those of `bytes_held`, "sent", and "sent_by_gloo".
    """
    held = HELD[sharding](world_size)
    share = (world_size - 1) / world_size * model_bytes
    return {**{kind: sizes * model_bytes for kind, sizes in zip(KINDS, held, strict=True)},
            "sent": SENT[sharding] * share, "sent_by_gloo": SENT_BY_GLOO[sharding] * share}
