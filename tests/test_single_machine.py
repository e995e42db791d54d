"""Tutorial 6_2."""

from types import SimpleNamespace

import torch
from torch import nn

from model_parallel_resnet import single_machine
from model_parallel_resnet import single_machine_results as results
from model_parallel_resnet.data import require_split_sizes
from tests.helpers import args_of


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
