"""`python -m benchmarks` and `benchmarks.outputs`: what they keep of the runs."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import outputs
from benchmarks.peers import collectives


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


def test_rounds_of_collectives_become_one_row():
    def row(way, median_s, vs_gloo):
        return {"world_size": 2, "collective": "all_reduce", "bytes": 64, "way": way, "median_s": median_s,
                "vs_gloo": vs_gloo}

    gloo, mpi = collectives.summary([[row("gloo", 4, 1), row("mpi", 1, 4)], [row("gloo", 6, 1), row("mpi", 3, 2)],
                                     [row("gloo", 5, 1), row("mpi", 4, 1.25)]])
    assert gloo == row("gloo", 5, 1) | {"low": 1, "high": 1}
    assert mpi == row("mpi", 3, 2) | {"low": 1.25, "high": 4}
