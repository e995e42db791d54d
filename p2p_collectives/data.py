"""Which samples a rank has in each step.

All ranks have as many steps, and every sample is used once in each epoch.
"""

import math
from collections.abc import Iterator, Sequence

import torch


def steps_of_epoch(partitions: Sequence[torch.Tensor], global_batch_size: int) -> list[int]:
    """Compute how many samples all ranks together have in each step of an epoch.

    On average about `global_batch_size`. The same number of steps on all ranks, or one would wait
    for ever; each rank has a sample in every step.

    Args:
        partitions: the positions of each rank.
        global_batch_size: samples of all ranks together in one step, at least one for each.
    """
    n_samples = sum(map(len, partitions))
    steps = min(math.ceil(n_samples / global_batch_size), n_samples // len(partitions))
    lengths = [[len(piece) for piece in cut(positions, steps, rank)]
               for rank, positions in enumerate(partitions)]
    return [sum(pieces) for pieces in zip(*lengths, strict=True)]


def cut(index: torch.Tensor, steps: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Cut positions into a piece for each step; some, on each rank others, are longer by one."""
    pieces = index.tensor_split(steps)
    return pieces[-rank % steps :] + pieces[: -rank % steps]


def batches(train_set: Sequence, global_batches: list[int],
            rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Shuffle the part of a rank, and cut it into its pieces of the global batches.

    Args:
        train_set: the part, a `Partition`.
        global_batches: from `steps_of_epoch`.
        rank: of this process.

    Yields:
        Images, labels, and the share of the piece in the samples of its global batch.
    """
    pieces = cut(torch.randperm(len(train_set)), len(global_batches), rank)
    for piece, global_batch in zip(pieces, global_batches, strict=True):
        yield *train_set[piece], len(piece) / global_batch
