"""Training data: bags of indices, and the classes that a teacher model gives them."""

from argparse import Namespace
from collections.abc import Callable

from common.cli import on_cpu, ranks_here, require_memory, require_own_gpus

import torch
from torch.nn import functional as F

BATCHES = 10  # of each trainer in an epoch


class Teacher:
    """A table and a linear layer that decide on the targets, so that the model can learn them."""

    def __init__(self, args: Namespace) -> None:
        # With the model's seed, the model would begin with the table that it should learn.
        generator = torch.Generator().manual_seed(10_000 + args.seed)
        rows, dim, classes = args.num_embeddings, args.embedding_dim, args.num_classes
        self.table = torch.randn(rows, dim, generator=generator, dtype=torch.float32)
        self.weight = torch.randn(classes, dim, generator=generator, dtype=torch.float32)

    def target(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the class of each bag, shape (bags,)."""
        sums = F.embedding_bag(indices, self.table, offsets, mode="sum")
        return F.linear(sums, self.weight).argmax(dim=1)


def bags_of(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the number of the bag that holds each index, shape (indices,)."""
    positions = torch.arange(len(indices), device=indices.device)
    return torch.searchsorted(offsets, positions, right=True) - 1


def require_tables(args: Namespace, role_name: Callable[[int, int], str], share: float = 0.0
                   ) -> None:
    """Refuse a table and a dense part that this machine cannot hold.

    Args:
        args: Parsed flags.
        role_name: Function that names a rank.
        share: Size of a trainer's weights and gradient of the table, in tables; 0 with a server.

    Raises:
        SystemExit: 2 after one line.
    """
    table, dense = (4 * n * args.embedding_dim for n in (args.num_embeddings, args.num_classes))
    n_bytes = 0
    for rank in ranks_here(args):
        role = role_name(rank, args.world_size)
        if role == "ps":
            n_bytes += table if args.sparse else 2 * table  # a dense gradient has all rows
        elif role != "master":
            # The teacher's table and layer; the weights and, on a CPU, their gradient.
            n_bytes += (1 + share) * table + (3 if on_cpu(args) else 2) * dense
    require_memory(args, ["num_embeddings", "embedding_dim", "num_classes"], n_bytes)


def require_parts(args: Namespace, role_name: Callable[[int, int], str]) -> None:
    """Refuse a table that cannot be spread over the trainers; see `require_tables`."""
    require_own_gpus(args)
    # A trainer holds the weights of its part and their gradient, which is dense unless --sparse.
    require_tables(args, role_name, (1 if args.sparse else 2) / args.world_size)
