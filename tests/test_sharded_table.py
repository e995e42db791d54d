"""The table of tutorial 6_9, spread over the trainers."""

import json
import statistics

import pytest
import torch

from benchmarks import ddp_rpc_hybrid_tables as tables
from ddp_rpc_hybrid import sharded_table, sharded_table_dtensor
from tests.helpers import bad, run, script

MAIN = "ddp_rpc_hybrid/sharded_table.py"


def metrics_in(folder):
    return json.loads((folder / "outputs/ddp_rpc_hybrid/sharded_table/metrics.json").read_text())


# --- what it computes


def test_training(tmp_path):
    """It learns, reports what it holds and sends, and draws; like main.py's, from the same table and batches."""
    result = run(script(MAIN, "--epochs", 60), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = metrics_in(tmp_path)
    assert len(metrics["epochs"]) == 60
    assert sum(epoch["accuracy"] for epoch in metrics["epochs"][-10:]) / 10 > 3 / 8  # chance is 1/8
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    assert metrics["table_bytes"] == metrics["table_gradient_bytes"] == 50 * 16 * 4
    assert 1000 < metrics["bytes_per_step"] < 2500
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[trainer0] epoch  10  loss 2.2")
    assert lines[-2].startswith("2 trainers, all_to_all: loss 2.5")
    assert lines[-2].endswith("kB a step, 3.2 kB of the table each")
    folder = tmp_path / "outputs/ddp_rpc_hybrid/sharded_table"
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.json"]


def test_a_training_that_diverges(capfd, tmp_path):
    with pytest.raises(SystemExit) as stop:
        sharded_table.main(["--epochs", "3", "--lr", "1e30", "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "training has diverged; give a smaller --lr" in err


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    bad("--world_size", "0", says=("--world_size", "'0'", "at least 1")),
    bad("--num_embeddings", "0", says=("--num_embeddings", "'0'", "at least 1")),
    bad("--rank", "2", "--master_addr", "localhost", says=("--rank", "2", "below")),
    bad("--output_dir", "/dev/null", says=("--output_dir", "/dev/null", "written")),
])
def test_bad_input(flags, says, refused):
    refused(sharded_table.main, flags, says)


@pytest.mark.parametrize(("flags", "says"), [
    bad("--sparse", says=("--sparse requires sharded_table.py",)),
    bad("--num_embeddings", "4", "--world_size", "3",
        says=("--num_embeddings 4 --world_size 3 leaves a trainer without rows", "a part has 2")),
    bad("--num_embeddings", "1", says=("--num_embeddings 1", "without rows")),
])
def test_bad_input_of_a_dtensor(flags, says, refused):
    refused(sharded_table_dtensor.main, flags, says)


def test_each_trainer_needs_its_own_gpu(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(sharded_table.main, ["--device", "cuda"], ["--device cuda", "1 GPUs", "each trainer needs its own"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_check_on_a_gpu(tmp_path):
    flags = ["--world_size", str(torch.cuda.device_count()), "--device", "cuda"]
    assert sharded_table.main(["--check", *flags, "--output_dir", str(tmp_path)])


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
    args = tables.build_parser().parse_args(["--epochs", "1", "--output_dir", str(tmp_path)])
    row = 16 * 4 / 1e6
    for way, rows in (("server", 2000), ("all_to_all", 1000), ("dtensor", 1500)):
        assert tables.train(way, "dense", 1000, args)["held_mb"] == pytest.approx(rows * row)
    assert capfd.readouterr().out == ""


def test_bad_input_of_the_tables(refused):
    refused(tables.main, ["--rows", "4", "--trainers", "3"], ["--num_embeddings 4", "without rows"])
