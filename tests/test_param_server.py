"""Tutorial 6_6."""

import json

import pytest
import torch
from torch.nn import functional as F

from param_server import main as param_server
from param_server.async_server import AsyncParameterServer
from tests.helpers import args_of, commands_in, results_of, script

# --- pieces


def test_dropout_of_the_right_kind():
    """The tutorial has Dropout2d where there are no channels any more."""
    kinds = [type(module) for module in param_server.Net().modules() if "Dropout" in type(module).__name__]
    assert kinds == [torch.nn.Dropout2d, torch.nn.Dropout]


@pytest.mark.parametrize("server_class", [param_server.ParameterServer, AsyncParameterServer])
def test_a_step_between_forward_and_backward(server_class, tmp_path):
    """What two trainers do to each other: only copies survive it, or a lock that keeps it from happening."""
    server = server_class(args_of(param_server, tmp_path, "--device", "cpu"))
    loss = F.nll_loss(server(torch.randn(8, 1, 28, 28)), torch.arange(8))
    with torch.no_grad():
        for param in server.model.parameters():
            param -= 0.01
    if server_class is not param_server.ParameterServer:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(("program", "lock"), [
    (param_server.ParameterServer, "turn"), (AsyncParameterServer, "weights_lock")])
def test_a_checkpoint_has_no_half_step(program, lock, monkeypatch, tmp_path):
    """Another trainer may step while the first one has the server save: it waits for that."""
    server = program(args_of(param_server, tmp_path, "--checkpoint", tmp_path / "run.pt"))
    held = []
    monkeypatch.setattr("common.checkpoint.save", lambda *_: held.append(getattr(server, lock).locked()))
    server.save(1)
    assert held == [True]


# --- what it computes


@pytest.mark.slow
def test_check_of_a_resumed_training(capfd, tmp_path):
    """The oracle goes on from the checkpoint as the server does; and a check writes over no file."""
    saved = tmp_path / "run.pt"
    flags = ["--world_size", "2", "--batch_size", "100", "--checkpoint", str(saved), "--output_dir", str(tmp_path)]
    param_server.main([*flags, "--epochs", "1"])
    before = saved.read_bytes()
    assert list(param_server.main(["--check", "--resume", *flags]))[-2:] == ["checkpoints", "last checkpoint"]
    assert saved.read_bytes() == before
    capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["main", "async_server"])
def test_it_learns(name, tmp_path):
    """The README's command, with a tenth of its epochs, and smaller batches."""
    command = next(command for command in commands_in("param_server/README.md") if command[1] == f"param_server/{name}.py")
    flags = ["--epochs", 2, "--batch_size", 16, "--lr", 0.04]
    folder, lines = results_of(script(*command[1:], *flags), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["test_accuracy"] > 0.8  # by chance 0.1; which trainer comes first is chance, too
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    assert ("staleness" in metrics) == (name == "async_server")
    if name == "async_server":
        assert 0.5 < metrics["staleness"]["mean"] < 1.5  # of N trainers, about N - 1
        assert (folder / "staleness.png").exists()
    assert lines[-1].startswith("digits: test accuracy ")
    assert (folder / "loss.png").exists()
