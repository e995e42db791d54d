"""07 ステップの数が違うランク / A rank with one more step (6_4, p2p_collectives/train.py)."""

from argparse import Namespace

from common.data import load_data

import torch.distributed as dist
from torch.utils.data import TensorDataset

from p2p_collectives.data import steps_of_epoch
from p2p_collectives.train import DataPartitioner, Partition


def partition_dataset(args: Namespace) -> tuple[Partition, list[int], TensorDataset]:
    """このランクの分担、各ステップの全ランクのサンプル数、テストデータを返します。誤りが1つあります。

    `steps_of_epoch(partitions, global_batch_size)`は、各ランクの位置のリストから、各ステップの
    全ランクのサンプル数のリストを求めます。リストの長さがステップの数です。

    Return this rank's part, the samples of all ranks in each step, and the test set. It contains
    one mistake.

    `steps_of_epoch(partitions, global_batch_size)` computes, from the positions of each rank, the
    number of samples of all ranks in each step. Its list has one entry for each step.
    """
    dataset, test_set = load_data(args)
    size = dist.get_world_size()
    partition_sizes = [1.0 / size for _ in range(size)]
    partitioner = DataPartitioner(dataset, partition_sizes, args.seed)
    own = partitioner.partitions[dist.get_rank()]
    global_batches = [size * n for n in steps_of_epoch([own], args.global_batch_size // size)]
    return partitioner.use(dist.get_rank()), global_batches, test_set
