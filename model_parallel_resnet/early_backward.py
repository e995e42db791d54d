r"""main.py, but each micro-batch goes back as soon as the master has its outputs.

The tutorial waits for the outputs of the whole batch before it sends the first gradient. But an
error that is a mean over images is a sum over micro-batches: what one of them adds to the gradients
needs no other. So the master sends its gradient at once, and worker2 works on it while worker1
still has others to send forward. On worker2 this is the order of "1f1b" in schedules.py, which here
nobody has to write down; worker1 still sends all forward first.

    main.py            worker1  F0 F1 F2 F3 .. .. B0 B1 B2 B3 step
                       worker2  .. F0 F1 F2 F3 B0 B1 B2 B3 .. step
    early_backward.py  worker1  F0 F1 F2 F3 B0 B1 .. B2 .. B3 step
                       worker2  .. F0 B0 F1 B1 F2 B2 F3 B3 .. step

What it wins: worker2 can drop the activations of a micro-batch before the next one comes; main.py
keeps those of all. It gains time only from a core that the other worker leaves idle: with equal
pieces and a core for each worker, both orders take ten slots. On 2 cores, with 4 micro-batches, a
batch took 2.31 s, and 2.29 s in main.py's order (`python -m benchmarks.model_parallel_resnet
--num_splits 4`). What it costs:

- a context of its own for each micro-batch. The first gradient that reaches a worker makes its
  autograd count what every gradient of that context has to wait for; a forward that comes later
  would not be among them;
- a thread of the master for each micro-batch, since a context belongs to a thread;
- an optimizer that steps with the sum of several contexts' gradients: `DistributedOptimizer` knows
  one context.

    python model_parallel_resnet/early_backward.py --num_splits 1 2 4 8
    python model_parallel_resnet/early_backward.py --check
    python -m common.tracing model_parallel_resnet/early_backward.py

It ends with, about:
    resnet50, RPC pipeline: loss 0.3693 -> 0.0214 |
    best with num_split 4: ... s a batch, ... times as fast as with 1 (ideal 1.60), ...
"""

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed.autograd as dist_autograd
from common.cli import Parser
from common.program import run_program
from common.session import wait_all
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef

from model_parallel_resnet import main as tutorial
from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.main import MASTER_NAME, WORKERS, role_name
from model_parallel_resnet.measuring import fetch_work, record_calls
from model_parallel_resnet.results import Batches, finish


class EarlyResNet50(tutorial.DistResNet50):
    """Makes a forward of one micro-batch."""

    def forward(self, x: torch.Tensor, i: int) -> torch.Tensor:
        """Compute logits (n, num_classes) of micro-batch `i`, images (n, 3, H, W)."""
        y_rref = self.p1_rref.remote().forward(RRef(x), i)
        return self.p2_rref.rpc_sync().forward(y_rref, i)


class ShardOptimizer:
    """Adds up, on a worker, the gradients of the micro-batches; then makes its shard's step."""

    def __init__(self, shard_rref: RRef, lr: float) -> None:
        self._lock = threading.Lock()  # RPC calls `add` in many threads
        self.opt = optim.SGD(shard_rref.local_value().parameters(), lr=lr)

    def add(self, context_id: int) -> None:
        """Add what a micro-batch's context has, while it is open."""
        gradients = dist_autograd.get_gradients(context_id)
        with self._lock:
            for param, gradient in gradients.items():
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)

    def step(self) -> None:
        """Make a step with the sum, and forget it."""
        self.opt.step()
        self.opt.zero_grad()


class EarlyOptimizer:
    """Holds, on the master, the optimizers of both shards."""

    def __init__(self, shard_rrefs: list[RRef], lr: float) -> None:
        self.rrefs = [rpc.remote(shard_rref.owner(), ShardOptimizer, args=(shard_rref, lr))
                      for shard_rref in shard_rrefs]

    def add(self, context_id: int) -> None:
        """Add a context's gradients on both workers; see `ShardOptimizer.add`."""
        wait_all([rref.rpc_async().add(context_id) for rref in self.rrefs])

    def step(self) -> None:
        """Make the step of both shards; see `ShardOptimizer.step`."""
        wait_all([rref.rpc_async().step() for rref in self.rrefs])


def train_batch(model: EarlyResNet50, inputs: torch.Tensor, labels: torch.Tensor,
                opt: EarlyOptimizer) -> torch.Tensor:
    """Send each micro-batch forward and back in a thread of its own; step; return the loss.

    Raises:
        Exception: that of the first micro-batch, by number, that failed; when all have ended.
    """
    loss_fn = nn.MSELoss()

    def micro_batch(i, x, y):
        with dist_autograd.context() as context_id:
            outputs = model(x, i)
            # A mean over these images: their share of the mean over the batch.
            loss = loss_fn(outputs, y) * (len(y) / len(labels))
            dist_autograd.backward(context_id, [loss])
            opt.add(context_id)  # the gradients go with their context
        return loss.detach()

    number = model.num_split
    with ThreadPoolExecutor(number) as threads:
        losses = list(threads.map(micro_batch, range(number), inputs.tensor_split(number),
                                  labels.tensor_split(number)))
    opt.step()
    return sum(losses)


def run_master(args: argparse.Namespace) -> dict:
    """Train as the tutorial's `run_master`, with `train_batch` for a batch."""
    model = EarlyResNet50(1, WORKERS, args.arch, args.num_classes, args.device, args.seed)
    opt = EarlyOptimizer([model.p1_rref, model.p2_rref], args.lr)
    inputs, labels = get_batch(args)
    batches = Batches(MASTER_NAME, args)
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:
            model.num_split = num_split
            started = time.time()
            loss = train_batch(model, inputs, labels, opt)
            batches.add(batch, num_split, started, loss)
    return batches.metrics(fetch_work(WORKERS))


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the tutorial's, with this master."""
    record_calls(ShardOptimizer, "add")  # it is work, too
    return tutorial.run_worker(rank, world_size, args, run_master)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py."""
    return tutorial.build_parser("model_parallel_resnet/early_backward", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch"], ["first half"], ["second half"]])
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
