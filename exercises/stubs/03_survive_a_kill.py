"""03 中断しても同じバッチ / Batches that survive a kill (6_3, ddp_basic/elastic.py)."""

import torch
from torch.utils.data import DistributedSampler


def batches_of(rank: int, world_size: int, train_set: TensorDataset, epoch: int,
               args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """このエポックで、このランクが使うバッチを、サンプルの位置のテンソルとして返します。

    rank, world_size: このランクの番号と、ランクの数。
    train_set: 訓練データ。`len(train_set)`個のサンプルがあります。
    epoch: エポックの番号（1から）。
    args: コマンドラインの値。`args.seed`はシード、`args.global_batch_size`は全ランクを合わせた
        バッチのサンプル数で、ランク数の倍数です。
    戻り値: 位置（整数）のテンソルの並び。長さはどれも`args.global_batch_size // world_size`で、
    最後だけ短くてもかまいません。
    - どのエポックでも、全データを新しくシャッフルし、全ランクで重ならないように分けます。
    - どのランクも、位置の数（したがってステップ数）が同じです。
    - 順序は`args.seed`と`epoch`だけで決まります。強制終了の後、新しいプロセスがこのエポックから
      始めても、まったく同じ順序になります。
    `DistributedSampler`（`seed=args.seed`）がそのすべてを行えます。

    The batches of this rank in this epoch, as tensors of positions.

    rank, world_size: the number of this rank, and how many there are.
    train_set: the training data, of `len(train_set)` samples.
    epoch: its number, from 1.
    args: the flags, with `args.seed`, and `args.global_batch_size`, the samples in a batch of all
        ranks together, a multiple of their number.
    Returns tensors of positions (integers), each of length `args.global_batch_size // world_size`;
    the last one may be shorter.
    - Each epoch has a new shuffle of all data, of which the ranks have shares that do not overlap.
    - All ranks have the same number of positions, and so of steps.
    - The order follows from `args.seed` and `epoch` alone: a new process that begins with this
      epoch, because the old one was killed, makes the same order.
    `DistributedSampler`, with `seed=args.seed`, can do all of it.
    """
    # ここを書き換えます（3行ほど）。 / Change this (about three lines).
    return torch.arange(len(train_set)).split(args.global_batch_size // world_size)
