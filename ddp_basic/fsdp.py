r"""One training spread over all ranks: what DDP repeats on each of them, FSDP keeps once.

The same network, trained in three ways. With N ranks, `full` keeps on each about an N-th of the
parameters, of their gradients and of Adam's two moments; for that, it sends half as much again
(with gloo twice as much). ZeRO: https://arxiv.org/abs/1910.02054, FSDP: arxiv.org/abs/2304.11277.

    --sharding   replicas                optimizer                full
                 DDP, Adam               DDP,                     fully_shard (FSDP2), Adam
                                         ZeroRedundancyOptimizer
    rank 0       [weights][grads][Adam]  [weights][grads][Ad  ]   [wei    ][gr   ][Ad  ]
    rank 1       [weights][grads][Adam]  [weights][grads][  am]   [   ghts][  ads][  am]
    a step       all-reduce: gradients   all-reduce: gradients    all-gather: a layer's weights,
                                         broadcast: the stepped   in forward, again in backward
                                         weights                  reduce-scatter: its gradients

    python ddp_basic/fsdp.py                       all three, on four ranks
    python ddp_basic/fsdp.py --width 64            a smaller network
    python ddp_basic/fsdp.py --sharding full --checkpoint DIR          saved after each epoch
    python ddp_basic/fsdp.py --sharding full --checkpoint DIR --resume --epochs 6 --world_size 2
    python ddp_basic/fsdp.py --check               the same numbers as a single process?
    torchrun --nproc_per_node 4 ddp_basic/fsdp.py

It ends with, about:
    1,846,789 parameters on 4 ranks: a rank holds at most 29.5 MB (replicas), 19.0 MB (optimizer),
    7.4 MB (full); it sends in a step 11.1 MB (replicas), 16.6 MB (optimizer), 22.2 MB (full)
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import report
from common.cli import RESUME, Parser, bounded, given, refuse, require_own_gpus
from common.program import role_name, run_program
from common.session import device_of_group, group_options
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import fsdp_checkpoint as folders
from ddp_basic import fsdp_memory as memory
from ddp_basic import fsdp_results as results
from ddp_basic.data import toy_samples
from ddp_basic.main import gpu_of

SAMPLES = 512  # of all ranks together
LAYERS = 8  # hidden ones


def build_model(args: argparse.Namespace) -> nn.Module:
    """Make a network that is larger than the tutorial's: inputs (n, 10) to outputs (n, 5)."""
    torch.manual_seed(args.seed)  # the same weights on all ranks: FSDP does not broadcast rank 0's
    widths = [10] + [args.width] * LAYERS + [5]
    layers = [(nn.Linear(*ends), nn.ReLU()) for ends in pairwise(widths)]
    return nn.Sequential(*sum(layers, ())[:-1])  # no ReLU at the end


def replicas(model: nn.Module, device: torch.device,
             args: argparse.Namespace) -> tuple[nn.Module, optim.Optimizer]:
    """Keep everything on every rank."""
    # Without the view, the gradients would be there twice: in the buckets, and in `.grad`.
    ddp_model = DDP(model, device_ids=gpu_of(device), gradient_as_bucket_view=True)
    return ddp_model, optim.Adam(ddp_model.parameters(), lr=args.lr)


def sharded_optimizer(model: nn.Module, device: torch.device,
                      args: argparse.Namespace) -> tuple[nn.Module, optim.Optimizer]:
    """Let each rank step some of the parameters, whole ones, and keep Adam's state of those."""
    ddp_model = DDP(model, device_ids=gpu_of(device), gradient_as_bucket_view=True)
    return ddp_model, ZeroRedundancyOptimizer(
        ddp_model.parameters(), optimizer_class=optim.Adam, lr=args.lr)


def fully_sharded(model: nn.Module, device: torch.device,
                  args: argparse.Namespace) -> tuple[nn.Module, optim.Optimizer]:
    """Give each rank some rows of every parameter, of its gradient and of its Adam state."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Layer by layer: each call makes a group that is gathered, used and dropped as a whole. With
    # the last call alone, forward would gather the whole network at once.
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optim.Adam(model.parameters(), lr=args.lr)  # after: of the shards


WAYS = {"replicas": replicas, "optimizer": sharded_optimizer, "full": fully_sharded}


def batches_of(rank: int, world_size: int, epoch: int,
               args: argparse.Namespace) -> list[torch.Tensor]:
    """Return the batches of one rank in one epoch, as indices: its share of each global batch.

    The global batches follow from (seed, epoch) alone, whatever the number of ranks: what four have
    begun, two can continue. A last batch that would be smaller is left out.
    """
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(args.seed + epoch))
    return [batch[rank::world_size] for batch in order.split(args.global_batch_size)
            if len(batch) == args.global_batch_size]


def save(model: nn.Module, optimizer: optim.Optimizer, history: list[dict],
         args: argparse.Namespace) -> None:
    """Write this rank's shards to a folder that is there as a whole or not at all; on all ranks."""
    epoch = len(history)
    temporary = folders.begin(args.folder, epoch)
    weights, state = get_state_dict(model, optimizer)
    with folders.errors_in_one_line(temporary):
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=temporary)
    if dist.get_rank() == 0:  # here, all ranks have written: dcp.save waits for them
        folders.publish(temporary, epoch, {"example": args.example, "settings": args.settings,
                                           "history": history})


def resume(model: nn.Module, optimizer: optim.Optimizer, args: argparse.Namespace) -> list[dict]:
    """Read the last whole checkpoint, written by any number of ranks; return its history."""
    folder = folders.latest(args.folder)
    weights, state = get_state_dict(model, optimizer)  # what is here: which rows this rank needs
    saved = {"model": weights, "optimizer": state}
    with folders.errors_in_one_line(folder):
        dcp.load(saved, checkpoint_id=folder, planner=folders.PlainValues())
    set_state_dict(model, optimizer, model_state_dict=saved["model"],
                   optim_state_dict=saved["optimizer"])
    return folders.about(folder)["history"]


def train(rank: int, world_size: int, sharding: str, args: argparse.Namespace) -> dict:
    """Train in one way.

    Returns:
        What this rank has measured: `memory.bytes_held`; of the last epoch, the `seconds` of each
        step, and the bytes `sent` in one (None where unknown). And all ranks' `history` by epoch.
    """
    device = device_of_group(args)
    model, optimizer = WAYS[sharding](build_model(args).to(device), device, args)
    history = resume(model, optimizer, args) if args.resumed else []
    inputs, labels = (tensor.to(device) for tensor in toy_samples(0, args.seed, SAMPLES))
    for epoch in range(len(history) + 1, args.epochs + 1):
        total, seconds = torch.zeros((), device=device), []
        dist.barrier()  # what was sent before has arrived, and is not counted
        sent = memory.bytes_sent()
        for batch in batches_of(rank, world_size, epoch, args):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs[batch]), labels[batch])  # full: all-gathers
            report.require_finite(loss, f"in epoch {epoch}")
            loss.backward()  # DDP: all-reduces; full: all-gathers and reduce-scatters
            optimizer.step()  # optimizer: broadcasts
            total += loss.detach()
            seconds.append(time.perf_counter() - started)
        dist.barrier()
        sent = None if sent is None else memory.bytes_sent() - sent
        dist.all_reduce(total)  # of equal shares: the mean of the means is the mean
        history.append({"epoch": epoch, "loss": total.item() / world_size / len(seconds)})
        if args.folder is not None:
            save(model, optimizer, history, args)
        if rank == 0:
            text = "{}: epoch {epoch}  loss {loss:.4f}"
            report.log("rank0", text.format(sharding, **history[-1]))
    return {"history": history, **memory.bytes_held(model, optimizer), "seconds": seconds,
            "sent": None if sent is None else sent / len(seconds)}


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join, train in each way that was chosen, leave; rank 0 returns the metrics."""
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    backend, measured = dist.get_backend(), {}
    for sharding in WAYS if args.sharding == "all" else [args.sharding]:
        measured[sharding] = [None] * world_size
        dist.all_gather_object(measured[sharding], train(rank, world_size, sharding, args))
    dist.destroy_process_group()
    parameters = memory.count(args.width, LAYERS)
    return results.metrics_of(measured, parameters, backend) if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("ddp_basic/fsdp", __doc__, world_size=4)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--sharding", choices=[*WAYS, "all"], default="all", help="of what each rank has a share")
    add("--width", type=count, default=512, metavar="N", help="units in each hidden layer")
    add("--epochs", type=count, default=3, metavar="N", help="in all, also before an interruption")
    add("--global_batch_size", type=bounded(int, at_least=1, at_most=SAMPLES), default=64,
        metavar="N", help="samples in a batch of all ranks together")
    add("--lr", type=bounded(float, above=0), default=0.001, help="learning rate of Adam")
    # Not `args.checkpoint`: the shared flags take that for a file.
    add("--checkpoint", dest="folder", type=Path, metavar="DIR",
        help="with --sharding full: save there after each epoch (default: nowhere)")
    add("--resume", dest="resumed", action="store_true",
        help=f"continue from the last whole checkpoint in --checkpoint, {RESUME}")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    if args.global_batch_size % args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be a multiple of "
               f"{given(args, 'world_size')}")
    require_own_gpus(args)
    memory.require_room(args, LAYERS)
    folders.require_useful(args)
    try:
        return run_program(run_worker, args, role_name, results.finish)
    finally:
        folders.clean_up(args)  # after ranks that were killed while they wrote


if __name__ == "__main__":
    main()
