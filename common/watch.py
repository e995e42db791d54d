"""Who has failed: launchers watch their ranks and each other, and agree on the one rank to blame.

    rank 1 ---- a beat every second, what it raised ----> its launcher ----+
    rank 2 ---------------------------------------------> its launcher ----+---- the launcher of rank 0

A local run has one launcher, which needs no network. Where ranks are launched manually, each terminal has a launcher.
Under torchrun the ranks have no launcher of ours: there this file, which needs no torch, runs as a small process beside
each of them. It is not frozen when its rank is, and outlives it. Several launchers connect to that of rank 0, which
decides whom to blame: the cause of a failure, not the rank that noticed it.

A rank may compute for as long as it likes: its beats come from a thread of its own. Only a single call that holds
Python's interpreter lock for longer than `--timeout` would be mistaken for silence.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from multiprocessing import connection
from pathlib import Path

BEAT_S = 1.0
GRACE_S = 4.0  # when a rank has only noticed that another one is gone: how long to look for that other one
SUSPECT_S = 3.5 * BEAT_S  # who is silent for so long while somebody else misses an answer is to blame
START_S = 60.0  # a process may take this long until its first beat
WELCOME = b"\n"  # to a launcher that knows the token
CAUSE, SILENCE, NOTICED = range(3)  # kinds of failures, the most telling first


def failure(rank, what, kind=CAUSE, traceback=""):
    """What is known of a failed rank: `what` completes the sentence "rank 2 (observer2) ..."."""
    return {"rank": rank, "what": what, "kind": kind, "traceback": traceback}


def silent(rank, seconds):
    """The failure of a rank whose process lives and does nothing."""
    return failure(rank, f"has not answered for {seconds:.0f} s", SILENCE)


def leave_word(folder, rank, story):
    """In a failed rank: write what it knows where its launcher finds it, whole or not at all."""
    path = folder / f"failure{rank}"
    path.with_suffix(".tmp").write_text(json.dumps(story))
    path.with_suffix(".tmp").replace(path)


def word_of(folder, rank):
    """The failure of which a rank has left word, in a list, or an empty list."""
    path = folder / f"failure{rank}"
    return [json.loads(path.read_text())] if path.exists() else []


def say(story, names, stopped=0):
    """Print the traceback of a failure, if there is one, and its one line."""
    others = f"; stopped {stopped} other process{'es' if stopped > 1 else ''}" if stopped else ""
    lines = [story["traceback"], f"error: rank {story['rank']} ({names[story['rank']]}) {story['what']}{others}"]
    print("".join(f"{line}\n" for line in lines if line), end="", file=sys.stderr, flush=True)


class Beats:
    """How long ago each of the own ranks was heard: it touches the file `beat<rank>` every second."""

    def __init__(self, ranks, folder):
        self.files = {rank: folder / f"beat{rank}" for rank in ranks}
        self.seen = dict.fromkeys(ranks)
        self.heard = dict.fromkeys(ranks, time.monotonic() + START_S)

    def age(self, rank):
        """Seconds of silence; negative until a rank that is being started has had its time."""
        with contextlib.suppress(FileNotFoundError):
            touched = self.files[rank].stat().st_mtime_ns
            if touched != self.seen[rank]:  # by our own clock: neither its changes nor a suspended machine matter
                self.seen[rank], self.heard[rank] = touched, time.monotonic()
        return time.monotonic() - self.heard[rank]

    def forgive(self):
        """Begin anew, after this process itself was stopped."""
        self.heard = {rank: max(at, time.monotonic()) for rank, at in self.heard.items()}


class Link:
    """A connection to another launcher: lines of JSON, never waited for."""

    def __init__(self, sock, rank=None):
        sock.setblocking(False)
        self.sock, self.rank, self.rest = sock, rank, b""
        self.heard, self.age = time.monotonic(), 0.0  # of the launcher, and what it says of its rank's silence

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
    """The launchers of the other ranks: that of rank 0 has a link to each, the others have one to it.

    Args:
        rank, world_size: of the one rank that belongs to this launcher, and of all.
        token: what a launcher of this run knows, and nobody else.
        join_s: seconds within which all must have connected.
        sock: of rank 0 one that listens, of the others one that is connected to it.
    """

    def __init__(self, rank, world_size, token, join_s, sock):
        self.rank, self.token, self.join_s, self.join_by = rank, token, join_s, time.monotonic() + join_s
        self.listener = sock if rank == 0 else None
        self.missing = set(range(1, world_size)) if rank == 0 else set()
        self.strangers, self.links, self.verdict = [], {}, None
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
        """Send a beat and the own failures; the failures of other ranks.

        Args:
            ready: those of `waitables` that have something to read.
            age: seconds since the own rank was heard.
            failures: what is known here, for the launcher of rank 0.
        """
        now, found = time.monotonic(), []
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
        for link in [link for link in self.links.values() if link in ready]:
            messages = link.receive()
            for message in messages or []:
                link.age = message.get("beat", link.age)
                found += message.get("failures", [])
                self.verdict = message.get("verdict", self.verdict)
            if messages is None and self.verdict is None and not any(story["rank"] == link.rank for story in found):
                found.append(failure(link.rank, "ended: its launcher is gone"))
            if messages is None or any("left" in message for message in messages):
                self.links.pop(link.rank).sock.close()
        for link in self.links.values():
            link.send(beat=age, **({"failures": failures} if failures and self.rank != 0 else {}))
        if self.missing and now > self.join_by:
            found.append(failure(min(self.missing), f"has not joined within {self.join_s:g} s", SILENCE))
        return found

    def unreachable(self, seconds):
        """The failures of the launchers, or of their ranks, that have been silent for so long."""
        now = time.monotonic()
        lost = [failure(link.rank, f"cannot be reached: no sign of life for {now - link.heard:.0f} s", SILENCE)
                for link in self.links.values() if now - link.heard > seconds]
        return lost + [silent(link.rank, link.age) for link in self.links.values() if link.age > seconds]

    def forgive(self):
        """Begin anew, after this process itself was stopped."""
        for link in self.links.values():
            link.heard = time.monotonic()

    def close(self, verdict=None):
        """Tell the others that this rank has left in peace, or, on rank 0, whom to blame."""
        for link in self.links.values():
            link.send(**({"left": True} if verdict is None else
                         {"verdict": verdict} if self.rank == 0 else {"failures": [verdict]}))
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
        # Read what is still to come: closing before could throw away what has just been sent.
        links, deadline = list(self.links.values()), time.monotonic() + BEAT_S
        while links and time.monotonic() < deadline:
            ready = connection.wait(links, max(0.0, deadline - time.monotonic()))
            links = [link for link in links if link not in ready or link.receive() is not None]


def watch(ranks, ended, folder, timeout, peers=None):
    """Wait until all is over.

    Args:
        ranks: `{rank: what becomes ready when it has ended}`.
        ended: called once with each rank that has: a list of its failures.
        folder: where the ranks beat and leave word.
        timeout: seconds that anybody may be silent.
        peers: the launchers elsewhere, if there are any.

    Returns:
        The failure to blame, or None if every rank has left in peace.
    """
    beats, ranks, failures, since, looked = Beats(ranks, folder), dict(ranks), [], None, time.monotonic()
    while ranks or failures or (peers and peers.present()):
        ready = connection.wait([*ranks.values(), *(peers.waitables() if peers else [])], BEAT_S)
        if time.monotonic() - looked > 5 * BEAT_S:  # Ctrl-Z, a suspended laptop: it was us who did not listen
            beats.forgive()
            if peers:
                peers.forgive()
        looked = time.monotonic()
        for rank in [rank for rank, sentinel in ranks.items() if sentinel in ready]:
            del ranks[rank]
            failures += ended(rank)
        ages = {rank: beats.age(rank) for rank in ranks}
        failures += [silent(rank, age) for rank, age in ages.items() if age > timeout]
        if peers:
            failures += peers.exchange(ready, max([0.0, *ages.values()]), failures) + peers.unreachable(timeout)
            if peers.verdict:
                return peers.verdict
        if failures:
            since = since or looked
            blamed = min(failures, key=lambda story: story["kind"])
            # The launcher of rank 0 decides, and only if it does not, the others do.
            decides = peers is None or peers.rank == 0 or 0 not in peers.links or blamed["rank"] == 0
            waited = looked - since > GRACE_S + (0 if decides else 2 * BEAT_S)
            if waited and blamed["kind"] == NOTICED:  # of what it has noticed, who is the cause?
                suspects = [silent(rank, age) for rank, age in ages.items() if age > SUSPECT_S]
                return (suspects + (peers.unreachable(SUSPECT_S) if peers else []) + [blamed])[0]
            if waited or (decides and blamed["kind"] != NOTICED):
                return blamed
    return None


def beside_a_rank(rank, world_size, names, folder, timeout, token, join_s, sock, neighbours):
    """The life of the process beside a rank of torchrun, whose standard input is a pipe from it.

    Args:
        rank, world_size, folder, timeout, token, join_s, sock: as for `Peers` and `watch`; `sock` is None if the rank
            is alone.
        names: the role of each rank.
        neighbours: the ranks of this machine, in order.
    """
    stopping = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # torchrun stops the rank; we end after it
        signal.signal(signum, lambda *_: stopping.append(True))
    peers = None if sock is None else Peers(rank, world_size, token, join_s, socket.socket(fileno=sock))
    folder, the_rank = Path(folder), os.getppid()

    def ended(rank):
        word = os.read(0, 100)
        if word or stopping:
            return word_of(folder, rank) or ([] if word else [failure(rank, "was stopped", NOTICED)])
        return [failure(rank, "died; torchrun shows how")]

    verdict = watch({rank: 0}, ended, folder, timeout, peers)
    if peers:
        peers.close(verdict)
    if verdict and not stopping:
        # One line on each machine: from beside the rank to blame, or where that is not here, from the first one.
        if verdict["rank"] == rank or (neighbours[0] == rank and verdict["rank"] not in neighbours):
            say(verdict, names)
        with contextlib.suppress(OSError):
            (folder / "verdict").touch()  # the rank ends when it sees this
            if not connection.wait([0], 2 * BEAT_S + 1) or os.read(0, 100):
                time.sleep(BEAT_S)
            if os.getppid() == the_rank:  # frozen; torchrun would wait for half a minute
                os.kill(the_rank, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    beside_a_rank(**json.loads(sys.argv[1]))
