"""Handwritten digits: 1,797 small ones, without a download, or MNIST.

The small ones are the "Optical Recognition of Handwritten Digits" of E. Alpaydin and C. Kaynak
(https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn has them: 8x8 pixels of 0 to 16. A
fifth of each digit is for testing. Importing scikit-learn would take each rank a second.
"""

import argparse
import contextlib
import io
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.limits import refuse, shortened
from common.vision import import_torchvision

import numpy
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DATASETS = ("digits", "mnist")
FETCH_S = 600  # seconds that the ranks of a machine wait until the first one has the data
SILENCE_S = 20  # seconds that the server may be silent: torchvision would wait forever
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
         "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DIGITS = Path(__file__).parent / "digits.npz"


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--dataset` and `--data_dir`."""
    parser.add_argument("--dataset", choices=DATASETS, default="digits",
                        help="digits, which needs no download, or MNIST")
    parser.add_argument("--data_dir", type=Path, default=Path("data"), metavar="DIR",
                        help="folder of MNIST, or where to put it")


def fetch_data(args: argparse.Namespace) -> None:
    """Make sure that the data are on this machine, before the processes race for the same files.

    Files that the user has placed in `DIR/MNIST/raw`, packed or unpacked, are used as they are.
    Under torchrun the ranks already run: the first rank of each machine fetches, the rest wait.

    Raises:
        SystemExit: 2 after one line, if MNIST is neither in `--data_dir` nor can be fetched.
    """
    if args.dataset != "mnist":
        return
    first = not dist.is_torchelastic_launched() or os.environ["LOCAL_RANK"] == "0"
    deadline = time.monotonic() + FETCH_S
    failure = _failure(_read, args.data_dir)
    if failure and first:
        failure = _failure(_fetch, args.data_dir) or _failure(_read, args.data_dir)
    while failure and not first and time.monotonic() < deadline:
        time.sleep(0.2)
        failure = _failure(_read, args.data_dir)
    if failure:
        folder = shortened(args.data_dir)
        refuse(f"--data_dir {folder} does not hold MNIST, which could not be fetched "
               f"({shortened(failure, 600)}). Place {', '.join(FILES)} (.gz or unpacked) into "
               f"{folder}/MNIST/raw, or use --dataset digits, which needs no download",
               rank=os.environ.get("RANK"))


def _failure(function: Callable[[Path], object], folder: Path) -> str | None:
    """Return how `function(folder)` fails, in one line, or None."""
    try:
        function(folder)
    except Exception as error:  # half a file, no permission, no network, a proxy, a full disk, ...
        return " ".join((str(error) or type(error).__name__).split())


def _read(folder: Path | str, **options: bool) -> list:
    mnist = import_torchvision().datasets.MNIST
    return [mnist(folder, train=train, **options) for train in (True, False)]


def _fetch(folder: Path) -> None:
    """Fetch or unpack the files beside their places, and move them there when they are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    silence = socket.getdefaulttimeout()
    with (tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as fetched,
          contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())):
        raw = Path(fetched, "MNIST", "raw")
        raw.mkdir(parents=True)
        for packed in folder.glob("MNIST/raw/*.gz"):
            shutil.copy(packed, raw)  # torchvision fetches only files whose checksum is wrong
        try:
            socket.setdefaulttimeout(SILENCE_S)
            _read(fetched, download=True)
        finally:
            socket.setdefaulttimeout(silence)
        for path in raw.glob("*ubyte"):
            place = folder / path.relative_to(fetched)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def load_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Load the images as tensors.

    Args:
        args: Parsed flags; see `add_data_flags`.

    Returns:
        Two `TensorDataset`s, for training and for testing, of images (N, 1, 28, 28) as float32,
        normalized to mean 0 and deviation 1 over the training set, and of labels (N,) as int64.
    """
    train, test = _digits() if args.dataset == "digits" else _mnist(args.data_dir)
    mean, std = train[0].mean(), train[0].std()
    return tuple(TensorDataset((images - mean) / std, labels) for images, labels in (train, test))


def _digits() -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    with numpy.load(DIGITS) as file:
        arrays = {name: torch.from_numpy(array) for name, array in file.items()}
    return tuple((F.interpolate(arrays[f"{half}_images"].unsqueeze(1).float() / 16, size=28,
                                mode="bilinear", align_corners=False),
                  arrays[f"{half}_labels"].long()) for half in ("train", "test"))


def _mnist(folder: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple((half.data.float().unsqueeze(1) / 255, half.targets) for half in _read(folder))
