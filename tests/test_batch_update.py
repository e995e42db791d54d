"""Tutorial 6_8, first half."""

import json
import os
import re
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.futures import Future

from param_server import batch_update
from tests.helpers import bad, commands_in, end, faulty, nothing_left, run, running, script, torchrun, workers

MAIN = "param_server/batch_update.py"
SMALL = ["--arch", "resnet18", "--image_size", "32", "--batch_size", "4", "--num_classes", "5"]


def parsed(*flags):
    return batch_update.build_parser().parse_args(["--output_dir", "/tmp", *SMALL, *map(str, flags)])


# --- pieces


def test_no_gradient_is_lost():
    """Threads that push at the same moment, as RPC's do: all futures complete, with the step of the mean gradient."""
    server = batch_update.BatchUpdateParameterServer(parsed("--world_size", 9, "--lr", 1))
    server.weights.zero_()
    barrier, update = Barrier(8), batch_update.BatchUpdateParameterServer.update_and_fetch_model

    def push(rank):
        barrier.wait()
        return update(server, rank, torch.full_like(server.weights, rank))

    with ThreadPoolExecutor(8) as threads:
        for expected in (-4.5, -4.5 - 1.9 * 4.5):  # lr 1, momentum 0.9, mean of 1 to 8
            futures = list(threads.map(push, range(1, 9)))
            assert all(future.done() for future in futures)
            weights, _ = futures[0].value()
            parameters, statistics = weights[: server.n_params], weights[server.n_params :]
            torch.testing.assert_close(parameters, torch.full_like(parameters, expected))
            assert torch.equal(statistics, torch.full_like(statistics, 4.5))  # a mean, not a gradient
            assert min(future.value()[1] for future in futures) >= 0


def test_the_batch_of_a_failed_trainer_fails():
    server = batch_update.BatchUpdateParameterServer(parsed("--world_size", 3))
    update = batch_update.BatchUpdateParameterServer.update_and_fetch_model
    waiting = update(server, 1, torch.zeros_like(server.weights))
    assert not waiting.done()
    failed = Future()
    failed.set_exception(RuntimeError("trainer2 is gone"))
    server.abandon(failed)
    for future in (waiting, update(server, 1, torch.zeros_like(server.weights))):
        with pytest.raises(RuntimeError, match="trainer2 is gone"):
            future.wait()


def test_weights_gradients_and_statistics_are_views():
    """What is sent is what the model has, without packing it."""
    server = batch_update.BatchUpdateParameterServer(parsed())
    model = server.model.train()
    loss = model(torch.randn(4, 3, 32, 32)).square().sum()
    loss.backward()
    sizes = [param.numel() for param in model.parameters()]
    for param, gradient in zip(model.parameters(), server.sum.split([*sizes, len(server.sum) - sum(sizes)])[:-1],
                               strict=True):
        assert torch.equal(param.grad.flatten(), gradient)
        assert gradient.any()
    assert torch.equal(server.weights[server.n_params :],
                       torch.cat([buffer.flatten() for buffer in batch_update.running_statistics(model)]))


def test_targets_stay_the_same():
    first, second = batch_update.batches_of(1, parsed("--num_updates", 2))
    other = next(batch_update.batches_of(2, parsed("--num_updates", 2)))
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])
    assert first[1].sum(dim=1).tolist() == [1] * 4


# --- what it computes


def test_check_passes(capfd, tmp_path):
    differences = batch_update.main(["--check", "--world_size", "4", "--output_dir", str(tmp_path), *SMALL])
    assert list(differences) == ["losses", "weights", "momentum", "statistics", "pushed"]
    assert max(differences.values()) <= 1e-9
    assert torch.get_default_dtype() == torch.float32
    out, err = capfd.readouterr()
    assert out.count(" ok\n") == 5
    assert err == ""


TUTORIALS_STATISTICS = """
honest = example.BatchUpdateParameterServer.update_and_fetch_model
@example.rpc.functions.async_execution
def update_and_fetch_model(self, rank, sent):
    sent[self.n_params:] = self.weights[self.n_params:]  # nobody sends any
    return honest(self, rank, sent)
example.BatchUpdateParameterServer.update_and_fetch_model = update_and_fetch_model
"""
LOST_GRADIENT = """
honest = example.BatchUpdateParameterServer.update_and_fetch_model
@example.rpc.functions.async_execution
def update_and_fetch_model(self, rank, sent):
    if rank == 2:
        sent[: self.n_params] = 0
    return honest(self, rank, sent)
example.BatchUpdateParameterServer.update_and_fetch_model = update_and_fetch_model
"""


@pytest.mark.parametrize(("patch", "fails"), [
    (LOST_GRADIENT, {"weights", "momentum", "pushed"}), (TUTORIALS_STATISTICS, {"statistics"}),
], ids=["a lost gradient", "the tutorial's statistics"])
def test_check_can_fail(patch, fails, tmp_path):
    command = [*faulty("param_server.batch_update", tmp_path, patch), "--check", "--world_size", "3", *SMALL]
    result = run(command, tmp_path)
    assert result.returncode == 1
    assert fails <= set(re.findall(r"\[check\] (.*): differs .* FAIL", result.stdout))


def test_it_learns(tmp_path):
    """The README's command, with a smaller model."""
    command = next(command for command in commands_in("param_server/README.md") if command[1] == MAIN)
    result = run([*script(*command[1:]), "--world_size", "3", "--num_updates", "5", "--timeline", *SMALL], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    folder = tmp_path / "outputs/param_server_batch_update"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["updates"]) == len(metrics["loss"]) == 5
    assert metrics["loss"][-1] < metrics["loss"][0]
    assert sorted(metrics["updates"])[2] == metrics["median_update_s"]
    numbers = 11_179_077 + 9_600  # ResNet18's parameters with five classes, and its running means and variances
    assert metrics["bytes_per_update"] == 2 * 2 * 4 * numbers  # there and back again, two trainers, float32
    for update in zip(*(metrics[what] for what in ("compute", "transfer", "waiting")), strict=True):
        assert min(update) > 0
    assert 0.2 < metrics["peak_memory_gb"] < 6
    lanes = "parameter_server", "trainer1", "trainer2"
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == list(lanes)
    assert sum(event.get("name") == "add" for event in events) == 5 * 2
    assert (folder / "timeline.png").stat().st_size > 10_000
    idle, spent, _ = result.stdout.splitlines()
    assert all(f"{lane} " in idle for lane in lanes)
    assert re.match(r"\[parameter_server\] an update is compute \d+%, transfer \d+%, waiting \d+%; ", spent)
    assert result.stdout.splitlines()[-1].startswith("resnet18, 2 trainers: ")
    width, height = struct.unpack(">II", (folder / "batch_update.png").read_bytes()[16:24])
    assert min(width, height) > 300


def test_longer_than_the_timeout(tmp_path):
    """In the tutorial, a training that takes longer than one RPC may (60 s) ends with an error."""
    patch = """
import time
honest = example.Trainer.get_next_batch
def slow(self):
    for batch in honest(self):
        time.sleep(3)
        yield batch
example.Trainer.get_next_batch = slow
"""
    flags = ["--world_size", "2", "--timeout", "8", "--num_updates", "4", *SMALL]
    result = run([*faulty("param_server.batch_update", tmp_path, patch), *flags], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


# --- how it is started


def test_torchrun(tmp_path):
    result = run(torchrun(3, MAIN, "--num_updates", 2, *SMALL), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("resnet18, 2 trainers: ") == 1
    metrics = json.loads((tmp_path / "outputs/param_server_batch_update/metrics.json").read_text())
    assert metrics["world_size"] == 3


def test_a_terminal_that_dies_ends_the_others(free_port, tmp_path):
    """Nobody watches over ranks started by hand: the server tells those that wait for a batch that cannot fill."""
    place = ["--world_size", 3, "--master_addr", "localhost", "--master_port", free_port, "--timeout", 90]
    server, one, two = (script(MAIN, "--rank", rank, *place, "--num_updates", 5000, *SMALL) for rank in range(3))
    with running(server, tmp_path) as server, running(two, tmp_path) as two:
        with running(one, tmp_path) as one, pytest.raises(Exception, match="timed out"):
            end(one, within_s=20)  # it trains meanwhile; at the end of this block it is killed
        for process in (server, two):
            _, err = end(process, within_s=40)
            assert process.returncode == 1
            assert re.match(r"error: rank \d \(.*\) raised ", err.splitlines()[-1])


# --- what can go wrong


@pytest.mark.parametrize("rank", [0, 2])
def test_killed(rank, tmp_path):
    command = script(MAIN, "--world_size", 3, "--num_updates", 5000, *SMALL)
    with running(command, tmp_path) as process:
        with pytest.raises(Exception, match="timed out"):
            end(process, within_s=12)
        os.kill(workers(process)[rank], signal.SIGKILL)
        _, err = end(process)
        assert process.returncode == 1
        name = batch_update.role_name(rank, 3)
        assert err.splitlines()[-1] == f"error: rank {rank} ({name}) was killed by SIGKILL; stopped 2 other processes"
        nothing_left(process, tmp_path)


def test_slow_trainer(tmp_path):
    """The one that is late is named, not one that waited for it."""
    patch = """
import time
honest = example.Trainer.get_next_batch
def slow(self):
    if self.rank == 2:
        time.sleep(60)
    return honest(self)
example.Trainer.get_next_batch = slow
"""
    command = [*faulty("param_server.batch_update", tmp_path, patch), "--world_size", "4", "--timeout", "8", *SMALL]
    with running(command, tmp_path) as process:
        _, err = end(process, within_s=50)
        assert process.returncode == 1
        assert "TimeoutError: no gradient from trainer2 for 8 s" in err.splitlines()
        assert err.splitlines()[-1] == "error: rank 0 (parameter_server) raised TimeoutError; stopped 3 other processes"
        nothing_left(process, tmp_path)


def test_trainer_raises(tmp_path):
    """And the others' batch fails with it: the line names where it began."""
    patch = """
honest = example.Trainer.get_next_batch
def breaks(self):
    if self.rank == 2:
        raise ValueError("no images")
    return honest(self)
example.Trainer.get_next_batch = breaks
"""
    command = [*faulty("param_server.batch_update", tmp_path, patch), "--world_size", "4", *SMALL]
    with running(command, tmp_path) as process:
        _, err = end(process, within_s=50)
        assert process.returncode == 1
        assert "no images" in err
        assert err.splitlines()[-1] == "error: rank 2 (trainer2) raised ValueError; stopped 3 other processes"
        nothing_left(process, tmp_path)


@pytest.mark.parametrize(("flags", "says"), [
    *(bad("--world_size", value, says=("--world_size", value, "at least 2")) for value in ("1", "two")),
    *(bad(f"--{flag}", "0", says=(f"--{flag}", "'0'", "at least 1")) for flag in ("num_classes", "num_updates")),
    bad("--batch_size", "1", says=("--batch_size", "1", "at least 2")),
    bad("--image_size", "4", says=("--image_size", "4", "at least 8")),
    bad("--arch", "resnet34", says=("--arch", "resnet34", "resnet50")),
    *(bad("--lr", value, says=("--lr", value, "above 0")) for value in ("0", "nan")),
    bad("--rank", "6", "--master_addr", "localhost", says=("--rank", "6", "below")),
])
def test_bad_input(flags, says, refused):
    refused(batch_update.main, flags, says)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the trainers' models are on it")
def test_check_on_a_gpu(tmp_path):
    assert batch_update.main(["--check", "--device", "cuda", "--output_dir", str(tmp_path), *SMALL])
