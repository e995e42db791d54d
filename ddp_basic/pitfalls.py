r"""Three mistakes with DDP: two end in an error, the third says nothing (for tutorial 6_3, cell 9).

    --kind     what is wrong, and what one sees of it
    unused     A step does not use one half of the model. Its gradients never come, so DDP has not
               averaged all when the next forward begins, and raises a RuntimeError: "Expected to
               have finished reduction in the prior iteration before starting a new one".
               Way out: find_unused_parameters=True, for a walk through the graph in each step.
    uneven     Each rank has a batch more than the rank before. In `backward()` it waits for those
               that have no more, until `--timeout`.
               Way out: `with ddp_model.join()`: ranks that are done take part with zeros.
    batchnorm  Each rank has the samples of one class, as in a file that is sorted by class.
               BatchNorm takes off their mean, which is all that tells the classes apart. No error:
               the loss stops near 0.25, the variance of the labels 0 and 1.
               Way out: the statistics of all ranks. nn.SyncBatchNorm, which trains on GPUs alone,
               does what `BatchNormOfAllRanks` does.

    python ddp_basic/pitfalls.py --kind unused                 the mistake
    python ddp_basic/pitfalls.py --kind unused --mended        the same, with its way out
    python ddp_basic/pitfalls.py --kind unused --check         mended: the same as one process?

It ends with, of batchnorm:
    batchnorm on 2 ranks: loss 0.780 -> 0.253
and with --mended:
    batchnorm, mended, on 2 ranks: loss 1.838 -> 0.015
"""

import contextlib
from argparse import Namespace
from typing import Any

from common import report
from common.cli import Parser, bounded
from common.program import role_name, run_program
from common.session import device_for, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic.data import toy_samples
from ddp_basic.main import ToyModel, gpu_of


class TwoHeads(nn.Module):
    """Maps inputs (n, 10) to outputs (n, 5), by the one or the other half of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([ToyModel(), ToyModel()])

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Compute the outputs, in turns."""
        return self.heads[step % 2](x)


class MeanOfRanks(torch.autograd.Function):
    """Averages over the ranks; with a backward, which `dist.all_reduce` does not have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Average over the ranks."""
        mean = x.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Average the gradients: the losses of all ranks depend on this x."""
        return MeanOfRanks.forward(ctx, gradient)


class BatchNormOfAllRanks(nn.BatchNorm1d):
    """Takes mean and variance of the samples of all ranks, who have as many each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (n, features); in training alone."""
        mean = MeanOfRanks.apply(x.mean(dim=0))
        variance = MeanOfRanks.apply((x - mean).square().mean(dim=0))
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def unused(rank: int, args: Namespace) -> list[float]:
    """Use the halves of a model in turns; return this rank's losses."""
    ddp_model = wrapped(TwoHeads(), args, find_unused_parameters=args.mended)
    samples = toy_samples(rank, args.seed)
    return train(ddp_model, [(*samples, step) for step in range(args.steps)], args)


def uneven(rank: int, args: Namespace) -> list[float]:
    """Train with as many batches more as the number of this rank; return its losses."""
    ddp_model = wrapped(ToyModel(), args)
    samples = toy_samples(rank, args.seed)
    with ddp_model.join() if args.mended else contextlib.nullcontext():
        return train(ddp_model, [samples] * (args.steps + rank), args)


def batchnorm(rank: int, args: Namespace) -> list[float]:
    """Learn the class of samples, of which each rank has one; return this rank's losses."""
    norm = BatchNormOfAllRanks(10) if args.mended else nn.BatchNorm1d(10)
    ddp_model = wrapped(nn.Sequential(nn.Linear(10, 10), norm, nn.Linear(10, 1)), args)
    inputs, _ = toy_samples(rank, args.seed)
    inputs[:, 0] += 10 * rank  # what tells the classes apart
    samples = inputs, torch.full((len(inputs), 1), float(rank))
    return train(ddp_model, [samples] * args.steps, args)


KINDS = {"unused": unused, "uneven": uneven, "batchnorm": batchnorm}


def wrapped(model: nn.Module, args: Namespace, **options: bool) -> DDP:
    """Wrap a model, on the device of this rank."""
    device = device_for(args.device)
    return DDP(model.to(device), device_ids=gpu_of(device), **options)


def train(ddp_model: DDP, batches: list[tuple], args: Namespace) -> list[float]:
    """Train on some batches; return the loss of each before its step.

    Args:
        ddp_model: wrapped.
        batches: inputs, labels, and what else the model is called with.
        args: the parsed flags.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    device, losses = device_for(args.device), []
    for step, (inputs, labels, *more) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(inputs.to(device), *more), labels.to(device))
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()  # in here, DDP waits for all ranks
        optimizer.step()
    return losses


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, train, leave; rank 0 returns the losses of all ranks."""
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    if rank == 0:
        report.log("rank0", f"{args.kind}{', mended' if args.mended else ''}: {world_size} ranks")
    torch.manual_seed(args.seed)
    losses = [None] * world_size
    dist.all_gather_object(losses, KINDS[args.kind](rank, args))
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": backend, "losses": losses} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("ddp_basic/pitfalls", __doc__, world_size=2, min_world_size=2)
    add = parser.add_argument
    add("--kind", choices=KINDS, default="unused", help="which mistake")
    add("--mended", action="store_true", help="train with its way out")
    add("--steps", type=bounded(int, at_least=1), default=20, metavar="N",
        help="steps; of uneven, on rank 0")
    add("--lr", type=bounded(float, above=0), default=0.1, help="learning rate of SGD")
    parser.set_defaults(timeout=5.0)  # nothing else here takes long
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print the line of numbers; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    for rank, losses in enumerate(metrics["losses"]):
        report.log("rank0", f"loss on the samples of rank {rank}: "
                            f"{losses[0]:.3f} -> {losses[-1]:.3f}, {len(losses)} steps")
    first, last = (sum(losses[step] for losses in metrics["losses"]) / args.world_size
                   for step in (0, -1))
    print(f"{args.kind}{', mended,' if args.mended else ''} on {args.world_size} ranks: "
          f"loss {first:.3f} -> {last:.3f}")
    return metrics


if __name__ == "__main__":
    main()
