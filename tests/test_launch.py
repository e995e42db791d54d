"""The start of the processes, whatever the example."""

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
import weakref
from multiprocessing import forkserver
from types import SimpleNamespace

import joblib
import psutil
import pytest
import torch
import torch.distributed as dist
from common import cli, program
from common.launcher import channel, environment, launch, start, watch
from common.launcher.network import interface_towards, is_loopback
from common.launcher.worker import exit_now, failure_of, stacks
from common.program import role_name
from common.session import backend_for, group_options, wait_all

from tests.fault_table import OF_A_MACHINE
from tests.helpers import SOON_S, run, script, torchrun


def parse(*flags, world_size=2):
    return cli.Parser("test", "", world_size).parse_args(["--output_dir", "/tmp", *flags])


def tell_state(rank, world_size, args):
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    backend, sums = dist.get_backend(), torch.tensor([rank, 1, torch.get_num_threads()])
    dist.all_reduce(sums)
    dist.destroy_process_group()
    if rank == 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return {"sums": sums.tolist(), "backend": backend, **{name: os.environ[name] for name in names}}
    return None


def test_state_of_a_worker(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    result = launch(tell_state, parse(), role_name)
    assert result["sums"] == [1, 2, 2 * max(1, joblib.cpu_count() // 2)]
    assert result["backend"] == "gloo"
    assert (result["RANK"], result["WORLD_SIZE"], result["LOCAL_RANK"], result["LOCAL_WORLD_SIZE"]) == tuple("1212")
    assert result["GLOO_SOCKET_IFNAME"] == result["TP_SOCKET_IFNAME"] in ("lo", "lo0")
    assert result["wall_s"] > 0
    assert "INIT_METHOD" not in os.environ  # the process that starts the others stays as it was


def test_nothing_is_collected_while_stacks_are_read(monkeypatch):
    """A collection lets other threads go on, and with Python 3.11 the frame that is being read may be gone."""
    collects = []

    def walk_stack(frame):
        collects.append(gc.isenabled())
        yield frame, 1

    monkeypatch.setattr("traceback.walk_stack", walk_stack)
    stacks()
    assert collects
    assert not any(collects)
    assert gc.isenabled()


def fail_in_a_collective(rank, world_size, args):
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    if rank == 0:
        raise KeyError("lost")
    dist.barrier()


def test_failure_is_told_once(capfd):
    with pytest.raises(SystemExit, match="^1$"):
        launch(fail_in_a_collective, parse(), role_name)
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == "error: rank 0 (rank0) raised KeyError; stopped 1 other process"
    assert err.count("Traceback (most recent call last):\n") == 1


def die_while_writing(rank, world_size, args):
    if rank == 1:
        for folder in (args.output_dir, args.checkpoint.parent):
            (folder / f".run.pt.{os.getpid()}.tmp").write_text("half a ")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_what_a_killed_rank_was_writing_is_removed(tmp_path, capfd):
    (tmp_path / "elsewhere").mkdir()
    others = tmp_path / "elsewhere" / ".run.pt.999999999.tmp"
    others.write_text("of a run that still writes")
    args = parse("--output_dir", str(tmp_path))
    args.checkpoint = tmp_path / "elsewhere" / "run.pt"
    with pytest.raises(SystemExit, match="^1$"):
        launch(die_while_writing, args, role_name)
    assert "rank 1 (rank1) was killed by SIGKILL" in capfd.readouterr().err
    assert list(tmp_path.rglob(".*.tmp")) == [others]


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3")))
    assert not any(map(is_loopback, ("10.0.0.1", "host127", "192.168.1.7")))


def test_interface_towards():
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no such host") is None


def test_an_end_that_is_seen_late():
    """A rank's pipe is closed before it is gone; on a busy machine the fork server tells its status seconds later."""
    states = iter([psutil.STATUS_RUNNING, psutil.STATUS_RUNNING])

    def join(seconds):
        child.exitcode = -signal.SIGSEGV if seconds > 2 else None

    child = SimpleNamespace(pid=os.getpid(), sentinel=None, exitcode=None, join=join)
    process = start.Process(1, child)
    process.handle = SimpleNamespace(status=lambda: next(states, psutil.STATUS_ZOMBIE))
    assert process.failure() == watch.Failure(1, "was killed by SIGSEGV")


def test_nccl_needs_a_gpu_for_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for ranks, backend in (("2", "nccl"), ("3", "gloo")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert backend_for("cuda:0") == backend
        assert backend_for("cpu") == "gloo"


def test_world_size_is_torchruns(monkeypatch, capsys):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    assert parse("--world_size", "3").world_size == 5
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="^2$"):
        cli.Parser("test", "", world_size=3, min_world_size=2).parse_args([])
    assert "--world_size: '1'" in capsys.readouterr().err


# --- starting


def take_note(rank, world_size, args):
    """What a worker has without having done anything."""
    if torch.cuda.is_available():  # a context of the fork server would not survive the fork
        torch.ones(1, device="cuda")
    note = {"variable": os.environ.get("A_VARIABLE"), "transports": os.environ.get("RPC_TRANSPORTS"),
            "threads": torch.get_num_threads(), "folder": os.getcwd(), "parent": os.getppid(),
            "modules": "torch._dynamo" in sys.modules}
    return note if rank == 0 else None


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_method(method, monkeypatch, tmp_path, capfd):
    """What a forked worker has from the launcher and not from the fork server: environment, folder, output."""
    monkeypatch.setenv("A_VARIABLE", method)
    monkeypatch.chdir(tmp_path)
    note = launch(take_note, parse("--start_method", method, world_size=1), role_name)
    assert (note["variable"], note["folder"]) == (method, str(tmp_path))
    assert note["modules"] or method == "spawn"
    assert (note["parent"] == os.getpid()) == (method == "spawn")
    if method == "forkserver":  # the same one: a second launch costs only the forks
        assert launch(take_note, parse(world_size=1), role_name)["parent"] == note["parent"]


def test_interrupted_between_two_ranks(monkeypatch, capfd):
    """The fork server is killed, and the rest is started by another one, which must not import torch for that."""
    popen = multiprocessing.context.ForkServerProcess._Popen
    launch(take_note, parse(world_size=1), role_name)  # there is a fork server
    preloaded = []

    def interrupt_after(process):
        preloaded.append(bool(forkserver._forkserver._preload_modules))
        started = popen(process)
        if len(preloaded) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # it ends
        return started

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "_Popen", staticmethod(interrupt_after))
    with pytest.raises(SystemExit, match="^130$"):
        launch(take_note, parse(), role_name)
    assert preloaded == [True, False]
    assert capfd.readouterr().err == "\ninterrupted; stopped 2 processes\n"


def test_out_of_files(monkeypatch, tmp_path, capfd):
    """A start that fails half-way leaves nothing behind."""
    monkeypatch.setattr(cli, "require_processes", lambda *_: None)
    args = parse(world_size=16)
    launch(take_note, parse(world_size=1), role_name)  # there is a fork server
    limits, fillers = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(20):
            os.close(fillers.pop())
        with pytest.raises(SystemExit, match="^1$"):
            launch(take_note, args, role_name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
    # Above it, Python's own fork server may say that it has ended.
    assert capfd.readouterr().err.endswith("error: cannot start 16 processes: Too many open files\n")
    time.sleep(1)  # Python's fork server may have ended with it; the next launch starts another one
    assert launch(take_note, parse(world_size=1), role_name)


@pytest.mark.parametrize("world_size", [20, 33])
def test_many_ranks(world_size):
    result = launch(tell_state, parse(world_size=world_size), role_name)
    assert result["sums"][:2] == [sum(range(world_size)), world_size]


def test_threads_of_the_user(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(take_note, parse(), role_name)["threads"] == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "zero")
    assert launch(take_note, parse(), role_name)["threads"] == max(1, joblib.cpu_count() // 2)


THREADS = """
from common import cli, program
from common.launcher import launch, worker
import torch
worker.BEAT_S = 0  # the thread that beats is always within the store, at Python's end, too
def threads(rank, world_size, args):
    print("threads", torch.get_num_threads())
if __name__ == "__main__":
    launch(threads, cli.Parser("test", "", 1).parse_args(), program.role_name)
"""


@pytest.mark.parametrize(("setting", "expected"), [(None, max(1, joblib.cpu_count() // 2)), ("1", 1), ("3", 3)])
def test_threads_under_torchrun(setting, expected, tmp_path):
    """Torchrun sets OMP_NUM_THREADS to 1 by itself: that is not the user's wish, but a user's 1 is."""
    (tmp_path / "threads.py").write_text(THREADS)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = run(torchrun(2, tmp_path / "threads.py"), tmp_path, cold=True,
                 env={**environment, **({"OMP_NUM_THREADS": setting} if setting else {})})
    assert result.stdout.splitlines() == [f"threads {expected}"] * 2, (result.stdout, result.stderr)
    assert result.returncode == 0, result.stderr  # -6: Python has ended a thread within C++


# --- a manual launch that does not come together


def by_rank(rank, port):
    """Of a program whose ranks join for longer than --timeout: the launcher is the first to give up."""
    return script("ddp_basic/skew.py", "--world_size", 2, "--rank", rank, "--timeout", 2, "--master_addr", "localhost",
                  "--master_port", port)


@pytest.mark.parametrize("answering", [True, False])
def test_nobody_at_the_port(answering, free_port, tmp_path):
    """Also where a port accepts and never answers, for which torch would wait for ever."""
    with socket.socket() as server:
        if answering:
            server.bind(("127.0.0.1", free_port))
            server.listen()
        result = run(by_rank(1, free_port), tmp_path)
    assert result.returncode == 1
    line = OF_A_MACHINE["rank 0 never comes"].expected("manual").format(address=f"localhost:{free_port}", joins=10)
    assert result.stderr == f"error: {line}\n"


def test_port_in_use(free_port, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))
        server.listen()
        result = run(by_rank(0, free_port), tmp_path)
    assert result.returncode == 2
    assert result.stderr == (f"error: --master_port {free_port} cannot be opened on localhost (address already in "
                             "use); give another port to all ranks\n")


def test_a_rank_that_does_not_come(free_port, tmp_path):
    result = run(by_rank(0, free_port), tmp_path)
    assert result.returncode == 1
    line = OF_A_MACHINE["never comes"].expected("manual").format(joins=10)
    assert result.stderr == f"error: rank 1 (rank1) {line}; stopped 1 other process\n"


# --- whom to blame


@pytest.fixture
def clock(monkeypatch):
    """`clock.now`: what `time.monotonic` says."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def test_several_failures_have_one_cause():
    """Own exceptions and deaths before silence, silence before what was only noticed."""
    died, silent = watch.Failure(2, "was killed by SIGKILL"), watch.silent(1, 8)
    noticed = failure_of(0, RuntimeError("Connection closed by peer [127.0.0.1]:1234"), 8)
    assert noticed.kind == watch.NOTICED
    assert min([noticed, silent, died], key=lambda failure: failure.kind) == died
    assert min([noticed, silent], key=lambda failure: failure.kind) == silent
    assert failure_of(0, ValueError("Connection closed"), 8).kind == watch.CAUSE
    over_rpc = "On WorkerInfo(id=2, name=observer2):\nRuntimeError('eof (this error originated at tensorpipe)')"
    told = failure_of(0, RuntimeError(over_rpc), 8)
    assert (told.rank, told.kind) == (2, watch.NOTICED)


def test_who_waits_has_not_failed():
    """Neither by a time-out of gloo, which may have a limit of its own, nor by one in a lesson's words."""
    waited = failure_of(0, RuntimeError("[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"), 8)
    assert (waited.kind, waited.what) == (watch.WAITED, "has waited for 60 s")
    late = TimeoutError("timed out: at a barrier of this machine's 2 ranks, 1 not heard of for 8 s")
    assert (failure_of(0, late, 8).kind, failure_of(0, late, 8).what) == (watch.WAITED, str(late))


def two_ranks(timeout):
    return watch.Decider(channel.Board(dist.HashStore(), ["rank/0", "rank/1"]), ["a", "b"], timeout)


def test_who_is_silent_is_blamed_and_not_who_waited(clock):
    """After --timeout for itself; as soon as somebody has waited in vain, after a few seconds."""
    decider, now = two_ranks(timeout=8), clock.now
    decider.board.at = {"rank/0": now, "rank/1": now - 5}
    assert decider.verdict() is None
    decider.failures["rank/0"], decider.since = watch.Failure(0, "has waited for 8 s", watch.WAITED), now
    assert decider.verdict() is None  # perhaps somebody else has a cause to tell
    decider.since = now - watch.GRACE_S
    assert decider.verdict() == watch.Failure(1, "has not answered for 5 s", watch.SILENCE)
    decider = two_ranks(timeout=8)
    decider.board.at["rank/1"] = now - 9
    assert decider.verdict() == watch.Failure(1, "has not answered for 9 s", watch.SILENCE)


def test_only_a_silence_of_late_is_blamed(clock):
    """Others may just have waited for it; not for one that ended before the last --timeout began."""
    decider = two_ranks(timeout=8)
    decider.board.gaps = {"rank/0": (6, clock.now - 9), "rank/1": (6, clock.now - 7)}
    assert decider.were_silent() == [watch.Failure(1, "did not answer for 6 s", watch.SILENCE)]


@pytest.mark.parametrize(("away_s", "heard_s", "blamed"), [
    (9, 0, (0, "did not answer for 9 s: its launcher was stopped")),  # meanwhile the other one has given up
    (9, 1.9, (1, "cannot be reached: no sign of life for 8 s")),  # Ctrl-Z for both, and then the other one was lost
    (5, 0, (1, "cannot be reached: no sign of life for 10 s")),
])
def test_a_launcher_that_was_stopped_blames_itself(away_s, heard_s, blamed, clock):
    decider, now = watch.Decider(channel.Board(dist.HashStore(), ["rank/0", "rank/1", "launcher/1"]), "ab", 8, 60), clock.now
    decider.away, decider.board.at = (away_s, now - 10), {"rank/0": now, **dict.fromkeys(["rank/1", "launcher/1"], now - 10 + heard_s)}
    decider.board.values["launcher/1"] = {"left": False}
    verdict = decider.verdict()
    assert (verdict.rank, verdict.what) == blamed


def test_a_store_that_ends_after_ctrl_z_for_all(clock):
    """If it has answered since, its launcher had not given up, and died: else this one was stopped for too long."""
    follower, now = watch.Follower(channel.Board(dist.HashStore(), ["rank/1", "verdict"], "launcher/1"), 1, 8), clock.now
    follower.away = 9, now - 5
    for answered, rank in ((now - 14, 1), (now - 1, 0)):
        follower.board.answered = answered
        assert follower.of_lost_store().rank == rank


def test_beats_are_measured_by_our_own_clock(clock):
    board = channel.Board(dist.HashStore(), ["rank/0"])
    assert board.age("rank/0") < 0  # it may still be starting
    board.hear("rank/0", b"whatever the rank's own clock says")
    assert board.age("rank/0") == 0
    clock.now += 30
    board.hear("rank/0", b"whatever the rank's own clock says")  # nothing new
    assert board.age("rank/0") == 30
    board.forgive()
    assert board.age("rank/0") == 0


def futures(*, failing=()):
    made = [torch.futures.Future() for _ in range(3)]
    for index in failing:
        made[index].set_exception(KeyError(index))
    return made


def test_wait_all_raises_at_once():
    """`torch.futures.wait_all` would wait for the two that never end."""
    with pytest.raises(KeyError):
        wait_all(futures(failing=[1]))
    whole = futures()
    for index in (2, 0, 1):
        whole[index].set_result(index)
    assert wait_all(whole) == [0, 1, 2]
    assert wait_all([]) == []


@pytest.mark.parametrize(("local_ranks", "together", "transports"), [(2, False, None), (99, True, None), (99, False, "uv")])
def test_how_rpc_sends(local_ranks, together, transports):
    """All ways, but where polling would take the cores from others."""
    assert environment.rpc_transports(local_ranks, 2, together) == transports


@pytest.mark.parametrize("wish", ["shm,uv", "uv", None])
def test_how_rpc_sends_is_the_users_choice(wish, monkeypatch):
    monkeypatch.delenv("RPC_TRANSPORTS", raising=False)
    if wish:
        monkeypatch.setenv("RPC_TRANSPORTS", wish)
    assert launch(take_note, parse(world_size=1), role_name)["transports"] == wish


def test_rpc_transports_unknown(monkeypatch, capsys):
    monkeypatch.setenv("RPC_TRANSPORTS", "uv,pigeon")
    with pytest.raises(SystemExit, match="^2$"):
        cli.Parser("example", "").parse_args([])
    assert capsys.readouterr().err == "error: RPC_TRANSPORTS=uv,pigeon must be one or more of shm,ibv,uv\n"


class SlowStore:
    """A store that answers the first question late."""

    def __init__(self, seconds):
        self.seconds, self.written = seconds, []

    def set(self, key, value):
        self.written.append(json.loads(value))

    def multi_get(self, keys):
        time.sleep(self.seconds)
        self.seconds = 0
        return [b""] * len(keys)


def test_a_launcher_leaves_a_slow_store(monkeypatch):
    """That it leaves is written also where an earlier question has not been answered yet."""
    monkeypatch.setattr(channel, "ours", lambda store: store)
    store = SlowStore(1.5 * channel.BEAT_S)
    board = channel.Board(store, ["verdict"], "launcher/1")
    assert not board.exchange()
    board.take_leave(left=True)
    assert store.written[-1]["left"]


def test_a_launcher_does_not_wait_for_a_silent_store(monkeypatch):
    """That has not answered for --timeout; the run would end later than the pages say."""
    board, asked = channel.Board(dist.HashStore(), ["verdict"], "launcher/1"), []
    board.answered -= 60
    monkeypatch.setattr(board, "exchange", lambda: asked.append(board.status["left"]))
    board.take_leave(left=True)
    assert asked == [True]


@pytest.mark.parametrize("words", [b"[" * 60_000, b"{", b"\xff" * 16, b"7"])
def test_what_a_stranger_writes_is_no_word_of_a_rank(words):
    """Neither does it end the launcher, nor is it taken for a status."""
    board = channel.Board(dist.HashStore(), ["rank/0"])
    board.store.set("rank/0", words)
    assert board.exchange()
    assert watch.Launcher(board, 0, 8).status(0) == {}


@pytest.mark.parametrize("own", [None, "launcher/1"])
def test_a_store_ends_with_its_board(own, monkeypatch):
    """Without the collector: the store of a run that is over has a server with a port and a thread, and a fork has no thread."""
    monkeypatch.setattr(channel, "ours", lambda store: store)
    board = channel.Board(SlowStore(0), ["verdict"], own)
    board.exchange()
    store = weakref.ref(board.store)
    gc.disable()
    try:
        del board
        deadline = time.monotonic() + SOON_S  # the thread that has read in it ends
        while store() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store() is None
    finally:
        gc.enable()


def test_a_result_is_read_before_its_launcher_leaves(monkeypatch, tmp_path):
    """When it has left, the launcher of rank 0 may end, and with it the store in which the result is."""
    left = []
    follower = SimpleNamespace(watch=lambda *_: None, status=lambda _: {"pieces": 1}, close=left.append)
    monkeypatch.setattr(start, "_meet", lambda *_: (None, "tcp://localhost:1", follower))
    monkeypatch.setattr(start.Processes, "start", lambda *_: None)
    monkeypatch.setattr(channel, "read_result", lambda *_: {"left": bool(left)})
    args = parse("--rank", "1", "--master_addr", "localhost", "--output_dir", str(tmp_path))
    assert not launch(None, args, role_name)["left"]
    assert left == [None]


@pytest.mark.parametrize(("module", "registered"), [("__main__", 1), ("rpc_rl.main", 0)])
def test_the_end_of_a_rank_of_torchrun(module, registered, monkeypatch):
    """A script ends at once, as other ranks do; a program that somebody else has imported leaves the end to him."""
    at_exit = []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    program.end_at_once(SimpleNamespace(__module__=module))
    assert at_exit == [(exit_now, 0)] * registered


def test_a_slow_start_is_no_standstill(clock, capfd):
    """A rank's first words are that it lives; what does not move yet has not stopped."""
    decider = two_ranks(timeout=8)

    def hear(later_s, **status):
        clock.now += later_s
        for key in decider.board.keys:
            decider.board.hear(key, json.dumps({"left": False, **status}).encode())
        decider.note_standstill()

    hear(20, beat=1)
    hear(0, beat=2, moved=[0, 7])
    assert capfd.readouterr().err == ""
    hear(8 + watch.GRACE_S + 1, beat=3, moved=[0, 7])
    assert capfd.readouterr().err.startswith("note: for 8 s, nothing has moved: ")
