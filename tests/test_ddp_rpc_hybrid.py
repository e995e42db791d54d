"""Tutorial 6_9."""

import json

import torch
from torch import nn
from torch.futures import Future

from ddp_rpc_hybrid import main as hybrid
from tests.helpers import args_of, commands_in, results_of, script

# --- data and roles


def test_roles():
    assert [hybrid.role_name(rank, 4) for rank in range(4)] == ["trainer0", "trainer1", "master", "ps"]
    assert [hybrid.role_name(rank, 3) for rank in range(3)] == ["trainer0", "master", "ps"]


def test_targets_can_be_learned(tmp_path):
    """The tutorial's are random: here they follow from the indices, by a table that is not the one to be trained."""
    args = args_of(hybrid, tmp_path)
    teacher = hybrid.Teacher(args)
    for indices, offsets, target in hybrid.get_next_batch(0, 0, teacher, args):
        assert torch.equal(hybrid.Teacher(args).target(indices, offsets), target)
    torch.manual_seed(args.seed)
    table = nn.EmbeddingBag(args.num_embeddings, args.embedding_dim, mode="sum").weight
    assert (table - teacher.table).abs().min() > 0


def test_the_master_passes_each_trainers_rank_and_no_timeout(monkeypatch, tmp_path):
    calls = []

    def rpc_async(*arguments, **options):
        calls.append((arguments, options))
        future = Future()
        future.set_result("result")
        return future

    for name, value in (("rpc_async", rpc_async), ("remote", lambda *_, **__: "table"),
                        ("init_rpc", lambda *_, **__: None), ("shutdown", lambda: None)):
        monkeypatch.setattr(hybrid.rpc, name, value)
    monkeypatch.setattr(hybrid, "rpc_options", lambda args: None)
    monkeypatch.setattr(hybrid.results, "over_trainers", list)
    args = args_of(hybrid, tmp_path, "--world_size", 5)
    assert hybrid.run_worker(3, 5, args) == ["result"] * 3
    assert calls == [((f"trainer{rank}", hybrid._run_trainer), {"args": ("table", rank, args), "timeout": 0})
                     for rank in range(3)]


# --- what it computes


def test_training(tmp_path):
    """The README's first command, with fewer epochs."""
    folder, lines = results_of(script(*commands_in("ddp_rpc_hybrid/README.md")[0][1:], "--epochs", 40), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["epochs"]) == 40
    assert args_of(hybrid, tmp_path).epochs == 100  # without the flag
    assert metrics["epochs"][0]["accuracy"] < 2 / 8
    last = metrics["epochs"][-10:]
    assert sum(epoch["accuracy"] for epoch in last) / 10 > 3 / 8  # chance is 1/8
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    lines = [line for line in lines if " of 40" not in line]  # printed where epochs are slow
    assert lines[0].startswith("[trainer0] epoch  10  loss ")
    assert lines[-1].startswith("2 trainers: loss 2.")
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.json"]
