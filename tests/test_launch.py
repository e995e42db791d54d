"""A rank that fails ends the run everywhere, and one line names it: the promise of docs/faults.md."""

import ast
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from argparse import Namespace
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
FOREVER = {RL: "--max_episodes 100000 --reward_threshold 499 --log_interval 1", TRAIN: "--epochs 100000"}
ROLES = {RL: ("agent", "observer1", "observer2"), TRAIN: ("rank0", "rank1", "rank2")}

RAISED = "raised ValueError"
SILENCE = r"has not (answered for \d+ s|joined within \d+ s)"  # the second one before its first beat
SAYS = {  # fault: the line of a local run; the status of the rank's own terminal; the line elsewhere; torchrun's line or exit code
    "raise": (RAISED, 1, RAISED, RAISED),
    "exit0": ("exited with status 0 before its work was done", 0, SILENCE, SILENCE),
    "exit3": ("exited with status 3", 3, SILENCE, 3),
    "SIGKILL": ("was killed by SIGKILL", -9, SILENCE, -9),
    "SIGTERM": ("was killed by SIGTERM", 130, "was interrupted", -15),
    "SIGSTOP": (SILENCE, None, SILENCE, SILENCE),
}
EACH_DAY = [
    *(("local", RL, fault, 1) for fault in SAYS), ("local", RL, "SIGSTOP", 0), ("local", TRAIN, "raise", 0), ("local", TRAIN, "SIGKILL", 1),
    ("spawn", RL, "raise", 1), ("manual", RL, "raise", 1), ("manual", RL, "SIGKILL", 1), ("manual", TRAIN, "SIGKILL", 0),
    ("torchrun", RL, "raise", 1), ("torchrun", TRAIN, "SIGKILL", 0)]
EACH_NIGHT = [row for row in itertools.product(("local", "manual", "torchrun"), FOREVER, SAYS, (0, 1)) if row not in EACH_DAY]


def forever(path, lesson, *flags):
    """A script and its flags, with three ranks that never end by themselves."""
    return [path, *flags, *FOREVER[lesson].split(), "--timeout", TIMEOUT_S]


def ended(mode, lesson, fault, rank, folder):
    """The status and the errors of each command of a run in which a rank fails; nothing is left."""
    flags = {"local": ["--world_size", 3], "spawn": ["--world_size", 3, "--start_method", "spawn"]}.get(mode, [])
    lines = commands("local" if mode == "spawn" else mode, 3, *forever("tests/fault.py", lesson, lesson, *flags))
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(line, folder, env={"FAULT": f"{rank} {fault}"})) for line in lines]
        frozen = runs[rank] if mode == "manual" and fault == "SIGSTOP" else None
        found = [(one.returncode, err) for one in runs if one is not frozen for _, err in [one.communicate(timeout=LIMIT_S)]]
        if frozen:
            frozen.kill()
        nothing_left(runs[0], folder, *runs[1:])
    return found


@pytest.mark.parametrize(("mode", "lesson", "fault", "rank"), [*EACH_DAY, *(pytest.param(*row, marks=slow) for row in EACH_NIGHT)])
def test_a_rank_fails(mode, lesson, fault, rank, tmp_path):
    """The run ends, and one line names the rank; torchrun's report names a rank that has died."""
    line, own_status, elsewhere, of_torchrun = SAYS[fault]
    found = ended(mode, lesson, fault, rank, tmp_path)
    if mode == "manual":
        line = f"(is gone|{SILENCE})" if elsewhere == SILENCE and rank == 0 else elsewhere
        if fault not in ("raise", "SIGSTOP"):
            status, err = found.pop(rank)  # of the rank's own terminal, which says nothing
            assert (status, errors_of(err)) == (own_status, [])
    for status, err in found:
        assert status == 1
        if mode == "torchrun" and isinstance(of_torchrun, int):
            assert re.search(rf"rank +: {rank} \(local_rank: {rank}\)\s+exitcode +: {of_torchrun} ", err), err
            continue
        line = of_torchrun if mode == "torchrun" else line
        said, = errors_of(err)
        assert re.fullmatch(rf"error: rank {rank} \({ROLES[lesson][rank]}\) {line}(; stopped \d other process(es)?)?", said), err
    if mode in ("local", "spawn"):
        assert err.splitlines()[-1] == said
        assert ("ValueError: injected" in err) == ("Traceback" in err) == (fault == "raise"), err


@pytest.mark.parametrize("mode", ["local", *(pytest.param(mode, marks=slow) for mode in ("manual", "torchrun"))])
def test_ranks_that_wait(mode, tmp_path):
    """All ranks show where they are, the one that sleeps, too; then one line says which has waited, and where."""
    found = ended(mode, TRAIN, "sleeps", 1, tmp_path)
    asleep = found[mode == "manual"][1]
    assert re.search(r'rank 1 \(rank1\), the innermost line first:\n(.*\n)*?  File ".*/tests/fault.py", line \d+ in fail\n', asleep), asleep
    for status, err in found:
        assert status == 1
        says = r"error: rank [02] \(rank[02]\) has waited for 8 s at p2p_collectives/\w+\.py:\d+, `.+`(; stopped \d other process(es)?)?"
        assert re.fullmatch(says, "\n".join(errors_of(err))), err
        assert mode == "torchrun" or err.splitlines()[-1] == errors_of(err)[0]


# --- Ctrl-C, SIGTERM, a killed launcher


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def imports_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


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


UNDER_NOHUP = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup: SIGHUP is ignored here")


@pytest.mark.parametrize(("name", "lesson"), [("SIGINT", RL), ("SIGTERM", TRAIN), pytest.param("SIGHUP", RL, marks=[slow, UNDER_NOHUP])])
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


CAN_UNSHARE = shutil.which("unshare") and run(["unshare", "-rn", "true"], ROOT).returncode == 0
RUN, TRAINS = "$PYTHON $ROOT/ddp_basic/main.py --demo basic", "$PYTHON $ROOT/p2p_collectives/train.py --world_size 1 --epochs 100000"
MANY = "$PYTHON $ROOT/rpc_rl/main.py --world_size 9 --max_episodes 1"
CLOSED = "error: .*cannot print, because (its|the) output is closed"


@pytest.mark.parametrize(("line", "status", "says"), [
    pytest.param(f"ulimit -Sn 64; {MANY}", 0, "", id="few open files: the soft limit"),
    pytest.param(f"ulimit -n 64; {MANY}", 2, "error: --world_size 9 is too much for this machine.*", id="few open files: the hard limit"),
    pytest.param(f"unshare -rn {RUN}", 2, "error: this machine cannot connect to itself at 127.0.0.1 .*", id="loopback is down",
                 marks=pytest.mark.skipif(not CAN_UNSHARE, reason="no network namespace can be made here")),
    pytest.param(f"{TRAINS} | head -1", 1, CLOSED, id="output that nobody reads"),
    pytest.param(f"{TRAINS} --rank 0 --master_addr localhost | head -1", 1, CLOSED, id="the same, manual", marks=slow),
    pytest.param(f"RANK=x LOCAL_RANK=x LOCAL_WORLD_SIZE=x TORCHELASTIC_RUN_ID=old {RUN}", 0, "", id="variables of torchrun"),
    pytest.param(RUN.replace("$PYTHON", "$PYTHON -m cProfile -o profile"), 0, "", id="cProfile"),
    pytest.param(RUN.replace("$PYTHON", "$PYTHON -m pdb -c continue -c quit"), 0, "", id="pdb"),
    pytest.param(f"{RUN} --lrr 1", 2, r"error: unrecognized arguments: --lrr 1; did you mean --lr\?", id="a typo in a flag"),
    pytest.param(f"{RUN} --local-rank=0", 2, "error: unrecognized arguments: --local-rank=0; .* with torchrun", id="torch.distributed.launch"),
    pytest.param(f"PICTURE_LANGUAGES=jp {RUN}", 2, "error: PICTURE_LANGUAGES=jp must be one or more of en,ja", id="no such language"),
])
def test_at_most_one_line(line, status, says, tmp_path):
    done = in_shell(line, tmp_path)
    assert done.returncode == status, done.stderr
    assert re.fullmatch(says, done.stderr.removesuffix("\n")), done.stderr


# --- the file that was given is what is judged


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A second checkout, whose ddp_basic does not train."""
    folder = tmp_path_factory.mktemp("checkouts") / "second"
    for name in ("common", "ddp_basic"):
        shutil.copytree(ROOT / name, folder / name)
    main = folder / "ddp_basic" / "main.py"
    main.write_text(main.read_text(encoding="utf-8").replace("        optimizer.zero_grad()", "        pass"))
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
    known = {"_exit", "_replace", "_get_help_string", "_check_ranks", "_settings", "_advice"}  # documented, or of argparse, or ours
    for name in ("launch", "environment", "program", "session", "limits", "cli"):
        tree = ast.parse((ROOT / "common" / f"{name}.py").read_text(encoding="utf-8"))
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
        store.set(f"state {rank}", f'{{"beat": {now[0]}, {", ".join(state.values())}}}')
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


def test_the_first_failure_of_a_rank_stays(tmp_path):
    """After Ctrl-C in a manual launch, a rank still raises what follows from the end of the others."""
    store = dist.HashStore()
    beats = launch.Beats(store, 0, Namespace(output_dir=tmp_path))
    beats.write(failure=Failure(CAUSE, 0, "was interrupted"))
    beats.write(failure=Failure(LOST, 0, "raised RuntimeError"))
    assert json.loads(store.get("state 0"))["failure"] == [CAUSE, 0, "was interrupted", ""]


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
    (None, max(1, joblib.cpu_count() // 3)), pytest.param("1", 1, marks=slow), pytest.param("4", 4, marks=slow)])
def test_state_under_torchrun(setting, expected, tmp_path):
    """Torchrun sets OMP_NUM_THREADS to 1 by itself: that is not the user's wish, but a user's 1 is. Many ranks do not poll."""
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RPC_TRANSPORTS")}
    done = run(torchrun(3, "tests/started.py"), tmp_path, env=environ | ({"OMP_NUM_THREADS": setting} if setting else {}))
    transports = "uv" if joblib.cpu_count() < 3 else None
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"threads {expected}, transports {transports}"] * 3), done.stderr


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
