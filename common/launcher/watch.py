"""Who has failed: the cause, and not the one that noticed it.

    rank 1 -- that it lives, and its failure ----+--> the store <-- reads and decides -- launcher 0
    rank 2 --------------------------------------+        |
    launcher 2 -- that it lives, how rank 2 ended +       +--> the verdict, for all other launchers

A local run has one launcher. Where ranks are launched manually, each terminal has one; under
torchrun, a process beside each rank takes its place. That of rank 0 serves the store and decides;
the others follow, and where the store has been silent for `--timeout`, blame rank 0.

A rank may compute for as long as it likes: its beats come from a thread of its own. Only a single
call that holds Python's interpreter lock for longer than `--timeout` would be mistaken for silence.
"""

import contextlib
import json
import linecache
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.distributed as dist
from common.launcher.channel import BEAT_S, SUSPECT_S, Board, LostError, prepare

ROOT = Path(__file__).resolve().parents[2]  # of this repository
GRACE_S = 4.0  # how long to look for the rank to blame, when others have only noticed its end
AWAY_S = 5.0  # a launcher that has not looked for so long was stopped itself
CAUSE, SILENCE, WAITED, NOTICED = range(4)  # kinds of failures, the most telling first


class Failure(NamedTuple):
    """Describes a failed rank: `what` completes the sentence "rank 2 (observer2) ..."."""

    rank: int | None  # None: no rank is at fault, and `what` is the whole sentence
    what: str
    kind: int = CAUSE
    traceback: str = ""


class Watched(Protocol):
    """Shows the process of a rank to its launcher: `start.Process`, or `torchrun.Parent`."""

    sentinel: object  # becomes ready when it has ended

    def gone(self) -> bool:
        """Return whether it has ended, where the sentinel fails."""

    def failure(self) -> Failure:
        """Return how it ended, if it has not written why."""


def exited(status: int) -> str:
    """Return how a process ended that did not report that it was leaving."""
    return f"exited with status {status}" + ("" if status else " before its work was done")


def silent(rank: int, seconds: float) -> Failure:
    """Return the failure of a rank whose process lives and does nothing."""
    return Failure(rank, f"has not answered for {seconds:.0f} s", SILENCE)


def unreachable(rank: int, seconds: float) -> Failure:
    """Return the failure of a rank of which nothing is heard, nor of its launcher."""
    return Failure(rank, f"cannot be reached: no sign of life for {seconds:.0f} s", SILENCE)


def described(at: str | None) -> str:
    """Return " at train.py:88, `dist.all_reduce(...)`", or "" if `at` is None."""
    if at is None:
        return ""
    path, _, line = at.rpartition(":")
    code = linecache.getline(str(ROOT / path), int(line)).strip()
    return f" at {at}" + (f", `{code}`" if code else "")


def report(failure: Failure, names: Sequence[str], stopped: int = 0) -> None:
    """Print the traceback of a failure, if there is one, and its one line."""
    others = f"; stopped {stopped} other process{'es' if stopped > 1 else ''}" if stopped else ""
    who = "" if failure.rank is None else f"rank {failure.rank} ({names[failure.rank]}) "
    line = f"error: {who}{failure.what}{others}"
    text = "".join(f"{part}\n" for part in (failure.traceback, line) if part)
    print(text, end="", file=sys.stderr, flush=True)  # in one piece: other launchers print, too


class Launcher:
    """Watches, as all launchers do; `Decider` and `Follower` differ in how they find a verdict.

    Args:
        board: reads the ranks, and whoever else matters to this launcher.
        rank: the first rank of this launcher.
        timeout: seconds that anybody may be silent.
    """

    def __init__(self, board: Board, rank: int, timeout: float) -> None:
        self.board, self.rank, self.timeout = board, rank, timeout
        self.limit_s = max(timeout, SUSPECT_S)
        self.failures, self.since = {}, None  # what is known, in order; since the first of it
        self.away = 0.0, -float("inf")  # how long this process was stopped, and until when

    def status(self, rank: int, who: str = "rank") -> dict:
        """Return what a rank, or its launcher, has written, as a dict."""
        value = self.board.values.get(f"{who}/{rank}")
        return value if isinstance(value, dict) else {}

    def watch(self, here: Mapping[int, Watched],
              interruption: int | None = None) -> Failure | None:
        """Wait until all is over.

        Args:
            here: `{rank: process}` of the ranks of this launcher.
            interruption: a file that becomes readable on Ctrl-C.

        Returns:
            The `Failure` to blame, or None if every rank has left.
        """
        here, looked = dict(here), time.monotonic()
        while here or self.failures or self.needed():
            waitables = [process.sentinel for process in here.values()]
            waitables += [] if interruption is None else [interruption]
            ready = connection.wait(waitables, BEAT_S)
            if interruption in ready:
                return Failure(self.rank, "was interrupted")
            if (away := time.monotonic() - looked) > AWAY_S:  # Ctrl-Z
                self.board.forgive()
                self.away = away, time.monotonic()
            looked = time.monotonic()
            try:
                self.listen()
            except LostError:
                return self.of_lost_store()
            for rank in [rank for rank, process in here.items() if process.sentinel in ready
                         or (self.board.age(f"rank/{rank}") > 2 * BEAT_S and process.gone())]:
                process, status = here.pop(rank), self.status(rank)
                if not status.get("left") and not status.get("failure"):
                    self.failures[f"end of {rank}"] = process.failure()
            if self.failures and self.since is None:
                self.since = time.monotonic()
            if verdict := self.verdict():
                return verdict
        return None

    def stopped(self) -> Failure | None:
        """Return the failure of this launcher if the others have just waited in vain for it."""
        away, until = self.away
        if away < self.limit_s - BEAT_S or time.monotonic() - until > self.limit_s + GRACE_S:
            return None
        return Failure(self.rank, f"did not answer for {away:.0f} s: its launcher was stopped")

    def listen(self) -> None:
        """Write the own status, and take in what the others have written since the last time."""
        self.board.exchange()
        for key, value in self.board.values.items():
            if isinstance(value, dict) and value.get("failure") and key not in self.failures:
                with contextlib.suppress(TypeError):  # a stranger has written it
                    self.failures[key] = Failure(*value["failure"])


class Follower(Launcher):
    """Watches another rank than 0: writes how it is, and reads the verdict."""

    def __init__(self, board: Board, rank: int, timeout: float) -> None:
        super().__init__(board, rank, timeout)
        with contextlib.suppress(LostError):
            board.exchange()  # from now on, this rank has joined

    def needed(self) -> bool:
        """Return False: it ends with its rank."""
        return False

    def listen(self) -> None:
        """Let the launcher of rank 0 know, too, what it cannot know from the rank itself."""
        self.board.status["failure"] = self.failures.get(f"end of {self.rank}")
        super().listen()

    def of_lost_store(self) -> Failure:
        """Return the failure to blame when the store is gone: one of its own comes first."""
        unheard = self.board.answered < self.away[1] + BEAT_S  # since we are back
        gone = (unheard and self.stopped()) or Failure(0, "ended: its launcher is gone")
        return min([*self.failures.values(), gone], key=lambda failure: failure.kind)

    def verdict(self) -> Failure | None:
        """Return what rank 0 has decided, or what is known here if it does not answer."""
        if verdict := self.board.values["verdict"]:
            return Failure(*verdict)
        silence = time.monotonic() - max(self.board.answered, self.away[1])
        if silence > self.limit_s:
            return unreachable(0, silence)
        patient = self.since is None or time.monotonic() - self.since < GRACE_S + 3 * BEAT_S
        return None if patient else next(iter(self.failures.values()))

    def close(self, verdict: Failure | None) -> None:
        """Write that this launcher has ended, and why if it was its own rank."""
        own = verdict if verdict is not None and verdict.rank == self.rank else None
        with contextlib.suppress(LostError):
            self.board.take_leave(failure=own, left=True)


class Decider(Launcher):
    """Watches rank 0, hears all ranks and all other launchers, and decides.

    Args:
        board: that reads every rank, and every other launcher if there are any.
        names: the role of each rank.
        timeout: seconds that anybody may be silent.
        join_s: seconds within which the other launchers must have come; None without any.
    """

    def __init__(self, board: Board, names: Sequence[str], timeout: float,
                 join_s: float | None = None) -> None:
        super().__init__(board, 0, timeout)
        self.names, self.ranks = names, range(len(names))
        self.followers = range(1, len(names) if join_s else 1)
        self.join_s, self.join_by = join_s, time.monotonic() + (join_s or 0)
        self.suspects = {}
        # What moves in each rank, and since when it stands.
        self.moved, self.noted = dict.fromkeys(self.ranks, (None, time.monotonic())), False

    def needed(self) -> bool:
        """Return whether others need the store, and somebody who decides."""
        return not all(self.status(rank, "launcher").get("left") for rank in self.followers)

    def of_lost_store(self) -> Failure:
        """Return the failure to blame when the store is gone, which this very process serves."""
        return Failure(None, "the store of this run has ended")

    def silences(self, seconds: float) -> list[Failure]:
        """Return the failures of those that have been silent for so long, or have not come."""
        found = []
        for rank in self.ranks:
            age, status = self.board.age(f"rank/{rank}"), self.status(rank)
            done = status.get("left") or status.get("failure") or f"end of {rank}" in self.failures
            if rank not in self.followers:
                found += [silent(rank, age)] if age > seconds and not done else []
            elif not self.status(rank, "launcher"):
                late = Failure(rank, f"has not joined within {self.join_s:g} s", SILENCE)
                found += [late] if time.monotonic() > self.join_by else []
            elif not self.status(rank, "launcher")["left"]:
                of_launcher = self.board.age(f"launcher/{rank}")
                if min(age, of_launcher) > SUSPECT_S or done:
                    found += [unreachable(rank, of_launcher)] if of_launcher > seconds else []
                elif age > seconds:
                    found.append(silent(rank, age))
                elif of_launcher > seconds:
                    found.append(Failure(rank, "cannot be reached: its launcher has not answered "
                                               f"for {of_launcher:.0f} s", SILENCE))
        return found

    def verdict(self) -> Failure | None:
        """Return the failure to blame, as soon as it is known."""
        self.note_standstill()
        found = [*self.failures.values(), *self.silences(self.limit_s)]
        if not found:
            return None
        now = time.monotonic()
        blamed = min(found, key=lambda failure: failure.kind)
        if blamed.kind <= SILENCE:
            unheard = (blamed.rank in self.followers and blamed.kind == SILENCE  # since we are back
                       and self.board.age(f"launcher/{blamed.rank}") > now - self.away[1] - BEAT_S)
            return (unheard and self.stopped()) or blamed
        # Somebody has noticed an end, or has waited in vain: who is silent, or was just now?
        for failure in (*self.silences(SUSPECT_S), *self.were_silent()):
            self.suspects.setdefault(failure.rank, failure)
        if now - self.since < GRACE_S:
            return None
        if self.suspects:
            return next(iter(self.suspects.values()))
        away, until = self.away
        if away > self.timeout / 2 and now - until < self.timeout + 2 * GRACE_S:
            return blamed._replace(what=(
                f"could not wait any longer: the whole run was stopped for {away:.0f} s (Ctrl-Z), "
                f"and --timeout is {self.timeout:g} s"))
        return self.with_the_others(blamed) if blamed.kind == WAITED else blamed

    def were_silent(self) -> list[Failure]:
        """Return the failures of ranks whose silence has just ended: others have waited for it."""
        now = time.monotonic()
        return [Failure(rank, f"did not answer for {gap:.0f} s", SILENCE) for rank in self.ranks
                for gap, end in [self.board.gaps.get(f"rank/{rank}", (0, 0))]
                if gap > max(SUSPECT_S, self.timeout / 2) and now - end < self.timeout]

    def with_the_others(self, blamed: Failure) -> Failure:
        """Return the failure of a rank that only waits, with where those are that did not come."""
        others = [rank for rank in self.ranks
                  if rank != blamed.rank and not self.status(rank).get("left")]
        others.sort(key=lambda rank: bool(self.status(rank).get("failure")))  # who has one, waited
        return blamed._replace(what="; ".join([blamed.what, *map(self.place, others[:3])]))

    def place(self, rank: int) -> str:
        """Return where a rank is, in words."""
        at = described(self.status(rank).get("at")) or " outside of these scripts"
        return f"rank {rank} ({self.names[rank]}) is{at}"

    def note_standstill(self) -> None:
        """Print once, if for `--timeout` nothing has moved, or only one of several ranks.

        RPC waits for ever where a program tells it to, for example for an episode.
        """
        running = [rank for rank in self.ranks if not self.status(rank).get("left")]
        for rank in running:
            moved = self.status(rank).get("moved")
            if moved is None or moved != self.moved[rank][0]:  # None: it starts
                self.moved[rank] = moved, time.monotonic()
        limit = time.monotonic() - self.timeout - GRACE_S
        _, woken = self.away  # until then, after Ctrl-Z, nobody could move
        moving = [rank for rank in running if max(self.moved[rank][1], woken) > limit]
        alone = bool(moving) and len(running) == 1  # it computes, and nobody waits for it
        alive = all(0 <= self.board.age(f"rank/{rank}") < SUSPECT_S for rank in running)
        if self.noted or self.failures or not running or not alive or len(moving) > 1 or alone:
            return
        self.noted = True
        who = f" but rank {moving[0]} ({self.names[moving[0]]})" if moving else ""
        places = [self.place(rank) for rank in sorted(running, key=lambda rank: rank not in moving)]
        print(f"note: for {self.timeout:g} s, nothing has moved{who}: {'; '.join(places[:4])}. "
              "Waiting goes on; Ctrl-C ends it.", file=sys.stderr, flush=True)

    def close(self, verdict: Failure | None) -> None:
        """Tell the others whom to blame, and serve the store until they know."""
        if not self.followers or verdict is None:
            return
        self.board.store.set("verdict", json.dumps(verdict))
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not all(
                self.status(rank, "launcher").get("left") or not self.status(rank, "launcher")
                or self.board.age(f"launcher/{rank}") > SUSPECT_S for rank in self.followers):
            time.sleep(BEAT_S / 10)
            self.board.exchange()


def launcher_of(rank: int | None, store: dist.Store, names: Sequence[str], timeout: float,
                join_s: float | None = None) -> Launcher:
    """Return who watches over a rank; of rank 0, or of all, the store is prepared for the others.

    Args:
        rank: None if one launcher watches over all.
        store: of `channel.open_store`.
        names, timeout, join_s: see `Decider`.
    """
    if rank:
        board = Board(store, [f"rank/{rank}", "verdict"], f"launcher/{rank}")
        return Follower(board, rank, timeout)
    prepare(store, len(names))
    keys = [f"rank/{one}" for one in range(len(names))]
    keys += [f"launcher/{one}" for one in range(1, len(names)) if join_s]
    return Decider(Board(store, keys), names, timeout, join_s)
