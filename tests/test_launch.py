"""The start of the processes, whatever the example."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from common import cli
from common.launch import launch
from common.place import core_count, interface_towards, is_loopback
from common.session import backend_for, process_group


def role_name(rank, world_size):
    return f"worker{rank}"


def parse(*flags, world_size=2):
    return cli.Parser("test", "", world_size).parse_args(["--output_dir", "/tmp", *flags])


def tell_state(rank, world_size, args):
    with process_group(rank, world_size, args.timeout) as backend:
        sums = torch.tensor([rank, 1, torch.get_num_threads()])
        dist.all_reduce(sums)
    if rank == 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return {"sums": sums.tolist(), "backend": backend, **{name: os.environ[name] for name in names}}
    return None


def test_state_of_a_worker():
    result = launch(tell_state, parse(), role_name)
    share = max(1, core_count() // 2)
    if "OMP_NUM_THREADS" not in os.environ:
        assert result["sums"] == [1, 2, 2 * share]
    assert result["backend"] == "gloo"
    assert (result["RANK"], result["WORLD_SIZE"], result["LOCAL_RANK"], result["LOCAL_WORLD_SIZE"]) == tuple("1212")
    assert result["GLOO_SOCKET_IFNAME"] == result["TP_SOCKET_IFNAME"] in ("lo", "lo0")
    assert result["wall_s"] > 0
    assert "INIT_METHOD" not in os.environ  # the process that starts the others stays as it was


def wait_for_ever(rank, world_size, args):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def test_sigterm_is_an_interruption(capfd):
    with pytest.raises(SystemExit) as stop:
        launch(wait_for_ever, parse(), role_name)
    assert stop.value.code == 130
    assert capfd.readouterr().err.strip() == "interrupted; stopped 2 processes"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as before


def leave_early(rank, world_size, args):
    if rank == 1:
        os._exit(7)
    with process_group(rank, world_size, args.timeout):
        pass


def fail_in_a_collective(rank, world_size, args):
    with process_group(rank, world_size, args.timeout):
        if rank == 0:
            raise KeyError("lost")
        dist.barrier()


@pytest.mark.parametrize(("worker", "line"), [
    (leave_early, "error: rank 1 (worker1) exited with status 7; stopped 1 other process"),
    (fail_in_a_collective, "error: rank 0 (worker0) raised KeyError; stopped 1 other process"),
])
def test_failure_is_told_once(worker, line, capfd):
    with pytest.raises(SystemExit) as stop:
        launch(worker, parse(), role_name)
    assert stop.value.code == 1
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == line
    assert err.count("Traceback") == (1 if "raised" in line else 0)


def die_while_writing(rank, world_size, args):
    if rank == 1:
        for folder in (args.output_dir, args.checkpoint.parent):
            (folder / f".file.{os.getpid()}.tmp").write_text("half a ")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_what_a_killed_rank_was_writing_is_removed(tmp_path, capfd):
    (tmp_path / "elsewhere").mkdir()
    others = tmp_path / "elsewhere" / ".file.999999999.tmp"
    others.write_text("of a run that still writes")
    args = parse("--output_dir", str(tmp_path))
    args.checkpoint = tmp_path / "elsewhere" / "run.pt"
    with pytest.raises(SystemExit):
        launch(die_while_writing, args, role_name)
    assert "rank 1 (worker1) was killed by SIGKILL" in capfd.readouterr().err
    assert list(tmp_path.rglob(".*.tmp")) == [others]


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "host127", "192.168.1.7")))


def test_interface_towards():
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no such host") is None


def test_nccl_needs_a_gpu_for_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for ranks, backend in (("2", "nccl"), ("3", "gloo")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert backend_for("cuda:0") == backend
        assert backend_for("cpu") == "gloo"


def test_world_size_is_torchruns(monkeypatch, capsys):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    assert parse("--world_size", "3").world_size == 5
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        cli.Parser("test", "", world_size=3, min_world_size=2).parse_args([])
    assert "--world_size: '1'" in capsys.readouterr().err
