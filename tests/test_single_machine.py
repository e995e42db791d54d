"""Tutorial 6_2."""

import copy
import json
import os
import struct
from types import SimpleNamespace

import pytest
import torch
from common.vision import import_torchvision
from torch import nn

from model_parallel_resnet import single_machine
from model_parallel_resnet.single_machine import ModelParallelResNet50, PipelineParallelResNet50, ToyModel
from tests.helpers import bad, commands_in, run, script, torchrun

MAIN = "model_parallel_resnet/single_machine.py"
README = "model_parallel_resnet/SINGLE_MACHINE.md"
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
    calls = []
    for half in ("first_half", "second_half"):
        original = getattr(ModelParallelResNet50, half)
        monkeypatch.setattr(PipelineParallelResNet50, half,
                            lambda self, x, half=half, original=original: calls.append(half) or original(self, x))
    PipelineParallelResNet50(Counted(), CPU_TWICE, split_size=2)(torch.randn(6, 3, 4, 4))
    assert calls == ["first_half"] + ["second_half", "first_half"] * 2 + ["second_half"]


def test_fewer_than_two_gpus_will_do(tmp_path, monkeypatch):
    """The tutorial's models want `cuda:0` and `cuda:1`, whatever there is."""
    for gpus, names in ((0, ["cpu", "cpu"]), (1, ["cuda:0", "cuda:0"]), (2, ["cuda:0", "cuda:1"]),
                        (8, ["cuda:0", "cuda:1"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        args, _ = settled(tmp_path)
        assert list(map(str, args.devices)) == names
        assert single_machine.can_overlap(args.devices) == (gpus >= 2)
        assert ("nothing can overlap" in single_machine.what_it_shows(args.devices)) == (gpus < 2)
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
    told = single_machine.TUTORIAL
    seconds = [("single", None, "single_s"), ("mp", None, "model_parallel_s"), ("pp", 12, "split_size_12_s"),
               ("pp", 20, "split_size_20_s")]
    rows = [{"model": model, "split_size": size, "median_s": told[key]} for model, size, key in seconds]
    for what, number in single_machine.compare_times(rows, split_size=20).items():
        assert round(number, 2) == told[what]


# --- the command


def test_the_documented_command(tmp_path):
    """With small flags: the numbers, the pictures, and what this hardware can show."""
    command = commands_in(README)[0][1:]
    assert command == [MAIN, "--num_repeat", "7"]
    result = run(script(*command, *SMALL, "--device", "cpu", "--num_repeat", 2, "--num_batches", 2), tmp_path,
                 env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # a normal run prints no warning
    lines = result.stdout.splitlines()
    assert "one device (cpu): nothing can overlap" in lines[0]
    assert "left out: split sizes [5, 8, 10, 12, 20, 40, 60]" in lines[1]
    assert lines[-1].startswith("ResNet50 on one device (cpu): model parallel takes ")

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
    assert metrics["tutorial"] == single_machine.TUTORIAL
    assert metrics["wall_s"] > 0


def test_check_passes(tmp_path, capfd):
    """Also where the last micro-batch is smaller."""
    differences = single_machine.main(
        ["--check", *SMALL, "--device", "cpu", "--split_sizes", "1", "3", "--output_dir", str(tmp_path)])
    names = ["model parallel", *(f"pipeline, split size {size}" for size in (1, 2, 3))]
    assert list(differences) == [f"{name}, {what}" for name in names for what in ("outputs", "gradients")]
    assert max(differences.values()) < 1e-9
    assert capfd.readouterr().out.count(" ok\n") == 8


def drop_gradients(ret, outputs_of, s_prev):
    ret.append(outputs_of(s_prev.detach()))  # the first half would not learn


def swap_answers(ret, outputs_of, s_prev):
    ret.insert(0, outputs_of(s_prev))  # in another order than the images


@pytest.mark.parametrize(("mistake", "fails"), [(drop_gradients, "gradients"), (swap_answers, "outputs")])
def test_check_can_fail(mistake, fails, monkeypatch, capfd, tmp_path):
    """With a ResNet18, which has the same parts."""
    def forward(self, x):
        ret = []
        for split in x.split(self.split_size):
            mistake(ret, self.second_half, self.first_half(split))
        return torch.cat(ret)

    monkeypatch.setattr(PipelineParallelResNet50, "forward", forward)
    models = SimpleNamespace(resnet50=import_torchvision().models.resnet18)
    monkeypatch.setattr(single_machine, "import_torchvision", lambda: SimpleNamespace(models=models))
    flags = ["--check", *SMALL, "--device", "cpu", "--split_sizes", "1", "--split_size", "1"]
    with pytest.raises(SystemExit) as stop:
        single_machine.main([*flags, "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    lines = capfd.readouterr().out.splitlines()
    verdicts = {line.split(": ")[0]: line.split()[-1] for line in lines if "[check]" in line}
    assert len(verdicts) == 4
    for what, verdict in verdicts.items():
        if "model parallel" in what:
            assert verdict == "ok"
        elif what.endswith(fails):
            assert verdict == "FAIL"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: both halves are on it, or on two")
def test_check_on_gpus(tmp_path):
    assert single_machine.main(["--check", *SMALL, "--device", "cuda", "--output_dir", str(tmp_path)])


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
