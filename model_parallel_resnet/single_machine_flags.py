"""The flags of single_machine.py: which devices there are, and what they can hold."""

import argparse
import re

import torch
from common.cli import refuse, require_memory, shortened
from common.launcher.environment import reproducible


def device(text):
    """An argparse type."""
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]?)", text):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not accepted; give cpu or cuda:N")
    return torch.device(text)


def choose_devices(args):
    """The devices of both halves.

    Raises:
        SystemExit: 2 after one line, if they are not here, or cannot be compared with a single one.
    """
    gpus = torch.cuda.device_count()
    if args.devices is None:
        on_cpu = args.device == "cpu" or gpus == 0
        names = ["cpu", "cpu"] if on_cpu else ["cuda:0", f"cuda:{min(gpus, 2) - 1}"]
        return [torch.device(name) for name in names]
    given = " ".join(map(str, args.devices))
    if args.device != "auto":
        refuse(f"--device {args.device} cannot be given with --devices {given}: one is enough")
    if any(of_half.type == "cuda" and of_half.index >= gpus for of_half in args.devices):
        refuse(f"--devices {given} must be " + (
            f"of cuda:0 to cuda:{gpus - 1}, or cpu" if gpus else "cpu cpu: torch sees no GPU here"))
    if args.devices[0].type != args.devices[1].type:
        refuse(f"--devices {given} must be two GPUs, or one device twice: a CPU and a GPU differ")
    return args.devices


def settle(args, split_sizes, num_classes):
    """Refuse what cannot be, and fill in what was left to us.

    `args.devices` and `args.split_size` are set afterwards, and `args.measured_sizes`: all split
    sizes, in order.

    Args:
        args: the parsed flags.
        split_sizes: the default of `--split_sizes`.
        num_classes: of the targets.

    Returns:
        The split sizes that are left out, as they are larger than the batch.
    """
    reproducible(args)
    args.devices = choose_devices(args)
    too_large = [size for size in args.split_sizes or split_sizes if size > args.batch_size]
    accepted = f"must be at most --batch_size {args.batch_size}: it is the samples of a micro-batch"
    if args.split_sizes and too_large:
        refuse(f"--split_sizes {too_large[0]} {accepted}")
    if args.split_size is None:
        args.split_size = min(20, (args.batch_size + 1) // 2)
    if args.split_size > args.batch_size:
        refuse(f"--split_size {args.split_size} {accepted}")
    # Images and one-hot targets, which were integers; on a CPU also what the first layer and its
    # BatchNorm make of an image, each 64 channels of half the height and width.
    of_image = 3 * (args.image_size**2 + num_classes)
    if args.devices[0].type == "cpu":
        of_image += 2 * 64 * (args.image_size // 2) ** 2
    require_memory(args, ["batch_size", "image_size"], 4 * args.batch_size * of_image)
    asked_for = {args.split_size, *(args.split_sizes or split_sizes)}
    args.measured_sizes = sorted(asked_for - set(too_large))
    return too_large
