"""train.py with DistributedDataParallel, which one uses today.

DDP averages in `backward()`: it puts gradients into buckets, and sends a bucket while the gradients
of earlier layers are still being computed. 2 ranks on 2 cores make 5384 samples/s, with train.py
3430, with train_flat.py 5394 (docs/results/p2p_train_ddp.json, p2p_train_per_parameter.json,
p2p_train.json): this network is so small that it has one bucket.

It costs memory for the buckets, and `backward()` hides the average.

    python p2p_collectives/train_ddp.py --world_size 2         all processes here
    python p2p_collectives/train_ddp.py --check                compare with a single process

It ends with, about:
    digits: test accuracy 95.3% after 10 epochs on 2 ranks: 5384 samples/s, ...
"""

from argparse import Namespace

from common.cli import Parser
from common.program import role_name, run_program
from common.session import device_for, group_options

import torch
import torch.distributed as dist
from torch import optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from p2p_collectives import train as tutorial
from p2p_collectives import train_results as results
from p2p_collectives.data import batches


def distributed(net: tutorial.Net, device: torch.device) -> DistributedDataParallel:
    """Return the network in DDP.

    A first pass comes before training, because DDP rearranges its buckets after it. Three or more
    ranks sum in another order then. Now all steps have the same order, even after a resume.
    """
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    model(torch.zeros(1, 1, 28, 28, device=device)).sum().backward()
    return model


def run(rank: int, size: int, args: Namespace) -> dict:
    """Train as `train.run` does; DDP averages the gradients in `backward()`."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    train_set, global_batches, test_set = tutorial.partition_dataset(args)
    net = tutorial.Net().to(device)
    model = distributed(net, device)
    optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=tutorial.MOMENTUM)
    epochs = tutorial.resume(net, optimizer, args) if args.resume else []
    progress = results.Progress(epochs, global_batches, args)
    for epoch in range(len(epochs), args.epochs):
        tutorial.seed_epoch(epoch, args)
        epoch_loss = 0.0
        with progress.clock:
            for data, target, share in batches(train_set, global_batches, rank):
                optimizer.zero_grad()
                output = model(data.to(device))
                loss = F.nll_loss(output, target.to(device))
                epoch_loss += progress.step(loss) * len(target) / len(train_set)
                # DDP divides by the world size, as if all pieces were equal: weight them by their
                # shares instead.
                (loss * share * size).backward()
                optimizer.step()
        tutorial.end_epoch(epochs, epoch_loss, net, optimizer, test_set, args)
    tutorial.require_equal_weights(net)
    return progress.metrics()


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join the group, train, and leave; rank 0 returns the metrics."""
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    # The DDP object ends with run(). If it outlived the group, it would end the group's threads
    # while it holds Python's lock, for which one of them may wait (pytorch/pytorch issue 56297).
    metrics = {"backend": dist.get_backend(), **run(rank, world_size, args)}
    dist.destroy_process_group()
    return metrics if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags, which are those of train.py."""
    return tutorial.build_parser("p2p_collectives/train_ddp", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    tutorial.require_inputs(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
