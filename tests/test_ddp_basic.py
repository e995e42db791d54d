"""Tutorial 6_3."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import time

import pytest
import torch

from ddp_basic import elastic, pitfalls, skew
from tests.helpers import LIMIT_S, children, command_of, nothing_left, running, script, torchrun

MAIN, ELASTIC = "ddp_basic/main.py", "ddp_basic/elastic.py"
TUTORIALS_PORT = 12355
EPOCHS = 8


@pytest.mark.slow
def test_two_runs_at_once(tmp_path):
    """The tutorial's would meet at port 12355, and read and delete each other's checkpoint. Here, a third run has both."""
    taken = tmp_path / "tmp" / "model.checkpoint"
    taken.mkdir(parents=True)
    with socket.socket() as listener:
        with contextlib.suppress(OSError):  # another process has the port, which is as good
            listener.bind(("127.0.0.1", TUTORIALS_PORT))
            listener.listen()
        with running(script(MAIN), tmp_path) as one, running(torchrun(2, MAIN), tmp_path) as two:
            (plain, err), (under_torchrun, _) = (process.communicate(timeout=LIMIT_S) for process in (one, two))
    assert one.returncode == two.returncode == 0
    assert err == ""
    assert plain == under_torchrun
    assert [path.name for path in (tmp_path / "outputs" / "ddp_basic").iterdir()] == ["metrics.json"]
    taken.rmdir()
    nothing_left(one, tmp_path, two)


def test_skew_says_who_waited(tmp_path, capfd):
    flags = ["--slow_rank", "1", "--delay", "100", "--timeout", "3", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="^1$"):
        skew.main(flags)
    *_, last = err = capfd.readouterr().err.splitlines()
    [told] = [line for line in err if line.startswith("RuntimeError: step 1")]
    assert told.startswith("RuntimeError: step 1: rank 0 waited 3 s in backward() for the gradients of a slower rank")
    assert "--timeout" in told
    assert last.startswith("error: rank 0 (rank0) has waited for 3 s at ddp_basic/skew.py:")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "says"), [
    ("unused", r"RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one"),
    ("reentrant", r"RuntimeError: Expected to mark a variable ready only once"),
    ("uneven", r"error: rank [01] \(rank[01]\) has waited for 3 s at "),
])
def test_a_pitfall_ends_in_an_error(kind, says, tmp_path, capfd):
    with pytest.raises(SystemExit, match="^1$"):
        pitfalls.main(["--kind", kind, "--timeout", "3", "--output_dir", str(tmp_path)])
    assert re.search(says, capfd.readouterr().err)


def test_a_failed_rank_leaves_no_worker_of_its_dataloader(tmp_path):
    """They outlive a rank that is killed (pytorch/pytorch#8805); with a fork server, forever."""
    with running(script("ddp_basic/pitfalls.py", "--kind", "open_files"), tmp_path) as one:
        _, err = one.communicate(timeout=LIMIT_S)
        *_, told, last = err.splitlines()
        assert told.startswith("RuntimeError: Too many open files")
        assert last.startswith("error: rank ")
        nothing_left(one, tmp_path)


def ranks_of(process):
    """Process ids of the ranks under torchrun; none once it has ended."""
    with contextlib.suppress(OSError):
        return sorted(pid for pid in children(process.pid) if "ddp_basic" in command_of(pid))
    return []


@pytest.mark.slow
def test_killed_twice_at_random_moments(tmp_path):
    """All epochs are done, none twice; two kills cost two attempts; history and weights are those of an undisturbed run."""
    flags = ["--epochs", str(EPOCHS), "--checkpoint"]
    whole = elastic.main([*flags, str(tmp_path / "whole.pt"), "--output_dir", str(tmp_path)])
    rng = random.Random(0)
    (tmp_path / ".run.pt.4711.tmp").write_text("half a checkpoint")
    told = []
    with running(torchrun(2, ELASTIC, *flags, "run.pt", options=("--standalone", "--max_restarts", 4)), tmp_path,
                 until="attempt 1: starts with epoch 1") as process:
        for last in (rng.randint(1, 2), rng.randint(4, EPOCHS - 3)):
            epoch = 0
            while epoch < last:
                began = time.monotonic()
                told.append(process.stdout.readline())
                assert told[-1], process.stderr.read()
                epoch = max(epoch, *map(int, re.findall(r"^\[rank0\] epoch (\d+) ", told[-1])), 0)
            time.sleep(rng.uniform(0, time.monotonic() - began))  # some moment of the next epoch
            os.kill(rng.choice(ranks_of(process)), signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    resumed = re.findall(r"resumed after epoch (\d+)", "".join([*told, out]))
    assert len(set(resumed)) == len(resumed) == 2
    metrics = json.loads((tmp_path / "outputs/ddp_basic/elastic/metrics.json").read_text())
    assert metrics["attempts"] == 3, err
    assert metrics["history"] == whole["history"]
    models = [torch.load(tmp_path / name, weights_only=True)["model"] for name in ("run.pt", "whole.pt")]
    for ours, theirs in zip(*(model.values() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    assert not list(tmp_path.glob(".run.pt.*"))
