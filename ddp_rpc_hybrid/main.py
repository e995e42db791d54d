r"""DistributedDataParallel and RPC in one model: dense replicas, one sparse table (tutorial 6_9).

A large embedding table stays on a parameter server, and trainers look up its rows over RPC. DDP
replicates the small layer on top of it. One `dist_autograd.backward` serves both: DDP averages the
layer's gradients over the trainers, and distributed autograd sends the table's to the server.

    rank 2 "master"            rank 0 "trainer0"                      rank 3 "ps"
    +------------------+       +--------------------------+           +---------------------+
    | makes the table, | ----> | _run_trainer(emb_rref):  |  indices  | EmbeddingBag        |
    | starts the       |       |   emb_rref....forward()  | --------> |   the rows' sums    |
    | trainers, waits  |       |   DDP(Linear)         <----------------                     |
    |                  |       |   backward()             | --------> |   their gradients   |
    |                  |       |   opt.step()             | --------> |   SGD, one at a time|
    |                  |       +--------------------------+           |                     |
    |                  |          ^ all_reduce of the Linear's gradient                     |
    |                  |          v rank 1 "trainer1"                 |                     |
    |                  | ----> [same, with other batches]    <----->  |                     |
    +------------------+                                              +---------------------+

    python ddp_rpc_hybrid/main.py --world_size 4             N processes make N-2 trainers
    python ddp_rpc_hybrid/main.py --sparse --num_embeddings 1000000
    python ddp_rpc_hybrid/main.py --check                    the same numbers as one process?
    torchrun --nproc_per_node 4 ddp_rpc_hybrid/main.py       under torchrun

It ends with, about:
    2 trainers: loss 2.50 -> 0.60, accuracy 15% -> 82% (chance 12%) | ...

sharded_table.py trains the same model without a server: each trainer owns a part of the rows.
"""

import random
from argparse import Namespace
from collections.abc import Iterator

from common.cli import Parser, bounded
from common.program import run_program
from common.session import device_for, group_options, rpc_options, wait_all

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_rpc_hybrid import results
from ddp_rpc_hybrid.data import BATCHES, Teacher, require_tables

PS_NAME, MASTER_NAME, TRAINER_NAME = "ps", "master", "trainer{}"


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: the trainers come first, then the master, then the server."""
    special = {world_size - 1: PS_NAME, world_size - 2: MASTER_NAME}
    return special.get(rank, TRAINER_NAME.format(rank))


class HybridModel(nn.Module):
    """A sparse part on the server, an EmbeddingBag, and a dense part here, a Linear in DDP."""

    def __init__(self, emb_rref: RRef, device: torch.device, args: Namespace) -> None:
        super().__init__()
        self.emb_rref = emb_rref
        torch.manual_seed(args.seed)  # gives all trainers the same weights, as DDP would, too
        fc = nn.Linear(args.embedding_dim, args.num_classes).to(device)
        # Tutorial: always gives device_ids, which DDP refuses for a module on the CPU.
        self.fc = DDP(fc, device_ids=[device] if device.type == "cuda" else None)
        self.device = device

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return scores (bags, classes) of bags of indices; bag i begins at `offsets[i]`."""
        emb_lookup = self.emb_rref.rpc_sync().forward(indices, offsets)
        return self.fc(emb_lookup.to(self.device))


def _retrieve_embedding_parameters(emb_rref: RRef) -> list[RRef]:
    """Return an RRef for each parameter of the table; runs on the server."""
    return [RRef(param) for param in emb_rref.local_value().parameters()]


class SGD(optim.SGD):
    """optim.SGD that `DistributedOptimizer` steps under a lock; see `Adam` in rpc_rnn/main.py."""


def get_next_batch(rank: int, epoch: int, teacher: Teacher, args: Namespace
                   ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield batches (indices, offsets, targets): 20 to 50 random indices in bags of 1 to 10."""
    seed = 1_000_000 * args.seed + 1000 * epoch + rank  # each trainer and epoch has its own batches
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        num_indices = rng.randint(20, 50)
        indices = torch.randint(args.num_embeddings, (num_indices,), generator=generator)
        # Generate the offsets, at which the bags begin.
        offsets, start = [], 0
        while start < num_indices:
            offsets.append(start)
            start += rng.randint(1, 10)
        offsets = torch.tensor(offsets)
        # Tutorial: draws random targets, which no model can learn.
        yield indices, offsets, teacher.target(indices, offsets)


def _run_trainer(emb_rref: RRef, rank: int, args: Namespace) -> dict:
    """Train when the master calls this on a trainer; return the metrics of this trainer."""
    # Set up the model.
    model = HybridModel(emb_rref, device_for(args.device), args)
    # Retrieve all parameters as RRefs for the distributed optimizer: first the table's ...
    model_parameter_rrefs = rpc.rpc_sync(PS_NAME, _retrieve_embedding_parameters, args=(emb_rref,))
    # ... then the local ones: model.parameters() holds only local parameters.
    for param in model.parameters():
        model_parameter_rrefs.append(RRef(param))
    # Tutorial: gives optim.SGD, whose steps take no lock: two trainers' steps of the table overlap,
    # and updates can be lost (torch 2.13).
    opt = DistributedOptimizer(SGD, model_parameter_rrefs, lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    teacher = Teacher(args)
    history = results.History(TRAINER_NAME.format(rank), args, show=rank == 0)
    for epoch in range(args.epochs):
        batches = list(get_next_batch(rank, epoch, teacher, args))
        history.begin_epoch()
        for indices, offsets, target in batches:
            # The context holds the gradients of this step, here and on the server.
            with dist_autograd.context() as context_id:
                output = model(indices, offsets)
                target = target.to(output.device)
                loss = criterion(output, target)
                # Inside, DDP averages the gradients of the dense part over the trainers. The
                # gradients of the sums travel to the server, which computes the table's gradient.
                dist_autograd.backward(context_id, [loss])
                # The server steps the table; every trainer steps its replica of the dense part.
                opt.step(context_id)
            # No zero_grad(): the next step has its own context, and so its own gradients.
            history.add(loss, output, target, indices)
        history.end_epoch()
    # One more backward, without a step, to measure the table's gradient.
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [criterion(model(indices, offsets), target)])
        gradient_bytes = rpc.rpc_sync(PS_NAME, _table_gradient_bytes, args=(emb_rref, context_id))
    return results.of_trainer(history, model, gradient_bytes)


def _table_gradient_bytes(emb_rref: RRef, context_id: int) -> int:
    """Return the bytes of the table's gradient in a context; runs on the server."""
    gradient = dist_autograd.get_gradients(context_id)[emb_rref.local_value().weight]
    return results.bytes_of(gradient)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, do the work of this role, leave; return the metrics on the master, None elsewhere."""
    role, n_trainers, metrics = role_name(rank, world_size), world_size - 2, None
    # Tutorial: needs two ports, 29500 and 29501. Here, RPC and the process group share one store.
    options = {"rank": rank, "world_size": world_size, "rpc_backend_options": rpc_options(args)}
    torch.manual_seed(args.seed)  # the server draws the table's weights when the master asks
    if role == MASTER_NAME:
        rpc.init_rpc(role, **options)
        # Build the table on the server.
        emb_rref = rpc.remote(
            PS_NAME, nn.EmbeddingBag, args=(args.num_embeddings, args.embedding_dim),
            kwargs={"mode": "sum", "sparse": args.sparse})
        # Run the training loop on the trainers.
        futs = []
        for trainer_rank in range(n_trainers):
            # Tutorial: passes rank, the master's own, so every trainer asks for cuda:2.
            # No timeout, because this call lasts as long as the training.
            fut = rpc.rpc_async(TRAINER_NAME.format(trainer_rank), _run_trainer,
                                args=(emb_rref, trainer_rank, args), timeout=0)
            futs.append(fut)
        # Wait for all trainers. If one fails, raise at once, even if the others wait for it.
        metrics = results.over_trainers(wait_all(futs))
    elif rank < n_trainers:
        # A process group of the trainers alone, for DDP.
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                                world_size=n_trainers)
        rpc.init_rpc(role, **options)
        # The trainers wait for the master's call of _run_trainer.
    else:
        rpc.init_rpc(role, **options)
        # The server does nothing here: it answers the trainers and the master.
    rpc.shutdown()  # waits until every process has finished
    if dist.is_initialized():
        dist.destroy_process_group()
    return metrics


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_rpc_hybrid", __doc__, world_size=4, min_world_size=3, rpc=True)
    add_model_flags(parser)
    return parser


def add_model_flags(parser: Parser) -> None:
    """Add the flags of the model and its training, which sharded_table.py has, too."""
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--epochs", type=count, default=100, metavar="N",
        help=f"number of epochs, of {BATCHES} batches on each trainer")
    add("--num_embeddings", type=count, default=100, metavar="N",
        help="number of rows in the table")
    add("--embedding_dim", type=count, default=16, metavar="N", help="size of a row")
    add("--num_classes", type=bounded(int, at_least=2), default=8, metavar="N",
        help="number of classes that the dense part tells apart")
    add("--lr", type=bounded(float, above=0), default=0.2, help="learning rate of SGD")
    add("--sparse", action="store_true",
        help="keep only the looked-up rows in the table's gradient")


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_tables(args, role_name)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
