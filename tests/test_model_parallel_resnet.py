"""Tutorial 6_7."""

from types import SimpleNamespace

from common.session import device_for

import pytest
import torch

from model_parallel_resnet import measuring, results


def test_devices(monkeypatch):
    """The tutorial wants cuda:0 and cuda:1, and does not start without them."""
    devices = {}
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for rank in ("1", "2"):
            monkeypatch.setenv("LOCAL_RANK", rank)
            devices.setdefault(gpus, []).append(str(device_for("auto")))
    assert devices == {0: ["cpu", "cpu"], 1: ["cuda:0", "cuda:0"], 2: ["cuda:1", "cuda:0"]}


def test_a_stage_waits_for_its_gpu(monkeypatch):
    """A kernel of a GPU is only queued by the line that calls it; a CPU has computed."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    compute = measuring.timed(lambda stage, number: number)
    for device, expected in (("cpu", []), ("cuda:1", [torch.device("cuda:1")])):
        assert compute(SimpleNamespace(device=torch.device(device), busy=measuring.Clock()), 7) == 7
        assert waited == expected


def test_rows():
    """Medians, which are no means; the first row is what the others are compared with; idle ranks, on average."""
    seconds = [[4.0, 6.0, 4.4], [2.0, 3.0, 2.2]]
    first, second = results.rows_of(seconds, [[[0.5] * 3] * 2, [[0.7] * 3] * 2], [1, 2])
    assert [second[key] for key in ("median_s", "speedup", "ideal")] == [2.2, 2.0, pytest.approx(4 / 3)]
    assert first["speedup"] == 1
    assert first["idle_share"] == pytest.approx(0.6)


def test_what_a_timeline_shows():
    """The last batch with 1 micro-batch, and that with the fastest number."""
    args = SimpleNamespace(num_splits=[1, 2, 4])
    steps = {"master": [], "worker1": [1, 2, 3, 10, 15, 21], "worker2": [2, 3, 4, 9, 16, 20]}
    spans = {role: [{"kind": "step", "start": end - 0.5, "end": end} for end in ends] for role, ends in steps.items()}
    assert results.shown_first(spans, args) == {"num_split 1: 6.00 s": (4, 10), "num_split 4: 5.00 s": (16, 21)}


def test_run_sees_a_plain_optimizer(capsys):
    results.require_falling([2.0, 1.9, 1.8, 1.7], 2)
    with pytest.raises(SystemExit, match="^1$"):
        results.require_falling([2.0, 1.9, 2.0, 1.9], 2)
    assert "the loss of the same batch has not fallen" in capsys.readouterr().err
