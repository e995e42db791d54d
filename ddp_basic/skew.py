r"""main.py's training with one slow rank: all other ranks wait for it (tutorial 6_3, cell 10).

`--slow_rank` loses `--delay` seconds in each step. Every rank measures how long it computes and how
long it stays in `backward()`. The same training without the delay comes first. The slowest rank
sets the pace, and a rank that waits for longer than `--timeout` raises an error.

    a step    rank 0, fast    [forward][ backward: waits for the gradients of rank 1 ][step]
              rank 1, slow    [forward][ delay                             ][backward][step]

    python ddp_basic/skew.py --slow_rank 1 --delay 0.5 --timeout 2
    python ddp_basic/skew.py --slow_rank 1 --delay 3 --timeout 2       fails: a rank waits too long
    python ddp_basic/skew.py --check                 the same numbers as a single process?
    torchrun --nproc_per_node 2 ddp_basic/skew.py

It ends with, about:
    skew on 2 ranks: a step takes 0.503 s where rank 1 takes 0.5 s longer, 0.002 s where none does
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

from common import report
from common.cli import LONGEST_S, Parser, bounded, refuse
from common.program import role_name, run_program
from common.session import device_for, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic.data import toy_samples
from ddp_basic.main import ToyModel, gpu_of
from ddp_basic.skew_results import finish, metrics_of

JOIN_TIMEOUT_S = 60.0  # processes take seconds to start, which is not what --timeout limits here


def train_twice(rank: int, args: argparse.Namespace) -> dict[str, list]:
    """Train without a slow rank, then with one; all ranks wait for it, up to `--timeout`.

    Returns:
        What `timed_steps` returns: `even_spans` without a slow rank, `spans` with it.
    """
    device = device_for(args.device)
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args.seed))
    # A group with this timeout. It is gloo, because nccl raises nothing: it ends the process.
    group = dist.new_group(timeout=timedelta(seconds=args.timeout), backend="gloo")
    spans = {}
    for name, slow_rank in (("even_spans", None), ("spans", args.slow_rank)):
        torch.manual_seed(args.seed)
        ddp_model = DDP(ToyModel().to(device), device_ids=gpu_of(device), process_group=group)
        delay = args.delay if rank == slow_rank else 0.0
        spans[name] = timed_steps(ddp_model, inputs, labels, delay, args)
    return spans


def timed_steps(ddp_model: DDP, inputs: torch.Tensor, labels: torch.Tensor, delay: float,
                args: argparse.Namespace) -> list[list[float]]:
    """Train, with extra work of `delay` seconds in every step.

    Args:
        ddp_model: Model wrapped in DDP, on any device.
        inputs, labels: Samples of this rank, (n, 10) and (n, 5).
        delay: Delay of this rank in seconds.
        args: Parsed flags; the model's process group waits for at most `timeout` seconds.

    Returns:
        For each step three moments, in seconds since all ranks began: its start, the start of its
        backward and its end.

    Raises:
        RuntimeError: if the gradients of another rank did not arrive within the timeout.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    bar = report.progress(args.steps, "step", show=dist.get_rank() == 0, role="rank0")
    dist.barrier()  # the clocks of all ranks start together
    zero, spans = time.perf_counter(), []
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels)
        report.require_finite(loss, f"at step {step}")
        time.sleep(delay)  # stands for a slower machine, or a file that only this rank writes
        computed = time.perf_counter()
        with waits_at_most(args.timeout, step):
            loss.backward()  # the fast ranks wait here
        optimizer.step()
        spans.append([moment - zero for moment in (started, computed, time.perf_counter())])
        bar.update()
    bar.close()
    return spans


@contextlib.contextmanager
def waits_at_most(timeout: float, step: int) -> Iterator[None]:
    """Explain the error if a `backward()` inside has waited for longer than the timeout."""
    started = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        # gloo raises "Timed out waiting 2000ms for recv operation", or "Connection closed by peer"
        # if another waiting rank has given up a moment earlier. A rank that died raises the same
        # error, but sooner.
        if time.perf_counter() - started < 0.9 * timeout:
            raise
        raise RuntimeError(
            f"step {step}: rank {dist.get_rank()} waited {timeout:g} s in backward() for the "
            "gradients of a slower rank; make the ranks equally fast, or give a larger --timeout"
        ) from error


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join, train twice, leave; return the metrics on rank 0."""
    options = group_options(args, device_for(args.device))
    options["timeout"] = timedelta(seconds=max(args.timeout, JOIN_TIMEOUT_S))
    dist.init_process_group(**options, rank=rank, world_size=world_size)
    rows = [None] * world_size
    dist.all_gather_object(rows, train_twice(rank, args))
    metrics = metrics_of(rows, "gloo")  # the backend of the group that averages
    dist.destroy_process_group()
    return metrics if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_basic/skew", __doc__, world_size=2)
    add = parser.add_argument
    add("--slow_rank", type=bounded(int, at_least=0), metavar="R",
        help="rank to slow down (default: the last one)")
    add("--delay", type=bounded(float, at_least=0, at_most=LONGEST_S), default=0.5, metavar="S",
        help="seconds that this rank loses in each step")
    add("--steps", type=bounded(int, at_least=1), default=10, metavar="N",
        help="number of steps in each of the two trainings")
    add("--lr", type=bounded(float, above=0), default=0.5, help="learning rate of SGD")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    args.slow_rank = args.world_size - 1 if args.slow_rank is None else args.slow_rank
    if args.slow_rank >= args.world_size:
        refuse(f"--slow_rank {args.slow_rank} must be below --world_size {args.world_size}")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
