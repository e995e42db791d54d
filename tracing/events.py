"""Keep what a process records: events, in a file that survives if the process is killed.

    recorder = Recorder(path, rank, ...)
    op = recorder.begin("call", to=0)      an operation begins in this line of the lesson
    recorder.finish(op)                    the operation ends
    events = read(path)                    all events of the file
"""

import itertools
import json
import marshal
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tracing import places

FULL = 2**22  # bytes of a file; a process keeps its last two files
FORMAT = 2  # of marshal: later ones search for repeated objects, which takes longer


class Here(threading.local):
    """The current work of this thread. (RPC calls may come from threads that end at once.)"""

    depth = 0  # above 0: inside a recorded function, whose own calls are not recorded
    waits = 0  # number of waits so far
    call, sync = None, False  # the RPC that the thread is about to send
    rrefs = ()  # the RRefs in what the thread is about to send
    run = None  # number of the operation in which RPC runs a function here
    forwards = None  # inside a call of a module: see work.py
    steps = ()  # start times of optimizer steps, nested ones last
    averages = False  # whether DDP averages the gradients of the next backward pass


here = Here()


class Recorder:
    """Writer of events.

    An event is a tuple, written in marshal's format into mapped memory. A system call for each
    event would cost more, because another thread would take Python's lock meanwhile. When a file
    is full, the recorder keeps it as the older one of two files and continues in a new file.

        ("header", rank, ...)                              first in each file
        ("place", number, place)                           numbers a place of the lesson
        ("begin", op, time, kind, thread, place, about)
        ("end", op, time, about)
        ("bar", run, kind, start, end, thread, place, name)   see work.py

    Args:
        path: Path of the newer file.
        header: Fields of the first event.
    """

    def __init__(self, path: Path, *header: object) -> None:
        self.path, self.lock = path, threading.RLock()  # a finalizer may interrupt its own thread
        self.numbers = itertools.count(1)
        self.kept = [("header", *header)]  # events that each file repeats
        self.open = {}  # events of operations that have not ended, by their numbers
        self.places = {}  # numbers of places, by file and line
        for left in (path, older(path)):  # of an earlier run
            left.unlink(missing_ok=True)
        self._next_file()

    def _next_file(self) -> None:
        """Continue in a new file, which begins with the kept events and the open operations."""
        if self.path.exists():
            self.path.replace(older(self.path))
        with self.path.open("wb+") as file:
            if hasattr(os, "posix_fallocate"):  # otherwise a full disk kills the process later
                os.posix_fallocate(file.fileno(), 0, FULL)
            file.truncate(FULL)
            self.memory, self.end = mmap.mmap(file.fileno(), FULL), 0
        for event in self.kept:
            self.write(*event)
        for op, event in list(self.open.items()):
            if self.end > FULL // 2:  # leave room for new events
                del self.open[op]
            else:
                self.write(*event)

    def write(self, *event: object) -> None:
        """Write an event."""
        try:
            data = marshal.dumps(event, FORMAT)
        except ValueError:  # a value is not of a built-in type: its text
            data = marshal.dumps(json.loads(json.dumps(event, default=str)), FORMAT)
        with self.lock:
            if self.end + len(data) > FULL:
                self._next_file()
            start, self.end = self.end, self.end + len(data)
            self.memory[start : self.end] = data

    def begin(self, kind: str, place: int | None = None, thread: int | None = None,
              op: int | None = None, **about: object) -> int:
        """Write that an operation begins here, or at `place`; return its number."""
        op = op or next(self.numbers)
        here.waits += kind == "wait" or bool(about.get("waits"))
        self.open[op] = event = (
            "begin", op, time.time(), kind, thread or threading.get_ident(),
            self.place() if place is None else place, about)
        self.write(*event)
        return op

    def finish(self, op: int, **about: object) -> None:
        """Write that an operation ends; a second end changes nothing."""
        if self.open.pop(op, None) is not None:
            self.write("end", op, time.time(), about)

    def bar(self, kind: str, start: float, name: str | None = None, place: int | None = None,
            run: int | None = None) -> None:
        """Write that a piece of computation ends now; see work.py."""
        self.write("bar", run or here.run, kind, start, time.time(), threading.get_ident(),
                   self.place() if place is None else place, name)

    def place(self) -> int:
        """Return the number of the place where this thread is; 0 outside of any lesson."""
        frame = sys._getframe(1)
        while frame is not None:
            filename = frame.f_code.co_filename
            if places.lesson_file(filename):
                line = filename, frame.f_lineno  # the callers are those of the first time
                return self.places.get(line) or self._add(line, places.place_of_frame(frame))
            frame = frame.f_back
        return 0

    def place_of(self, definition: object) -> int:
        """Return the number of the place where the lesson defines a function or class, or 0."""
        place = places.place_of_definition(definition)
        if not place:
            return 0
        line = tuple(place[0][:2])
        return self.places.get(line) or self._add(line, place)

    def _add(self, line: tuple[str, int], place: places.Place) -> int:
        with self.lock:
            number = self.places[line] = len(self.places) + 1
            self.kept.append(("place", number, place))
            self.write(*self.kept[-1])
        return number


def older(path: Path) -> Path:
    """Return the path of the older one of a process's two files."""
    return path.with_name(f"older-{path.name}")


def read(path: Path) -> Iterator[tuple]:
    """Yield the events of a process, the oldest first."""
    for file in filter(Path.exists, (older(path), path)):
        with file.open("rb") as events, suppress(EOFError, TypeError, ValueError):
            while True:  # until the unused rest of the file, or an event that a kill cut off
                yield marshal.load(events)
