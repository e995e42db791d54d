"""What a rank does beside its work: it beats, it reports its failure, it leaves."""

import gc
import glob
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
from common.launcher import watch
from common.launcher.channel import BEAT_S, in_thread, ours
from common.launcher.watch import ROOT
from common.limits import shortened
from torch.distributed import rpc

# What no message names: it stands around the lesson's lines.
OWN = tuple(str(Path(__file__).parents[1] / name) for name in ("launcher", "tracing"))
LONGEST = 100_000  # characters of a traceback that are sent
IN_WORDS = ("NotSavedError", "NotFiniteError")  # of common.checkpoint and common.report

# How torch says that another process is gone, and that it has not answered.
SAYS_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed ?out|timeout|tensorpipe|gloo|NCCL|RPCErr|"
    r"Broken pipe|\beof\b|failed to connect|rendezvous|Socket|store")
SAYS_WAITED = re.compile(r"[Tt]imed ?out|timeout")
# How an exception that came over RPC names the worker where it was raised; the traceback follows.
ORIGIN = re.compile(
    r"On WorkerInfo\(id=(?P<rank>\d+), name=[\w:-]+\):\s*(?P<kind>\w+)\((?P<message>.*)")
PLACE = re.compile(r'File "(.+?)", line (\d+)')  # in a traceback


class Heartbeat(threading.Thread):
    """Writes at every beat that this rank lives, and where it is; ends it when nobody watches it.

    It looks whether somebody does before there is a store: whoever serves that may end while a rank
    connects, and torch would go on trying for a minute.

    Args:
        rank: of this process.
        unwatched: `unwatched(seconds)` waits for so long, and returns whether the process that
            watches over this one is gone.
        args: the parsed flags.
    """

    def __init__(self, rank: int, unwatched: Callable[[float], bool], args: Namespace) -> None:
        super().__init__(daemon=True)
        self.rank, self.unwatched, self.args, self.store = rank, unwatched, args, None
        self.status = {"beat": 0, "failure": None, "left": False, "pieces": 0}
        self.lock, self.calls = threading.Lock(), 0  # calls: those of other ranks, over RPC
        self.moved = []  # see `look`
        self.failed_at = None  # where, once it has failed: from then on it is elsewhere

    def connect(self, store: dist.Store) -> None:
        """Write to this store from now on, of module `channel`."""
        self.store = ours(store)
        self.write()

    def write(self, **changes: object) -> None:
        """Write how this rank is, with `changes` in it. Without a store, nobody reads it."""
        if self.store is None:
            return
        with self.lock, suppress(RuntimeError):
            self.status |= {"beat": self.status["beat"] + 1, **changes}
            self.store.set(f"rank/{self.rank}", json.dumps(self.status))

    def run(self) -> None:
        """Beat until the end; `connect` has done so for the first time."""
        while not self.unwatched(BEAT_S):
            self.write(**self.look())
        self.write(failure=watch.Failure(self.rank, "ended: its launcher is gone"))
        remove_leftovers([os.getpid()], self.args)
        os.kill(os.getpid(), signal.SIGKILL)

    def look(self) -> dict:
        """Return where this rank is, and what has moved in it; {} if all is where it was.

        `moved` stays the same as long as no Python thread of this process moves: the number of
        calls, the CPU time of the main thread, and where the others are, for a call that spans a
        training runs in one of those. Without others, their frames need not be read: a rank that
        waits in a collective should cost nothing.
        """
        main, me = threading.main_thread().ident, threading.get_ident()
        # `_current_frames` is private: see `stacks`.
        now = [self.calls, cpu_time(main) or time.monotonic_ns()]
        if sys._current_frames().keys() <= {main, me} and [*now, hash(())] == self.moved:
            return {}
        frames = stacks()
        del frames[me]
        others = [(thread, frame.f_lasti) for thread in frames if thread != main
                  for frame, _ in frames[thread]]
        self.moved = [*now, hash(tuple(others))]
        # The last one, while it ends.
        at = self.failed_at or position(frames) or self.status.get("at")
        return {"at": at, "moved": self.moved}

    def fail(self, error: BaseException) -> None:
        """Report that this rank ends by an exception."""
        self.failed_at = innermost(reversed([*traceback.walk_tb(error.__traceback__)]))
        at = self.failed_at or self.status.get("at")
        self.write(failure=failure_of(self.rank, error, self.args.timeout), at=at)
        self._sent()

    def leave(self, pieces: int = 0) -> None:
        """Report that this rank has done its work; `pieces` of a result are in the store."""
        self.write(left=True, pieces=pieces)
        self._sent()

    def _sent(self) -> None:
        """Return when the store has got what was written, or does not answer."""
        with suppress(RuntimeError, TimeoutError):
            in_thread(lambda: self.store.check(["verdict"])).result(watch.GRACE_S)


def innermost(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return the first line of this repository among frames, "rpc_rl/main.py:88", or None.

    Args:
        frames: as of `traceback.walk_stack`, the innermost first.
    """
    for frame, line in frames:
        if is_ours(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{line}"
    return None


def is_ours(path: str) -> bool:
    """Return whether a file is one of this repository's, and none of those in `OWN`."""
    return path.startswith(f"{ROOT}/") and not path.startswith(OWN) and "site-packages" not in path


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


def position(frames: Mapping[int, list[tuple[FrameType, int]]]) -> str | None:
    """Return where this rank is, like `innermost`.

    That is where its main thread is; or, if that waits in `rpc.shutdown` until all are done, where
    a call of another rank is.

    Args:
        frames: of `stacks`, without this thread's.
    """
    main = threading.main_thread().ident
    waits = any(frame.f_code.co_name == "shutdown" for frame, _ in frames[main])
    calls = [frames[thread] for thread in frames if thread != main] if waits else []
    found = [innermost(thread) for thread in (*calls, frames[main])]
    return next(filter(None, found), None)


def cpu_time(thread: int) -> int | None:
    """Return the CPU time of a living thread in ns; None where the system does not tell (macOS)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))


def watch_calls(heartbeat: Heartbeat) -> None:
    """Count the calls of other ranks, and let `sys.exit()` in one of them end this rank.

    RPC takes an Exception to the caller with the name of the worker, but SystemExit and
    KeyboardInterrupt without: the caller would be blamed. RPC calls this private function for each
    message; without it, that is what would happen.
    """
    run_function = getattr(rpc.internal, "_run_function", None)

    def run(call):
        heartbeat.calls += 1
        try:
            return run_function(call)
        except BaseException as error:
            heartbeat.fail(error)
            return exit_now(1)

    if run_function is not None:
        rpc.internal._run_function = run


def exit_now(status: int) -> NoReturn:
    """End this process at once.

    Not by sys.exit: taking torch apart costs more than a second, and a live RPC agent may wait for
    peers that are gone.
    """
    flush()
    os._exit(status)


def flush() -> None:
    """Write what this process has printed, where somebody reads it: `| head -1` does no more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def remove_leftovers(pids: Sequence[int], args: Namespace) -> None:
    """Remove what ranks were writing when they were killed.

    `report.replacing` puts the id of its process into the name.
    """
    checkpoint, writers = getattr(args, "checkpoint", None), {str(pid) for pid in pids}
    leftovers = [*args.output_dir.glob(".*.*.tmp")]
    if checkpoint is not None:  # in its folder, other runs may be writing theirs
        leftovers += checkpoint.parent.glob(f".{glob.escape(checkpoint.name)}.*.tmp")
    for leftover in leftovers:
        if leftover.name.split(".")[-2] in writers:
            leftover.unlink(missing_ok=True)


def failure_of(rank: int, error: BaseException, timeout: float) -> watch.Failure:
    """Return the `watch.Failure` that an exception in `rank` means.

    Its own, that of the worker where an RPC raised, or only a notice of another one's.

    Args:
        rank: where it was raised.
        error: the exception.
        timeout: seconds, of `--timeout`.
    """
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return watch.Failure(rank, watch.exited(status))
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return watch.Failure(rank, "cannot print: nobody reads its output any more")
    whole = shortened("".join(traceback.format_exception(error)).rstrip(), LONGEST)
    message, kind = str(error), type(error).__name__
    origin = origin_of(message)
    if origin:
        rank, kind, message = int(origin["rank"]), origin["kind"], origin["message"]
    message = shortened(message.rstrip(")").strip("\"'") if origin else message, LONGEST)
    if kind in IN_WORDS:  # which say all
        return watch.Failure(rank, message)
    if kind == "TimeoutError" and message.startswith("timed out: "):  # and for whom: a lesson's own
        return watch.Failure(rank, message, watch.WAITED, whole)
    noticed = isinstance(error, ConnectionError) or (
        isinstance(error, (RuntimeError, OSError)) and SAYS_GONE.search(message))
    if not noticed:
        return watch.Failure(rank, f"raised {kind}", traceback=whole)
    if kind != "TimeoutError" and SAYS_WAITED.search(message):
        if waited := re.search(r"waiting (\d+)ms", message):  # gloo's own limit may be another one
            timeout = int(waited[1]) / 1000
        at = watch.described(last_place(whole))
        return watch.Failure(rank, f"has waited for {timeout:g} s{at}", watch.WAITED, whole)
    return watch.Failure(rank, f"raised {kind}", watch.NOTICED, whole)


def origin_of(message: str) -> re.Match | None:
    """Return the match of ORIGIN that is the last one: where what came over RPC was raised."""
    start = len(message)
    while (start := message.rfind("On WorkerInfo(", 0, start)) >= 0:
        if match := ORIGIN.match(message, start):
            return match
    return None


def last_place(text: str) -> str | None:
    """Return the last line of this repository in a traceback, like `innermost`."""
    places = [f"{path}:{line}" for path, line in PLACE.findall(text) if is_ours(path)]
    return places[-1].removeprefix(f"{ROOT}/") if places else None


def _nobody_reads() -> bool:
    """Return whether the standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
