"""Who trains on which images: the tutorial's `Partition` and `DataPartitioner` (tutorial 6_4). No other rank here."""

import math

import torch
from common.data import load_data


class Partition:
    """A part of a dataset: the elements at the positions `index`."""

    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        """The element at one position of the part, or a batch of them for a tensor of positions."""
        return self.data[self.index[index]]


class DataPartitioner:
    """Cut a dataset into parts of the given sizes, at random, and on every rank alike.

    Args:
        data: the dataset.
        sizes: shares of it; together at most 1.
        seed: the same on all ranks, or the parts would overlap.
    """

    def __init__(self, data, sizes=(0.7, 0.2, 0.1), seed=1234):
        indexes = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        # Round the ends, not the lengths, which the tutorial does: all samples are used, and no two parts overlap.
        ends = [math.floor(sum(sizes[: part + 1]) * len(data) + 0.5) for part in range(len(sizes))]
        self.data = data
        self.partitions = [indexes[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def use(self, partition):
        """The part with that number."""
        return Partition(self.data, self.partitions[partition])


def partition_dataset(args, rank, world_size):
    """Give `rank` its part of the training images.

    Returns:
        The `Partition`; how many samples all ranks together have in each step of an epoch, on average about
        `args.global_batch_size`; the test set.
    """
    train, test = load_data(args)
    partitioner = DataPartitioner(train, [1 / world_size] * world_size, args.seed)
    # The same number of steps on all ranks, or one would wait for ever; each has a sample in every step.
    steps = min(math.ceil(len(train) / args.global_batch_size), len(train) // world_size)
    lengths = [[len(piece) for piece in cut(part, steps, other)] for other, part in enumerate(partitioner.partitions)]
    return partitioner.use(rank), [sum(pieces) for pieces in zip(*lengths, strict=True)], test


def cut(index, steps, rank):
    """Cut positions into a piece for each step; some are longer by one, on each rank in other steps."""
    pieces = index.tensor_split(steps)
    return pieces[-rank % steps :] + pieces[: -rank % steps]


def batches(train_set, joined_batch_sizes, rank):
    """Shuffle this rank's part; yield images and labels of its piece of each joined batch, and the piece's share."""
    pieces = cut(torch.randperm(len(train_set)), len(joined_batch_sizes), rank)
    for piece, joined_batch_size in zip(pieces, joined_batch_sizes, strict=True):
        yield *train_set[piece], len(piece) / joined_batch_size
