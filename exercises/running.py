"""Run a program in a copy, watch over its ranks, and end it where it will not end by itself."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from exercises.catalog import ROOT
from exercises.overlay import Copy, Line

LIMIT_S = 60.0  # for a run on a slow machine; on two cores none takes longer than 20 s
STANDSTILL_S = 5.0  # all ranks wait for so long: nothing will ever happen
LOOP_S = 10.0  # a thread has been in the learner's function for so long, which is a matter of ms
BUSY = 0.01  # a thread that computes for more of the time does not wait, on a busy machine, too
POLL_S = 0.1


@dataclasses.dataclass
class Thread:
    """Keeps where a thread was last seen that is in the learner's function or in the lesson.

    Args:
        lines: of both, the innermost first.
        time_s, computed_s: when that was, and how long it had computed by then.
        still_s: for how long it has been in these lines without computing.
        inside_s, inside_computed_s: for how long it has been in the learner's function, and for
            how much of that it has computed.
    """

    lines: list[Line]
    time_s: float
    computed_s: float
    still_s: float = 0.0
    inside_s: float = 0.0
    inside_computed_s: float = 0.0

    @property
    def is_own(self) -> bool:
        """Return whether it is in the learner's function."""
        return any(line.is_own for line in self.lines)

    def follow(self, before: "Thread") -> None:
        """Add to what was seen of it before."""
        passed, computed = self.time_s - before.time_s, self.computed_s - before.computed_s
        if self.lines == before.lines and computed <= BUSY * passed:
            self.still_s = before.still_s + passed
        if self.is_own and before.is_own:
            self.inside_s = before.inside_s + passed
            self.inside_computed_s = before.inside_computed_s + computed


@dataclasses.dataclass
class Rank:
    """Keeps what a rank has last written of itself; see observer.py."""

    number: int
    role: str
    pid: int
    has_ended: bool
    threads: dict[str, Thread]  # by their ids


class Watch:
    """Sees what the ranks of a run do.

    Args:
        copy: where they run.
        patience: multiplies all limits.
    """

    def __init__(self, copy: Copy, patience: float) -> None:
        self.copy, self.patience = copy, patience
        self.ranks, self.settled_at = [], 0.0  # since then no rank has come or gone

    def look(self) -> None:
        """Take in what the ranks have written."""
        before = {rank.pid: rank.threads for rank in self.ranks}
        alive, self.ranks = self.alive(), []
        for path in sorted((self.copy.tree / "seen").glob("*.json")):
            state = json.loads(path.read_text())
            pid, threads = state["pid"], {}
            for ident, (computed_s, stack) in state["threads"].items():
                if lines := [line for place in stack if (line := self.copy.origin(*place))]:
                    threads[ident] = Thread(lines, state["time"], computed_s)
                    if ident in before.get(pid, {}):
                        threads[ident].follow(before[pid][ident])
            if state["rank"] is None and not any(thread.is_own for thread in threads.values()):
                continue  # the launcher
            self.ranks.append(Rank(state["rank"] or 0, state["role"], pid,
                                   not psutil.pid_exists(pid), threads))
        if self.alive() != alive:
            self.settled_at = time.monotonic()

    def alive(self) -> list[int]:
        """Return the process ids of the ranks that run."""
        return [rank.pid for rank in self.ranks if not rank.has_ended]

    def why_to_end(self) -> str:
        """Return "loops" or "waits" where the run would never end, else ""."""
        threads = [thread for rank in self.ranks if not rank.has_ended
                   for thread in rank.threads.values()]
        loop_s = self.copy.exercise.text.get("loop_s", LOOP_S) * self.patience
        if any(thread.inside_s > loop_s and thread.inside_computed_s > loop_s / 10
               for thread in threads):
            return "loops"
        # A server waits for its trainers all the time: when the last has just ended, it ends next.
        still_s = [time.monotonic() - self.settled_at, *(thread.still_s for thread in threads)]
        return "waits" if threads and min(still_s) > STANDSTILL_S * self.patience else ""


@dataclasses.dataclass
class Ended:
    """Keeps what is left of a run.

    Args:
        status: None if it was ended here.
        output: of the command and its ranks.
        why: it was ended here: "waits", "loops", "too_long"; else "".
        ranks: as they were last seen.
        seconds: that it took.
    """

    status: int | None
    output: str
    why: str
    ranks: list[Rank]
    seconds: float


def run(copy: Copy, program: Path, *arguments: object, patience: float = 1.0) -> Ended:
    """Run a program, and end it, with all its processes, where it will not end by itself.

    Args:
        copy: whose folder it runs in.
        program: the path of a Python file.
        arguments: of the command.
        patience: multiplies all limits, for a busy machine.
    """
    (copy.tree / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": f"{copy.tree}{os.pathsep}{ROOT}",
               "TMPDIR": str(copy.tree / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(program), *map(str, arguments)]
    watch, why, began = Watch(copy, patience), "", time.monotonic()
    with open(copy.tree / "output", "w+") as output:
        process = subprocess.Popen(command, cwd=copy.tree, env=environ, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and not why:
                time.sleep(POLL_S)
                watch.look()
                is_late = time.monotonic() - began > LIMIT_S * patience
                why = watch.why_to_end() or ("too_long" if is_late else "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what has lost its parent
            process.wait()
        output.seek(0)
        return Ended(None if why else process.returncode, output.read(), why, watch.ranks,
                     time.monotonic() - began)
