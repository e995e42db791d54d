"""Who has failed: launchers watch their ranks and each other, and agree on the one rank to blame.

    rank 1 --- a beat every second, what it raised ---> its launcher ---+
    rank 2 -------------------------------------------> its launcher ---+--- the launcher of rank 0

A local run has one launcher, which needs no network. Where ranks are launched manually, each
terminal has a launcher; under torchrun, a small process beside each rank takes its place
(`beside.py`, without torch: this file imports none). Several launchers connect to that of rank 0
(`peers.py`), which decides whom to blame: the cause of a failure, not the rank that noticed it.

A rank may compute for as long as it likes: its beats come from a thread of its own. Only a single
call that holds Python's interpreter lock for longer than `--timeout` would be mistaken for silence.
"""

import contextlib
import json
import sys
import time
from multiprocessing import connection

BEAT_S = 1.0
GRACE_S = 4.0  # how long to look for the rank to blame, when others have only noticed its end
SUSPECT_S = 3.5 * BEAT_S  # who is silent for so long while somebody misses an answer is to blame
START_S = 60.0  # a process may take this long until its first beat
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
    with contextlib.suppress(FileNotFoundError):  # the launcher was killed: another rank tidied up
        path.with_suffix(".tmp").write_text(json.dumps(story))
        path.with_suffix(".tmp").replace(path)


def word_of(folder, rank):
    """The failure of which a rank has left word, in a list, or an empty list."""
    path = folder / f"failure{rank}"
    return [json.loads(path.read_text())] if path.exists() else []


def say(story, names, stopped=0):
    """Print the traceback of a failure, if there is one, and its one line."""
    others = f"; stopped {stopped} other process{'es' if stopped > 1 else ''}" if stopped else ""
    line = f"error: rank {story['rank']} ({names[story['rank']]}) {story['what']}{others}"
    told = "".join(f"{text}\n" for text in (story["traceback"], line) if text)
    print(told, end="", file=sys.stderr, flush=True)  # in one piece: other launchers print, too


class Beats:
    """How long ago each of the own ranks was heard; it touches the file `beat<rank>`."""

    def __init__(self, ranks, folder):
        self.files = {rank: folder / f"beat{rank}" for rank in ranks}
        self.seen = dict.fromkeys(ranks)
        self.heard = dict.fromkeys(ranks, time.monotonic() + START_S)

    def age(self, rank):
        """Seconds of silence; negative until a rank that is being started has had its time."""
        with contextlib.suppress(FileNotFoundError):
            touched = self.files[rank].stat().st_mtime_ns
            # By our own clock: neither changes of the other nor a suspended machine matter.
            if touched != self.seen[rank]:
                self.seen[rank], self.heard[rank] = touched, time.monotonic()
        return time.monotonic() - self.heard[rank]

    def forgive(self):
        """Begin anew, after this process itself was stopped."""
        self.heard = {rank: max(at, time.monotonic()) for rank, at in self.heard.items()}


def watch(ranks, ended, folder, timeout, peers=None):
    """Wait until all is over.

    Args:
        ranks: `{rank: what becomes ready when it has ended}`.
        ended: called once with each rank that has: a list of its failures.
        folder: where the ranks beat and leave word.
        timeout: seconds that anybody may be silent.
        peers: the launchers elsewhere (`peers.Peers`), if there are any.

    Returns:
        The failure to blame, or None if every rank has left in peace.
    """
    beats, ranks, failures = Beats(ranks, folder), dict(ranks), []
    since, looked = None, time.monotonic()  # since: the first failure
    while ranks or failures or (peers and peers.present()):
        ready = connection.wait([*ranks.values(), *(peers.waitables() if peers else [])], BEAT_S)
        if time.monotonic() - looked > 5 * BEAT_S:  # Ctrl-Z, a suspended laptop: we did not listen
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
            failures += peers.exchange(ready, max([0.0, *ages.values()]), failures)
            failures += peers.unreachable(timeout)
            if peers.verdict:
                return peers.verdict
        if failures:
            since = since or looked
            blamed = min(failures, key=lambda story: story["kind"])
            # The launcher of rank 0 decides, and only if it does not, the others do.
            decides = (peers is None or peers.rank == 0 or 0 not in peers.links
                       or blamed["rank"] == 0)
            waited = looked - since > GRACE_S + (0 if decides else 2 * BEAT_S)
            if waited and blamed["kind"] == NOTICED:  # of what it has noticed, who is the cause?
                suspects = [silent(rank, age) for rank, age in ages.items() if age > SUSPECT_S]
                return (suspects + (peers.unreachable(SUSPECT_S) if peers else []) + [blamed])[0]
            if waited or (decides and blamed["kind"] != NOTICED):
                return blamed
    return None
