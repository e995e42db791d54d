"""Samples that the toy networks can learn; the tutorial's are noise."""

import torch


def toy_samples(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the samples of one rank, the same in every step.

    Args:
        rank: has samples of its own: with one seed for all, all ranks would train on the same.
        seed: of the run.

    Returns:
        Inputs (20, 10), as many as in the tutorial's batch, and labels (20, 5) that a linear
        teacher, the same for all ranks, gives them.
    """
    inputs = _draw(1000 * seed + 1 + rank, 20, 10)
    return inputs, inputs @ _draw(seed, 10, 5) / 10**0.5


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
