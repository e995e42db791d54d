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
    python ddp_basic/main.py --demo checkpoint       one of them
    python ddp_basic/main.py --check                 the same numbers as a single process?
    torchrun --nproc_per_node 2 ddp_basic/main.py
    python ddp_basic/main.py --rank 1 --master_addr HOST       one rank per terminal or machine

It ends with: basic, checkpoint, model_parallel on 2 ranks: loss 1.169 -> 0.572

skew.py makes one rank slower; pitfalls.py makes three mistakes with DDP; elastic.py survives the
death of a rank.
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
    """Join the process group: gloo, or nccl where every rank has a GPU of its own."""
    # Tutorial: MASTER_PORT 12355, where the second run on a machine finds the port taken.
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)


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
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args.seed))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()  # in here, DDP waits for all ranks and averages their gradients
        optimizer.step()
    with torch.no_grad():  # only a measurement: on the model itself, without DDP
        loss = loss_fn(ddp_model.module(inputs), labels)
    return [*losses, report.require_finite(loss, "after the last step")]


def gpu_of(device: torch.device) -> list[int] | None:
    """Return DDP's `device_ids`."""
    # Tutorial: [rank], which needs a GPU for each rank, on one machine.
    return [device.index] if device.type == "cuda" else None


def demo_checkpoint(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """Save on one rank, load on all, train what was loaded; return this rank's losses."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    ddp_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))
    # Tutorial: loads into the model that was saved, which would look right without loading.
    loaded_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))  # other random weights

    # Tutorial: one path in the temporary folder, where two runs overwrite each other's checkpoint.
    # The launcher removes what ends in .<process id>.tmp, should this process be killed.
    # On several machines, --output_dir must be a folder that all of them see.
    paths = [args.output_dir.resolve() / f".model.{os.getpid()}.tmp"]
    dist.broadcast_object_list(paths)  # rank 0's
    [path] = paths
    if rank == 0:  # all ranks have the same weights; several writers would race for the file
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()  # nobody may read before rank 0 has written
    # Saved from rank 0's device: without map_location, all ranks would load onto that one.
    # Tutorial: no weights_only; before torch 2.6, loading ran whatever code was in the file.
    loaded_model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    dist.barrier()  # Tutorial: deletes after a backward(), in which all have met. Here: before
    if rank == 0:
        path.unlink()
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
    # nccl's group here is bound to one GPU of each rank, and this model has two: gloo.
    group = dist.new_group(backend="gloo") if dev1 != dev0 else None
    # No device_ids: the model has two devices and moves its inputs.
    ddp_mp_model = DDP(mp_model, process_group=group)
    return train(ddp_mp_model, rank, dev1, args)


DEMOS = {"basic": demo_basic, "checkpoint": demo_checkpoint, "model_parallel": demo_model_parallel}


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
    add = parser.add_argument
    add("--demo", choices=[*DEMOS, "all"], default="all", help="which one")
    add("--steps", type=bounded(int, at_least=1), default=10, metavar="N",
        help="steps of each demo")
    add("--lr", type=bounded(float, above=0), default=0.5, help="learning rate of SGD")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    args.demos = list(DEMOS) if args.demo == "all" else [args.demo]
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
