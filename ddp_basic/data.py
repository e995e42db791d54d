"""Samples that the toy networks can learn; the tutorial's are noise."""

import argparse

import torch


def toy_samples(rank: int, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the samples of one rank, the same in every step.

    Args:
        rank: has samples of its own: with one seed for all, all ranks would train on the same.
        args: with `seed` and `local_batch_size`, called n here.

    Returns:
        Inputs (n, 10), and labels (n, 5) that a linear teacher, the same for all ranks, gives them.
    """
    inputs = _draw(1000 * args.seed + 1 + rank, args.local_batch_size, 10)
    return inputs, inputs @ _draw(args.seed, 10, 5) / 10**0.5


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
