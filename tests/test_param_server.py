"""Tutorial 6_6."""

import json

import pytest
import torch
from torch.nn import functional as F

from param_server import main as param_server
from param_server.async_server import AsyncParameterServer
from tests.helpers import args_of, results_of, script


def test_dropout_of_the_right_kind():
    """The tutorial uses Dropout2d after fc1, where there are no channels any more."""
    kinds = [type(module) for module in param_server.Net().modules() if "Dropout" in type(module).__name__]
    assert kinds == [torch.nn.Dropout2d, torch.nn.Dropout]


@pytest.mark.parametrize("copies", [False, True])
def test_a_step_between_forward_and_backward(copies, tmp_path):
    """Another trainer's step breaks a backward pass, unless the forward has computed with copies of the weights."""
    args = args_of(param_server, tmp_path, "--device", "cpu")
    images = torch.randn(8, 1, 28, 28)
    if copies:
        server = AsyncParameterServer(args)
        output = server(images, 1)
    else:
        server = param_server.ParameterServer(args)
        output = server(images)
    with torch.no_grad():
        for param in server.model.parameters():
            param -= 0.01
    loss = F.nll_loss(output, torch.arange(8))
    if copies:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_checkpoint_has_no_half_step(monkeypatch, tmp_path):
    """The server saves while it holds the lock, under which every trainer steps."""
    server = param_server.ParameterServer(args_of(param_server, tmp_path, "--checkpoint", tmp_path / "run.pt"))
    held = []
    monkeypatch.setattr("common.checkpoint.save", lambda *_: held.append(server.lock.locked()))
    server.save(1)
    assert held == [True]


@pytest.mark.slow
def test_check_of_a_resumed_training(capfd, tmp_path):
    """The single process goes on from the checkpoint as the server does, and a check does not overwrite the file."""
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
    """Two epochs, a tenth of the default, with smaller batches."""
    command = script(f"param_server/{name}.py", "--epochs", 2, "--batch_size", 16, "--lr", 0.04)
    folder, _ = results_of(command, tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["test_accuracy"] > 0.8  # by chance 0.1; the order of the trainers differs from run to run
    assert metrics["epochs"][-1]["loss"] < 0.6 * metrics["epochs"][0]["loss"]
    if name == "async_server":
        assert 0.5 < metrics["staleness"]["mean"] < 1.5  # N trainers: about N - 1
