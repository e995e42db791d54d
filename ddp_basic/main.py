r"""DistributedDataParallel: a replica on every rank, gradients averaged (tutorial 6_3).

Every rank holds the same model and its own samples. In `backward()`, DDP averages the gradients
over all ranks, so every rank takes the step that one process with all samples would take.

    rank 0                                                           rank 1
    +-------------------------+                                      +-------------------------+
    | samples of rank 0       |                                      | samples of rank 1       |
    | DDP(model)              | ----- the weights of rank 0 -------> | DDP(model)              |
    | forward                 |                                      | forward                 |
    | backward: gradients     | <--- all-reduce: their average ----> | backward: gradients     |
    | optimizer.step()        |                                      | optimizer.step()        |
    +-------------------------+        again the same weights        +-------------------------+

    python ddp_basic/main.py --world_size 2          three demos: basic, checkpoint, model_parallel
    python ddp_basic/main.py --demo checkpoint       one of them
    python ddp_basic/main.py --check                 the same numbers as a single process?
    torchrun --nproc_per_node 2 ddp_basic/main.py
    python ddp_basic/main.py --rank 1 --master_addr HOST       one rank per terminal or machine

It ends with: basic, checkpoint, model_parallel on 2 ranks: loss 1.169 -> 0.572

skew.py slows one rank down; pitfalls.py makes five mistakes with DDP; elastic.py survives the death
of a rank.
"""

import argparse
import os

from common import report
from common.cli import Parser, bounded
from common.program import role_name, run_program
from common.session import device_for, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import results
from ddp_basic.data import toy_samples


def setup(rank: int, world_size: int, args: argparse.Namespace) -> None:
    """Join the process group, with nccl if every rank has its own GPU, otherwise with gloo."""
    # Tutorial: uses MASTER_PORT 12355, so a second run on the machine finds the port taken.
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)


def cleanup() -> None:
    """Leave the process group; after an error, this would only make the other ranks fail first."""
    dist.destroy_process_group()


class ToyModel(nn.Module):
    """Maps inputs (n, 10) to outputs (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (n, 5) of inputs (n, 10) on the device of the weights."""
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Wrap a model and train it; return the losses that `train` returns."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    model = ToyModel().to(device)
    # DDP copies rank 0's weights to all ranks. For a model on the CPU, device_ids must be None:
    # "device_ids and output_device arguments only work with single-device/multiple-device GPU
    # modules or CPU modules, but got device_ids [0]".
    ddp_model = DDP(model, device_ids=gpu_of(device))
    return train(ddp_model, rank, device, args)


def train(ddp_model: DDP, rank: int, device: torch.device,
          args: argparse.Namespace) -> list[float]:
    """Train on the samples of this rank.

    Args:
        ddp_model: Model wrapped in DDP.
        rank: Rank whose samples are used.
        device: Device of the model's outputs.
        args: Parsed flags.

    Returns:
        The loss on these samples before each step and after the last one.

    Raises:
        NotFiniteError: if a loss is infinite or not a number.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    # Tutorial: draws random labels, which no model can learn, and makes one step.
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args.seed))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()  # inside, DDP waits for all ranks and averages their gradients
        optimizer.step()
    with torch.no_grad():  # a measurement needs no averages: call the model without DDP
        loss = loss_fn(ddp_model.module(inputs), labels)
    return [*losses, report.require_finite(loss, "after the last step")]


def gpu_of(device: torch.device) -> list[int] | None:
    """Return DDP's `device_ids`: the GPU of this process, or None on the CPU."""
    # Tutorial: gives [rank], which needs one machine with a GPU for each rank.
    return [device.index] if device.type == "cuda" else None


def demo_checkpoint(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Save on one rank, load on all ranks, train what was loaded; return this rank's losses."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    ddp_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))
    # Tutorial: loads into the model that was saved, which looks right even if nothing is loaded.
    loaded_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))  # other random weights

    # Tutorial: uses one path in the temporary folder, so two runs overwrite each other's file.
    # If this process is killed, the launcher removes the file, because it ends in .<its id>.tmp.
    # On several machines, --output_dir must be a folder that all machines share.
    paths = [args.output_dir.resolve() / f".model.{os.getpid()}.tmp"]
    dist.broadcast_object_list(paths)  # every rank needs rank 0's path
    [path] = paths
    if rank == 0:  # all ranks hold the same weights, and several writers would race
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()  # no rank may read before rank 0 has written
    # Without map_location, every rank would load onto rank 0's device.
    # Tutorial: omits weights_only; before torch 2.6, loading ran whatever code the file held.
    loaded_model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    # Tutorial: deletes after a backward(), in which all ranks have met. Here, training comes later.
    dist.barrier()  # rank 0 may not delete before every rank has read
    if rank == 0:
        path.unlink()
    return train(loaded_model, rank, device, args)


class ToyMpModel(nn.Module):
    """The same network, split: the first half on `dev0`, the second half on `dev1`."""

    def __init__(self, dev0: torch.device, dev1: torch.device) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (n, 5), on `dev1`, of inputs (n, 10) on any device."""
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def demo_model_parallel(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Train replicas that are each split over two devices; return this rank's losses."""
    # Tutorial: sets dev0 = rank * 2 and dev1 = rank * 2 + 1, which needs two GPUs for each rank.
    dev0 = dev1 = device_for(args.device)
    n_ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    if dev0.type == "cuda" and torch.cuda.device_count() >= 2 * n_ranks_here:
        dev1 = torch.device("cuda", n_ranks_here + int(os.environ["LOCAL_RANK"]))  # no dev0
    torch.manual_seed(args.seed)
    mp_model = ToyMpModel(dev0, dev1)
    # nccl binds the default group to one GPU of each rank. This model uses two, so it needs gloo.
    group = dist.new_group(backend="gloo") if dev1 != dev0 else None
    # No device_ids, because the model uses two devices and moves its inputs itself.
    ddp_mp_model = DDP(mp_model, process_group=group)
    return train(ddp_mp_model, rank, dev1, args)


DEMOS = {"basic": demo_basic, "checkpoint": demo_checkpoint, "model_parallel": demo_model_parallel}


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join, run the chosen demos one after another, leave; return the metrics on rank 0."""
    setup(rank, world_size, args)
    metrics = {"backend": dist.get_backend()}
    for demo in args.demos:
        rows = [None] * world_size
        dist.all_gather_object(rows, DEMOS[demo](rank, world_size, args))
        metrics[demo] = results.table(demo, rows, args, show=rank == 0)
    cleanup()
    return metrics if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_basic", __doc__, world_size=2)
    add = parser.add_argument
    add("--demo", choices=[*DEMOS, "all"], default="all", help="demo to run")
    add("--steps", type=bounded(int, at_least=1), default=10, metavar="N",
        help="number of steps in each demo")
    add("--lr", type=bounded(float, above=0), default=0.5, help="learning rate of SGD")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run, or `--check`.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    args.demos = list(DEMOS) if args.demo == "all" else [args.demo]
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
