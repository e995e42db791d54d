"""Handwritten digits: scikit-learn's 1,797 small ones, which need no download, or MNIST through torchvision."""

import contextlib
import io
import os
from pathlib import Path

import torch
from common.cli import refuse
from common.vision import import_torchvision
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DATASETS = ("digits", "mnist")
SPLIT_SEED = 0  # the split is part of the task: it does not follow --seed


def add_data_flags(parser):
    """Add `--dataset` and `--data_dir`."""
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    parser.add_argument("--data_dir", type=Path, default=Path("data"), metavar="DIR", help="where MNIST is or goes")


def fetch_data(args):
    """Make sure that the data are on this machine, once, before the processes start and race for the same files.

    Under torchrun they have started: there, one process of each machine does so, and the others must not load the data
    before they have met it.

    Raises:
        SystemExit: 2 after one line, if MNIST is neither in `--data_dir` nor can be fetched.
    """
    if args.dataset == "mnist" and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                for train in (True, False):
                    import_torchvision().datasets.MNIST(args.data_dir, train=train, download=True)
        except Exception as error:  # no network, no such host, a full disk, damaged files: whatever it was
            reason = (str(error) or type(error).__name__).splitlines()[0]
            refuse("--data_dir", args.data_dir, "a folder that holds MNIST, or use --dataset digits "
                   f"(MNIST is not in {args.data_dir} and could not be fetched: {reason})")


def load_data(args):
    """The images as tensors.

    Args:
        args: with `dataset` and `data_dir`; see `add_data_flags`.

    Returns:
        Two `TensorDataset`s, for training and for testing, of images (N, 1, 28, 28) as float32, normalised to mean 0
        and deviation 1 over the training set, and of labels (N,) as int64.
    """
    train, test = _digits() if args.dataset == "digits" else _mnist(args.data_dir)
    mean, std = train[0].mean(), train[0].std()
    return tuple(TensorDataset((images - mean) / std, labels) for images, labels in (train, test))


def _digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)  # 8x8 pixels of 0 to 16
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(labels)
    halves = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=SPLIT_SEED)
    return tuple((images[half], labels[half]) for half in halves)


def _mnist(folder):
    datasets = import_torchvision().datasets
    halves = (datasets.MNIST(folder, train=train) for train in (True, False))
    return tuple((half.data.float().unsqueeze(1) / 255, half.targets) for half in halves)
