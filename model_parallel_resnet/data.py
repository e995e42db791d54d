"""One batch of random images and one-hot targets, always the same; what a machine can hold."""

import argparse

import torch
from common.cli import given, on_cpu, ranks_here, refuse, require_memory
from torch.nn import functional as F


def get_batch(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the tutorial's data, once.

    Returns:
        Images (batch_size, 3, image_size, image_size) and one-hot targets (batch_size,
        num_classes), both of torch's default type.
    """
    generator = torch.Generator().manual_seed(args.seed)
    size = args.batch_size, 3, args.image_size, args.image_size
    images = torch.randn(size, generator=generator)
    indices = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    return images, F.one_hot(indices, args.num_classes).to(images.dtype)


def require_sizes(args: argparse.Namespace, roles: list[list[str]]) -> None:
    """Sort `--num_splits`, with 1; refuse what cannot be split, or held by this machine.

    Args:
        args: the parsed flags of main.py or schedules.py.
        roles: what each rank has: of "batch", "first half" and "second half".

    Raises:
        SystemExit: 2 after one line, before any process starts.
    """
    if args.world_size != len(roles):
        refuse(f"--world_size {args.world_size} must be {len(roles)}: one process for each role")
    args.num_splits = sorted({1, *args.num_splits})
    most = args.num_splits[-1]
    if most > args.batch_size:
        refuse(f"--num_splits {most} must be at most {given(args, 'batch_size')}: every "
               "micro-batch needs a sample")
    if args.batch_size // most == 1 and args.image_size == 32:  # BatchNorm of a single number
        refuse(f"{given(args, 'image_size')} must be above 32 with --num_splits {most} and "
               f"{given(args, 'batch_size')}: the last layers would see one pixel of one image")
    # Images and one-hot targets, which were integers; what the first layer and its BatchNorm make
    # of an image, each 64 channels of half the height and width; the last layer's weights.
    first_layers = 2 * 64 * (args.image_size // 2) ** 2 if on_cpu(args) else 0
    numbers = {"batch": args.batch_size * 3 * (args.image_size**2 + args.num_classes),
               "first half": args.batch_size * first_layers,
               "second half": {"resnet18": 512, "resnet50": 2048}[args.arch] * args.num_classes}
    n_bytes = 4 * sum(numbers[part] for rank in ranks_here(args) for part in roles[rank])
    require_memory(args, ["batch_size", "image_size", "num_classes"], n_bytes)
