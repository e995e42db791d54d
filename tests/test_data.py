"""Handwritten digits, and MNIST, which is fetched once for all ranks of a machine."""

import struct
import time
from pathlib import Path
from types import SimpleNamespace

from common import cli, data
from common.data import fetch_data, load_data
from common.launch import launch
from common.program import role_name

import numpy as np
import pytest
import torch


def test_digits():
    train, test = load_data(SimpleNamespace(dataset="digits", data_dir=None))
    images, labels = train.tensors
    assert (len(train), len(test)) == (1437, 360)
    assert images.shape == (1437, 1, 28, 28)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    for part in (train, test):  # stratified: each digit has its tenth
        shares = part.tensors[1].bincount(minlength=10) / len(part)
        assert shares.numpy() == pytest.approx(0.1, abs=0.005)
    again, _ = load_data(SimpleNamespace(dataset="digits", data_dir=None))
    assert torch.equal(again.tensors[0], images)
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert not any(tuple(image.flatten().tolist()) in seen for image in test.tensors[0])


def write_mnist(folder, counts):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in counts.items():
        pixels = np.arange(count * 28 * 28, dtype=np.uint8).tobytes()
        labels = (np.arange(count, dtype=np.uint8) % 10).tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    return raw


def test_mnist_that_is_there(tmp_path):
    write_mnist(tmp_path, {"train": 30, "t10k": 10})
    args = SimpleNamespace(dataset="mnist", data_dir=tmp_path)
    fetch_data(args)
    train, test = load_data(args)
    assert train.tensors[1].tolist() == 3 * list(range(10))
    assert test.tensors[1].tolist() == list(range(10))
    # The bytes of the file, row by row; the test set in the units of the training set.
    pixels = np.arange(30 * 28 * 28).reshape(30, 1, 28, 28) % 256 / 255
    normalised = (pixels - pixels.mean()) / pixels.std(ddof=1)
    assert train.tensors[0].numpy() == pytest.approx(normalised, abs=1e-4)
    assert test.tensors[0].numpy() == pytest.approx(normalised[:10], abs=1e-4)


class SlowMNIST:
    """Like torchvision's, with a server that takes a second for every file."""

    def __init__(self, root, train=True, download=False):
        path = Path(root, "MNIST", "raw", f"{'train' if train else 't10k'}-images-idx3-ubyte")
        if download:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for number in range(10):
                    file.write(bytes([number]) * 28 * 28)
                    time.sleep(0.1)
        pixels = bytearray(path.read_bytes())
        self.data = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 28, 28)
        self.targets = torch.arange(len(self.data))


def fetch_and_load(rank, world_size, args):
    """On first use, all at the same time; what each rank has loaded is in a file."""
    data.import_torchvision = lambda: SimpleNamespace(datasets=SimpleNamespace(MNIST=SlowMNIST))
    fetch_data(args)
    shapes = [list(half.tensors[0].shape) for half in load_data(args)]
    (args.output_dir / f"rank{rank}").write_text(str(shapes))


def test_one_process_of_each_machine_fetches(tmp_path):
    """Under torchrun, the others wait until the first one has all files: nobody reads half of one."""
    parser = cli.Parser("test", "", world_size=2)
    data.add_data_flags(parser)
    folder = tmp_path / "data"
    flags = ["--dataset", "mnist", "--data_dir", str(folder), "--output_dir", str(tmp_path / "out")]
    args = parser.parse_args(flags)
    launch(fetch_and_load, args, role_name)
    for rank in range(2):
        assert (tmp_path / f"out/rank{rank}").read_text() == "[[10, 1, 28, 28], [10, 1, 28, 28]]"
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == [f"MNIST/raw/{half}-images-idx3-ubyte" for half in ("t10k", "train")]
    assert [path.name for path in folder.iterdir()] == ["MNIST"]  # no temporary folder is left


def test_nobody_waits_for_ever_for_the_first(tmp_path, monkeypatch, capsys):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(data, "FETCH_S", 0.5)
    with pytest.raises(SystemExit, match="^2$"):
        fetch_data(SimpleNamespace(dataset="mnist", data_dir=tmp_path / "nowhere"))
    assert "does not hold MNIST" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()  # it has fetched nothing itself
