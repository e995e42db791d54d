"""The table of tutorial 6_9, spread over the trainers."""

import json
import statistics

import pytest

from benchmarks import ddp_rpc_hybrid_tables as tables
from tests.helpers import args_of, results_of, script

MAIN = "ddp_rpc_hybrid/sharded_table.py"


# --- what it computes


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


# --- benchmarks/ddp_rpc_hybrid_tables.py


def test_the_tables_are_measured_in_turns(monkeypatch, tmp_path, capfd):
    """One round after the other; medians in the table and in metrics.json, a picture in both languages."""
    runs = []

    def train(way, gradient, rows, args):
        runs.append((way, gradient, rows))
        return {name: float(len(runs)) for name in tables.COLUMNS}

    monkeypatch.setattr(tables, "train", train)
    monkeypatch.setenv("PICTURE_LANGUAGES", "en,ja")
    metrics = tables.main(["--rounds", "3", "--rows", "100", "1000", "--output_dir", str(tmp_path)])
    once = [(way, gradient, rows) for rows in (100, 1000) for way, gradient in tables.RUNS]
    assert runs == 3 * once
    assert ("dtensor", "sparse", 100) not in runs
    for index, table in enumerate(metrics["tables"], start=1):
        assert table["steps_per_s"] == statistics.median(table["steps_per_s_of_rounds"]) == index + len(once)
    assert len(capfd.readouterr().out.splitlines()) == 1 + len(once)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "tables.ja.png", "tables.png"]


def test_the_memory_of_a_table(tmp_path, capfd):
    """The server has all rows and their gradient, a trainer half of both, with DTensor the whole gradient."""
    args = args_of(tables, tmp_path, "--epochs", 1)
    row = 16 * 4 / 1e6
    for way, rows in (("server", 2000), ("all_to_all", 1000), ("dtensor", 1500)):
        assert tables.train(way, "dense", 1000, args)["held_mb"] == pytest.approx(rows * row)
    assert capfd.readouterr().out == ""
