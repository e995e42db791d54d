"""Tutorial 6_4: what `--check` of its programs cannot see."""

import json
import os
import re

from common.oracle import Comparison

import pytest
import torch

from p2p_collectives import deadlock, deadlock_check, ring_allreduce, train
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.shared_memory import SharedMemory, ring_all_gather, ring_reduce_scatter
from p2p_collectives.train import DataPartitioner
from tests.helpers import LIMIT_S, ROOT, errors_of, results_of, run, running, script, torchrun

TRAIN, DEADLOCK = "p2p_collectives/train.py", "p2p_collectives/deadlock.py"


def fails(main, folder, *given):
    """Run a lesson in which a worker makes a mistake: status 1."""
    with pytest.raises(SystemExit, match="^1$"):
        main(["--output_dir", str(folder), *map(str, given)])


# --- rings and shared memory


def with_a_ring_that_does_nothing(rank, world_size, args):
    ring_allreduce.ring_chunked = lambda tensor: None
    return ring_allreduce.run_worker(rank, world_size, args)


def test_a_wrong_sum_is_not_timed(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(ring_allreduce, "run_worker", with_a_ring_that_does_nothing)
    fails(ring_allreduce.main, tmp_path, "--world_size", 2, "--sizes", 64)
    assert "ring_chunked has summed 64 B wrongly" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []  # no metrics.json


def test_a_column_is_refused():
    """Gloo's all_reduce would sum other numbers. No group is needed: the refusal comes first."""
    column, shared = torch.zeros(6, 2)[:, 0], SharedMemory.__new__(SharedMemory)
    shared.small, shared.place = [torch.zeros(1, 2**17, dtype=torch.uint8)] * 2, 0
    for collective in (ring_allreduce.ring_chunked, RingAllReduce.__new__(RingAllReduce), ring_reduce_scatter, ring_all_gather,
                       shared.all_reduce, shared.reduce_scatter, shared.all_gather):
        with pytest.raises(ValueError, match="must be contiguous"):
            collective(column)


def test_a_barrier_in_shared_memory_does_not_wait_forever():
    """One of two ranks, and the pipe into which the missing rank would write."""
    shared = SharedMemory.__new__(SharedMemory)
    shared.place, shared.size, shared.timeout, shared.outboxes = 0, 2, 0.05, []
    shared.inbox, outbox = os.pipe()
    with pytest.raises(TimeoutError, match=r"this machine's 2 ranks, 1 not heard of for 0\.05 s"):
        shared.barrier()
    os.close(outbox)
    with pytest.raises(ConnectionError, match="has ended"):
        shared.barrier()
    shared.close()


# --- training


def test_partitions_of_the_tutorial():
    assert [len(part) for part in DataPartitioner(range(10)).partitions] == [7, 2, 1]


def without_all_reduce(rank, world_size, args):
    def average_gradients(model, share):
        for param in model.parameters():
            param.grad *= share

    train.average_gradients = average_gradients
    return train.run_worker(rank, world_size, args)


def test_ranks_that_drift_apart_are_noticed(monkeypatch, capfd, tmp_path):
    """An `average_gradients` that divides, and forgets the all_reduce."""
    monkeypatch.setattr(train, "run_worker", without_all_reduce)
    fails(train.main, tmp_path, "--epochs", 1)
    assert "ArithmeticError: the replicas have drifted apart" in capfd.readouterr().err


@pytest.mark.slow
def test_resume_on_two_machines(free_port, tmp_path_factory):
    """In a manual launch, only the machine of rank 0 has the checkpoint."""
    machines = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    saved = ["--checkpoint", str(machines[0] / "run.pt"), "--output_dir", str(machines[0])]
    whole = train.main([*saved, "--epochs", "3"])
    train.main([*saved, "--epochs", "1"])
    place = ["--world_size", 2, "--master_addr", "localhost", "--master_port", free_port]
    command = [TRAIN, "--epochs", 3, "--checkpoint", "run.pt", "--resume", *place, "--rank"]
    with running(script(*command, 0), machines[0]) as one, running(script(*command, 1), machines[1]) as other:
        _, err = one.communicate(timeout=LIMIT_S)
        assert (one.returncode, err) == (0, "")
        assert other.communicate(timeout=LIMIT_S) == ("", "")
    metrics = json.loads((machines[0] / "outputs/p2p_collectives/train/metrics.json").read_text())
    assert metrics["epochs"] == whole["epochs"]
    assert not (machines[1] / "run.pt").exists()


# --- rendezvous


def test_two_terminals(tmp_path):
    """In a manual launch, the ranks meet in a file that both can write."""
    place = ["--method", "file", "--file", tmp_path / "shared", "--world_size", 2, "--master_addr", "localhost"]
    with running(script("p2p_collectives/init_methods.py", *place, "--rank", 1), tmp_path) as other:
        _, lines = results_of(script("p2p_collectives/init_methods.py", *place, "--rank", 0), tmp_path)
        assert lines[-1] == "file: 2 ranks found each other once, and their sum is 3"
        other.communicate(timeout=LIMIT_S)
        assert other.returncode == 0


# --- deadlocks on purpose


@pytest.mark.parametrize("kind", deadlock.KINDS)
def test_a_fix_stands_above_a_line_that_waits(kind):
    numbers = [deadlock_check.place(ROOT / DEADLOCK, *where)[0] for where in deadlock_check.WAITS[kind]]
    lines = (ROOT / DEADLOCK).read_text().splitlines()
    assert any(lines[number - 2].strip().startswith("# Fix: ") for number in numbers)


@pytest.mark.slow  # test_launch.py has ranks that wait under torchrun
def test_a_deadlock_under_torchrun(tmp_path):
    result = run(torchrun(2, DEADLOCK, "--output_dir", tmp_path), tmp_path)
    [line] = errors_of(result.stderr)
    assert re.search(rf"rank \d \(rank\d\) .*? at {DEADLOCK}:\d+, `dist\.send\(mine, dst=\(rank \+ 1\) % size\)`", line)


@pytest.mark.slow
def test_torch_names_other_collectives(tmp_path):
    """As the program's docstring promises; torch reads the variable while it is imported."""
    result = run(script(DEADLOCK, "--kind", "other_collective"), tmp_path, env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert result.returncode == 1
    assert "Op type: ALLREDUCEvs BROADCAST" in result.stderr
    assert re.fullmatch(r"error: rank \d \(rank\d\) raised RuntimeError(; stopped 1 other process)?", result.stderr.splitlines()[-1])


@pytest.mark.parametrize(("rank", "old", "new", "printed", "fails"), [
    (0, "dist.barrier", "dist.send", "deadlock.py", ["line"]),
    (1, "", "", "deadlock.py", ["line"]),  # rank 1 waits at another line
    (0, "", "", "other.py", ["places"]),
], ids=range(3))
def test_the_check_of_a_deadlock_sees_a_wrong_line(rank, old, new, printed, fails):
    args = deadlock.build_parser().parse_args(["--kind", "one_fewer"])
    (barrier, code), (recv, _) = (deadlock_check.place(ROOT / DEADLOCK, "one_fewer", call) for call in ("dist.barrier", "dist.recv"))
    what = f"has waited for 5 s at {DEADLOCK}:{barrier}, `{code}`".replace(old or "\0", new)
    findings = Comparison("a run", "its source")
    tracebacks = "".join(f'File "/x/{printed}", line {line}, in one_fewer\n' for line in (barrier, recv))
    deadlock_check.compare_deadlock(findings, rank, what, tracebacks, ROOT / DEADLOCK, args)
    assert [finding["what"] for finding in findings.findings if not finding["holds"]] == fails
