"""Tutorial 6_4."""

import json
import os
import shutil
import signal
import struct

import pytest
import torch
import torch.distributed as dist
from common import checkpoint, program
from common.launcher import launch
from common.session import group_options
from common.vision import import_torchvision
from torch.utils.data import TensorDataset

from p2p_collectives import init_methods, ring_allreduce, train
from p2p_collectives import main as demos
from p2p_collectives.data import batches, steps_of_epoch
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.ring_allreduce_results import fit_model, model_seconds
from p2p_collectives.train import DataPartitioner
from tests.helpers import bad, commands_in, end, nothing_left, run, running, script
from tests.test_data import write_mnist

README = "p2p_collectives/README.md"
TRAIN = "p2p_collectives/train.py"
SOME = ["--epochs", "4"]
SLOW_START_S = 100  # that a real process may take on a busy machine


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Let this process be a world of its own."""
    for name, value in (("INIT_METHOD", f"file://{tmp_path}/store"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"),
                        ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def group_of_one(alone):
    """The process group of that world."""
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flags(parser, folder, *given):
    return parser.parse_args(["--output_dir", str(folder / "out"), *map(str, given)])


def fails(main, folder, *given):
    """Run a lesson, in which a worker makes a mistake: status 1."""
    with pytest.raises(SystemExit) as stop:
        main(["--output_dir", str(folder), *map(str, given)])
    assert stop.value.code == 1


# --- messages and collectives


def test_demos(tmp_path):
    """The README's first command."""
    result = run(script(*commands_in(README)[0][1:]), tmp_path, cold=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-2] == "19 operations on 4 ranks over gloo: every rank holds what it should"
    assert "FAIL" not in result.stdout
    metrics = json.loads((tmp_path / "outputs/p2p_collectives/metrics.json").read_text())
    rows = {operation["operation"]: operation["rows"] for operation in metrics["operations"]}
    assert rows["all_reduce SUM"] == [[[rank + 1], [10], [10]] for rank in range(4)]  # before, after, expected
    assert [after for _, after, _ in rows["all_to_all"]] == [[r, 10 + r, 20 + r, 30 + r] for r in range(4)]
    assert [after for _, after, _ in rows["reduce SUM"]] == [[10], None, None, None]
    assert [after for _, after, _ in rows["all_reduce in [0, 1]"]] == [[2], [2], [1], [1]]
    # A table is not torn: below its title and its heading, the rows of all ranks in their order.
    lines = result.stdout.splitlines()
    at = lines.index("broadcast: rank 0's tensor to all")
    assert [line.split()[0] for line in lines[at + 1 : at + 6]] == ["rank", "0", "1", "2", "3"]


# --- rings


def bytes_sent(rank, world_size, args):
    """How much each ring sends for 4,000 bytes."""
    sent, isend = [], dist.isend

    def counting(tensor, *place):
        sent.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *place)

    ring_allreduce.dist.isend = counting
    totals = {}
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    for name, ring in ring_allreduce.algorithms(torch.float32).items():
        sent.clear()
        ring(torch.ones(1000))
        totals[name] = sum(sent)
    dist.destroy_process_group()
    return totals if rank == 0 else None


def test_chunks_save_bytes(tmp_path):
    """The tutorial's ring sends the whole tensor N-1 times: N/2 times the bytes."""
    totals = launch(bytes_sent, flags(ring_allreduce.build_parser(), tmp_path), ring_allreduce.role_name)
    assert totals["ring_naive"] == 3 * 4000
    assert totals["ring_chunked"] == totals["RingAllReduce"] == 2 * 3 * 1000


def test_measured_rows_and_picture(tmp_path, capfd):
    sizes = ("4096", "800000")
    metrics = ring_allreduce.main(["--world_size", "2", "--sizes", *sizes, "--repeats", "3", "--dtype", "int64",
                                   "--output_dir", str(tmp_path / "out")])
    assert capfd.readouterr().err == ""
    assert [row["bytes"] for row in metrics["rows"]] == [4096] * 4 + [800000] * 4
    for row in metrics["rows"]:
        assert row["world_size"] == 2
        assert row["bus_GBps"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)  # 2(N-1)/N is 1 for 2 ranks
        assert row["vs_all_reduce"] > 0
    assert [row["vs_all_reduce"] for row in metrics["rows"] if row["algorithm"] == "all_reduce"] == [1, 1]
    width, height = struct.unpack(">II", (tmp_path / "out/bandwidth.png").read_bytes()[16:24])
    assert min(width, height) > 300
    model = ["model.png"] if "alpha_s" in metrics else []  # where the times determine one
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bandwidth.png", "metrics.json", *model]


def test_algorithms_take_turns(alone, monkeypatch, tmp_path):
    """A B A B, not A A B B."""
    order = []
    fakes = {name: lambda tensor, name=name: order.append(name) for name in ("all_reduce", "B")}
    monkeypatch.setattr(ring_allreduce, "algorithms", lambda dtype: fakes)
    args = flags(ring_allreduce.build_parser(), tmp_path, "--sizes", 64, "--repeats", 2, "--world_size", 1)
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


def test_model_is_recovered():
    points = [(n_bytes, model_seconds(4, n_bytes, 1e-4, 2e9)) for n_bytes in (2**14, 2**20, 2**26)]
    assert fit_model(4, points) == pytest.approx((1e-4, 2e9))


def test_no_model_of_one_size():
    assert fit_model(4, [(2**20, 0.1), (2**20, 0.2)]) is None
    assert fit_model(4, [(2**20, 0.1), (2**21, 0.1 / 4)]) is None  # more bytes in less time


def test_a_ring_of_one(group_of_one):
    """Its buffers are made once, and of the size that was asked for."""
    ring = RingAllReduce(torch.float32, segment_bytes=64, n_buffers=3)
    assert [buffer.numel() for buffer in ring.buffers] == [16, 16, 16]
    tensor = torch.arange(5.0)
    ring(tensor)
    assert tensor.tolist() == [0, 1, 2, 3, 4]


# --- training


@pytest.mark.parametrize("n_samples", [7, 100, 1437])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_partitions_cover_everything_once(n_samples, parts):
    """The tutorial rounds each length down, and loses the rest."""
    partitioner = DataPartitioner(range(n_samples), [1 / parts] * parts, seed=3)
    used = [partitioner.use(part) for part in range(parts)]
    assert sorted(torch.cat([part.index for part in used]).tolist()) == list(range(n_samples))
    assert max(map(len, used)) - min(map(len, used)) <= 1
    again = DataPartitioner(range(n_samples), [1 / parts] * parts, seed=3)  # another rank
    assert all(torch.equal(one.index, again.use(part).index) for part, one in enumerate(used))
    assert used[0][0] == used[0].index[0]


def test_partitions_of_the_tutorial():
    assert [len(part) for part in DataPartitioner(range(10)).partitions] == [7, 2, 1]


@pytest.mark.parametrize(("world_size", "global_batch_size"), [(1, 128), (2, 128), (3, 128), (8, 8), (4, 5000)])
def test_batches_add_up(world_size, global_batch_size):
    """In the tutorial, a batch size is a float; here no sample is lost and no rank has more steps than another."""
    data = TensorDataset(torch.zeros(1437, 1), torch.zeros(1437))
    partitioner = DataPartitioner(data, [1 / world_size] * world_size)
    joined = steps_of_epoch(partitioner.partitions, global_batch_size)
    assert all(type(size) is int for size in joined)
    assert max(joined) <= global_batch_size + 1
    pieces = [[(len(labels), share) for _, labels, share in batches(partitioner.use(rank), joined, rank)]
              for rank in range(world_size)]
    assert sum(joined) == 1437
    for step, size in enumerate(joined):
        assert sum(of_rank[step][0] for of_rank in pieces) == size
        assert sum(of_rank[step][1] for of_rank in pieces) == pytest.approx(1)
        assert min(of_rank[step][0] for of_rank in pieces) >= 1


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


def test_a_loss_that_is_not_finite_is_said(capfd, tmp_path):
    """It is not called a drift."""
    fails(train.main, tmp_path, "--lr", "1e30")
    err = capfd.readouterr().err
    assert err.startswith("error: rank ")
    assert "training has diverged; give a smaller --lr; stopped 1 other process\n" in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_training(tmp_path):
    """With its defaults."""
    result = run(script("p2p_collectives/train.py", "--world_size", 2), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    metrics = json.loads((tmp_path / "outputs/p2p_collectives/train/metrics.json").read_text())
    assert metrics["test_accuracy"] >= 0.96
    assert metrics["samples_per_s"] > 0
    assert len(metrics["epochs"]) == 10
    assert metrics["epochs"][-1]["loss"] < 0.3 * metrics["epochs"][0]["loss"]
    assert metrics["epochs"][-1]["accuracy"] == metrics["test_accuracy"]
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[rank0] epoch  1  test accuracy ")
    assert "weights bitwise identical" in lines[-2]


def killed_in_the_third_epoch(rank, world_size, args):
    """Rank 0 is, when it has written half of the third checkpoint."""
    honest = torch.save

    def save(state, path):
        honest(state, path)
        if len(state["epochs"]) == 3:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.torch.save = save
    return train.run_worker(rank, world_size, args)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Of one that nobody interrupted: its metrics, and what its checkpoint holds. The checkpoint of one that was."""
    folder = tmp_path_factory.mktemp("trainings")
    whole, interrupted = folder / "whole.pt", folder / "interrupted.pt"
    metrics = train.main([*SOME, "--checkpoint", str(whole), "--output_dir", str(folder)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run_worker", killed_in_the_third_epoch)
        fails(train.main, folder, *SOME, "--checkpoint", interrupted)
    assert sorted(path.name for path in folder.iterdir()) == ["interrupted.pt", "metrics.json", "whole.pt"]
    return metrics, torch.load(whole, weights_only=True), interrupted


def identical(one, other):
    """Whether two nested states are equal, their tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


def test_resume_continues_as_if_never_stopped(trainings, tmp_path):
    whole, state, interrupted = trainings
    saved = tmp_path / "run.pt"
    shutil.copy(interrupted, saved)
    assert len(torch.load(saved, weights_only=True)["epochs"]) == 2
    resumed = train.main([*SOME, "--checkpoint", str(saved), "--resume", "--output_dir", str(tmp_path)])
    assert resumed["epochs"] == whole["epochs"]
    assert identical(torch.load(saved, weights_only=True), state)


def test_resume_on_two_machines(trainings, free_port, tmp_path_factory):
    """Manual launch; the checkpoint is where rank 0 is, and rank 1 has none."""
    whole, state, interrupted = trainings
    machines = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    shutil.copy(interrupted, machines[0] / "run.pt")
    place = ["--world_size", 2, "--master_addr", "localhost", "--master_port", free_port]
    command = [TRAIN, *SOME, "--checkpoint", "run.pt", "--resume", *place, "--rank"]
    with running(script(*command, 0), machines[0]) as one, running(script(*command, 1), machines[1]) as other:
        out, err = end(one, within_s=SLOW_START_S)
        assert (one.returncode, err) == (0, "")
        assert end(other, within_s=SLOW_START_S) == ("", "")
        assert other.returncode == 0
    assert [line.split("  ")[:2] for line in out.splitlines()[:-2]] == [["[rank0] epoch", "3"], ["[rank0] epoch", "4"]]
    metrics = json.loads((machines[0] / "outputs/p2p_collectives/train/metrics.json").read_text())
    assert metrics["epochs"] == whole["epochs"]
    assert identical(torch.load(machines[0] / "run.pt", weights_only=True), state)
    assert not (machines[1] / "run.pt").exists()
    for process, machine in ((one, machines[0]), (other, machines[1])):
        nothing_left(process, machine)


def test_only_rank_0_needs_the_checkpoint(monkeypatch, refused, tmp_path):
    """Where another rank starts, no process looks for the file."""
    launched = []
    monkeypatch.setattr(program, "launch", lambda run_worker, args, role_name: launched.append(args.rank))
    command = ["--world_size", "2", "--master_addr", "localhost", "--resume", "--checkpoint", "none.pt", "--rank"]
    monkeypatch.chdir(tmp_path)
    assert train.main([*command, "1"]) is None
    refused(train.main, [*command, "0"], ["--checkpoint none.pt"])
    assert launched == [1]


# --- ways to meet


def test_three_ways_to_meet(tmp_path):
    result = run(script("p2p_collectives/init_methods.py"), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-2] == (
        "env, tcp, file: 3 ranks found each other 3 times, and their sum is 6 each time")
    metrics = json.loads((tmp_path / "outputs/p2p_collectives/init_methods/metrics.json").read_text())
    for meeting, word in zip(metrics["meetings"], ("MASTER_ADDR=", "tcp://127.0.0.1:", "file:///"), strict=True):
        assert [row["rank"] for row in meeting["ranks"]] == [0, 1, 2]
        assert all(word in row["knew"] for row in meeting["ranks"])


def test_two_terminals(tmp_path):
    """Manual launch; they meet in a file that both can write."""
    place = ["--method", "file", "--file", tmp_path / "shared", "--world_size", 2, "--master_addr", "localhost"]
    with running(script("p2p_collectives/init_methods.py", *place, "--rank", 1), tmp_path) as other:
        result = run(script("p2p_collectives/init_methods.py", *place, "--rank", 0), tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-2] == "file: 2 ranks found each other once, and their sum is 3"
        end(other, within_s=SLOW_START_S)
        assert other.returncode == 0


# --- bad input


@pytest.mark.parametrize(("given", "says"), [
    *(bad("--world_size", value, says=("--world_size", value, "at least 2")) for value in ("0", "1", "-3", "two")),
    bad("--demo", "everything", says=("--demo", "everything", "nonblocking")),
])
def test_bad_input_for_the_demos(given, says, refused):
    refused(demos.main, given, says)


@pytest.mark.parametrize(("given", "says"), [
    *(bad("--sizes", value, says=("--sizes", value, "at least 1")) for value in ("0", "-4", "1e6")),
    bad("--sizes", 6, says=("--sizes 6 must be a multiple of 4",)),
    bad("--sizes", 8, 12, "--dtype", "int64", says=("--sizes 12 must be a multiple of 8",)),
    bad("--repeats", 0, says=("--repeats", "0", "at least 1")),
    bad("--dtype", "float16", says=("--dtype", "float16", "float64")),
    bad("--world_size", 0, says=("--world_size", "0", "at least 1")),
])
def test_bad_input_for_the_rings(given, says, refused):
    refused(ring_allreduce.main, given, says)


@pytest.mark.parametrize(("given", "says"), [
    *(bad(flag, value, says=(flag, value, "at least 1"))
      for flag in ("--epochs", "--global_batch_size", "--world_size") for value in ("0", "-1", "1.5")),
    bad("--global_batch_size", 3, "--world_size", 4, says=("--global_batch_size 3 must be at least --world_size 4",)),
    bad("--world_size", 2000, "--global_batch_size", 2000, "--rank", 0, "--master_addr", "localhost",
        says=("--world_size 2000 must be at most 1437",)),
    *(bad("--lr", value, says=("--lr", value, "above 0")) for value in ("0", "nan")),
    bad("--momentum", 1.5, says=("--momentum", "1.5", "at most 1")),
    bad("--resume", says=("--resume", "--checkpoint")),
    bad("--dataset", "cifar", says=("--dataset", "cifar", "mnist")),
])
def test_bad_input_for_the_training(given, says, refused):
    refused(train.main, given, says)


@pytest.mark.parametrize("damage", ["empty", "damaged"])
def test_no_mnist(damage, refused, tmp_path, monkeypatch):
    """One process looks for it, before the ranks could race for the download."""
    if damage == "damaged":
        for path in write_mnist(tmp_path, {"train": 30, "t10k": 10}).iterdir():
            path.write_bytes(path.read_bytes()[:9])
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    refused(train.main, ["--dataset", "mnist", "--data_dir", str(tmp_path)], (str(tmp_path), "--dataset digits"))


@pytest.mark.parametrize("kind", ["another model", "another example", "truncated", "more epochs"])
def test_not_our_checkpoint(kind, refused, tmp_path):
    path = tmp_path / "run.pt"
    state = {"example": train.EXAMPLE, "model": train.Net().state_dict(), "epochs": []}
    if kind == "another model":
        state["model"]["fc2.weight"] = torch.zeros(3, 3)
    elif kind == "more epochs":
        state["epochs"] = [{}] * 11
    torch.save({**state, **({"example": "rpc_rl"} if kind == "another example" else {})}, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    before = path.read_bytes()
    refused(train.main, ["--checkpoint", str(path), "--resume"], ["--epochs" if kind == "more epochs" else str(path)])
    assert path.read_bytes() == before


@pytest.mark.parametrize(("given", "says"), [
    bad("--method", "udp", says=("--method", "udp", "tcp")),
    bad("--rank", 0, "--master_addr", "localhost", says=("--method all must be env, tcp or file",)),
    bad("--rank", 0, "--master_addr", "localhost", "--method", "file", says=("--method file requires --file",)),
    bad("--file", "/dev/null", says=("--file /dev/null must be a file",)),
    bad("--file", __file__, says=(f"--file {__file__}", "nothing is yet")),
    bad("--file", "/proc/1/none/store", says=("--file", "/proc/1/none/store", "written")),
])
def test_bad_input_for_the_meeting(given, says, refused):
    refused(init_methods.main, given, says)
