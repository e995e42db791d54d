"""28 増えないデータ / More trainers, no more data (6_9, ddp_rpc_hybrid/main.py)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """マスターがトレーナーに訓練を始めさせ、結果を集めます。どこかに誤りがあります。

    rank, world_size: このプロセスのランクと、プロセスの数。ランク0からの`world_size - 2`個が
        トレーナー、その次がマスター、最後のランクがパラメーターサーバー（ps）です。
    args: コマンドラインの値。
    `_run_trainer(emb_rref, rank, args)`は、トレーナーの上で実行される訓練です。`rank`はトレーナーの
    番号で、どのバッチを読むかを決めます。
    戻り値: マスターでは全トレーナーの結果をまとめた辞書、ほかでは`None`。

    The master has the trainers train, and collects their results. There is a mistake in here.

    rank, world_size: of this process, and how many there are. The last rank is the parameter
        server, the one before it the master; the others, from rank 0 on, are the trainers.
    args: the flags.
    `_run_trainer(emb_rref, rank, args)` is the training, which runs on a trainer; `rank` is the
    number of that trainer, and decides which batches it reads.
    Returns the results of all trainers, a dict, on the master; None elsewhere.
    """
    role, n_trainers, metrics = role_name(rank, world_size), world_size - 2, None
    options = {"rank": rank, "world_size": world_size, "rpc_backend_options": rpc_options(args)}
    torch.manual_seed(args.seed)
    if role == MASTER_NAME:
        rpc.init_rpc(role, **options)
        emb_rref = rpc.remote(
            PS_NAME, nn.EmbeddingBag, args=(args.num_embeddings, args.embedding_dim),
            kwargs={"mode": "sum", "sparse": args.sparse})
        futs = []
        for trainer_rank in range(n_trainers):
            fut = rpc.rpc_async(TRAINER_NAME.format(trainer_rank), _run_trainer,
                                args=(emb_rref, rank, args), timeout=0)
            futs.append(fut)
        metrics = results.over_trainers(wait_all(futs))
    elif rank < n_trainers:
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                                world_size=n_trainers)
        rpc.init_rpc(role, **options)
    else:
        rpc.init_rpc(role, **options)
    rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return metrics
