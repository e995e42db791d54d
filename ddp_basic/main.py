r"""DistributedDataParallel: a replica on every rank, gradients averaged (tutorial 6_3).

Every rank holds the same model and samples of its own. In `backward()`, DDP averages the gradients
over all ranks: every rank takes the step that a single process with all samples would take.

    rank 0                                                           rank 1
    +-------------------------+                                      +-------------------------+
    | samples of rank 0       |                                      | samples of rank 1       |
    | DDP(model)              | ----- the weights of rank 0 -------> | DDP(model)              |
    | forward                 |                                      | forward                 |
    | backward: gradients     | <--- all-reduce: their average ----> | backward: gradients     |
    | optimizer.step()        |                                      | optimizer.step()        |
    +-------------------------+        again the same weights        +-------------------------+

    python ddp_basic/main.py --world_size 2          three demos: basic, checkpoint, model_parallel
    python ddp_basic/main.py --demo skew --slow_rank 1 --delay 0.5 --timeout 2
    python ddp_basic/main.py --check                 the same numbers as a single process?
    torchrun --nproc_per_node 2 ddp_basic/main.py
    python ddp_basic/main.py --rank 1 --master_addr HOST       one rank per terminal or machine

It ends with: basic, checkpoint, model_parallel on 2 ranks: loss 1.169 -> 0.572
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from common import report
from common.cli import LONGEST_S, Parser, bounded, ranks_here, refuse, require_memory
from common.program import role_name, run_program
from common.session import device_for, group_options
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import results
from ddp_basic.data import toy_samples

JOIN_TIMEOUT_S = 60.0  # processes take seconds to start: a tight --timeout is not for that


def setup(rank: int, world_size: int, args: argparse.Namespace) -> None:
    """Join the process group: gloo, or nccl where every rank has a GPU of its own."""
    # Tutorial: MASTER_PORT 12355, where the second run on a machine finds the port taken.
    options = group_options(args, device_for(args.device))
    options["timeout"] = timedelta(seconds=max(args.timeout, JOIN_TIMEOUT_S))
    dist.init_process_group(**options, rank=rank, world_size=world_size)


def cleanup() -> None:
    """Leave the process group. Not after an error: it would only make the others fail first."""
    dist.destroy_process_group()


class ToyModel(nn.Module):
    """Maps inputs (n, 10) to outputs (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of inputs that are on the device of the weights."""
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Wrap a model and train it; return this rank's losses, see `train`."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=gpu_of(device))  # rank 0's weights become everybody's
    return train(ddp_model, rank, device, args)


def train(ddp_model: DDP, rank: int, device: torch.device,
          args: argparse.Namespace) -> list[float]:
    """Train on the samples of this rank.

    Args:
        ddp_model: wrapped.
        rank: whose samples.
        device: of the outputs.
        args: the parsed flags.

    Returns:
        The loss on these samples before each step, and at the end.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    # Tutorial: random labels, which nobody can learn, and one step.
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()  # in here, DDP waits for all ranks and averages their gradients
        optimizer.step()
    return [*losses, results.loss_on(inputs, labels, ddp_model.module, loss_fn)]


def gpu_of(device: torch.device) -> list[int] | None:
    """Return DDP's `device_ids`."""
    # Tutorial: [rank], which needs a GPU for each rank, on one machine.
    return [device.index] if device.type == "cuda" else None


def demo_skew(rank: int, world_size: int, args: argparse.Namespace) -> dict[str, list]:
    """Make one rank slower: all wait for it, up to `--timeout` ("Skewed Processing Speeds").

    Returns:
        What `timed_steps` returns, as `even_spans` without a slow rank, as `spans` with it.
    """
    device = device_for(args.device)
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args))
    # A timeout of its own. gloo: with nccl, a watchdog ends the process, and nothing is raised.
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
        ddp_model: wrapped, on any device.
        inputs, labels: (n, 10) and (n, 5), of this rank.
        delay: of this rank, in seconds.
        args: with `lr`, `steps` and `timeout`, the seconds that the model's process group waits.

    Returns:
        For each step, in seconds since all ranks began: its start, the start of its backward, its
        end.

    Raises:
        RuntimeError: if the gradients of another rank did not come within the timeout.
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
        time.sleep(delay)  # a slower machine, longer samples, a file that only this rank writes
        computed = time.perf_counter()
        with waits_at_most(args.timeout, step):
            loss.backward()  # the fast ranks wait in here
        optimizer.step()
        spans.append([moment - zero for moment in (started, computed, time.perf_counter())])
        bar.update()
    bar.close()
    return spans


@contextlib.contextmanager
def waits_at_most(timeout: float, step: int) -> Iterator[None]:
    """Explain the error if a `backward()` in here has waited for longer than the timeout."""
    started = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        # gloo says "Timed out waiting 2000ms for recv operation", or "Connection closed by peer"
        # where another waiting rank has given up a moment earlier. How long it took distinguishes
        # this from a rank that died.
        if time.perf_counter() - started < 0.9 * timeout:
            raise
        raise RuntimeError(
            f"step {step}: rank {dist.get_rank()} waited {timeout:g} s in backward() for the "
            "gradients of a slower rank; make the ranks equally fast, or give a larger --timeout"
        ) from error


def demo_checkpoint(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Save on one rank, load on all, train what was loaded; return this rank's losses."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    ddp_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))
    # Tutorial: loads into the model that was saved, which would look right without loading.
    loaded_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))  # other random weights

    # Tutorial: one path in the temporary folder, where two runs overwrite each other's checkpoint.
    # The launcher removes what ends in .<process id>.tmp, should this process be killed.
    path = [args.output_dir.resolve() / f".model.{os.getpid()}.tmp"]
    dist.broadcast_object_list(path)  # rank 0's
    if rank == 0:  # all ranks have the same weights; several writers would race for the file
        torch.save(ddp_model.state_dict(), path[0])
    dist.barrier()  # nobody may read before rank 0 has written
    # Saved from rank 0's device: without map_location, all ranks would load onto that one.
    # Tutorial: no weights_only; it runs whatever code somebody has put into the file.
    loaded_model.load_state_dict(torch.load(path[0], map_location=device, weights_only=True))
    dist.barrier()  # Tutorial: none. Rank 0 may not delete before everybody has read
    if rank == 0:
        path[0].unlink()
    return train(loaded_model, rank, device, args)


class ToyMpModel(nn.Module):
    """Splits the same network: its first half is on `dev0`, its second on `dev1`."""

    def __init__(self, dev0: torch.device, dev1: torch.device) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs, on `dev1`, of inputs from any device."""
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def demo_model_parallel(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Train replicas that are each split over two devices; return this rank's losses."""
    # Tutorial: dev0 = rank * 2 and dev1 = rank * 2 + 1, which needs two GPUs for each rank.
    dev0 = dev1 = device_for(args.device)
    n_ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    if dev0.type == "cuda" and torch.cuda.device_count() >= 2 * n_ranks_here:
        dev1 = torch.device("cuda", n_ranks_here + int(os.environ["LOCAL_RANK"]))  # no rank's dev0
    torch.manual_seed(args.seed)
    mp_model = ToyMpModel(dev0, dev1)
    ddp_mp_model = DDP(mp_model)  # no device_ids: the model has two devices and moves its inputs
    return train(ddp_mp_model, rank, dev1, args)


DEMOS = {"basic": demo_basic, "checkpoint": demo_checkpoint,
         "model_parallel": demo_model_parallel, "skew": demo_skew}
ALL = ["basic", "checkpoint", "model_parallel"]


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join, run the chosen demos one after the other, leave; rank 0 returns the metrics."""
    setup(rank, world_size, args)
    metrics = {"backend": dist.get_backend()}
    for demo in args.demos:
        rows = [None] * world_size
        dist.all_gather_object(rows, DEMOS[demo](rank, world_size, args))
        metrics[demo] = results.table(demo, rows, args, show=rank == 0)
    cleanup()
    return metrics if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("ddp_basic", __doc__, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--demo", choices=[*ALL, "all", "skew"], default="all", help="all: the first three")
    add("--steps", type=count, default=10, metavar="N", help="steps of each demo")
    add("--local_batch_size", type=count, default=20, metavar="N", help="samples of each rank")
    add("--lr", type=bounded(float, above=0), default=0.5, help="learning rate of SGD")
    add("--slow_rank", type=bounded(int, at_least=0), metavar="R", help="(default: the last)")
    add("--delay", type=bounded(float, at_least=0, at_most=LONGEST_S), default=0.5, metavar="S",
        help="seconds it loses in each step")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    args.slow_rank = args.world_size - 1 if args.slow_rank is None else args.slow_rank
    if args.slow_rank >= args.world_size:
        refuse(f"--slow_rank {args.slow_rank} must be below --world_size {args.world_size}")
    n_bytes = len(ranks_here(args)) * args.local_batch_size * (10 + 5) * 4
    require_memory(args, ["local_batch_size"], n_bytes)
    args.demos = ALL if args.demo == "all" else [args.demo]
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
