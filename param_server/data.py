"""Inputs of the parameter servers: images, checkpoints, and refused flags."""

from argparse import Namespace
from collections.abc import Callable, Iterator

from common import checkpoint
from common.cli import given, ranks_here, refuse, require_memory, starts_rank
from common.data import fetch_data, load_data

import torch
from torch import nn
from torch.utils.data import TensorDataset


def get_next_batch(train_set: TensorDataset, rank: int, epoch: int, args: Namespace
                   ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images (N, 1, 28, 28) and labels (N,) of a trainer's share, shuffled in each epoch.

    In the tutorial, every trainer goes through all images: N trainers do N times the work.

    Args:
        train_set: images and labels of all trainers.
        rank: rank of the trainer, from 1.
        epoch: number of the epoch, from 0.
        args: parsed flags: `seed`, `world_size` and `batch_size`. The last batch may be smaller.
    """
    shuffled = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(args.seed))
    share = shuffled[rank - 1 :: args.world_size - 1]
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + 1000 * epoch + rank)
    for batch in share[torch.randperm(len(share), generator=generator)].split(args.batch_size):
        yield train_set[batch]


def count_batches(train_set: TensorDataset, rank: int, args: Namespace) -> int:
    """Return the number of batches that `get_next_batch` yields in an epoch."""
    share = range(rank - 1, len(train_set), args.world_size - 1)
    return -(-len(share) // args.batch_size)


def save_checkpoint(model: nn.Module, epochs: int, args: Namespace) -> None:
    """Write a checkpoint if `--checkpoint` is given; the random numbers of a GPU are not in it."""
    if args.checkpoint:
        checkpoint.save(args, {"model": model.state_dict(), "epochs": epochs,
                               "random_numbers": torch.get_rng_state()})


def load_checkpoint(model: nn.Module, args: Namespace) -> int:
    """Load a checkpoint if `--resume` is given; return the number of epochs in it."""
    if not args.resume:
        return 0
    state = checkpoint.load(args)
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random_numbers"])
    return state["epochs"]


def require_inputs(args: Namespace, make_model: Callable[[], nn.Module]) -> None:
    """Fetch the images if necessary; refuse too many trainers and unsuitable checkpoints.

    Raises:
        SystemExit: 2 after one line, if the run cannot start.
    """
    fetch_data(args)
    if starts_rank(args, 1) and args.world_size - 1 > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples + 1}: every trainer needs "
               "an image", rank=1)
    state = checkpoint.inspect(args, make_model)
    if state:
        checkpoint.require_epochs(args, state["epochs"])


def require_sizes(args: Namespace) -> None:
    """Refuse images of `batch_update.py` that do not fit into this machine's memory.

    Raises:
        SystemExit: 2 after one line, if they do not fit.
    """
    # A trainer holds a pattern for each class and, for each image of a batch, also its noise.
    images = (args.num_classes + 2 * args.batch_size) * sum(rank > 0 for rank in ranks_here(args))
    targets = args.batch_size * args.num_classes
    require_memory(args, ["batch_size", "image_size", "num_classes"],
                   4 * (3 * images * args.image_size**2 + targets))
