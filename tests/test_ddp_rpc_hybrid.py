"""Tutorial 6_9."""

import json

import pytest
import torch
from torch import nn

from ddp_rpc_hybrid import main as hybrid
from tests.helpers import args_of, commands_in, results_of, script

# --- data


def test_targets_can_be_learned(tmp_path):
    """The tutorial's are random: here they follow from the indices, by a table that is not the one to be trained."""
    args = args_of(hybrid, tmp_path)
    teacher = hybrid.Teacher(args)
    for indices, offsets, target in hybrid.get_next_batch(0, 0, teacher, args):
        assert torch.equal(hybrid.Teacher(args).target(indices, offsets), target)
    torch.manual_seed(args.seed)
    table = nn.EmbeddingBag(args.num_embeddings, args.embedding_dim, mode="sum").weight
    assert (table - teacher.table).abs().min() > 0


# --- what it computes


@pytest.mark.slow
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
