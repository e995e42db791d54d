"""The samples of each rank in each step.

All ranks have the same number of steps, and each epoch uses every sample once.
"""

import math
from collections.abc import Iterator, Sequence

import torch


def steps_of_epoch(partitions: Sequence[torch.Tensor], global_batch_size: int) -> list[int]:
    """Compute the number of samples that all ranks together have in each step of an epoch.

    This number is `global_batch_size` on average. All ranks make the same number of steps, because
    a rank with one more step would wait forever. Every rank has at least one sample in every step.

    Args:
        partitions: Positions of each rank's samples.
        global_batch_size: Samples of all ranks together in one step, at least one for each rank.
    """
    n_samples = sum(map(len, partitions))
    steps = min(math.ceil(n_samples / global_batch_size), n_samples // len(partitions))
    lengths = [[len(piece) for piece in split(positions, steps, rank)]
               for rank, positions in enumerate(partitions)]
    return [sum(pieces) for pieces in zip(*lengths, strict=True)]


def split(index: torch.Tensor, steps: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Split positions into one piece per step; the longer pieces differ from rank to rank."""
    pieces = index.tensor_split(steps)
    return pieces[-rank % steps :] + pieces[: -rank % steps]


def batches(train_set: Sequence, global_batches: list[int],
            rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Shuffle the part of a rank, and split it into its pieces of the global batches.

    Args:
        train_set: This rank's part, a `Partition`.
        global_batches: Result of `steps_of_epoch`.
        rank: Rank of this process.

    Yields:
        Images (n, 1, 28, 28), labels (n,), and this piece's fraction of its global batch.
    """
    pieces = split(torch.randperm(len(train_set)), len(global_batches), rank)
    for piece, global_batch in zip(pieces, global_batches, strict=True):
        yield *train_set[piece], len(piece) / global_batch
