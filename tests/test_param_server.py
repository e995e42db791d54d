"""Tutorial 6_6."""

import collections
import itertools
import json
import random
import sys

import pytest
import torch
from torch.nn import functional as F

from param_server import bounded_server
from param_server import main as param_server
from param_server.async_server import AsyncParameterServer
from param_server.bounded_server import Bound, BoundedParameterServer
from tests.helpers import args_of, commands_in, results_of, run, script
from tests.test_data import write_mnist

# --- pieces


def test_dropout_of_the_right_kind():
    """The tutorial has Dropout2d where there are no channels any more."""
    kinds = [type(module) for module in param_server.Net().modules() if "Dropout" in type(module).__name__]
    assert kinds == [torch.nn.Dropout2d, torch.nn.Dropout]


SERVERS = [param_server.ParameterServer, AsyncParameterServer, BoundedParameterServer]


@pytest.mark.parametrize("server_class", SERVERS)
def test_a_step_between_forward_and_backward(server_class, tmp_path):
    """What two trainers do to each other: only copies survive it, or a lock that keeps it from happening."""
    server = server_class(args_of(bounded_server, tmp_path, "--device", "cpu"))
    loss = F.nll_loss(server(torch.randn(8, 1, 28, 28)), torch.arange(8))
    with torch.no_grad():
        for param in server.model.parameters():
            param -= 0.01
    if server_class is not param_server.ParameterServer:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 7, 1000])
def test_bound(max_staleness):
    """Many interleavings: nothing is older than K, nobody waits for ever, and nobody without a reason."""
    for n_trainers, seed in itertools.product((1, 2, 3, 5, 8), range(4)):
        draw, bound = random.Random(seed), Bound(max_staleness)
        state, read_at, ages = dict.fromkeys(range(n_trainers), "idle"), {}, []
        speed = [draw.choice((1, 1, 5, 30)) for _ in state]
        made = collections.Counter()
        for _ in range(1000):
            can = [trainer for trainer in state if not state[trainer].startswith("wants")]
            assert can, "all wait for each other"
            (trainer,) = draw.choices(can, [speed[trainer] for trainer in can])
            before, state[trainer] = state[trainer], {"idle": "wants to read", "may read": "computes",
                                                      "computes": "wants to step", "may step": "idle"}[state[trainer]]
            if before == "may read":
                read_at[trainer] = len(ages)
                bound.read(trainer)
            elif before == "may step":
                ages.append(len(ages) - read_at[trainer])
                bound.stepped(trainer)
                made[trainer] += 1
            else:
                wish = state[trainer].split()[-1]
                bound.ask(trainer, wish, (trainer, f"may {wish}"))
            state.update(bound.go_on())
            in_flight = sorted(bound.read_at.values())
            assert all(len(ages) - moment + place <= max_staleness for place, moment in enumerate(in_flight))
        assert max(ages) <= max_staleness
        assert min(made[trainer] for trainer in state) > 0
        if n_trainers > max_staleness + 1:
            assert max(ages) == max_staleness  # as much as is allowed


def test_a_large_bound_holds_nobody_back():
    bound = Bound(1000)
    for trainer in range(8):
        bound.ask(trainer, "read", trainer)
    assert bound.go_on() == list(range(8))
    for trainer in (3, 3, 3, 1):  # one is much faster than the others
        bound.ask(trainer, "step", "may step")
        assert bound.go_on() == ["may step"]
        bound.stepped(trainer)
        bound.ask(trainer, "read", "may read")
        assert bound.go_on() == ["may read"]


@pytest.mark.parametrize(("program", "lock"), [
    (param_server.ParameterServer, "turn"), (AsyncParameterServer, "weights_lock"), (BoundedParameterServer, "weights_lock")])
def test_a_checkpoint_has_no_half_step(program, lock, monkeypatch, tmp_path):
    """Another trainer may step while the first one has the server save: it waits for that."""
    server = program(args_of(bounded_server, tmp_path, "--checkpoint", tmp_path / "run.pt"))
    held = []
    monkeypatch.setattr("common.checkpoint.save", lambda *_: held.append(getattr(server, lock).locked()))
    server.save(1)
    assert held == [True]


# --- what it computes


def test_check_of_a_resumed_training(capfd, tmp_path):
    """The oracle goes on from the checkpoint as the server does; and a check writes over no file."""
    saved = tmp_path / "run.pt"
    flags = ["--world_size", "2", "--batch_size", "100", "--checkpoint", str(saved), "--output_dir", str(tmp_path)]
    param_server.main([*flags, "--epochs", "1"])
    before = saved.read_bytes()
    assert list(param_server.main(["--check", "--resume", *flags]))[-2:] == ["checkpoints", "last checkpoint"]
    assert saved.read_bytes() == before
    capfd.readouterr()


@pytest.mark.parametrize("name", ["main", "async_server"])
def test_it_learns(name, tmp_path):
    """The README's command, with a tenth of its epochs, and smaller batches."""
    command = next(command for command in commands_in("param_server/README.md") if command[1] == f"param_server/{name}.py")
    flags = ["--epochs", 2, "--batch_size", 16, "--lr", 0.04]
    folder, lines = results_of(script(*command[1:], *flags), tmp_path, cold=True)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["test_accuracy"] > 0.8  # by chance 0.1; which trainer comes first is chance, too
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    assert ("staleness" in metrics) == (name == "async_server")
    if name == "async_server":
        assert 0.5 < metrics["staleness"]["mean"] < 1.5  # of N trainers, about N - 1
        assert (folder / "staleness.png").exists()
    assert lines[-1].startswith("digits: test accuracy ")
    assert (folder / "loss.png").exists()


# --- the benchmarks


def test_benchmark_of_the_trainers(tmp_path):
    write_mnist(tmp_path, {"train": 60, "t10k": 1})
    flags = ["--trainers", 2, "--epochs", 1, "--batch_size", 4, "--dataset", "mnist", "--data_dir", tmp_path]
    result = run([sys.executable, "-m", "benchmarks.param_server_trainers", *map(str, flags)], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    folder = tmp_path / "outputs/benchmark_param_server_trainers"
    rows = {row["consistency"]: row for row in json.loads((folder / "metrics.json").read_text())["rows"]}
    assert list(rows) == ["lock", "bounded 1", "async"]
    assert rows["lock"]["staleness_max"] == 0
    assert rows["bounded 1"]["staleness_max"] <= 1
    assert all(row["samples_per_s"] > 0 for row in rows.values())
    assert (folder / "trainers.png").exists()
