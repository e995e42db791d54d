"""In the copy of a lesson: each process writes, twice a second, where its threads are.

The lesson's file imports this as `exercise_observer`; it imports nothing of the workbook, and of
`common` what lies in the copy. What it writes, `seen/<rank>.json`, is read by running.py.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

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


def stacks() -> dict[int, list[tuple[FrameType, int]]]:
    """Return the frames of each thread with their lines, the innermost first, by its identity.

    Nothing is collected meanwhile: with Python 3.11, a collection inside of `frame.f_back` can let
    that thread go on, and then the frame that is read is gone (seen: a rank that crashed).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        # CPython's, as in faulthandler; without it, messages would not tell where a rank waits.
        return {thread: list(traceback.walk_stack(frame))
                for thread, frame in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def cpu_time(thread: int) -> int | None:
    """Return the CPU time of a living thread in ns; None where the system does not tell (macOS)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))


def start() -> None:
    """Observe this process from now on."""
    threading.Thread(target=observe, daemon=True).start()


# Not in the fork server, which must have no threads. The ranks that are forked from it have this
# module from there, or import it themselves.
os.register_at_fork(after_in_child=start)
is_fork_server = "forkserver" in str(sys.orig_argv)
if not is_fork_server or multiprocessing.current_process().name != "MainProcess":
    start()
