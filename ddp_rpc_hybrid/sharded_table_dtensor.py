"""sharded_table.py with torch's DTensor in place of written-out collectives.

The rows are in a DTensor that is sharded over the trainers, and `RowwiseParallel` puts the
collectives around its Embedding:

    indices of all trainers -> each looks up the rows that it has -> reduce_scatter: the rows
    gradient of the rows    <- each keeps those of its own        <- all_gather

What it wins: no AllToAll, no counts, no owners in the code. What it costs: DTensor (torch 2.13) has
no rule for EmbeddingBag, so the rows of a bag travel, not their sum, and are added up here; and
none for sparse gradients, so each trainer makes the gradient of the whole table. With 100 rows it
makes 70 steps/s where sharded_table.py makes 132 (`python -m benchmarks.ddp_rpc_hybrid_tables`).

    python ddp_rpc_hybrid/sharded_table_dtensor.py --world_size 2    N processes are N trainers
    python ddp_rpc_hybrid/sharded_table_dtensor.py --check           as one process?
    torchrun --nproc_per_node 2 ddp_rpc_hybrid/sharded_table_dtensor.py

It ends with, about:
    2 trainers, dtensor: loss 2.50 -> 0.60, accuracy 15% -> 82% (chance 12%) | ...
"""

from argparse import Namespace

import torch
import torch.distributed as dist
from common.cli import Parser
from common.program import run_program
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional as F

from ddp_rpc_hybrid import sharded_table
from ddp_rpc_hybrid.data import bags_of, require_parts
from ddp_rpc_hybrid.sharded_table import role_name
from ddp_rpc_hybrid.sharded_table_results import finish


class DTensorTable(nn.Module):
    """Has the rows of all trainers in a DTensor, whose Embedding has the collectives inside.

    https://docs.pytorch.org/docs/stable/distributed.tensor.html

    Args:
        table: all rows, (num_embeddings, embedding_dim); the DTensor keeps those of this rank.
        rank, world_size: of the trainers.
        sparse: False.
    """

    def __init__(self, table: torch.Tensor, rank: int, world_size: int, sparse: bool) -> None:
        super().__init__()
        self.world_size = world_size
        mesh = init_device_mesh(table.device.type, (world_size,))
        # All ranks put the same indices in, and get a part of the rows out: a reduce_scatter adds
        # up what owners have found, and zeros of the others.
        way = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        self.rows = parallelize_module(nn.Embedding.from_pretrained(table, freeze=False), mesh, way)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the sums (bags, embedding_dim) of this rank's bags, the i-th from `offsets[i]`."""
        # As many from each rank: shorter lists are filled up, with rows that nobody will use.
        length = torch.tensor(len(indices), device=indices.device)
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        self.length = length.item()
        everyones = [indices.new_empty(self.length) for _ in range(self.world_size)]
        dist.all_gather(everyones, F.pad(indices, (0, self.length - len(indices))))
        rows = self.rows(torch.cat(everyones))[: len(indices)]
        sums = rows.new_zeros(len(offsets), rows.shape[1])
        return sums.index_add(0, bags_of(indices, offsets), rows)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Do what sharded_table.py does, with a DTensor."""
    return sharded_table.run_worker(rank, world_size, args, DTensorTable)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of sharded_table.py."""
    parser = sharded_table.build_parser("ddp_rpc_hybrid/sharded_table_dtensor", __doc__)
    parser.set_defaults(exchange="dtensor")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_parts(args, role_name)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
