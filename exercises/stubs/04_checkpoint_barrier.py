"""04 ときどき見つからないファイル / A file that is sometimes missing (6_3, ddp_basic/main.py)."""

import argparse
import os

from common.session import device_for

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic.main import ToyModel, gpu_of, train


def demo_checkpoint(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """ランク0が保存し、全ランクが読み込んで訓練し、損失のリストを返します。誤りが1つあります。

    Save on rank 0, load on all ranks, train, and return the losses. It contains one mistake.
    """
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    ddp_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))
    loaded_model = DDP(ToyModel().to(device), device_ids=gpu_of(device))

    paths = [args.output_dir.resolve() / f".model.{os.getpid()}.tmp"]
    dist.broadcast_object_list(paths)
    [path] = paths
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    loaded_model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    dist.barrier()
    if rank == 0:
        path.unlink()
    return train(loaded_model, rank, device, args)
