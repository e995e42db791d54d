"""`python -m benchmarks`: what it keeps of its runs."""

import json
import signal
import threading
import time

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import outputs
from benchmarks.peers import collectives

MACHINE = {"cpu_count": 2, "device": "cpu", "torch": "2.13.0+cpu"}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Commands that only write their number; `bench.fails` names the run that ends with an error."""
    class Bench:
        runs, fails = [], None
        kept, results = tmp_path / "kept", tmp_path / "results"

    def measure(name, folder):
        if len(Bench.runs) + 1 == Bench.fails:
            Bench.fails = None
            raise SystemExit("error")
        Bench.runs.append((name, folder.name))
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({**MACHINE, "wall_s": -len(Bench.runs) % 5}))
        (folder / "printed.txt").write_text(f"{name} {folder.name}")
        for picture in ("learning_curve.png", "unseen.png"):
            (folder / picture).write_text(f"{name} {folder.name}")

    monkeypatch.setenv("PICTURE_LANGUAGES", "")  # so that it is put back
    monkeypatch.setattr(benchmarks, "measure", measure)
    monkeypatch.setattr(benchmarks, "KEPT", Bench.kept)
    monkeypatch.setattr(benchmarks, "RESULTS", Bench.results)
    monkeypatch.setattr(outputs, "path_of", lambda name: Bench.results / f"{name}.txt")
    return Bench


def test_an_interrupted_measurement_continues(bench):
    bench.fails = 4
    with pytest.raises(SystemExit):
        benchmarks.main(["ring", "rpc_rl"])
    benchmarks.main(["ring", "rpc_rl"])
    assert bench.runs == [(name, str(number)) for number in (1, 2, 3) for name in ("ring", "rpc_rl")]
    written = json.loads((bench.results / "ring.json").read_text())
    assert written["median"]["wall_s"] == 2
    assert written["range"]["wall_s"] == [0, 4]


def test_what_is_shown_is_of_the_run_in_the_middle(bench):
    benchmarks.main(["ring", "rpc_rl"])
    (kept,) = (bench.results / "rpc_rl").iterdir()  # of the two that a run draws: what a page shows
    # Runs 1 to 3 took 3, 1 and 4 s.
    assert (kept.name, kept.read_text()) == ("learning_curve.png", "rpc_rl 1")
    assert (bench.results / "rpc_rl.txt").read_text().splitlines()[1:] == ["rpc_rl 1"]
    assert not (bench.results / "ring.txt").exists()  # no page shows it


def test_a_finished_measurement_begins_anew(bench):
    benchmarks.main(["rpc_rl", "--rounds", "1"])
    benchmarks.main(["rpc_rl", "--rounds", "1"])
    assert len(bench.runs) == 2


PROGRAM = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    pathlib.Path("{folder}", "started").touch()
    time.sleep(60)
finally:
    pathlib.Path("{folder}", "tidied").touch()
"""


def test_an_interruption_lets_the_command_tidy_up(tmp_path, monkeypatch):
    """What it has made is gone when `python -m benchmarks` ends."""
    (tmp_path / "program.py").write_text(PROGRAM.format(folder=tmp_path))
    monkeypatch.setitem(benchmarks.HEADLINES, "program", (str(tmp_path / "program.py"), ()))

    def interrupt():
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()  # for ever, if the command does not start
    with pytest.raises(KeyboardInterrupt):
        benchmarks.measure("program", tmp_path / "1")
    assert (tmp_path / "tidied").exists()
    assert not (tmp_path / "1").exists()


def test_rounds_of_collectives_become_one_row():
    def row(way, median_s, vs_gloo):
        return {"world_size": 2, "collective": "all_reduce", "bytes": 64, "way": way, "median_s": median_s,
                "vs_gloo": vs_gloo}

    gloo, mpi = collectives.summary([[row("gloo", 4, 1), row("mpi", 1, 4)], [row("gloo", 6, 1), row("mpi", 3, 2)],
                                     [row("gloo", 5, 1), row("mpi", 4, 1.25)]])
    assert gloo == row("gloo", 5, 1) | {"low": 1, "high": 1}
    assert mpi == row("mpi", 3, 2) | {"low": 1.25, "high": 4}
    with pytest.raises(AssertionError):
        collectives.summary([[row("gloo", 4, 1)], [row("mpi", 1, 4)]])
