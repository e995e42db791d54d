"""Tutorial 6_9: both programs learn, with their default flags but fewer epochs."""

import json

import pytest

from tests.helpers import results_of, script


@pytest.mark.slow
@pytest.mark.parametrize("program", ["main", "sharded_table"])
def test_training(program, tmp_path):
    folder, _ = results_of(script(f"ddp_rpc_hybrid/{program}.py", "--epochs", 60), tmp_path)
    epochs = json.loads((folder / "metrics.json").read_text())["epochs"]
    assert epochs[0]["accuracy"] < 2 / 8  # chance is 1/8
    assert sum(epoch["accuracy"] for epoch in epochs[-10:]) / 10 > 3 / 8
    assert epochs[-1]["loss"] < 0.6 * epochs[0]["loss"]
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.json"]
