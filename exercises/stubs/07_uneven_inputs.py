"""07 ステップの数が違うランク / A rank with one step more (6_4, p2p_collectives/train.py)."""

import math

import torch
import torch.distributed as dist


def partition_dataset(args: Namespace) -> tuple[Partition, list[int], TensorDataset]:
    """このランクの分、各ステップの全ランクのサンプル数、テスト用データを返します。どこかに誤りがあります。

    args: コマンドラインの値。`global_batch_size`は、1ステップの全ランクのサンプル数（平均）。
    `steps_of_epoch(partitions, global_batch_size)`は、各ランクの位置のリスト`partitions`から、
    各ステップの全ランクのサンプル数を求めます。リストの長さがステップの数です。

    Return this rank's part, how many samples all ranks have in each step, and the test set. There
    is a mistake in here.

    args: the flags. `global_batch_size` is how many samples all ranks have in a step, on average.
    `steps_of_epoch(partitions, global_batch_size)` computes from the positions of each rank how
    many samples all ranks have in each step; the list has an entry for each step.
    """
    dataset, test_set = load_data(args)
    size = dist.get_world_size()
    partition_sizes = [1.0 / size for _ in range(size)]
    partitioner = DataPartitioner(dataset, partition_sizes, args.seed)
    own = partitioner.partitions[dist.get_rank()]
    global_batches = [size * n for n in steps_of_epoch([own], args.global_batch_size // size)]
    return partitioner.use(dist.get_rank()), global_batches, test_set
