"""A rank that fails ends the run everywhere, and one line names it: the promise of docs/faults.md."""

import ast
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

from common import cli, environment, launch
from common.launch import CAUSE, LOST, SILENT, WAITED, Failure, failure_of
from common.program import role_name

import joblib
import pytest
import torch.distributed as dist

from tests import started
from tests.helpers import (
    ROOT,
    all_end,
    children,
    command_of,
    commands,
    errors_of,
    nothing_left,
    processes,
    run,
    running,
    script,
    torchrun,
)

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(150)
TIMEOUT_S = 8
LIMIT_S = 100  # torchrun waits for 30 s before it kills a frozen rank
RL, TRAIN = "rpc_rl.main", "p2p_collectives.train"
FOREVER = {RL: "--max_episodes 100000 --reward_threshold 499 --log_interval 1",
           TRAIN: "--epochs 100000"}
ROLES = {RL: ("agent", "observer1", "observer2"), TRAIN: ("rank0", "rank1", "rank2")}
SILENCE = r"has not (answered for \d+ s|joined within \d+ s)"  # the second one before its first beat
SAYS = {"raise": "raised ValueError", "exit0": "exited with status 0 before its work was done",
        "exit3": "exited with status 3", "SIGKILL": "was killed by SIGKILL",
        "SIGTERM": "was killed by SIGTERM", "SIGSTOP": SILENCE}


def forever(path, lesson, *flags):
    """A script and its flags, with three ranks that never end by themselves."""
    return [path, *flags, *FOREVER[lesson].split(), "--timeout", TIMEOUT_S]


def ended(mode, lesson, fault, rank, folder, *flags):
    """The status and the errors of each command of a run in which a rank fails; nothing is left."""
    three = [] if mode == "torchrun" else ["--world_size", 3]
    lines = commands(mode, 3, *forever("tests/fault.py", lesson, lesson, *flags), *three[:mode == "local" and 2])
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(line, folder, env={"FAULT": f"{rank} {fault}"})) for line in lines]
        frozen = runs[rank] if mode == "manual" and fault == "SIGSTOP" else None
        found = [(one.returncode, err) for one in runs if one is not frozen for _, err in [one.communicate(timeout=LIMIT_S)]]
        if frozen:
            frozen.kill()
        nothing_left(runs[0], folder, *runs[1:])
    return found


@pytest.mark.parametrize(("lesson", "fault", "rank"), [
    *((RL, fault, 1) for fault in SAYS), (RL, "SIGSTOP", 0), (TRAIN, "raise", 0), (TRAIN, "SIGKILL", 1),
    *(pytest.param(RL, fault, 0, marks=slow) for fault in SAYS if fault != "SIGSTOP"),
    *(pytest.param(TRAIN, fault, rank, marks=slow) for fault in SAYS for rank in (0, 1)
      if (fault, rank) not in (("raise", 0), ("SIGKILL", 1)))])
def test_local(lesson, fault, rank, tmp_path):
    (status, err), = ended("local", lesson, fault, rank, tmp_path)
    assert status == 1
    assert len(errors_of(err)) == 1, err
    line = rf"error: rank {rank} \({ROLES[lesson][rank]}\) {SAYS[fault]}(; stopped \d other process(es)?)?"
    assert re.fullmatch(line, err.splitlines()[-1]), err
    assert ("ValueError: injected" in err) == (fault == "raise")
    assert ("Traceback" in err) == (fault == "raise"), err


@pytest.mark.parametrize(("lesson", "fault"), [(RL, "raise"), pytest.param(TRAIN, "SIGKILL", marks=slow)])
def test_spawn(lesson, fault, tmp_path):
    (status, err), = ended("local", lesson, fault, 1, tmp_path, "--start_method", "spawn")
    assert status == 1
    assert [rf"error: rank 1 ({ROLES[lesson][1]}) {SAYS[fault]}" in line for line in errors_of(err)] == [True], err


@pytest.mark.parametrize(("lesson", "fault", "rank"), [
    (RL, "raise", 1), (RL, "SIGKILL", 1), (TRAIN, "SIGKILL", 0),
    *(pytest.param(lesson, fault, rank, marks=slow)
      for lesson in FOREVER for fault in ("raise", "exit0", "SIGKILL", "SIGTERM", "SIGSTOP") for rank in (0, 1)
      if (lesson, fault, rank) not in ((RL, "raise", 1), (RL, "SIGKILL", 1), (TRAIN, "SIGKILL", 0)))])
def test_manual(lesson, fault, rank, tmp_path):
    """Three terminals: each one that lives ends, and says who failed. Nobody can tell how a rank has died."""
    found = ended("manual", lesson, fault, rank, tmp_path)
    says = {"raise": SAYS["raise"], "SIGTERM": "was interrupted"}.get(fault, SILENCE if rank else f"(is gone|{SILENCE})")
    own = {"exit0": 0, "SIGKILL": -signal.SIGKILL, "SIGTERM": 130}.get(fault, 1)
    for number, (status, err) in enumerate(found):
        if number == rank and fault in ("exit0", "SIGKILL", "SIGTERM"):
            assert (status, errors_of(err)) == (own, [])
            continue
        assert status == 1
        assert len(errors_of(err)) == 1, err
        assert re.fullmatch(rf"error: rank {rank} \({ROLES[lesson][rank]}\) {says}", errors_of(err)[0]), err


@pytest.mark.parametrize(("lesson", "fault", "rank"), [
    (RL, "raise", 1), (TRAIN, "SIGKILL", 0),
    *(pytest.param(lesson, fault, rank, marks=slow)
      for lesson in FOREVER for fault in SAYS for rank in (0, 1)
      if (lesson, fault, rank) not in ((RL, "raise", 1), (TRAIN, "SIGKILL", 0)))])
def test_torchrun(lesson, fault, rank, tmp_path):
    """Our line names a rank that raised or is silent; the report of torchrun, one that has died."""
    (status, err), = ended("torchrun", lesson, fault, rank, tmp_path)
    assert status == 1
    dies = {"exit3": 3, "SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM}.get(fault)
    if dies is not None:
        assert re.search(rf"rank +: {rank} \(local_rank: {rank}\)\s+exitcode +: {dies} ", err), err
        return
    assert len(errors_of(err)) == 1, err
    says = SAYS["raise"] if fault == "raise" else SILENCE
    assert re.fullmatch(rf"error: rank {rank} \({ROLES[lesson][rank]}\) {says}", errors_of(err)[0]), err


# --- Ctrl-C, SIGTERM, a killed launcher


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def imports_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def has_child(words):
    return lambda pid: any(words in command_of(child) for child in children(pid))


MOMENTS = {"torch is imported": imports_torch, "the fork server starts": has_child("forkserver"),
           "the ranks start": lambda pid: any(len(children(child)) > 1 for child in children(pid))}


def stop(one, name):
    """Ctrl-C goes to all processes of a terminal; other signals only to the launcher."""
    os.killpg(one.pid, signal.SIGINT) if name == "SIGINT" else one.send_signal(getattr(signal, name))


@pytest.mark.parametrize(("moment", "method", "name"), [
    *((moment, "forkserver", "SIGINT") for moment in MOMENTS), ("the ranks start", "forkserver", "SIGTERM"),
    pytest.param("spawn", "spawn", "SIGINT", marks=slow)])
def test_stopped_early(moment, method, name, tmp_path):
    with running(script("ddp_basic/main.py", "--start_method", method), tmp_path) as one:
        wait_until(lambda: MOMENTS.get(moment, has_child("spawn_main"))(one.pid))
        stop(one, name)
        _, err = one.communicate(timeout=LIMIT_S)
        assert one.returncode == 130
        assert re.fullmatch(r"\ninterrupted(; stopped \d process(es)?)?\n", err), err
        nothing_left(one, tmp_path)


@pytest.mark.parametrize(("name", "lesson"), [("SIGINT", RL), ("SIGTERM", TRAIN), pytest.param("SIGHUP", RL, marks=slow)])
def test_stopped_late(name, lesson, tmp_path):
    with running(script(*forever(f"{lesson.replace('.', '/')}.py", lesson, "--world_size", 3)), tmp_path, until="ep") as one:
        for _ in range(3):  # `timeout` repeats a signal
            stop(one, name)
        _, err = one.communicate(timeout=LIMIT_S)
        assert (one.returncode, err) == (130, "\ninterrupted; stopped 3 processes\n")
        nothing_left(one, tmp_path)


@pytest.mark.parametrize(("mode", "until"), [
    ("local", "ep"), ("local", None), pytest.param("torchrun", "ep", marks=slow)])
def test_a_killed_launcher_leaves_no_process(mode, until, tmp_path):
    line, = commands(mode, 3, *forever("rpc_rl/main.py", RL))
    with running(line, tmp_path, until=until) as one:
        if until is None:
            wait_until(lambda: MOMENTS["the ranks start"](one.pid))
        one.kill()
        all_end(lambda process: os.getsid(process.pid) == one.pid)
        all_end(lambda process: process.cwd() == str(tmp_path))  # torchrun's ranks have sessions of their own


# --- what surrounds a run


def in_shell(line, folder, **variables):
    """Run a command line of a shell in which $PYTHON and $ROOT are set."""
    return run(["bash", "-o", "pipefail", "-c", line], folder,
               env={**os.environ, "PYTHON": sys.executable, "ROOT": str(ROOT), **variables})


@pytest.mark.parametrize("limit", ["-Sn 64", pytest.param("-n 64", id="hard")])
def test_open_files(limit, tmp_path):
    """The soft limit is raised; what does not fit into the hard one is refused before any process starts."""
    done = in_shell(f"ulimit {limit}; $PYTHON $ROOT/rpc_rl/main.py --world_size 9 --max_episodes 1", tmp_path)
    if "S" in limit:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert done.stderr.startswith("error: --world_size 9 is too much for this machine"), done.stderr


@pytest.mark.parametrize("mode", ["", pytest.param("--rank 0 --master_addr localhost", marks=slow)])
def test_nobody_reads(mode, tmp_path):
    done = in_shell(f"$PYTHON $ROOT/p2p_collectives/train.py --world_size 1 --epochs 100000 {mode} | head -1", tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.match("error: .*cannot print, because (its|the) output is closed", done.stderr)


@pytest.mark.parametrize("value", [pytest.param("1", marks=slow), "x"])
def test_variables_of_torchrun_count_only_under_torchrun(value, tmp_path):
    done = in_shell("$PYTHON $ROOT/ddp_basic/main.py --demo basic", tmp_path,
                    RANK=value, LOCAL_RANK=value, LOCAL_WORLD_SIZE=value, TORCHELASTIC_RUN_ID="old")
    assert (done.returncode, done.stderr) == (0, "")


# --- the file that was given is what is judged


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A second checkout, whose ddp_basic does not train."""
    folder = tmp_path_factory.mktemp("checkouts") / "second"
    for name in ("common", "ddp_basic"):
        shutil.copytree(ROOT / name, folder / name)
    main = folder / "ddp_basic" / "main.py"
    main.write_text(main.read_text().replace("        optimizer.zero_grad()", "        pass"))
    shutil.copytree(folder / "ddp_basic", folder.parent / "ddp_basic")  # without its checkout
    shutil.copy(main, folder / "copied.py")
    return folder


@pytest.mark.parametrize("line", [
    pytest.param("cd $SECOND/ddp_basic; $PYTHON main.py --check", id="second clone"),
    pytest.param("$PYTHON $SECOND/ddp_basic/main.py --check", id="another directory"),
    pytest.param("$PYTHON -m torch.distributed.run --standalone --nproc_per_node 1 $SECOND/ddp_basic/main.py --check", id="torchrun"),
    pytest.param("$PYTHON $SECOND/../ddp_basic/main.py --check", id="folder copied out"),
    pytest.param("$PYTHON $SECOND/copied.py", id="copied script"),
    pytest.param("cd $ROOT; $PYTHON - --check --output_dir $PLACE < $SECOND/ddp_basic/main.py", id="stdin"),
])
def test_what_is_judged_is_the_file_that_was_given(line, second, tmp_path):
    """An environment in which the first checkout is installed."""
    done = in_shell(line, tmp_path, PYTHONPATH=str(ROOT), SECOND=str(second), PLACE=str(tmp_path))
    if "torch.distributed.run" in line:
        assert (done.returncode, len(errors_of(done.stderr))) == (1, 1), done.stderr
    else:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert done.stderr.startswith("error: ")
    assert "[check]" not in done.stdout


def test_a_second_clone_with_an_environment_of_its_own_is_judged(second, tmp_path):
    done = in_shell("$PYTHON $SECOND/ddp_basic/main.py --check", tmp_path, PYTHONPATH=str(second), SECOND=str(second))
    assert (done.returncode, "FAIL" in done.stdout) == (1, True), done.stderr


# --- private names

LOST_NAMES = {
    # Not for multiprocessing itself, which has taken it already.
    "resource tracker": """
import multiprocessing, multiprocessing.forkserver, multiprocessing.popen_forkserver, types
multiprocessing.resource_tracker = types.ModuleType("resource_tracker")""",
    "RPC's print": "import torch.distributed.rpc as r; del r.internal",
    "default timeouts": "from torch.distributed import distributed_c10d as d; del d.default_pg_timeout, d.default_pg_nccl_timeout",
    "RPC's transports": """
import torch.distributed.rpc as r
class Options(r.TensorPipeRpcBackendOptions):
    def __init__(self, num_worker_threads=16, rpc_timeout=60, init_method="env://", **_):
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
r.TensorPipeRpcBackendOptions = Options""",
    "a preload": "from common import environment as e; e.PRELOAD = ['torch._no_such_module']",
    "argparse's help": """
import argparse
del argparse.HelpFormatter._get_help_string, argparse.ArgumentDefaultsHelpFormatter._get_help_string""",
}
LOST_NAMES["all of them"] = "\n".join(LOST_NAMES.values())


@pytest.mark.parametrize("program", ["rpc_rl.main --max_episodes 1", "ddp_basic.main --demo basic"])
@pytest.mark.parametrize("name", [
    name if name == "all of them" else pytest.param(name, marks=slow) for name in LOST_NAMES])
def test_no_private_name_is_needed(name, program, tmp_path):
    """A script that deletes it, in each rank, too."""
    lesson, *flags = program.split()
    (tmp_path / "without.py").write_text(
        f"{LOST_NAMES[name]}\nif __name__ == '__main__':\n    import {lesson}\n    {lesson}.main()\n")
    done = in_shell(f"$PYTHON without.py {' '.join(flags)}", tmp_path, PYTHONPATH=str(ROOT), RPC_TRANSPORTS="uv")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_no_other_private_name_is_used():
    known = {"_exit", "_replace", "_get_help_string", "_check_ranks", "_settings"}  # documented, or of argparse, or ours
    for name in ("launch", "environment", "program", "session", "limits", "cli"):
        tree = ast.parse((ROOT / "common" / f"{name}.py").read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert {one for one in used if one.startswith("_") and not one.endswith("__")} <= known


# --- whom to blame


@pytest.mark.parametrize(("error", "failure"), [
    (ValueError("Connection closed"), (CAUSE, 0, "raised ValueError")),
    (RuntimeError("Connection closed by peer [127.0.0.1]:1234"), (LOST, 0, "raised RuntimeError")),
    (ConnectionResetError(), (LOST, 0, "raised ConnectionResetError")),
    (SystemExit(3), (CAUSE, 0, "exited with status 3")),
    (SystemExit(), (CAUSE, 0, "exited with status 0 before its work was done")),
    (RuntimeError("On WorkerInfo(id=2, name=observer2):\nKeyError('a')"), (CAUSE, 2, "raised KeyError")),
    (RuntimeError("On WorkerInfo(id=2, name=observer2):\nRuntimeError('eof (this error originated at tensorpipe)')"),
     (LOST, 2, "raised RuntimeError")),
    (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"),
     (WAITED, 0, "has waited for 60 s")),
    (TimeoutError("timed out: at a barrier of this machine's 2 ranks"), (WAITED, 0, "timed out: at a barrier of this machine's 2 ranks")),
], ids=repr)
def test_what_an_exception_means(error, failure):
    assert failure_of(0, error, 8)[:3] == failure


def test_the_cause_comes_before_silence_before_notices(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    states = launch.States(store, ["a", "b", "c"], TIMEOUT_S, 60.0)

    def write(rank, **state):
        launch.of_states(store).set(str(rank), f'{{"beat": {now[0]}, {", ".join(state.values())}}}')
        states.read()

    for rank in range(3):
        write(rank, left='"left": false')
    now[0] += 5
    write(0, failure=f'"failure": [{LOST}, 0, "raised RuntimeError"]')
    write(2, left='"left": false')
    assert states.verdict() is None  # rank 1 has been silent, but another cause may still be written
    now[0] += launch.GRACE_S
    write(2, left='"left": false')
    assert states.verdict()[:3] == (SILENT, 1, "has not answered for 9 s")
    states.found.append(Failure(CAUSE, 2, "was killed by SIGKILL"))
    assert states.verdict() == states.found[0]


def test_where_the_other_ranks_are():
    """The places of the ranks that have waited, too, and of those that still run."""
    reader, writer = Pipe(duplex=False)
    states = launch.States(dist.HashStore(), ["a", "b", "c"], TIMEOUT_S, 60.0)
    place = f'  File "{ROOT}/ddp_basic/main.py", line 1 in work\n'
    states.found.append(Failure(WAITED, 1, "has waited", f'  File "{ROOT}/rpc_rl/main.py", line 1, in call\n'))
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    os.write(writer.fileno(), f"Current thread 0x01:\n{place}".encode())
    try:
        told = launch.with_the_others(Failure(WAITED, 0, "has waited for 8 s"), states, {2: sleeper.pid}, reader)
    finally:
        sleeper.kill()
        sleeper.wait()
    first, second = ((ROOT / name).read_text().splitlines()[0].strip() for name in ("rpc_rl/main.py", "ddp_basic/main.py"))
    assert told.what == (f"has waited for 8 s; rank 1 (b) is at rpc_rl/main.py:1, `{first}`; "
                         f"rank 2 (c) is at ddp_basic/main.py:1, `{second}`")
    assert "rank 2 (c), the innermost line first:" in told.traceback


# --- the state of a rank


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=slow)])
def test_state_of_a_rank(method, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("A_VARIABLE", method)
    monkeypatch.chdir(tmp_path)
    args = cli.Parser("test", "", 2).parse_args(["--start_method", method])
    state = launch.launch(started.tell_state, args, role_name)
    assert state.pop("wall_s") > 0
    assert state.pop("interfaces") in (["lo", "lo"], ["lo0", "lo0"])
    assert state == {"ranks": ["1", "2", "1", "2"], "threads": max(1, joblib.cpu_count() // 2), "variable": method,
                     "folder": str(tmp_path)}
    assert "INIT_METHOD" not in os.environ  # the process that starts the others stays as it was


@pytest.mark.parametrize(("setting", "expected"), [
    (None, max(1, joblib.cpu_count() // 2)), pytest.param("1", 1, marks=slow), pytest.param("3", 3, marks=slow)])
def test_threads_under_torchrun(setting, expected, tmp_path):
    """Torchrun sets OMP_NUM_THREADS to 1 by itself: that is not the user's wish, but a user's 1 is."""
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = run(torchrun(2, "tests/started.py"), tmp_path, env=others | ({"OMP_NUM_THREADS": setting} if setting else {}))
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"threads {expected}"] * 2), done.stderr


def test_two_runs_at_once(monkeypatch, tmp_path):
    """Each is quiet, and has its result; without what conftest.py has set for all tests."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("RPC_TRANSPORTS")
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(script("rpc_rl/main.py", "--max_episodes", 1, "--output_dir", name), tmp_path))
                for name in "ab"]
        for one in runs:
            assert one.communicate(timeout=LIMIT_S)[1] == ""
            assert one.returncode == 0
        nothing_left(runs[0], tmp_path, *runs[1:])
    assert {path.parent.name for path in tmp_path.glob("*/metrics.json")} == {"a", "b"}


def test_transports_of_rpc():
    """All of them, except where polling would take the cores from other ranks."""
    found = [environment.rpc_transports(ranks, 2, together) for ranks, together in itertools.product((2, 99), (True, False))]
    assert found == [None, None, None, "uv"]


def test_loopback():
    assert all(map(environment.is_loopback, ("localhost", "127.0.0.1", "127.1.2.3")))
    assert not any(map(environment.is_loopback, ("10.0.0.1", "host127", "192.168.1.7")))
    assert environment.interface_towards("127.0.0.1") in ("lo", "lo0")
    assert environment.interface_towards("no such host") is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_manual_launch_that_does_not_come_together(rank, free_port, tmp_path):
    done = run(script("ddp_basic/skew.py", "--world_size", 2, "--rank", rank, "--timeout", 2, "--master_addr", "localhost",
                      "--master_port", free_port), tmp_path)  # in skew.py, the ranks join for longer than --timeout
    says = ("rank 1 (rank1) has not joined within 10 s",
            f"rank 0 (rank0) cannot be reached: localhost:{free_port} has not answered for 10 s")[rank]
    assert (done.returncode, done.stderr) == (1, f"error: {says}\n")
    assert not processes(lambda process: process.cwd() == str(tmp_path))
