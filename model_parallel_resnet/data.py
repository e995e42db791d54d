"""The data: one batch of random images. Also the limits of what this machine can hold."""

import argparse

from common.cli import given, on_cpu, ranks_here, refuse, require_memory

import torch


def get_batch(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate the batch that all steps train on.

    Returns:
        Images (batch_size, 3, image_size, image_size) and one-hot targets (batch_size,
        num_classes), both of torch's default type.
    """
    generator = torch.Generator().manual_seed(args.seed)
    size = args.batch_size, 3, args.image_size, args.image_size
    inputs = torch.randn(size, generator=generator)
    one_hot_indices = torch.randint(args.num_classes, (args.batch_size, 1), generator=generator)
    labels = torch.zeros(args.batch_size, args.num_classes).scatter_(1, one_hot_indices, 1)
    return inputs, labels


def require_sizes(args: argparse.Namespace, roles: list[list[str]]) -> None:
    """Add 1 to `--num_splits`, and sort it; refuse sizes that cannot be split or do not fit here.

    Args:
        args: Parsed flags of main.py or schedules.py.
        roles: For each rank, what it holds of "batch", "first half" and "second half".

    Raises:
        SystemExit: 2 after one line, before any process starts.
    """
    if args.world_size != len(roles):
        refuse(f"--world_size {args.world_size} must be {len(roles)}: one process for each role")
    args.num_splits = sorted({1, *args.num_splits})
    most = args.num_splits[-1]
    if most > args.batch_size:
        refuse(f"--num_splits {most} must be at most {given(args, 'batch_size')}: every "
               "micro-batch needs an image")
    # BatchNorm cannot average a single number.
    if args.batch_size // most == 1 and args.image_size == 32:
        refuse(f"{given(args, 'image_size')} must be above 32 with --num_splits {most} and "
               f"{given(args, 'batch_size')}: the last layers would see one pixel of one image")
    last_layer = {"resnet18": 512, "resnet50": 2048}[args.arch] * args.num_classes
    n_bytes = {"batch": batch_bytes(args, args.num_classes),
               "first half": first_layers_bytes(args) if on_cpu(args) else 0,
               "second half": 4 * last_layer}
    require_memory(args, ["batch_size", "image_size", "num_classes"],
                   sum(n_bytes[part] for rank in ranks_here(args) for part in roles[rank]))


def require_split_sizes(args: argparse.Namespace, split_sizes: list[int],
                        num_classes: int) -> list[int]:
    """Set `args.split_size` and `args.measured_sizes`, all split sizes in order.

    Args:
        args: Parsed flags of single_machine.py, with the chosen `devices`.
        split_sizes: Default of `--split_sizes`.
        num_classes: Number of classes.

    Returns:
        The split sizes that are left out because they are larger than the batch.

    Raises:
        SystemExit: 2 after one line, if a size is larger than the batch or does not fit here.
    """
    too_large = [size for size in args.split_sizes or split_sizes if size > args.batch_size]
    accepted = f"must be at most --batch_size {args.batch_size}: it is the size of a micro-batch"
    if args.split_sizes and too_large:
        refuse(f"--split_sizes {too_large[0]} {accepted}")
    if args.split_size is None:
        args.split_size = min(20, (args.batch_size + 1) // 2)
    if args.split_size > args.batch_size:
        refuse(f"--split_size {args.split_size} {accepted}")
    n_bytes = batch_bytes(args, num_classes)
    if args.devices[0].type == "cpu":
        n_bytes += first_layers_bytes(args)
    require_memory(args, ["batch_size", "image_size"], n_bytes)
    asked_for = {args.split_size, *(args.split_sizes or split_sizes)}
    args.measured_sizes = sorted(asked_for - set(too_large))
    return too_large


def batch_bytes(args: argparse.Namespace, num_classes: int) -> int:
    """Estimate the bytes of the images and one-hot targets in float32."""
    return 4 * args.batch_size * (3 * args.image_size**2 + num_classes)


def first_layers_bytes(args: argparse.Namespace) -> int:
    """Estimate the bytes of the first two layers' outputs: 64 channels of half the image size."""
    return 4 * args.batch_size * 2 * 64 * (args.image_size // 2) ** 2
