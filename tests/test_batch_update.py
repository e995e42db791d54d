"""Tutorial 6_8, first half."""

import json
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.distributed import rpc

from param_server import batch_update
from tests.helpers import bad, commands_in, end, run, running, script, torchrun

MAIN = "param_server/batch_update.py"
SMALL = ["--arch", "resnet18", "--image_size", "32", "--batch_size", "4", "--num_classes", "5"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Of torch in this process: more would only wait for each other where two test processes share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def change_what_is_sent(change):
    """In a worker: `change(server, rank, sent)` before the server adds what a trainer has sent."""
    honest = batch_update.BatchUpdateParameterServer.update_and_fetch_model

    @rpc.functions.async_execution
    def update_and_fetch_model(self, rank, sent):
        change(self, rank, sent)
        return honest(self, rank, sent)

    batch_update.BatchUpdateParameterServer.update_and_fetch_model = update_and_fetch_model


def record_with_lost_gradient(rank, world_size, args):
    def lose(server, rank, sent):
        if rank == 2:
            sent[: server.n_params] = 0

    change_what_is_sent(lose)
    return batch_update.record(rank, world_size, args)


def record_with_tutorials_statistics(rank, world_size, args):
    def send_none(server, rank, sent):
        sent[server.n_params :] = server.weights[server.n_params :]

    change_what_is_sent(send_none)
    return batch_update.record(rank, world_size, args)


@pytest.mark.parametrize(("record", "fails"), [
    (record_with_lost_gradient, {"weights", "momentum", "pushed"}),
    (record_with_tutorials_statistics, {"statistics"}),
], ids=["a lost gradient", "the tutorial's statistics"])
def test_check_can_fail(record, fails, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(batch_update, "record", record)
    with pytest.raises(SystemExit) as stop:
        batch_update.main(["--check", "--world_size", "3", "--output_dir", str(tmp_path), *SMALL])
    assert stop.value.code == 1
    assert fails <= set(re.findall(r"\[check\] (.*): differs .* FAIL", capfd.readouterr().out))


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


LIMIT_S = 0.5  # of a call that gives none of its own


def run_slowly(rank, world_size, args):
    """A training that takes longer than the server's process lets a call take."""
    honest, call_trainers = batch_update.Trainer.get_next_batch, batch_update.run_trainers

    def slow(self):
        for batch in honest(self):
            time.sleep(LIMIT_S)
            yield batch

    def impatient(*arguments):
        rpc._set_rpc_timeout(LIMIT_S)
        with pytest.raises(RuntimeError, match="(?i)time"):  # the limit holds
            rpc.rpc_sync("trainer1", time.sleep, args=(3 * LIMIT_S,))
        return call_trainers(*arguments)

    batch_update.Trainer.get_next_batch, batch_update.run_trainers = slow, impatient
    return batch_update.run_worker(rank, world_size, args)


def test_longer_than_the_timeout(capfd, monkeypatch, tmp_path):
    """In the tutorial, a training that takes longer than one RPC may (60 s) ends with an error."""
    monkeypatch.setattr(batch_update, "run_worker", run_slowly)
    flags = ["--world_size", "2", "--num_updates", "4", "--output_dir", str(tmp_path), *SMALL]
    metrics = batch_update.main(flags)
    assert len(metrics["loss"]) == 4
    assert capfd.readouterr().err == ""


# --- how it is started


def test_torchrun(tmp_path):
    result = run(torchrun(2, MAIN, "--num_updates", 2, *SMALL), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("resnet18, 1 trainers: ") == 1
    metrics = json.loads((tmp_path / "outputs/param_server_batch_update/metrics.json").read_text())
    assert metrics["world_size"] == 2  # torchrun's, not the default


def test_manual_launch(free_port, capfd, monkeypatch, tmp_path):
    """The other terminal is this process."""
    flags = ["--world_size=2", "--master_addr=localhost", f"--master_port={free_port}", "--num_updates=2", *SMALL]
    with running(script(MAIN, "--rank=1", *flags), tmp_path) as trainer:
        metrics = batch_update.main(["--rank=0", *flags, "--output_dir", str(tmp_path)])
        assert len(metrics["loss"]) == 2
        assert capfd.readouterr().out.splitlines()[-1].startswith("resnet18, 1 trainers: ")
        assert end(trainer) == ("", "")
        assert trainer.returncode == 0


# --- what can go wrong


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
