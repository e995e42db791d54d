"""In the copy of a lesson: each process writes, twice a second, where its threads are.

The lesson's file imports this as `exercise_observer`; it imports nothing of the workbook, and of
`common` what lies in the copy. What it writes, `seen/<rank>.json`, is read by running.py.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from common.launcher.worker import cpu_time, stacks

PERIOD_S = 0.5
TREE = Path(__file__).parent
lesson = {}  # the names of the lesson's file, which puts them here


def observe() -> None:
    """Write, again and again, what `state` returns."""
    while True:
        time.sleep(PERIOD_S)
        path = TREE / "seen" / f"{os.environ.get('RANK', 'alone')}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # the copy is being removed
            temporary.write_text(json.dumps(state()))
            temporary.replace(path)


def state() -> dict:
    """Return who this process is, and of each thread its CPU time and its lines in the copy.

    The lines, (file, number), begin with the innermost one. `rank` is None in a process that is
    none: the launcher, or a program of one process.
    """
    threads = {}
    for ident, frames in stacks().items():
        stack = [(frame.f_code.co_filename, line) for frame, line in frames]
        lines = [(file, line) for file, line in stack if line and file.startswith(str(TREE))]
        if lines:
            with contextlib.suppress(OSError):  # it has just ended
                # Where the system does not tell a thread's time (macOS), that of all.
                threads[ident] = (cpu_time(ident) or time.process_time_ns()) / 1e9, lines
    rank, role = None, "rank0"
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and "role_name" in lesson:
        rank = int(os.environ["RANK"])
        role = lesson["role_name"](rank, int(os.environ["WORLD_SIZE"]))
    return {"rank": rank, "role": role, "pid": os.getpid(), "time": time.monotonic(),
            "threads": threads}


def start() -> None:
    """Observe this process from now on."""
    threading.Thread(target=observe, daemon=True).start()


# Not in the fork server, which must have no threads. The ranks that are forked from it have this
# module from there, or import it themselves.
os.register_at_fork(after_in_child=start)
is_fork_server = "forkserver" in str(sys.orig_argv)
if not is_fork_server or multiprocessing.current_process().name != "MainProcess":
    start()
