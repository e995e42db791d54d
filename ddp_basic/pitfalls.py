r"""Five mistakes with DDP: four end in an error, one trains badly in silence (for 6_3, cell 9).

    --kind     the mistake, what it looks like, and its fix
    unused     A step leaves one half of the model unused, so that half gets no gradients. DDP still
               waits for them when the next forward begins, and raises a RuntimeError: "Expected to
               have finished reduction in the prior iteration before starting a new one".
               Fix: find_unused_parameters=True, which walks through the graph in each step.
    uneven     Each rank has one batch more than the rank before it. In `backward()`, it waits for
               ranks that have already finished, until `--timeout`.
               Fix: `with ddp_model.join()`, so ranks that have finished take part with zeros.
    reentrant  find_unused_parameters=True walks through the graph after the forward. A re-entrant
               activation checkpoint hides its layer from that graph, so DDP counts the layer as
               unused. In `backward()`, the layer's gradients arrive after all, and DDP raises a
               RuntimeError: "Expected to mark a variable ready only once".
               Fix: use_reentrant=False.
    open_files A DataLoader's worker process sends each tensor as an open file in shared memory.
               Each rank keeps all batches, until the system refuses another file: a RuntimeError,
               "Too many open files". The limit is often 1,024 files. Here, a rank may open 16 more
               than it has.
               Fix: `tensor.clone()`, a copy in the memory of the rank.
    batchnorm  Each rank has the samples of one class, as in a file that is sorted by class.
               BatchNorm subtracts their mean, which is all that tells the classes apart. There is
               no error: the loss stops near 0.25, the variance of the labels 0 and 1.
               Fix: the mean and variance over all ranks. nn.SyncBatchNorm computes them, but trains
               only on GPUs; `BatchNormOfAllRanks` does the same on any device.

    python ddp_basic/pitfalls.py --kind unused                 the mistake
    python ddp_basic/pitfalls.py --kind unused --fixed         the same training, fixed
    python ddp_basic/pitfalls.py --kind unused --check         fixed: the same as one process?

With --kind batchnorm, it ends with:
    batchnorm on 2 ranks: loss 0.780 -> 0.253
and with --fixed:
    batchnorm, fixed, on 2 ranks: loss 1.838 -> 0.015
"""

import contextlib
from argparse import Namespace
from typing import Any

from common import report
from common.cli import Parser, bounded
from common.program import role_name, run_program
from common.session import device_for, group_options

import psutil
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ddp_basic.data import toy_samples
from ddp_basic.main import ToyModel, gpu_of

MORE_FILES = 16  # of `open_files`; a rank that keeps no batch needs about six


class TwoHeads(nn.Module):
    """Maps inputs (n, 10) to outputs (n, 5), with one of its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([ToyModel(), ToyModel()])

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return the outputs (n, 5) of the half that this step uses."""
        return self.heads[step % 2](x)


class CheckpointedModel(ToyModel):
    """ToyModel that recomputes its second layer in `backward()` and so keeps fewer activations."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (n, 5) of inputs (n, 10)."""
        hidden = self.relu(self.net1(x))
        return checkpoint(self.net2, hidden, use_reentrant=self.use_reentrant)


class MeanOfRanks(torch.autograd.Function):
    """Mean over the ranks, with a backward, which `dist.all_reduce` lacks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of x, of any shape, over the ranks."""
        mean = x.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the mean of the gradients, because the losses of all ranks depend on this x."""
        return MeanOfRanks.forward(ctx, gradient)


class BatchNormOfAllRanks(nn.BatchNorm1d):
    """BatchNorm with mean and variance over all ranks, which hold equally many samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x (n, features), during training only."""
        mean = MeanOfRanks.apply(x.mean(dim=0))
        variance = MeanOfRanks.apply((x - mean).square().mean(dim=0))
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def unused(rank: int, args: Namespace) -> list[float]:
    """Use the halves of a model alternately; return this rank's losses.

    Raises:
        RuntimeError: "Expected to have finished reduction in the prior iteration ...", unless
            `--fixed`.
    """
    ddp_model = wrapped(TwoHeads(), args, find_unused_parameters=args.fixed)
    samples = toy_samples(rank, args.seed)
    return train(ddp_model, [(*samples, step) for step in range(args.steps)], args)


def uneven(rank: int, args: Namespace) -> list[float]:
    """Train on `rank` batches more than rank 0; return this rank's losses."""
    ddp_model = wrapped(ToyModel(), args)
    samples = toy_samples(rank, args.seed)
    with ddp_model.join() if args.fixed else contextlib.nullcontext():
        return train(ddp_model, [samples] * (args.steps + rank), args)


def reentrant(rank: int, args: Namespace) -> list[float]:
    """Train with an activation checkpoint; return this rank's losses.

    Raises:
        RuntimeError: "Expected to mark a variable ready only once ...", unless `--fixed`.
    """
    model = CheckpointedModel(use_reentrant=not args.fixed)
    ddp_model = wrapped(model, args, find_unused_parameters=True)
    return train(ddp_model, [toy_samples(rank, args.seed)] * args.steps, args)


def open_files(rank: int, args: Namespace) -> list[float]:
    """Keep the batches of a DataLoader, then train on them; return this rank's losses.

    Raises:
        RuntimeError: "Too many open files ...", unless `--fixed`.
    """
    import resource  # Windows lacks it, and must reach the line that refuses it

    ddp_model = wrapped(ToyModel(), args)
    inputs, labels = toy_samples(rank, args.seed)
    samples = list(zip(inputs, labels, strict=True))
    # The worker starts with `iter`, so only this process gets the lower limit.
    loader = iter(DataLoader(samples * args.steps, batch_size=len(samples), num_workers=1,
                             multiprocessing_context="fork"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(soft, psutil.Process().num_fds() + MORE_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        batches = [[tensor.clone() for tensor in batch] if args.fixed else batch
                   for batch in loader]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return train(ddp_model, batches, args)


def batchnorm(rank: int, args: Namespace) -> list[float]:
    """Learn the class of samples when each rank has one class; return this rank's losses."""
    norm = BatchNormOfAllRanks(10) if args.fixed else nn.BatchNorm1d(10)
    ddp_model = wrapped(nn.Sequential(nn.Linear(10, 10), norm, nn.Linear(10, 1)), args)
    inputs, _ = toy_samples(rank, args.seed)
    inputs[:, 0] += 10 * rank  # tells the classes apart
    samples = inputs, torch.full((len(inputs), 1), float(rank))
    return train(ddp_model, [samples] * args.steps, args)


KINDS = {"unused": unused, "uneven": uneven, "reentrant": reentrant, "open_files": open_files,
         "batchnorm": batchnorm}


def wrapped(model: nn.Module, args: Namespace, **options: bool) -> DDP:
    """Wrap a model in DDP, on the device of this rank."""
    device = device_for(args.device)
    return DDP(model.to(device), device_ids=gpu_of(device), **options)


def train(ddp_model: DDP, batches: list[tuple], args: Namespace) -> list[float]:
    """Train on the batches of this rank; return the loss on each batch before its step.

    Args:
        ddp_model: Model wrapped in DDP.
        batches: Batches (inputs, labels, further arguments of the model).
        args: Parsed flags.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    device, losses = device_for(args.device), []
    for step, (inputs, labels, *more) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(inputs.to(device), *more), labels.to(device))
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()  # inside, DDP waits for all ranks
        optimizer.step()
    return losses


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, train, leave; return the losses of all ranks on rank 0."""
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    if rank == 0:
        report.log("rank0", f"{args.kind}{', fixed' if args.fixed else ''}: {world_size} ranks")
    torch.manual_seed(args.seed)
    losses = [None] * world_size
    dist.all_gather_object(losses, KINDS[args.kind](rank, args))
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": backend, "losses": losses} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_basic/pitfalls", __doc__, world_size=2, min_world_size=2)
    add = parser.add_argument
    add("--kind", choices=KINDS, default="unused", help="mistake to make")
    add("--fixed", action="store_true", help="train without the mistake")
    add("--steps", type=bounded(int, at_least=1), default=20, metavar="N",
        help="number of steps; with --kind uneven, on rank 0")
    add("--lr", type=bounded(float, above=0), default=0.1, help="learning rate of SGD")
    parser.set_defaults(timeout=5.0)  # how long `uneven` waits; all else takes a moment
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print the summary line; return the complete metrics."""
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    for rank, losses in enumerate(metrics["losses"]):
        report.log("rank0", f"loss on the samples of rank {rank}: "
                            f"{losses[0]:.3f} -> {losses[-1]:.3f}, {len(losses)} steps")
    first, last = (sum(losses[step] for losses in metrics["losses"]) / args.world_size
                   for step in (0, -1))
    print(f"{args.kind}{', fixed,' if args.fixed else ''} on {args.world_size} ranks: "
          f"loss {first:.3f} -> {last:.3f}")
    return metrics


if __name__ == "__main__":
    main()
