"""Tutorial 6_6."""

import itertools
import json
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common.data import load_data
from common.vision import import_torchvision
from torch.nn import functional as F

from param_server import main as param_server
from tests.helpers import bad, commands_in, end, run, running, script, torchrun
from tests.test_data import write_mnist

MAIN = "param_server/main.py"


def parsed(*flags):
    return param_server.build_parser().parse_args(["--output_dir", "/tmp", *map(str, flags)])


# --- pieces


def test_every_trainer_has_its_own_images():
    args = parsed("--world_size", 4)
    train_set = [(index, 10 * index) for index in range(100)]

    class Numbered:
        def __len__(self):
            return len(train_set)

        def __getitem__(self, index):
            return index, 10 * index

    orders = {}
    for rank in (1, 2, 3):
        for epoch in (0, 1):
            batches = list(param_server.get_next_batch(Numbered(), rank, epoch, args))
            assert all(torch.equal(labels, 10 * images) for images, labels in batches)
            orders[rank, epoch] = torch.cat([images for images, _ in batches]).tolist()
    assert sorted(sum((orders[rank, 0] for rank in (1, 2, 3)), [])) == list(range(100))
    for rank in (1, 2, 3):
        assert sorted(orders[rank, 0]) == sorted(orders[rank, 1])
        assert orders[rank, 0] != orders[rank, 1]


def test_dropout_of_the_right_kind():
    """The tutorial has Dropout2d where there are no channels any more."""
    kinds = [type(module) for module in param_server.Net().modules() if "Dropout" in type(module).__name__]
    assert kinds == [torch.nn.Dropout2d, torch.nn.Dropout]


@pytest.mark.parametrize("world_size", [2, 3])
def test_mode_reaches_the_network(world_size):
    """In the tutorial, `model.eval()` stays with the trainer's shell, and the accuracy is measured with dropout on."""
    server = param_server.ParameterServer(parsed("--world_size", world_size, "--device", "cpu"))
    images = torch.randn(8, 1, 28, 28)
    server.set_mode(False)
    assert torch.equal(server(images), server(images))
    assert torch.equal(server(images), server.model(images))
    server.set_mode(True)
    assert not torch.equal(server(images), server(images))


def test_gradients_flow_through_the_copies():
    server = param_server.ParameterServer(parsed("--device", "cpu"))
    server.set_mode(False)
    images, labels = torch.randn(8, 1, 28, 28), torch.arange(8)
    gradients = torch.autograd.grad(F.nll_loss(server(images), labels), list(server.model.parameters()))
    expected = torch.autograd.grad(F.nll_loss(server.model(images), labels), list(server.model.parameters()))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize(("consistency", "works"), [("async", True), ("lock", False)])
def test_a_step_between_forward_and_backward(consistency, works):
    """What two trainers do to each other: only copies survive it, or a lock that keeps it from happening."""
    server = param_server.ParameterServer(parsed("--device", "cpu", "--consistency", consistency))
    loss = F.nll_loss(server(torch.randn(8, 1, 28, 28)), torch.arange(8))
    with torch.no_grad():
        for param in server.model.parameters():
            param -= 0.01
    if works:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_threads_share_no_module():
    """functional_call changes the module that it is given, for a while: with one for all, training has no effect."""
    server = param_server.ParameterServer(parsed("--device", "cpu"))
    with ThreadPoolExecutor(max_workers=1) as other_thread:
        elsewhere = other_thread.submit(server.shell).result()
    assert server.shell() is server.shell()
    assert len({server.shell(), elsewhere, server.model}) == 3
    assert all(param.is_meta for param in elsewhere.parameters())  # and takes no memory


def test_turns():
    server = param_server.ParameterServer(parsed("--device", "cpu"))
    acquire = param_server.ParameterServer.acquire
    first, second, third = (acquire(server) for _ in range(3))
    assert [turn.done() for turn in (first, second, third)] == [True, False, False]
    server.release()
    assert [turn.done() for turn in (second, third)] == [True, False]
    server.release()
    assert third.done()
    server.release()
    assert acquire(server).done()


# --- what it computes


@pytest.mark.parametrize("flags", [["--world_size", "4"], ["--consistency", "lock"]])
def test_check_passes(flags, capfd, tmp_path):
    differences = param_server.main(["--check", "--output_dir", str(tmp_path), *flags])
    assert list(differences) == ["gradients", "losses", "weights", "pushed"]
    assert max(differences.values()) <= 1e-5
    out, err = capfd.readouterr()
    assert out.count(" ok\n") == 4
    assert err == ""


def record_with_lost_steps(rank, world_size, args):
    """The run of `--check`, where every tenth step of an optimizer is lost."""
    honest, calls = param_server.SGD.step, itertools.count(1)

    def step(self, closure=None):
        return None if next(calls) % 10 == 0 else honest(self, closure)

    param_server.SGD.step = step
    return param_server.record(rank, world_size, args)


def test_check_can_fail(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(param_server, "record", record_with_lost_steps)
    with pytest.raises(SystemExit) as stop:
        param_server.main(["--check", "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    assert capfd.readouterr().out.count("FAIL") == 2  # weights, pushed: the tenth step of each


def test_it_learns(tmp_path):
    """The README's command, with a quarter of its epochs, and smaller batches."""
    flags = ["--epochs", "5", "--batch_size", "16", "--lr", "0.04"]
    result = run([*script(*commands_in("param_server/README.md")[0][1:]), *flags], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/param_server/metrics.json").read_text())
    assert metrics["test_accuracy"] > 0.92
    assert metrics["updates"] == 5 * 2 * 45
    assert len(metrics["epochs"]) == 5
    assert metrics["epochs"][-1]["loss"] < 0.2 * metrics["epochs"][0]["loss"]
    assert metrics["samples_per_s"] > 0
    assert [trainer["rank"] for trainer in metrics["per_trainer"]] == [1, 2]
    assert sum(trainer["samples"] for trainer in metrics["per_trainer"]) == 5 * 1437
    assert result.stdout.splitlines()[-1].startswith("digits: test accuracy 9")
    width, height = struct.unpack(">II", (tmp_path / "outputs/param_server/loss.png").read_bytes()[16:24])
    assert min(width, height) > 300


def test_resume(tmp_path):
    """With one trainer and the same seeds, the images come in the order of a training that never stopped."""
    saved = tmp_path / "server.pt"
    flags = ["--world_size", "2", "--batch_size", "200", "--output_dir", str(tmp_path), "--checkpoint", str(saved)]
    first = param_server.main([*flags, "--epochs", "1"])
    state = torch.load(saved, weights_only=True)
    assert state["epochs"] == 1
    net = param_server.Net().eval()
    net.load_state_dict(state["model"])
    images, labels = load_data(parsed())[1].tensors
    with torch.no_grad():
        assert (net(images).argmax(dim=1) == labels).double().mean().item() == first["test_accuracy"]
    resumed = param_server.main([*flags, "--epochs", "2", "--resume"])
    assert len(resumed["epochs"]) == 1
    assert resumed["epochs"][0]["loss"] < first["epochs"][-1]["loss"]
    assert torch.load(saved, weights_only=True)["epochs"] == 2


# --- how it is started


def test_torchrun(tmp_path):
    result = run(torchrun(2, MAIN, "--epochs", 1, "--batch_size", 200), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("digits: test accuracy") == 1
    metrics = json.loads((tmp_path / "outputs/param_server/metrics.json").read_text())
    assert metrics["world_size"] == 2  # torchrun's, not the default


def test_manual_launch(free_port, capfd, monkeypatch, tmp_path):
    """As the tutorial has it: --rank, and nothing about the machine. The other terminal is this process."""
    flags = ["--world_size=2", f"--master_port={free_port}", "--epochs=1", "--batch_size=200"]
    with running(script(MAIN, "--rank=0", *flags), tmp_path) as server:
        param_server.main(["--rank=1", *flags, "--output_dir", str(tmp_path)])
        assert capfd.readouterr().out.splitlines()[-1].startswith("digits: test accuracy")
        assert end(server) == ("", "")
        assert server.returncode == 0


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    *(bad("--world_size", value, says=("--world_size", value, "at least 2")) for value in ("1", "0", "two")),
    bad("--world_size", "1439", "--rank", "1", says=("--world_size 1439 must be at most 1438",)),
    *(bad(f"--{flag}", "0", says=(f"--{flag}", "'0'", "at least 1")) for flag in ("epochs", "batch_size")),
    *(bad("--lr", value, says=("--lr", value, "above 0")) for value in ("0", "nan")),
    bad("--consistency", "eventual", says=("--consistency", "eventual", "lock")),
    bad("--dataset", "cifar", says=("--dataset", "cifar", "mnist")),
    bad("--rank", "3", says=("--rank", "3", "below")),
    bad("--resume", says=("--resume", "--checkpoint")),
    bad("--checkpoint", "/dev/null/run.pt", says=("--checkpoint", "/dev/null/run.pt", "written")),
])
def test_bad_input(flags, says, refused):
    refused(param_server.main, flags, says)


def test_no_mnist(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    folder = str(tmp_path / "data")
    refused(param_server.main, ["--dataset", "mnist", "--data_dir", folder], ["--data_dir", folder, "--dataset digits"])


@pytest.mark.parametrize("kind", ["truncated", "another example", "another model", "more epochs"])
def test_not_this_models_checkpoint(kind, tmp_path, refused):
    path = tmp_path / "run.pt"
    state = {"example": "param_server", "model": param_server.Net().state_dict(), "epochs": 1}
    state |= {"another example": {"example": "rpc_rl"}, "more epochs": {"epochs": 21},
              "another model": {"model": torch.nn.Linear(2, 2).state_dict()}}.get(kind, {})
    torch.save(state, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:20_000])
    before = path.read_bytes()
    flags = ["--checkpoint", str(path), "--resume"]
    refused(param_server.main, flags, ["--epochs" if kind == "more epochs" else str(path)])
    assert path.read_bytes() == before


def test_benchmark(tmp_path):
    write_mnist(tmp_path, {"train": 60, "t10k": 1})
    flags = ["--rounds", 1, "--batch_size", 4, "--dataset", "mnist", "--data_dir", tmp_path]
    result = run(script("benchmarks/param_server.py", *flags), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/benchmark_param_server/metrics.json").read_text())
    assert min(metrics["ms_per_step"].values()) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the network is on it")
def test_check_on_a_gpu(tmp_path):
    assert param_server.main(["--check", "--device", "cuda", "--output_dir", str(tmp_path)])
