r"""DDP that survives the death of a worker: it restarts from a checkpoint.

torchrun watches the workers (tutorial 6_3 points to TorchElastic for this). If a worker dies,
torchrun stops the other workers and restarts all of them, up to `--max_restarts` times. The new
workers find the checkpoint and continue from there.

                     torchrun, the agent of this machine
              starts both; restarts both if one has died
                   |                               |
                   v                               v
    rank 0                          rank 1
    +----------------------+        +----------------------+
    | DDP, a share of the  | <----> | DDP, a share of the  |    start:     rank 0 reads run.pt
    | digits               |        | digits               |               and broadcasts it
    +----------------------+        +----------------------+    an epoch:  a new shuffle, made from
         ^ |                                                               (seed, epoch)
         | v                                                    after it:  rank 0 writes run.pt,
    run.pt: weights, optimizer, history                                    completely or not at all

    torchrun --standalone --nproc_per_node 2 --max_restarts 3 \
        ddp_basic/elastic.py --checkpoint run.pt
    python ddp_basic/elastic.py --checkpoint run.pt    after a death, run the same command again
    python ddp_basic/elastic.py --check                the same as one process, also interrupted?

It ends with, about:
    10 epochs on 2 ranks: test accuracy 96.9%, loss 0.020, attempt 1
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

from common import checkpoint, report
from common.cli import RESUME, Parser, bounded, given, refuse
from common.data import add_data_flags, fetch_data, load_data
from common.program import role_name, run_program
from common.session import backend_for, device_for

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_basic.main import gpu_of

MOMENTUM = 0.9
FEWEST_SAMPLES = 1437  # size of the smaller training set; each rank needs at least one sample


def setup(rank: int, world_size: int, args: argparse.Namespace) -> None:
    """Join the process group, with nccl if every rank has its own GPU, otherwise with gloo."""
    limit = timedelta(seconds=args.timeout)
    store, _, _ = next(dist.rendezvous(os.environ["INIT_METHOD"], rank, world_size, timeout=limit))
    if int(os.environ["LOCAL_WORLD_SIZE"]) == world_size:
        # torchrun's store outlives the workers. New workers would find the addresses of dead ones
        # in it and call them, so each attempt has its own keys. (Several machines count their
        # attempts independently; see the README.)
        store = dist.PrefixStore(f"attempt {attempt()}", store)
    dist.init_process_group(backend_for(device_for(args.device)), store=store, timeout=limit,
                            rank=rank, world_size=world_size)


def attempt() -> int:
    """Return how often torchrun has started this worker, counted from 1."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1


def build_model(seed: int) -> nn.Sequential:
    """Return a small convolutional network from images (n, 1, 28, 28) to scores (n, 10)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def batches_of(rank: int, world_size: int, train_set: TensorDataset, epoch: int,
               args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """Return the batches of one rank in one epoch, as indices: its share of a shuffle.

    The shuffle follows from (seed, epoch) alone. A generator that continues from epoch to epoch
    would start again in each new worker.
    """
    # The sampler repeats samples until all shares have the same size: a rank with fewer batches
    # would leave the other ranks waiting.
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    sampler.set_epoch(epoch)  # without it, every epoch would have the same order
    return torch.tensor(list(sampler)).split(args.global_batch_size // world_size)


def train_epoch(ddp_model: DDP, optimizer: optim.Optimizer, train_set: TensorDataset,
                batches: tuple[torch.Tensor, ...], epoch: int) -> torch.Tensor:
    """Train on each batch of this rank once; return the mean loss on them, shape ()."""
    total = torch.zeros((), device=train_set.tensors[0].device)
    for batch in batches:
        images, labels = train_set[batch]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(images), labels)
        report.require_finite(loss, f"in epoch {epoch}")
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(batch)
    return total / sum(map(len, batches))


def evaluate(model: nn.Module, test_set: TensorDataset, rank: int, world_size: int) -> float:
    """Return the accuracy on all test images; each rank classifies its share."""
    images, labels = (tensor[rank::world_size] for tensor in test_set.tensors)
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def resume(model: nn.Module, optimizer: optim.Optimizer, rank: int,
           args: argparse.Namespace) -> list[dict]:
    """Continue from the checkpoint, if there is one; return the history so far.

    Raises:
        SystemExit: 2 if the file is not a checkpoint of this program.
    """
    state = [None]
    if rank == 0 and args.checkpoint is not None:
        checkpoint.remove_leftovers(args)  # a killed rank 0 leaves half a file
        if args.checkpoint.exists():
            state = [checkpoint.load(args)]
    # The other ranks do not read the file: on another machine they would find none, or a file of
    # another training run.
    dist.broadcast_object_list(state)
    history = []
    if state[0] is not None:
        model.load_state_dict(state[0]["model"])
        optimizer.load_state_dict(state[0]["optimizer"])
        history = state[0]["history"]
    if rank == 0:
        how = f"resumed after epoch {len(history)}" if history else "starts with epoch 1"
        report.log("rank0", f"attempt {attempt()}: {how}")
    return history


def train(rank: int, world_size: int, args: argparse.Namespace) -> list[dict]:
    """Train from the checkpoint or from the start; return the history of all epochs."""
    device = device_for(args.device)
    train_set, test_set = (TensorDataset(*(tensor.to(device) for tensor in half.tensors))
                           for half in load_data(args))
    model = build_model(args.seed).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
    history = resume(model, optimizer, rank, args)
    ddp_model = DDP(model, device_ids=gpu_of(device))
    # After its first backward, DDP rearranges its buckets of gradients, so three or more ranks sum
    # in another order from then on. This backward makes no step, so all steps have the same order,
    # also the first step after an interruption.
    ddp_model(train_set.tensors[0][:1]).sum().backward()
    for epoch in range(len(history) + 1, args.epochs + 1):
        batches = batches_of(rank, world_size, train_set, epoch, args)
        loss = train_epoch(ddp_model, optimizer, train_set, batches, epoch)
        dist.all_reduce(loss)  # the shares have the same size, so the mean of the means is the mean
        accuracy = evaluate(model, test_set, rank, world_size)
        history.append({"epoch": epoch, "loss": loss.item() / world_size, "accuracy": accuracy})
        if rank == 0:  # the other ranks need the file only after a restart
            if args.checkpoint is not None:
                checkpoint.save(args, {"model": model.state_dict(), "history": history,
                                       "optimizer": optimizer.state_dict()})
            text = "epoch {epoch}  loss {loss:.3f}  test accuracy {accuracy:.1%}"
            report.log("rank0", text.format(**history[-1]))
    return history


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join, train, leave; return the metrics on rank 0."""
    setup(rank, world_size, args)
    backend = dist.get_backend()
    history = train(rank, world_size, args)
    dist.destroy_process_group()
    if rank != 0:
        return None
    return {"backend": backend, "attempts": attempt(), "history": history,
            "loss": history[-1]["loss"], "test_accuracy": history[-1]["accuracy"]}


def build_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser("ddp_basic/elastic", __doc__, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=10, metavar="N",
        help="number of epochs in total, including those before an interruption")
    add("--global_batch_size", type=bounded(int, at_least=1, at_most=FEWEST_SAMPLES), default=32,
        metavar="N", help="samples in one batch of all ranks together")
    add("--lr", type=bounded(float, above=0), default=0.02,
        help=f"learning rate of SGD with momentum {MOMENTUM}")
    add("--checkpoint", type=Path, metavar="FILE",
        help="file to write after each epoch; if it exists, training continues from it "
             f"{RESUME} (default: none)")
    parser.set_defaults(resume=False)  # torchrun restarts a worker with the same command line
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        Metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    if args.global_batch_size % args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be a multiple of "
               f"{given(args, 'world_size')}")
    if not args.check:  # --check uses its own checkpoint
        args.resume = args.checkpoint is not None and args.checkpoint.exists()
        state = checkpoint.inspect(args, lambda: build_model(args.seed))
        if state:
            checkpoint.require_epochs(args, len(state["history"]))
    fetch_data(args)
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json and print the summary line; return the complete metrics."""
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    print(f"{len(metrics['history'])} epochs on {args.world_size} ranks: "
          f"test accuracy {metrics['test_accuracy']:.1%}, loss {metrics['loss']:.3f}, "
          f"attempt {metrics['attempts']}")
    return metrics


if __name__ == "__main__":
    main()
