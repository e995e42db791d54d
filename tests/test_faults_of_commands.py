"""Faults of programs that are started as commands: manual launch, torchrun, and a launcher that gets a signal.

The table of programs is in tests/test_faults.py.
"""

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from tests.helpers import (
    ROOT,
    children,
    descendants,
    nothing_left,
    running,
    script,
    torchrun,
    workers,
)
from tests.test_faults import PROGRAMS, line, wait_for

MANUAL_TIMEOUT_S = 10.0  # several commands that import torch at the same time come late


def terminals(program, what, port, ranks):
    """The commands of a manual launch."""
    return [[sys.executable, str(ROOT / "tests/sabotage.py"), *program.sabotaged(what), *program.command(None),
             "--timeout", str(MANUAL_TIMEOUT_S), "--world_size", str(len(ranks)), "--rank", str(rank),
             "--master_addr", "localhost", "--master_port", str(port), "--output_dir", f"out{rank}"] for rank in ranks]


RL, TRAIN = PROGRAMS[0], next(program for program in PROGRAMS if program.lesson == "p2p_collectives.train")


@pytest.mark.parametrize(("program", "fault", "rank"), [
    (RL, "SIGKILL", 0), (RL, "SIGKILL", 1), (RL, "SIGSTOP", 0), (RL, "SIGSTOP", 1), (RL, "exception", 1),
    (TRAIN, "SIGSTOP", 1), (TRAIN, "exception", 1),
], ids=str)
@pytest.mark.parametrize("way", ["manual", "torchrun"])
def test_fault_in_the_other_ways_in(program, fault, rank, way, tmp_path, free_port):
    """Every launcher ends, in time, and says who failed; under torchrun, so does the process beside the rank."""
    roles = program.roles.split()
    what = program.raises[roles[1]] if fault == "exception" else "-"
    if way == "manual":
        commands = terminals(program, what, free_port, range(len(roles)))
    else:
        flags = [*program.sabotaged(what), *program.command(None), "--timeout", MANUAL_TIMEOUT_S]
        commands = [torchrun(len(roles), "tests/sabotage.py", *flags, "--output_dir", "out")]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path)) for command in commands]
        if fault == "exception":
            wait_for(tmp_path / ("out1" if way == "manual" else "out") / "moment")
        else:
            of_ranks = runs if way == "manual" else runs * len(roles)
            victim = [wait_for_worker(run, rank, way) for rank, run in enumerate(of_ranks)][rank]
            time.sleep(2.0)
            os.kill(victim, getattr(signal, fault))
        began, ended = time.monotonic(), [run.communicate(timeout=MANUAL_TIMEOUT_S + 30) for run in runs]
        assert time.monotonic() - began < (MANUAL_TIMEOUT_S if fault == "SIGSTOP" else 0) + 10
        for rank_of_run, (run, (_, err)) in enumerate(zip(runs, ended, strict=True)):
            expected = line(rank, roles, fault, stopped=int(way == "manual" and rank_of_run != rank))
            if way == "torchrun" and fault == "SIGKILL":
                expected = rf"error: rank {rank} \({roles[rank]}\) died; torchrun shows how"
            errors = [text for text in err.splitlines() if text.startswith("error:")]
            assert len(errors) == 1, err
            assert re.fullmatch(expected, errors[0]), err
            assert run.returncode == 1
            if fault == "exception":
                assert "ValueError: sabotage" in err
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
    cold = fault in ("SIGINT", "SIGKILL")
    with running(script("rpc_rl/main.py"), tmp_path, until="episode 10 ", cold=cold) as run:
        if "frozen" in fault:
            os.kill(workers(run)[2], signal.SIGSTOP)
        for pause in range(10 if "ten" in fault else 1):  # until it is gone; also on its way out
            if fault == "SIGINT":
                os.killpg(run.pid, signal.SIGINT)
            elif run.poll() is None:
                run.send_signal(getattr(signal, fault.split()[0]))
            time.sleep(0.005 * pause)
        _, err = run.communicate(timeout=20)
        assert run.returncode == (-signal.SIGKILL if fault == "SIGKILL" else 130)
        assert err == ("" if fault == "SIGKILL" else "\ninterrupted; stopped 3 processes\n")
        nothing_left(run, tmp_path)


@pytest.mark.parametrize(("method", "children"), [
    *(("forkserver", children) for children in range(1, 6)), *(("spawn", children) for children in range(1, 5))])
def test_interrupted_while_starting(children, method, tmp_path):
    """A signal after each of the children has appeared: the resource tracker, the fork server, the ranks."""
    command = script("ddp_basic/main.py", "--world_size", 3, "--demo", "basic", "--steps", 10_000_000,
                     "--start_method", method)
    with running(command, tmp_path, cold=True) as run:
        deadline = time.monotonic() + 60
        while len(descendants(run.pid)) < children:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if children % 2:
            os.killpg(run.pid, signal.SIGINT)
        else:
            os.kill(run.pid, signal.SIGTERM)
        _, err = run.communicate(timeout=20)
        assert run.returncode == 130, err
        assert re.fullmatch(r"\ninterrupted; stopped (0|3) processes\n", err)
        nothing_left(run, tmp_path)
