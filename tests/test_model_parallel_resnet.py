"""Tutorial 6_7."""

import json
from types import SimpleNamespace

from common.session import device_for

import pytest
import torch

from model_parallel_resnet import check, measuring, results
from model_parallel_resnet import main as rpc_pipeline
from tests.helpers import commands_in, results_of, script
from tracing import timeline

MAIN = "model_parallel_resnet/main.py"
SMALL = ["--arch", "resnet18", "--image_size", "64", "--batch_size", "8"]


# --- the model, in one process


class Here:
    """Stands for an RRef of a tensor that is here."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to_here(self):
        return self.tensor


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_two_shards_are_the_whole(arch, monkeypatch):
    args = SimpleNamespace(arch=arch, num_classes=10, seed=3)
    monkeypatch.setattr(check, "BLOCKS", rpc_pipeline.ARCHS[arch][1])
    whole = check.whole_resnet(args).eval()
    first, second = (shard.eval() for shard in check.shards_of(args))
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(second(Here(first(Here(images), 0)), 0), whole(images))
    ours, theirs = check.layers_of_both(args)
    assert ours == theirs


def test_spans_wait_for_a_gpu(monkeypatch):
    """A kernel of a GPU is only queued by the line that calls it; a CPU has computed."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(timeline, "_spans", [])

    class Stage:
        stage_index = 0

        def forward_one_chunk(self, number):
            assert len(waited) == number

        backward_one_chunk = backward_weight_one_chunk = forward_one_chunk

    monkeypatch.setattr(measuring, "record_work", lambda role: None)
    measuring.record_stages("stage0", Stage)
    stage, gpu = Stage(), torch.device("cuda", 1)
    stage.device = torch.device("cpu")
    stage.forward_one_chunk(0)
    assert waited == []
    stage.device = gpu
    stage.forward_one_chunk(0)
    assert waited == [gpu]
    assert [span["kind"] for span in timeline._spans] == ["forward", "forward"]


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


# --- the analysis


def made_up_batch(*spans):
    """Spans (kind, micro-batch, start, end), and the parts of two workers in a batch from 0 to 20."""
    return {worker: [{"kind": kind, "labels": {} if number is None else {"micro_batch": number},
                      "start": float(start), "end": float(end)} for kind, number, start, end in of_worker]
            for worker, of_worker in zip(("worker1", "worker2"), spans, strict=True)}


def parts(spans):
    """What is not 0."""
    return {worker: {part: seconds for part, seconds in of_worker.items() if seconds}
            for worker, of_worker in measuring.parts_of(spans, ["worker1", "worker2"], (0, 20)).items()}


def test_the_parts_of_a_batch():
    """All forwards, then all backwards: who waits for what, and since when the message is on its way."""
    spans = made_up_batch(
        [("forward", 0, 1, 3), ("forward", 1, 3, 5), ("backward", 0, 11, 13), ("backward", 1, 14, 16),
         ("step", None, 17, 18)],
        [("forward", 0, 4, 5), ("forward", 1, 6, 7), ("backward", 0, 8, 10), ("backward", 1, 10, 12),
         ("step", None, 17, 18)])
    assert parts(spans) == {
        # The master's send; gradient 0 is ready at 10, gradient 1 at 12, before worker1 wants it; answers.
        "worker1": {"forward": 4, "backward": 4, "turn": 5, "step": 1, "messages": 1 + 1 + 1 + 1 + 2},
        # Features 0 are ready at 3; 1 at 5; its own outputs go to the master and come back as gradients.
        "worker2": {"first": 3, "forward": 2, "backward": 4, "step": 1, "last": 4, "messages": 1 + 1 + 1 + 1 + 2}}


def test_the_parts_of_a_batch_with_two_pieces_at_a_time():
    """A moment with a forward and a backward counts once."""
    spans = made_up_batch(
        [("forward", 0, 0, 4), ("forward", 1, 4, 8), ("backward", 0, 6, 10), ("backward", 1, 15, 19),
         ("step", None, 19, 20)],
        [("forward", 0, 4, 5), ("backward", 0, 5, 6), ("forward", 1, 9, 12), ("backward", 1, 11, 14)])
    assert parts(spans) == {
        "worker1": {"forward": 6, "both": 2, "backward": 6, "between": 4, "messages": 1, "step": 1},
        "worker2": {"first": 4, "forward": 3, "both": 1, "backward": 3, "between": 2, "messages": 1 + 1,
                    "last": 5}}


# --- the runs, and what they check themselves


@pytest.mark.slow
def test_readme_command(tmp_path):
    """The first command of the README, with less to do, and sizes that do not divide."""
    command = commands_in("model_parallel_resnet/README.md")[0]
    assert command[1] == MAIN
    folder, lines = results_of(script(*command[1:], *SMALL, "--num_splits", 1, 3, "--num_batches", 2), tmp_path)
    assert lines[6].split() == ["splits", "s/batch", "speed-up", "ideal", "idle"]
    assert [line.split()[0] for line in lines[7:9]] == ["1", "3"]
    assert lines[-1].startswith("resnet18, RPC pipeline: loss 0.")
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "num_split.png"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [row["num_split"] for row in metrics["where"]] == [1, 3]


def test_what_a_timeline_shows():
    """The last batch with 1 micro-batch, and that with the fastest number."""
    args = SimpleNamespace(num_splits=[1, 2, 4])
    steps = {"master": [], "worker1": [1, 2, 3, 10, 15, 21], "worker2": [2, 3, 4, 9, 16, 20]}
    spans = {role: [{"kind": "step", "start": end - 0.5, "end": end} for end in ends] for role, ends in steps.items()}
    assert results.shown_first(spans, args) == {"num_split 1: 6.00 s": (4, 10), "num_split 4: 5.00 s": (16, 21)}


def unsound(capsys, losses, forwards):
    """What a run ends with, of which worker1 has had so many micro-batches in place of one."""
    span = {"kind": "forward", "start": 0.0, "end": 1.0, "labels": {}}
    metrics = {"losses": losses, "windows": [[(0, 9)]], "spans": {"worker1": [span] * forwards}}
    with pytest.raises(SystemExit, match="^1$"):
        results.require_sound(metrics, SimpleNamespace(num_splits=[1]), ["worker1"])
    return capsys.readouterr().err


def test_run_sees_a_split_size(capsys):
    """As in the tutorial, where `xs.split` gets the number as a size: the table's first column would be wrong."""
    assert "worker1 had 8 micro-batches with --num_splits 1" in unsound(capsys, [2.0, 1.0], 8)


def test_run_sees_a_plain_optimizer(capsys):
    assert "the loss of the same batch has not fallen" in unsound(capsys, [1.0, 1.0], 1)
