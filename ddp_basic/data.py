"""Samples that the toy networks can learn; the tutorial's samples are noise."""

import torch


def toy_samples(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the samples of one rank, the same in every step.

    Args:
        rank: Rank that the samples belong to. With one seed for all ranks, all would train on the
            same samples.
        seed: Seed of the run.

    Returns:
        Inputs (20, 10), one batch of the tutorial, and labels (20, 5). One linear teacher, the same
        for all ranks, computes the labels from the inputs.
    """
    inputs = _draw(1000 * seed + 1 + rank, 20, 10)
    return inputs, inputs @ _draw(seed, 10, 5) / 10**0.5


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
