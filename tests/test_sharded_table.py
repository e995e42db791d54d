"""The table of tutorial 6_9, spread over the trainers."""

import json

import pytest

from tests.helpers import results_of, script

MAIN = "ddp_rpc_hybrid/sharded_table.py"


# --- what it computes


@pytest.mark.slow
def test_training(tmp_path):
    """It learns, reports what it holds and sends, and draws; like main.py's, from the same table and batches."""
    folder, lines = results_of(script(MAIN, "--epochs", 60), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert sum(epoch["accuracy"] for epoch in metrics["epochs"][-10:]) / 10 > 3 / 8  # chance is 1/8
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    lines = [line for line in lines if " of 60" not in line]  # where it takes longer
    assert lines[0].startswith("[trainer0] epoch  10  loss 2.2")
    assert lines[-1].startswith("2 trainers, all_to_all: loss 2.5")
    assert lines[-1].endswith("kB a step, 3.2 kB of the table each")
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.json"]
