"""Faults of programs that are started as commands: manual launch, torchrun, and a launcher that gets a signal.

The table of programs is in tests/test_faults.py.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from tests.fault_table import KILLED, OF_A_LAUNCHER
from tests.helpers import (
    ENDS_S,
    SOON_S,
    children,
    command_of,
    commands,
    descendants,
    errors_of,
    listening,
    nothing_left,
    running,
    script,
    workers,
)
from tests.test_faults import PROGRAMS, line, wait_for

COLD_S = 150  # that a busy machine may take for imports
MANUAL_TIMEOUT_S = 10.0  # several commands that import torch at the same time come late
BY_ITSELF = ("exception", "long traceback", "KeyboardInterrupt", "os._exit(0)", "sys.exit(0)", "sys.exit(3)", "destroyed group")
RL, TRAIN = PROGRAMS[0], next(program for program in PROGRAMS if program.lesson == "p2p_collectives.train")


@pytest.mark.parametrize(("program", "fault", "rank"), [
    (RL, "SIGKILL", 0), (RL, "SIGKILL", 1), (RL, "SIGSTOP", 0), (RL, "SIGSTOP", 1), (RL, "exception", 1),
    (TRAIN, "SIGSTOP", 1), (TRAIN, "SIGSEGV", 0), (TRAIN, "SIGTERM", 1), (TRAIN, "SIGABRT", 0),
    *((TRAIN, fault, 1) for fault in BY_ITSELF),
], ids=str)
@pytest.mark.parametrize("way", ["manual", "torchrun"])
def test_fault_in_the_other_ways_in(program, fault, rank, way, tmp_path):
    """Every launcher ends, in time, and says who failed; under torchrun, so does the process beside the rank."""
    roles = program.roles.split()
    by_itself = fault in BY_ITSELF
    sabotaged = program.sabotaged(roles[1], fault) if by_itself else program.sabotaged()
    flags = [*sabotaged, *program.command("out", MANUAL_TIMEOUT_S)]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path))
                for command in commands(way, len(roles), "tests/sabotage.py", *flags)]
        if by_itself:
            wait_for(tmp_path / "out" / "moment")
        else:
            of_ranks = runs if way == "manual" else runs * len(roles)
            victim = [wait_for_worker(run, rank, way) for rank, run in enumerate(of_ranks)][rank]
            time.sleep(2.0)
            os.kill(victim, getattr(signal, fault))
        began, ended = time.monotonic(), [run.communicate(timeout=MANUAL_TIMEOUT_S + ENDS_S) for run in runs]
        assert time.monotonic() - began < (MANUAL_TIMEOUT_S if fault == "SIGSTOP" else 0) + ENDS_S
        for rank_of_run, (run, (_, err)) in enumerate(zip(runs, ended, strict=True)):
            expected = line(rank, roles, fault, stopped=int(way == "manual" and rank_of_run != rank), way=way)
            errors = errors_of(err)
            assert len(errors) == 1, err
            assert re.fullmatch(expected, errors[0]), err
            assert run.returncode == 1
            if fault == "exception":
                assert "ValueError: sabotage" in err
            if fault in ("SIGSEGV", "SIGABRT") and rank_of_run == rank:
                assert "Fatal Python error" in err
        for run in runs:
            nothing_left(run, tmp_path)


def wait_for_worker(run, rank, way):
    """The process id of a rank, as soon as it has one: forked by its fork server, or watched under torchrun."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = children(run.pid) if way == "torchrun" else workers(run)
        if way == "torchrun" and len(ranks) > rank and children(ranks[rank]):
            return ranks[rank]
        if way == "manual" and ranks:
            return ranks[0]
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    raise AssertionError("no rank has started")


@pytest.mark.parametrize("fault", ["SIGINT", "SIGTERM ten times", "SIGTERM and a frozen rank", "SIGKILL"])
def test_fault_of_a_real_launcher(fault, tmp_path):
    """Ctrl-C goes to all processes of a terminal; `timeout` repeats SIGTERM; a killed one cannot clean up."""
    with running(script("rpc_rl/main.py", "--log_interval", 2), tmp_path, until="episode 2 ") as run:
        if "frozen" in fault:
            os.kill(workers(run)[2], signal.SIGSTOP)
        for pause in range(10 if "ten" in fault else 1):  # until it is gone; also on its way out
            if "SIGINT" in fault:
                os.killpg(run.pid, signal.SIGINT)
            elif run.poll() is None:
                run.send_signal(getattr(signal, fault.split()[0]))
            time.sleep(0.005 * pause)
        _, err = run.communicate(timeout=ENDS_S)
        assert run.returncode == (-signal.SIGKILL if fault == "SIGKILL" else 130)
        assert err == ("" if fault == "SIGKILL" else "\ninterrupted; stopped 3 processes\n")
        nothing_left(run, tmp_path)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_interrupted_with_spawn(program, tmp_path):
    """Ctrl-C in the middle of the work of ranks that `mp.spawn` has started, one of which does not come back from a call."""
    sabotaged = program.sabotaged([*program.raises][-1], "sleep")
    with running(script("tests/sabotage.py", *sabotaged, *program.command("out", COLD_S), "--start_method", "spawn"), tmp_path) as run:
        wait_for(tmp_path / "out" / "moment", COLD_S)  # each rank imports torch for itself
        os.killpg(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=ENDS_S)
        assert run.returncode == 130
        assert err == f"\ninterrupted; stopped {len(program.roles.split())} processes\n"
        nothing_left(run, tmp_path)


@pytest.mark.parametrize(("method", "children"), [
    *(("forkserver", children) for children in range(1, 6)), *(("spawn", children) for children in range(1, 5))])
def test_interrupted_while_starting(children, method, tmp_path):
    """A signal after each of the children has appeared: the resource tracker, the fork server, the ranks."""
    command = script("ddp_basic/main.py", "--world_size", 3, "--demo", "basic", "--steps", 10_000_000,
                     "--start_method", method)
    with running(command, tmp_path, cold=True) as run:
        deadline = time.monotonic() + COLD_S
        while len(descendants(run.pid)) < children:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if children % 2:
            os.killpg(run.pid, signal.SIGINT)
        else:
            os.kill(run.pid, signal.SIGTERM)
        _, err = run.communicate(timeout=ENDS_S)
        assert run.returncode == 130, err
        assert re.fullmatch(r"\ninterrupted; stopped (0|3) processes\n", err)
        nothing_left(run, tmp_path)


# --- processes that are no ranks: the rows of OF_A_LAUNCHER

PHASES_TIMEOUT_S = 5.0


def in_a_phase(way, phase):
    """The commands of a run of tests/phases.py, that of the terminal first in which something happens."""
    of_ranks = commands(way.removesuffix(" 0"), 2, "tests/phases.py", "--phase", phase, "--timeout", PHASES_TIMEOUT_S)
    return of_ranks if way == "manual 0" else of_ranks[::-1]


def pid_of(who, run, folder, phase):
    """The process id of "launcher", "rank 1", "watcher 1"... of a run that is in this phase."""
    name, _, rank = who.rpartition(" ") if who[-1].isdigit() else (who, "", "1")
    if name in ("launcher", "agent"):
        return run.pid
    if name == "tracker":
        return next(pid for pid in children(run.pid) if "resource_tracker" in command_of(pid))
    if name == "fork server":
        return next(pid for pid in children(run.pid) if "forkserver" in command_of(pid))
    of_rank = int(wait_for(folder / f"{phase}{rank}.in"))
    return of_rank if name == "rank" else children(of_rank)[0]


@pytest.mark.parametrize(("way", "phase"), OF_A_LAUNCHER, ids=lambda value: value)
def test_fault_beside_the_ranks(way, phase, tmp_path):
    """Whatever is killed or frozen: the run ends, and one line names it, or it goes on; nothing is left."""
    with contextlib.ExitStack() as stack:
        runs = []
        for number, row in enumerate(OF_A_LAUNCHER[way, phase]):
            (folder := tmp_path / f"{number} {row.deeds}").mkdir()
            runs.append((row, folder, [stack.enter_context(running(command, folder))
                                       for command in in_a_phase(way, phase)]))
        for _, folder, _ in runs:
            ranks = ["0", "1"] if phase == "run" or way == "torchrun" else [""]
            for rank in ranks:
                wait_for(folder / f"{phase}{rank}.in")
        time.sleep(1.5)  # some beats
        began = time.monotonic()
        later = []
        for row, folder, (run, *_) in runs:
            for deed in row.deeds.split(", "):
                who, _, what = deed.rpartition(" ")
                if what == "exit":
                    (folder / f"exit{who[-1]}").touch()
                elif what == "SIGCONT":
                    later.append((-run.pid if who == "all" else run.pid, folder))
                else:  # Ctrl-Z stops all processes of a terminal
                    os.kill(-run.pid if who == "all" else pid_of(who, run, folder, phase), getattr(signal, what))
            if (row.status == 0 or phase in ("import", "connect")) and "SIGCONT" not in row.deeds:
                (folder / "go").touch()
        problems = []
        for row, folder, of_row in runs:
            if "SIGCONT" in row.deeds:
                continue
            problems += outcome(row, folder, of_row, began)
        time.sleep(max(0.0, began + PHASES_TIMEOUT_S + 2 - time.monotonic()))
        began = time.monotonic()
        for pid, folder in later:
            os.kill(pid, signal.SIGCONT)
            (folder / "go").touch()
        for row, folder, of_row in runs:
            if "SIGCONT" in row.deeds:
                problems += outcome(row, folder, of_row, began)
        assert not problems, "\n".join(problems)


def outcome(row, folder, runs, began):
    """What is wrong with the end of a run, in words."""
    problems = []
    try:
        for number, run in enumerate(runs):
            frozen = number == 0 and len(runs) > 1 and row.deeds == "launcher SIGSTOP"
            if frozen:  # after the others have given up
                continue
            ended = run.communicate(timeout=max(0.1, began + row.within_s(PHASES_TIMEOUT_S) - time.monotonic()))
            problems += wrong(row, number, run, *ended)
        for run in runs[:1]:
            if row.deeds == "launcher SIGSTOP" and len(runs) > 1:
                os.kill(run.pid, signal.SIGCONT)
                problems += wrong(row, 0, run, *run.communicate(timeout=SOON_S))
        nothing_left(runs[0], folder, *runs[1:])
    except subprocess.TimeoutExpired:
        problems.append("no end")
    except AssertionError as error:
        problems.append(str(error).splitlines()[0])
    return [f"{row.deeds}: {problem}" for problem in problems]


def without_torchruns(err):
    """What was printed on stderr, but for torchrun's own lines."""
    return re.sub(r"(?s)^\n?\*{20,}\n.*?\*{20,} ?\n", "", re.sub(r"(?m)^[WE]\d{4} .*\n", "", err))


def wrong(row, number, run, out, err):
    """The same for one terminal."""
    line, status = (row.line, row.status) if number == 0 else (row.others, 1)
    err = without_torchruns(err)
    if "tracker" in row.deeds:  # Python's own
        err = re.sub(r".*resource_tracker: process died unexpectedly, relaunching.*\n(  warnings.warn.*\n)?", "", err)
    errors = errors_of(err)
    if status == 130 or not line and status in (0, KILLED):
        as_expected = re.fullmatch(f"\n{line}\n" if line else "", err)
    else:
        as_expected = re.fullmatch(f"error: {line}", errors[0]) if line and len(errors) == 1 else not (line or errors)
    problems = [] if as_expected else [f"printed {err[-1500:]!r}"]
    if status == 0 and "sum 1" not in out:
        problems.append(f"no result: {out!r}")
    return problems + ([f"status {run.returncode}"] if run.returncode != status else [])


# --- strangers

GARBAGE = [b"\x00" * 1000, os.urandom(100_000), b"[" * 60_000 + b"\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
           bytes.fromhex("16030100c8010000c40303") + bytes(200), b'{"rank": 1, "failure": [1, "x", 0, ""]}\n', b"\xff" * 16]


@pytest.mark.parametrize("way", ["local", "manual", "torchrun"])
def test_strangers(way, tmp_path):
    """Whatever comes to a port that we open, the run goes on to its end and prints nothing of it."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path)) for command in in_a_phase(way, "run")]
        for rank in "01":
            wait_for(tmp_path / f"run{rank}.in")
        pids = [pid for run in runs for pid in (run.pid, *descendants(run.pid))]
        assert (found := {port for _, port in listening(pids)})
        slow = []
        for port in found:
            for words in GARBAGE:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                    stranger.settimeout(0.2)
                    stranger.sendall(words)
                    stranger.recv(100)
            for _ in range(200):  # many, of which each has said one byte, and never says another
                slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)))
                slow[-1].sendall(b"\x01")
        time.sleep(PHASES_TIMEOUT_S + 1)
        (tmp_path / "go").touch()
        for run in runs:
            out, err = run.communicate(timeout=60)  # torchrun's own store takes 15 s to end under so many connections
            err = without_torchruns(err)
            assert (run.returncode, err) == (0, "")
            assert ("sum 1" in out) == (run is runs[-1])
        nothing_left(runs[0], tmp_path, *runs[1:])


# --- surroundings

ODD = {"a number sign": b"a#b", "a question mark": b"a?b=c", "no UTF-8": b"\xff\xfe"}


def test_odd_temporary_folders(tmp_path):
    """Their names are no part of an address: the ranks meet, and leave nothing there."""
    command = script("p2p_collectives/main.py", "--demo", "collectives", "--output_dir", "out")
    with contextlib.ExitStack() as stack:
        runs = []
        for name in ODD.values():
            folder = tmp_path / os.fsdecode(name)
            folder.mkdir()
            runs.append((folder, stack.enter_context(
                running(command, tmp_path, env={"TMPDIR": str(folder)}, cold=True))))
        for folder, run in runs:
            _, err = run.communicate(timeout=COLD_S)
            assert (run.returncode, err) == (0, ""), folder
            nothing_left(run, tmp_path)
            # But for torch's own cache, made where this process has not said where it is.
            assert [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []
        assert {path.name for path in tmp_path.iterdir()} == {"out", "tmp", *map(os.fsdecode, ODD.values())}


def test_nobody_reads(tmp_path):
    """`| head -1`: one line in a moment, and no file of torch's."""
    (tmp_path / "out").mkdir()
    with running(script("p2p_collectives/train.py", "--epochs", 100_000, "--output_dir", "out"), tmp_path, until=".") as run:
        run.stdout.close()
        err = run.stderr.read()
        assert run.wait(timeout=SOON_S) == 1
        assert re.fullmatch(r"error: rank \d \(rank\d\) cannot print: nobody reads its output any more; "
                            r"stopped 1 other process\n", err), err
        run.stdout = None
        nothing_left(run, tmp_path)
        assert list(tmp_path.rglob("*errorfile*")) == []


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_closed_streams(closed, tmp_path):
    """`>&-` and the like: the run comes to its end, and what would have been printed is nowhere."""
    (tmp_path / "go").touch()
    with running(script("tests/phases.py", "--closed", closed), tmp_path) as run:
        out, err = run.communicate(timeout=SOON_S)
        assert (run.returncode, err) == (0, "")
        assert ("sum 1" in out) == (closed == "2")
        nothing_left(run, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"go", "outputs", "tmp", "run0.in", "run1.in"}


@pytest.mark.parametrize(("env", "ended"), [
    ({"TORCHELASTIC_RUN_ID": "none"}, (0, "")),  # left over: as if it were not there
    ({"OMP_NUM_THREADS": "9999999"}, (2, "error: OMP_NUM_THREADS=9999999 must be at most 1024\n")),
], ids=["stale", "threads"])
def test_surroundings(env, ended, tmp_path):
    (tmp_path / "go").touch()
    with running(script("tests/phases.py"), tmp_path, env=env) as run:
        _, err = run.communicate(timeout=SOON_S)
        assert (run.returncode, err) == ended
        nothing_left(run, tmp_path)


@pytest.mark.parametrize("inodes", [2, 3])
def test_no_inodes(inodes, tmp_path):
    """A temporary folder in which no more files can be made: one line, or another one is taken."""
    (tmp_path / "go").touch()
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "tmpfs", str(tmp_path / "small")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root to mount a file system")
    try:
        with running(script("tests/phases.py"), tmp_path, env={"TMPDIR": str(tmp_path / "small")}, cold=True) as run:
            _, err = run.communicate(timeout=SOON_S)
            assert (run.returncode, err) in [
                (1, "error: cannot start 2 processes: No space left on device\n"), (0, "")]
            nothing_left(run, tmp_path)
            assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def test_warnings_as_errors(tmp_path):
    """`python -W error`: torch's own warnings end it, in words."""
    (tmp_path / "go").touch()
    command = script("tests/phases.py")
    with running([command[0], "-W", "error", *command[1:]], tmp_path, cold=True) as run:
        _, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "") or (run.returncode, err.splitlines()[-1:]) == (
            1, ["error: cannot start 2 processes: the fork server has ended"]), err
        nothing_left(run, tmp_path)
