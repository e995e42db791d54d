"""Tutorial 6_6, and the first half of 6_8: what `--check` cannot see."""

import time

import pytest
import torch
from torch.distributed import rpc
from torch.nn import functional as F

from param_server import batch_update
from param_server import main as param_server
from param_server.async_server import AsyncParameterServer
from tests.helpers import args_of


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
def test_check_of_a_resumed_training(tmp_path):
    """The single process goes on from the checkpoint as the server does, and a check does not overwrite the file."""
    saved = tmp_path / "run.pt"
    flags = ["--world_size", "2", "--batch_size", "100", "--checkpoint", str(saved), "--output_dir", str(tmp_path)]
    param_server.main([*flags, "--epochs", "1"])
    before = saved.read_bytes()
    assert list(param_server.main(["--check", "--resume", *flags]))[-2:] == ["checkpoints", "last checkpoint"]
    assert saved.read_bytes() == before


LIMIT_S = 0.5  # timeout of a call without a timeout of its own


def run_slowly(rank, world_size, args):
    """Run a training that takes longer than the timeout of the server's calls."""
    original, call_trainers = batch_update.Trainer.get_next_batch, batch_update.run_ps

    def slow(self):
        for batch in original(self):
            time.sleep(LIMIT_S)
            yield batch

    def impatient(*arguments):
        rpc._set_rpc_timeout(LIMIT_S)
        with pytest.raises(RuntimeError, match="(?i)time"):  # the limit holds
            rpc.rpc_sync("trainer1", time.sleep, args=(3 * LIMIT_S,))
        return call_trainers(*arguments)

    batch_update.Trainer.get_next_batch, batch_update.run_ps = slow, impatient
    return batch_update.run_worker(rank, world_size, args)


def test_longer_than_the_timeout(capfd, monkeypatch, tmp_path):
    """In the tutorial, a training run that takes longer than one RPC may (60 s) ends with an error."""
    monkeypatch.setattr(batch_update, "run_worker", run_slowly)
    metrics = batch_update.main(["--world_size", "2", "--num_updates", "4", "--output_dir", str(tmp_path), "--arch", "resnet18",
                                 "--image_size", "32", "--batch_size", "4", "--num_classes", "5"])
    assert len(metrics["loss"]) == 4
    assert capfd.readouterr().err == ""
