r"""The same model without a server: each trainer owns a part of the table's rows (beyond 6_9).

Each trainer owns a part of the rows (model parallel) and a replica of the Linear (data parallel,
DDP). In a step, every trainer asks the owners for the rows of its bags, and sends the gradients
back the same way. There is no master, no server and no RPC: all trainers join in collectives.

    rank 0 "trainer0"                                     rank 1 "trainer1"
    +--------------------------+   all_to_all: indices    +--------------------------+
    | its own batches          | <----------------------> | its own batches          |
    | rows 0 to 49 of the table|   sums of the rows       | rows 50 to 99            |
    |   their SGD              | <----------------------> |   their SGD              |
    | backward()               |   their gradients        | backward()               |
    |                          | <----------------------> |                          |
    | DDP(Linear)              |   all_reduce             | DDP(Linear)              |
    +--------------------------+                          +--------------------------+

The server of main.py applies the trainers' steps of the table one by one, in any order. Here, the
owners add up the gradients of a step and apply them together, to the rows that were looked up.

Gains: 161 steps/s per trainer where main.py makes 99 (100 rows, two trainers on 2 cores), and no
process keeps the full table (each rank draws it once, at the start). Costs: in each step, all
trainers wait for the slowest one.

    python ddp_rpc_hybrid/sharded_table.py --world_size 2     N processes are N trainers
    python ddp_rpc_hybrid/sharded_table.py --check            the same numbers as one process?
    torchrun --nproc_per_node 2 ddp_rpc_hybrid/sharded_table.py

It ends with, about:
    2 trainers, all_to_all: loss 2.50 -> 0.60, accuracy 15% -> 82% (chance 12%) | ...
"""

from argparse import Namespace

from common.cli import Parser
from common.program import run_program
from common.session import device_of_group, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_rpc_hybrid import sharded_table_results as results
from ddp_rpc_hybrid.data import Teacher, bags_of, require_parts
from ddp_rpc_hybrid.main import TRAINER_NAME, add_model_flags, get_next_batch


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: all ranks are trainers."""
    return TRAINER_NAME.format(rank)


def exchange(tensor: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    """Run an all_to_all: the first `send[0]` entries of a tensor go to rank 0, and so on.

    Args:
        tensor: Entries to send, shape (sum(send), ...).
        send, receive: Numbers of entries, one for each rank.

    Returns:
        Received entries, ordered by rank, shape (sum(receive), ...).
    """
    received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    dist.all_to_all_single(received, tensor.contiguous(), receive, send)
    return received


class AllToAll(torch.autograd.Function):
    """all_to_all of tensors that need a gradient, which returns the way that the entries came."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, send: list[int],
                receive: list[int]) -> torch.Tensor:
        """Send and receive; see `exchange`."""
        ctx.counts = send, receive
        return exchange(tensor, send, receive)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        """Fetch the gradients of the sent entries from the ranks that received them."""
        send, receive = ctx.counts
        return exchange(gradient, receive, send), None, None


class AllToAllTable(nn.Module):
    """A table whose rows belong to all ranks: each rank holds a part and asks for the other rows.

    An owner adds up its rows of each bag before it answers, as row-wise sharded tables of TorchRec
    do (https://docs.pytorch.org/torchrec/). A bag of up to ten rows costs one sum from each owner.

    Args:
        table: All rows, (num_embeddings, embedding_dim); this rank keeps a copy of its part.
        rank, world_size: Rank of this trainer, and number of trainers.
        sparse: Whether the gradient holds only the rows that were looked up.
    """

    def __init__(self, table: torch.Tensor, rank: int, world_size: int, sparse: bool) -> None:
        super().__init__()
        self.world_size = world_size
        self.part = -(-len(table) // world_size)  # rounded up: last parts may be shorter, or empty
        # A view instead of a clone would keep the memory of the full table on each rank.
        mine = table[rank * self.part : (rank + 1) * self.part].clone()
        self.rows = nn.EmbeddingBag.from_pretrained(mine, freeze=False, mode="sum", sparse=sparse)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the sums (bags, embedding_dim) of this rank's bags; bag i begins at `offsets[i]`.

        All ranks must call it together.
        """
        one_each, my_bags = [1] * self.world_size, [len(offsets)] * self.world_size
        # A question to an owner names one of its rows, and the bag here that needs the row.
        owner = indices // self.part
        questions = torch.stack([indices % self.part, bags_of(indices, offsets)], dim=1)
        questions = questions[owner.argsort(stable=True)]
        n_questions = owner.bincount(minlength=self.world_size)
        # No rank knows how much other ranks will ask: the counts go first, then the questions.
        counts = torch.stack([n_questions, torch.full_like(n_questions, len(offsets))], dim=1)
        n_asked, their_bags = exchange(counts, one_each, one_each).unbind(dim=1)
        asked = exchange(questions, n_questions.tolist(), n_asked.tolist())
        # Number the bags of all ranks consecutively: bag b of rank r gets number first[r] + b.
        first = their_bags.cumsum(dim=0) - their_bags
        bags = asked[:, 1] + first.repeat_interleave(n_asked)
        begin = torch.searchsorted(bags, torch.arange(their_bags.sum(), device=bags.device))
        sums = self.rows(asked[:, 0], begin)  # zeros for a bag with none of these rows
        answers = AllToAll.apply(sums, their_bags.tolist(), my_bags)
        return answers.view(self.world_size, len(offsets), -1).sum(dim=0)


class ShardedModel(nn.Module):
    """The HybridModel of main.py, with the table on the trainers instead of behind RPC."""

    def __init__(self, rank: int, world_size: int, device: torch.device, args: Namespace) -> None:
        super().__init__()
        # Each rank draws the full table, the same as main.py's server, and keeps its part.
        torch.manual_seed(args.seed)
        table = nn.EmbeddingBag(args.num_embeddings, args.embedding_dim).weight.detach().to(device)
        self.table = AllToAllTable(table, rank, world_size, args.sparse)
        torch.manual_seed(args.seed)
        fc = nn.Linear(args.embedding_dim, args.num_classes).to(device)
        # DDP wraps only the Linear, because no other rank has a copy of these rows to average with.
        self.fc = DDP(fc, device_ids=[device] if device.type == "cuda" else None)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return scores (bags, classes) of bags of indices; bag i begins at `offsets[i]`."""
        return self.fc(self.table(indices, offsets))


def train(rank: int, world_size: int, args: Namespace) -> dict:
    """Train this rank's part of the model; return the metrics of this trainer."""
    device = device_of_group(args)
    model = ShardedModel(rank, world_size, device, args)
    # Each rank steps its own rows and its replica of the Linear.
    opt = optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    teacher = Teacher(args)
    history = results.History(role_name(rank, world_size), rank, model.table, args)
    for epoch in range(args.epochs):
        batches = list(get_next_batch(rank, epoch, teacher, args))
        history.begin_epoch()
        for batch in batches:
            indices, offsets, target = (tensor.to(device) for tensor in batch)
            opt.zero_grad()
            output = model(indices, offsets)
            loss = criterion(output, target)
            # In this call, DDP averages the Linear's gradients over the trainers. Each owner adds
            # up the gradients of its rows, just as the steps on main.py's server add up.
            loss.backward()
            opt.step()
            history.add(loss, output, target, indices)
        history.end_epoch()
    return results.of_trainer(history, model)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, train, leave; return the metrics over all trainers on rank 0, None elsewhere."""
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    trainers = [None] * world_size
    dist.all_gather_object(trainers, train(rank, world_size, args))
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {**results.over_trainers(trainers), "backend": backend} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_rpc_hybrid/sharded_table", __doc__, world_size=2)
    add_model_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_parts(args, role_name)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
