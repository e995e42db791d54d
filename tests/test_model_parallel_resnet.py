"""Tutorials 6_2 and 6_7: what `--check` cannot see on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model_parallel_resnet import measuring, results, single_machine
from model_parallel_resnet.data import require_split_sizes
from tests.helpers import args_of


def test_a_stage_waits_for_its_gpu(monkeypatch):
    """A kernel of a GPU is only queued by the line that calls it; a CPU has computed."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    compute = measuring.timed(lambda stage, number: number)
    for device, expected in (("cpu", []), ("cuda:1", [torch.device("cuda:1")])):
        assert compute(SimpleNamespace(device=torch.device(device), busy=measuring.Clock()), 7) == 7
        assert waited == expected


def test_run_sees_a_plain_optimizer(capsys):
    results.require_falling([2.0, 1.9, 1.8, 1.7], 2)
    with pytest.raises(SystemExit, match="^1$"):
        results.require_falling([2.0, 1.9, 2.0, 1.9], 2)
    assert "the loss of the same batch has not fallen" in capsys.readouterr().err


# --- one process


def settled(folder, *flags):
    """The flags, parsed and filled in; and the split sizes that are left out."""
    args = args_of(single_machine, folder, *flags)
    args.devices = single_machine.choose_devices(args)
    return args, require_split_sizes(args, single_machine.SPLIT_SIZES, single_machine.NUM_CLASSES)


class SmallResNet(nn.Module):
    """Stands for torchvision's ResNet50."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Identity() for _ in range(8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 5)


def test_each_half_is_on_its_device():
    """Without a second device to compute on: "meta" has no numbers, but it is another one."""
    devices = [torch.device("cpu"), torch.device("meta")]
    model = single_machine.ModelParallelResNet50(SmallResNet(), devices)
    assert model(torch.randn(2, 3, 4, 4)).device == devices[1]
    toy = single_machine.ToyModel(devices)
    assert [toy.net1.weight.device, toy.net2.weight.device] == devices


def test_micro_batches_overlap_by_one():
    """The second half of a micro-batch is queued before the first half of the next one: both may then run at once."""
    calls, model = [], single_machine.PipelineParallelResNet50(SmallResNet(), [torch.device("cpu")] * 2, split_size=2)
    for half in ("seq1", "seq2"):
        getattr(model, half).register_forward_hook(lambda *_, half=half: calls.append(half))
    model(torch.randn(6, 3, 4, 4))
    assert calls == ["seq1"] + ["seq2", "seq1"] * 2 + ["seq2"]


def test_fewer_than_two_gpus_will_do(tmp_path, monkeypatch):
    """The tutorial's models want `cuda:0` and `cuda:1`, whatever there is."""
    for gpus, names in ((0, ["cpu", "cpu"]), (1, ["cuda:0", "cuda:0"]), (8, ["cuda:0", "cuda:1"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert list(map(str, settled(tmp_path)[0].devices)) == names
        assert list(map(str, settled(tmp_path, "--device", "cpu")[0].devices)) == ["cpu", "cpu"]


@pytest.mark.parametrize(("flags", "size", "measured", "left_out"), [
    ("--batch_size 9", 5, [1, 3, 5, 8], [10, 12, 20, 40, 60]), ("--split_sizes 4 2 2 --split_size 3", 3, [2, 3, 4], [])])
def test_split_sizes_that_do_not_fit_the_batch(flags, size, measured, left_out, tmp_path):
    args, found = settled(tmp_path, *flags.split())
    assert (args.split_size, args.measured_sizes, found) == (size, measured, left_out)


def test_the_clock_waits_for_the_gpus(monkeypatch):
    """Kernels may still be in the queue when `train` returns."""
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of_half: events.append(str(of_half)))
    monkeypatch.setattr(single_machine, "train", lambda *_: events.append("train") or [])
    clock = SimpleNamespace(perf_counter=lambda: events.append("clock") or 0.0)
    monkeypatch.setattr(single_machine, "time", clock)
    args = SimpleNamespace(devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    single_machine.time_training(None, None, None, args)
    assert events == ["cuda:0", "cuda:1", "clock", "train", "cuda:0", "cuda:1", "clock"]
