"""04 ときどき見つからないファイル / A file that is sometimes missing (6_3, ddp_basic/main.py)."""

import torch
import torch.distributed as dist


def demo_checkpoint(rank: int, world_size: int, args: argparse.Namespace) -> list[float]:
    """ランク0が保存し、全ランクが読み込み、読み込んだモデルを訓練します。どこかに誤りがあります。

    戻り値: このランクの損失のリスト（各ステップの前と、最後）。

    Save on rank 0, load on all, train what was loaded. There is a mistake in here.

    Returns this rank's losses, a list: before each step, and at the end.
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
