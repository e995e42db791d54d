"""The one channel of a run: a TCPStore, in which ranks and launchers write how they are.

    rank/2       by rank 2, at every beat: {"beat": 17, "failure": null, "left": false, ...}
    launcher/2   by the process that watches over rank 2, likewise, where there are several
    verdict      by the launcher of rank 0, once: whom to blame
    result/0/0   by the rank that has one, in pieces

The launcher of rank 0 serves the store, and lives until the others have read the verdict or have
left. A value is written whole or not at all. The ranks meet in the same store (`INIT_METHOD`).
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 1.5
SUSPECT_S = 3.5  # who is silent for so long while somebody misses an answer is to blame
START_S = 60.0  # a process may take this long until its first beat
LIMIT = timedelta(seconds=60)  # of a single call that waits for a key
PIECE = 2**22  # bytes: a TCPStore refuses values of 8 MiB


class LostError(Exception):
    """Means that the store is gone: whoever served it has ended."""


def open_store(host: str, port: int, listener: socket.socket | None = None) -> dist.TCPStore:
    """Return a client of the store at an address; with `listener`, also serve it on that socket.

    Args:
        host, port: where it is served.
        listener: a listening `socket.socket`, which the store takes over.

    Raises:
        OSError, RuntimeError: if nobody serves it there.
    """
    if listener is not None:
        return dist.TCPStore(host, port, None, True, LIMIT, wait_for_workers=False,
                             master_listen_fd=listener.detach())
    # torch would wait for the port, and print its own errors.
    socket.create_connection((host, port), timeout=LIMIT.total_seconds()).close()
    store = join_store(host, port)
    ours(store).wait(["verdict"])  # until it is prepared
    return store


def join_store(host: str, port: int) -> dist.TCPStore:
    """Return a client of a store that is there, and prepared."""
    return dist.TCPStore(host, port, None, False, LIMIT, wait_for_workers=False)


def ours(store: dist.Store) -> dist.PrefixStore:
    """Return the part of a store that belongs to the launchers, apart from what the ranks put."""
    return dist.PrefixStore("launcher", store)


def prepare(store: dist.Store, world_size: int) -> None:
    """Write every key, empty: to read a key that is not there would mean to wait for it."""
    keys = [f"{who}/{rank}" for who in ("rank", "launcher") for rank in range(world_size)]
    ours(store).multi_set([*keys, "verdict"], [""] * (len(keys) + 1))


def write_result(store: dist.Store, rank: int, result: dict) -> int:
    """Write what a rank returns, in pieces that the store accepts; return how many there are."""
    text = json.dumps(result)
    pieces = [text[start:start + PIECE] for start in range(0, len(text), PIECE)]
    for number, piece in enumerate(pieces):
        ours(store).set(f"result/{rank}/{number}", piece)
    return len(pieces)


def read_result(store: dist.Store, rank: int, pieces: int) -> dict:
    """Return what `write_result` has written.

    Raises:
        LostError: the store is gone.
    """
    keys = [f"result/{rank}/{number}" for number in range(pieces)]
    try:
        return json.loads(b"".join(ours(store).get(key) for key in keys))
    except RuntimeError:
        raise LostError from None


def in_thread(call: Callable) -> Future:
    """Call in a thread, for which Python does not wait at its end; return what will come of it.

    A server that is frozen or cut off does not answer, and torch's time-outs do not bound every
    call: with 2.13, `multi_get` waits for ever, and so does a new client.
    """
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Board:
    """Reads in the store and writes there for a launcher, never waiting for longer than a beat.

    A thread makes the calls, except where the server is in this very process. When a key was last
    written, it finds by its own clock: no other one matters, nor a date.

    Args:
        store: as of `open_store`.
        keys: those that are read.
        own: the key that this launcher writes; None for the one that serves the store.
    """

    def __init__(self, store: dist.Store, keys: Sequence[str], own: str | None = None) -> None:
        self.store, self.keys, self.own = ours(store), keys, own
        # Of each key: what was read, what that means, when it was new.
        self.texts, self.values = dict.fromkeys(keys, b""), dict.fromkeys(keys)
        self.at = dict.fromkeys(keys, time.monotonic() + START_S)
        self.gaps = {}  # silences that are over: (seconds, end)
        self.answered = time.monotonic()
        self.status = {"beat": 0, "failure": None, "left": False}  # of this launcher
        self._reply = None  # to what was asked, and has not been answered yet

    def _ask(self) -> Future:
        """Write the own status and read all keys, in a thread."""
        self.status["beat"] += 1
        status = json.dumps(self.status)

        def ask():
            self.store.set(self.own, status)
            return self.store.multi_get(self.keys)

        return in_thread(ask)

    def exchange(self) -> bool:
        """Write the own status and read all keys; return False if the store does not answer.

        Raises:
            LostError: the store is gone.
        """
        try:
            if self.own is None:
                texts = self.store.multi_get(self.keys)
            else:
                self._reply = self._reply or self._ask()
                texts = self._reply.result(BEAT_S)
        except TimeoutError:
            return False
        except RuntimeError:
            raise LostError from None
        self._reply, self.answered = None, time.monotonic()
        for key, text in zip(self.keys, texts, strict=True):
            self.hear(key, text)
        return True

    def hear(self, key: str, text: bytes) -> None:
        """Take in what a key holds now."""
        if text == self.texts[key]:
            return
        if (gap := self.age(key)) > SUSPECT_S:
            self.gaps[key] = gap, time.monotonic()
        self.texts[key], self.at[key] = text, time.monotonic()
        with contextlib.suppress(ValueError, RecursionError):  # a stranger has written it
            self.values[key] = json.loads(text)

    def age(self, key: str) -> float:
        """Return the seconds of silence; negative until one that starts has had its time."""
        return time.monotonic() - self.at[key]

    def forgive(self) -> None:
        """Begin anew, after this process itself was stopped."""
        self.at = {key: max(at, time.monotonic()) for key, at in self.at.items()}

    def take_leave(self, **changes: object) -> None:
        """Write the own status for the last time, also where the store is slow, but not silent."""
        self.status |= changes
        while True:
            asks = self._reply is None  # else this is the reply to what was asked before
            written = self.exchange() and asks
            if written or time.monotonic() > self.answered + 5 * BEAT_S:
                return
