"""The connections between the launchers of one run: each with that of rank 0, in lines of JSON.

    {"hello": 2, "token": "..."}    the first line of each launcher; that of rank 0 says welcome
    {"beat": 0.4}                   both ways, every second: seconds since the own rank was heard
    {"failures": [...]}             to rank 0: what is known of failed ranks
    {"verdict": {...}}              from rank 0: whom to blame
    {"left": true}                  the own rank has left in peace

Like `watch.py`, this file imports no torch.
"""

import contextlib
import json
import socket
import time
from multiprocessing import connection

from common.watch import BEAT_S, SILENCE, failure, silent

WELCOME = b"\n"  # to a launcher that knows the token


class Link:
    """A connection to another launcher: lines of JSON, never waited for."""

    def __init__(self, sock, rank=None):
        sock.setblocking(False)
        self.sock, self.rank, self.rest = sock, rank, b""
        # When the launcher was heard, and what it says of its rank's silence.
        self.heard, self.age = time.monotonic(), 0.0

    def fileno(self):
        """For `connection.wait`."""
        return self.sock.fileno()

    def send(self, **message):
        """Send, or leave it: a launcher that does not read any more will be missed soon."""
        with contextlib.suppress(OSError):
            self.sock.send(json.dumps(message).encode() + b"\n")

    def receive(self):
        """The messages that have come; None when the other side is gone."""
        try:
            data = self.sock.recv(2**16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (TypeError, ValueError):  # somebody else
            return None


class Peers:
    """The launchers of the other ranks: that of rank 0 has a link to each, the others one to it.

    Args:
        rank, world_size: of the one rank that belongs to this launcher, and of all.
        token: what a launcher of this run knows, and nobody else.
        join_s: seconds within which all must have connected.
        sock: of rank 0 one that listens, of the others one that is connected to it.
    """

    def __init__(self, rank, world_size, token, join_s, sock):
        self.rank, self.token = rank, token
        self.join_s, self.join_by = join_s, time.monotonic() + join_s
        self.listener = sock if rank == 0 else None
        self.missing = set(range(1, world_size)) if rank == 0 else set()
        self.strangers, self.links, self.verdict = [], {}, None
        self.sent_at, self.n_sent = -BEAT_S, 0  # when the last beat was sent; failures, with it
        if rank == 0:
            sock.setblocking(False)
        else:
            self.links[0] = Link(sock, rank=0)

    def waitables(self):
        """What becomes ready when a message has come."""
        return [*self.links.values(), *self.strangers, *([self.listener] if self.listener else [])]

    def present(self):
        """Whether rank 0's launcher is still needed: its store, too, serves the others."""
        return bool(self.rank == 0 and (self.missing or self.links))

    def exchange(self, ready, age, failures):
        """Send a beat and the own failures, if it is time; the failures of other ranks.

        Args:
            ready: those of `waitables` that have something to read.
            age: seconds since the own rank was heard.
            failures: what is known here, for the launcher of rank 0.
        """
        now = time.monotonic()
        self._admit(ready)
        found = self._read(ready)
        # Not whenever a message has come: two launchers would answer each other without a pause.
        if now - self.sent_at > BEAT_S / 2 or len(failures) > self.n_sent:
            self.sent_at, self.n_sent = now, len(failures)
            mine = {"failures": failures} if failures and self.rank != 0 else {}
            for link in self.links.values():
                link.send(beat=age, **mine)
        if self.missing and now > self.join_by:
            late = f"has not joined within {self.join_s:g} s"
            found.append(failure(min(self.missing), late, SILENCE))
        return found

    def _admit(self, ready):
        """On rank 0: accept connections, and make links of those that know the token."""
        if self.listener in ready:
            with contextlib.suppress(OSError):
                self.strangers.append(Link(self.listener.accept()[0]))
        for link in [link for link in self.strangers if link in ready]:
            self.strangers.remove(link)
            for message in link.receive() or []:
                if message.get("token") == self.token and message.get("hello") in self.missing:
                    link.rank = message["hello"]
                    self.missing.remove(link.rank)
                    self.links[link.rank] = link
                    link.sock.send(WELCOME)
                    break
            else:
                link.sock.close()

    def _read(self, ready):
        """The failures in what the links bring; what they say of beats and the verdict is kept."""
        found = []
        for link in [link for link in self.links.values() if link in ready]:
            messages = link.receive()
            for message in messages or []:
                link.age = message.get("beat", link.age)
                found += message.get("failures", [])
                self.verdict = message.get("verdict", self.verdict)
            known = self.verdict is not None or any(story["rank"] == link.rank for story in found)
            if messages is None and not known:
                found.append(failure(link.rank, "ended: its launcher is gone"))
            if messages is None or any("left" in message for message in messages):
                self.links.pop(link.rank).sock.close()
        return found

    def unreachable(self, seconds):
        """The failures of the launchers, or of their ranks, that have been silent for so long."""
        ages = {link.rank: time.monotonic() - link.heard for link in self.links.values()}
        lost = [failure(rank, f"cannot be reached: no sign of life for {age:.0f} s", SILENCE)
                for rank, age in ages.items() if age > seconds]
        return lost + [silent(link.rank, link.age) for link in self.links.values()
                       if link.age > seconds]

    def forgive(self):
        """Begin anew, after this process itself was stopped."""
        for link in self.links.values():
            link.heard = time.monotonic()

    def close(self, verdict=None):
        """Say to the others that this rank has left in peace, or, on rank 0, whom to blame."""
        last = {"left": True} if verdict is None else (
            {"verdict": verdict} if self.rank == 0 else {"failures": [verdict]})
        for link in self.links.values():
            link.send(**last)
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
        # Read what is still to come: closing before could throw away what has just been sent.
        links, deadline = list(self.links.values()), time.monotonic() + BEAT_S
        while links and time.monotonic() < deadline:
            ready = connection.wait(links, max(0.0, deadline - time.monotonic()))
            links = [link for link in links if link not in ready or link.receive() is not None]
