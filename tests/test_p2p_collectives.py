"""Tutorial 6_4."""

import json

import pytest
import torch

from p2p_collectives import ring_allreduce, train
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.ring_allreduce_results import fit
from p2p_collectives.shared_memory import SharedMemory, ring_all_gather, ring_reduce_scatter
from p2p_collectives.train import DataPartitioner
from tests.helpers import LIMIT_S, args_of, results_of, running, script

TRAIN = "p2p_collectives/train.py"


def fails(main, folder, *given):
    """Run a lesson in which a worker makes a mistake: status 1."""
    with pytest.raises(SystemExit, match="^1$"):
        main(["--output_dir", str(folder), *map(str, given)])


# --- rings


def test_algorithms_alternate(monkeypatch, tmp_path):
    """The order is A B A B, not A A B B. This process is a world of its own."""
    for name, value in (("INIT_METHOD", f"file://{tmp_path}/store"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"),
                        ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    order = []
    fakes = {name: lambda tensor, name=name: order.append(name) for name in ("all_reduce", "B")}
    monkeypatch.setattr(ring_allreduce, "algorithms", lambda: fakes)
    args = args_of(ring_allreduce, tmp_path, "--sizes", 64, "--repeats", 2, "--world_size", 1)
    ring_allreduce.run_worker(0, 1, args)
    assert order == ["all_reduce", "B"] * 3


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


@pytest.mark.parametrize(("points", "model"), [
    ([(6, 2**20, 0.1), (6, 2**21, 0.3)], (0, pytest.approx(2**20 * (100 + 400 / 9) / (10 + 20 / 3)))),  # no negative alpha
    ([(6, 2**20, 0.1), (6, 2**20, 0.2)], None),  # one size
    ([(6, 2**20, 0.1), (6, 2**21, 0.1 / 4)], None),  # more bytes in less time
], ids=range(3))
def test_alpha_beta_model(points, model):
    assert fit(points) == model


# --- training
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
def test_training(tmp_path):
    """With its defaults."""
    folder, lines = results_of(script(TRAIN, "--world_size", 2), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["test_accuracy"] >= 0.94
    assert len(metrics["epochs"]) == 10
    assert metrics["epochs"][-1]["loss"] < 0.3 * metrics["epochs"][0]["loss"]
    assert lines[0].startswith("[rank0] epoch  1  test accuracy ")
    assert "weights bitwise identical" in lines[-1]


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
