"""Tutorial 6_2."""

import copy
import json
import os
import struct
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from model_parallel_resnet import single_machine
from model_parallel_resnet import single_machine_results as results
from model_parallel_resnet.single_machine import (
    ModelParallelResNet50,
    PipelineParallelResNet50,
    ToyModel,
)
from tests.helpers import bad, commands_in, run, script, torchrun

MAIN = "model_parallel_resnet/single_machine.py"
README = "model_parallel_resnet/README.md"
CPU_TWICE = [torch.device("cpu")] * 2
SMALL = ["--batch_size", "4", "--image_size", "33"]
PICTURES = ["mp_vs_rn.png", "mp_vs_rn_vs_pp.png", "split_size_tradeoff.png"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Of torch in this process: more would only wait for each other where two test processes share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settled(folder, *flags):
    """The flags, parsed and filled in; and the split sizes that are left out."""
    args = single_machine.build_parser().parse_args(["--output_dir", str(folder), *map(str, flags)])
    return args, single_machine.settle(args)


class Counted(nn.Module):
    """Stands for torchvision's ResNet50, and remembers the sizes of the batches that come."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Identity() for _ in range(8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 5)
        self.sizes = []
        self.conv1.register_forward_hook(lambda _, inputs, __: self.sizes.append(len(inputs[0])))


# --- what it computes


def test_toy_model_trains_on_two_devices():
    torch.manual_seed(0)
    model, loss_fn = ToyModel(CPU_TWICE), nn.MSELoss()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5)
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    optimizer.step()
    assert loss_fn(model(inputs), labels) < loss
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert not torch.equal(old, new)  # on the first device, too: the gradient has come all the way


def test_each_half_is_on_its_device():
    """Without a second device to compute on: "meta" has no numbers, but it is another one."""
    devices = [torch.device("cpu"), torch.device("meta")]
    model = ModelParallelResNet50(Counted(), devices)
    assert model(torch.randn(2, 3, 4, 4)).device == devices[1]
    toy = ToyModel(devices)
    assert [toy.net1.weight.device, toy.net2.weight.device] == devices


@pytest.mark.parametrize(("split_size", "micro_batches"), [
    (1, [1] * 7), (3, [3, 3, 1]), (5, [5, 2]), (7, [7]), (20, [7]),
])
def test_split_size_is_samples_not_a_count(split_size, micro_batches):
    """One printing stores `num_split` and reads `split_size`, another passes a count as the size."""
    resnet = Counted()
    model = PipelineParallelResNet50(resnet, CPU_TWICE, split_size=split_size)
    assert model.split_size == split_size
    assert not hasattr(model, "num_split")
    images = torch.randn(7, 3, 4, 4)
    outputs = model(images)
    assert resnet.sizes == micro_batches
    assert torch.allclose(outputs, resnet.fc(images.mean((2, 3))), atol=1e-6)  # in order, none lost


def test_micro_batches_overlap_by_one(monkeypatch):
    """The second half of a micro-batch is queued before the first half of the next one: both may then run at once."""
    calls, model = [], PipelineParallelResNet50(Counted(), CPU_TWICE, split_size=2)
    for half in ("seq1", "seq2"):
        getattr(model, half).register_forward_hook(lambda *_, half=half: calls.append(half))
    model(torch.randn(6, 3, 4, 4))
    assert calls == ["seq1"] + ["seq2", "seq1"] * 2 + ["seq2"]


def test_fewer_than_two_gpus_will_do(tmp_path, monkeypatch):
    """The tutorial's models want `cuda:0` and `cuda:1`, whatever there is."""
    for gpus, names in ((0, ["cpu", "cpu"]), (1, ["cuda:0", "cuda:0"]), (2, ["cuda:0", "cuda:1"]),
                        (8, ["cuda:0", "cuda:1"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        args, _ = settled(tmp_path)
        assert list(map(str, args.devices)) == names
        assert results.can_overlap(args.devices) == (gpus >= 2)
        assert ("nothing can overlap" in results.what_it_shows(args.devices)) == (gpus < 2)
        assert list(map(str, settled(tmp_path, "--device", "cpu")[0].devices)) == ["cpu", "cpu"]
    assert list(map(str, settled(tmp_path, "--devices", "cuda:7", "cuda:3")[0].devices)) == ["cuda:7", "cuda:3"]


def test_split_sizes_that_do_not_fit_the_batch(tmp_path):
    args, left_out = settled(tmp_path, "--batch_size", 9)
    assert (args.split_size, args.measured_sizes, left_out) == (5, [1, 3, 5, 8], [10, 12, 20, 40, 60])
    args, left_out = settled(tmp_path, "--batch_size", 120)
    assert (args.split_size, args.measured_sizes, left_out) == (20, single_machine.SPLIT_SIZES, [])
    args, left_out = settled(tmp_path, "--split_sizes", 4, 2, 2, "--split_size", 3)
    assert (args.split_size, args.measured_sizes, left_out) == (3, [2, 3, 4], [])


def test_the_tutorials_arithmetic():
    """From the tutorial's seconds, the shares that it publishes."""
    told = results.TUTORIAL
    seconds = [("single", None, "single_s"), ("mp", None, "model_parallel_s"), ("pp", 12, "split_size_12_s"),
               ("pp", 20, "split_size_20_s")]
    rows = [{"model": model, "split_size": size, "median_s": told[key]} for model, size, key in seconds]
    for what, number in results.compare_times(rows, split_size=20).items():
        assert round(number, 2) == told[what]


def test_each_bar_has_its_label(tmp_path, monkeypatch):
    """The pictures show the rows under their own names."""
    axes = MagicMock()
    monkeypatch.setattr(results.picture, "in_each_language", lambda _, words, *__, **values: [
        (axes, {name: text.format(**values) for name, text in words["en"].items()})])
    ran = {"devices": CPU_TWICE, "split_size": 3, "batch_size": 5, "image_size": 33, "num_batches": 1}
    rows = [{"split_size": size, "times_s": [seconds]} for size, seconds in ((None, 1.0), (None, 2.0), (3, 4.0),
                                                                             (5, 8.0))]
    results.plot([{**ran, "rows": rows}], SimpleNamespace(output_dir=tmp_path))
    bars = [(label.splitlines()[0], height) for (labels, heights), _ in axes.bar.call_args_list
            for label, height in zip(labels, heights, strict=True)]
    alike = [("single device", 1.0), ("model parallel", 2.0)]
    assert bars == [*alike, *alike, ("pipelined, split size 3", 4.0)]
    assert axes.plot.call_args.args[:2] == ([3, 5], [4.0, 8.0])


# --- the command


def test_the_documented_command(tmp_path):
    """With small flags: the numbers, the pictures, and what this hardware can show."""
    command = next(command[1:] for command in commands_in(README) if MAIN in command)
    assert command == [MAIN, "--num_repeat", "7"]
    result = run(script(*command, *SMALL, "--device", "cpu", "--num_repeat", 2, "--num_batches", 2), tmp_path,
                 cold=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # a normal run prints no warning
    lines = result.stdout.splitlines()
    assert "one device (cpu): nothing can overlap" in lines[0]
    assert "left out: split sizes [5, 8, 10, 12, 20, 40, 60]" in lines[1]
    assert lines[-2].startswith("ResNet50 on one device (cpu): model parallel takes ")

    folder = tmp_path / "outputs" / "model_parallel_resnet" / "single_machine"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", *PICTURES]
    for name in PICTURES:
        width, height = struct.unpack(">II", (folder / name).read_bytes()[16:24])
        assert (width, height) == (960, 540)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [(row["split_size"], row["micro_batches"]) for row in metrics["rows"]] == [
        (None, 1), (None, 1), (1, 4), (2, 2), (3, 2)]
    for row in metrics["rows"]:
        assert len(row["times_s"]) == 2  # without the one that warms up
        assert row["mean_s"] == pytest.approx(sum(row["times_s"]) / 2)
        assert row["std_s"] == pytest.approx(abs(row["times_s"][0] - row["times_s"][1]) / 2)
        assert len(row["losses"]) == 3 * 2
    single, model_parallel = (row["losses"] for row in metrics["rows"][:2])
    assert model_parallel == pytest.approx(single, rel=0.05)  # the same training; rounding grows
    assert model_parallel[0] == pytest.approx(single[0], rel=1e-4)
    assert metrics["loss_after"] < 0.9 * metrics["loss_before"]
    assert metrics["toy_loss_after"] < metrics["toy_loss_before"]
    assert metrics["best_split_size"] in (1, 2, 3)
    assert metrics["left_out"] == [5, 8, 10, 12, 20, 40, 60]
    assert not metrics["can_overlap"]
    assert metrics["devices"] == ["cpu", "cpu"]
    assert metrics["device"] == "cpu"
    assert metrics["tutorial"] == results.TUTORIAL
    assert metrics["wall_s"] > 0


def test_a_loss_that_is_not_finite(tmp_path, capfd):
    """One line and status 1, and no metrics.json with NaN in it."""
    flags = [*SMALL, "--device", "cpu", "--num_batches", "3", "--lr", "1e30"]
    with pytest.raises(SystemExit) as stop:
        single_machine.main([*flags, "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "training has diverged; give a smaller --lr" in err
    assert list(tmp_path.iterdir()) == []


def test_the_clock_waits_for_the_gpus(tmp_path, monkeypatch):
    """Kernels may still be in the queue when `train` returns."""
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of_half: events.append(str(of_half)))
    monkeypatch.setattr(single_machine, "train", lambda *_: events.append("train") or [])
    clock = SimpleNamespace(perf_counter=lambda: events.append("clock") or 0.0)
    monkeypatch.setattr(single_machine, "time", clock)
    args = SimpleNamespace(devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    single_machine.time_training(None, None, None, args)
    assert events == ["cuda:0", "cuda:1", "clock", "train", "cuda:0", "cuda:1", "clock"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: both halves are on it, or on two")
def test_check_on_gpus(tmp_path):
    assert single_machine.main(["--check", "--device", "cuda", "--output_dir", str(tmp_path)])


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    bad("--devices", "cuda:0", "cuda:99", says=("--devices", "cuda:0 cuda:99", "cpu")),
    bad("--devices", "cpu", "tpu", says=("--devices", "'tpu'", "cuda:N")),
    bad("--devices", "cuda", "cuda", says=("--devices", "'cuda'", "cuda:N")),
    bad("--devices", "cpu", says=("--devices", "2")),
    bad("--devices", "cpu", "cpu", "--device", "cpu", says=("--device cpu cannot be given with --devices cpu cpu",)),
    bad("--split_sizes", "1", "13", says=("--split_sizes 13 must be at most --batch_size 12",)),
    bad("--split_size", "13", says=("--split_size 13 must be at most --batch_size 12",)),
    *(bad("--split_sizes", value, says=("--split_sizes", value, "at least 1")) for value in ("0", "-3", "two")),
    *(bad("--batch_size", value, says=("--batch_size", value, "at least 1")) for value in ("0", "1.5")),
    bad("--image_size", "32", says=("--image_size", "32", "at least 33")),
    bad("--num_repeat", "0", says=("--num_repeat", "0", "at least 1")),
    bad("--lr", "0", says=("--lr", "0", "above 0")),
    *(bad(flag, "2", says=("unrecognized arguments", flag)) for flag in ("--world_size", "--rank", "--timeout")),
    bad("--output_dir", "/dev/null", says=("--output_dir", "/dev/null", "written")),
])
def test_bad_input(flags, says, refused):
    refused(single_machine.main, flags, says)


def test_a_cpu_beside_a_gpu_is_refused(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(single_machine.main, ["--devices", "cpu", "cuda:0"], ["--devices", "cpu cuda:0", "one device twice"])


def test_torchrun_with_several_processes_is_refused(tmp_path):
    result = run(torchrun(2, MAIN), tmp_path)
    assert result.returncode != 0
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "this example is one process" in told[0]
    assert "not torchrun" in told[0]
