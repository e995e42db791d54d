"""train.py with DistributedDataParallel, which is what one uses today.

DDP averages in `backward()`: it puts gradients into buckets, and sends a bucket while the gradients
of earlier layers are still being computed. 2 ranks on 2 cores make 5384 samples/s, with train.py
3430, with train_flat.py 5394 (docs/results/p2p_train_ddp.json, p2p_train_per_parameter.json,
p2p_train.json): this network is so small that it has one bucket.

It costs memory for the buckets, and the average is hidden in `backward()`.

    python p2p_collectives/train_ddp.py --world_size 2         all processes here
    python p2p_collectives/train_ddp.py --check                the same as a single process?

It ends with, about:
    digits: test accuracy 96.7% after 10 epochs on 2 ranks: 5384 samples/s, ...
"""

from argparse import Namespace

from common.cli import Parser
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from p2p_collectives import train as tutorial
from p2p_collectives.train_results import finish


def train_step(model: DistributedDataParallel, optimizer: optim.Optimizer, data: torch.Tensor,
               target: torch.Tensor, share: float) -> torch.Tensor:
    """Make one step; see `train.train_step`."""
    optimizer.zero_grad()
    output = model(data)
    loss = F.nll_loss(output, target)
    # DDP averages in backward(), as if all pieces were equal: undo that, then weight.
    (loss * share * dist.get_world_size()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), tutorial.MAX_NORM)
    optimizer.step()
    return loss.detach()


def distributed(net: nn.Module) -> DistributedDataParallel:
    """Put the network into DDP.

    A pass for nothing comes first: after that, DDP arranges its buckets of gradients anew, and
    three or more ranks then sum in another order. Now all steps have the same order, also the first
    one after a resume.
    """
    device = next(net.parameters()).device
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    model(torch.zeros(1, 1, 28, 28, device=device)).sum().backward()
    return model


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, train, leave; rank 0 returns the metrics."""
    # DDP ends with train.run(). It must not outlive the group: it would end the group's threads
    # while it holds Python's lock, for which one of them may wait (pytorch/pytorch issue 56297).
    return tutorial.run_worker(rank, world_size, args, train_step, distributed)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of train.py."""
    return tutorial.build_parser("p2p_collectives/train_ddp", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    tutorial.require_inputs(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
