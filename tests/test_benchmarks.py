"""The benchmarks run, and `python -m benchmarks` keeps what it should of the runs."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import one_process, outputs, rpc_rl


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Commands that only write their number; `bench.fails` is the number of the run that ends with an error."""
    class Bench:
        runs, fails = [], None
        kept, results = tmp_path / "kept", tmp_path / "results"

    def measure(command, folder):
        if len(Bench.runs) + 1 == Bench.fails:
            Bench.fails = None
            raise SystemExit("error")
        Bench.runs.append((command, folder.name))
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({"wall_s": -len(Bench.runs) % 5}), encoding="utf-8")
        (folder / "printed.txt").write_text(f"{command} {folder.name}", encoding="utf-8")
        for picture in ("learning_curve.png", "unseen.png"):
            (folder / picture).write_text(f"{command} {folder.name}", encoding="utf-8")

    Bench.results.mkdir()
    for name in ("ring", "rpc_rl"):
        (Bench.results / f"{name}.json").write_text(json.dumps({"command": f"python {name}.py"}), encoding="utf-8")
    (Bench.results / "rpc_rl.txt").write_text("$ python rpc_rl.py\n", encoding="utf-8")
    monkeypatch.setenv("PICTURE_LANGUAGES", "")  # so that it is put back
    monkeypatch.setattr(benchmarks, "measure", measure)
    monkeypatch.setattr(benchmarks, "KEPT", Bench.kept)
    monkeypatch.setattr(benchmarks, "RESULTS", Bench.results)
    monkeypatch.setattr(outputs, "TRANSCRIPTS", Bench.results)
    monkeypatch.setattr(outputs, "folder_of", lambda command: "outputs")
    return Bench


def test_an_interrupted_measurement_continues(bench):
    bench.fails = 4
    with pytest.raises(SystemExit):
        benchmarks.main([])
    benchmarks.main([])
    assert bench.runs == [(f"python {name}.py", str(number)) for number in (1, 2, 3) for name in ("ring", "rpc_rl")]
    written = json.loads((bench.results / "ring.json").read_text(encoding="utf-8"))
    assert (written["median"]["wall_s"], written["range"]["wall_s"]) == (2, [0, 4])
    assert not (bench.kept / "running/ring").exists()  # the next measurement begins anew


def test_what_is_shown_is_of_the_run_in_the_middle(bench):
    benchmarks.main([])
    (kept,) = (bench.results / "rpc_rl").iterdir()  # of the two that a run draws: what a page shows
    # Runs 1 to 3 took 3, 1 and 4 s.
    assert (kept.name, kept.read_text(encoding="utf-8")) == ("learning_curve.png", "python rpc_rl.py 1")
    assert (bench.results / "rpc_rl.txt").read_text(encoding="utf-8").splitlines()[1:] == ["python rpc_rl.py 1"]


@pytest.mark.slow
def test_rpc_rl(tmp_path):
    metrics = rpc_rl.main(["--world_size", "2", "--rounds", "4", "--min_steps", "1", "--output_dir", str(tmp_path)])
    assert [row["agent"] for row in metrics["rows"]] == ["plain", "fast, 2 RPCs a step", "fast", "ceiling"]
    assert all(len(speeds) == 4 and min(speeds) > 0 for speeds in metrics["steps_per_s"].values())


@pytest.mark.slow
def test_one_process(tmp_path):
    flags = ["--num_envs", "8", "32", "--num_steps", "60", "--output_dir", str(tmp_path)]
    metrics = one_process.main([*flags, "--num_episode", "1"])
    assert [row["num_envs"] for row in metrics["rows"]] == [8, 32]
    metrics = one_process.main([*flags, "--mode", "train", "--lr", "0.02", "--reward_threshold", "45"])
    assert all(row["solved"] for row in metrics["rows"])
