"""The small process beside each rank of torchrun, which takes the place of a launcher of ours.

    torchrun --- starts ---> rank 1 --- starts ---> this process of rank 1
                                  (pipe)                 |
    torchrun --- starts ---> rank 0 --- starts ---> this process of rank 0: decides whom to blame

It is not frozen when its rank is, and outlives it. It runs this file as a plain script, without
torch: it is there within a tenth of a second, and small.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path
from types import ModuleType


def start(rank, args, names, folder, peers, neighbours):
    """In a rank: start the process beside it, which takes over the connection to the others.

    Args:
        rank, args: of this rank, and the parsed flags.
        names: the role of each rank.
        folder: where the rank beats and leaves word.
        peers: the launchers elsewhere (`peers.Peers`); None if the rank is alone.
        neighbours: the ranks of this machine, in order.

    Returns:
        The process: what is written to its standard input means that the rank ends as it should
        ("left"), or has left word of a failure ("!").
    """
    sock = peers and (peers.listener or peers.links[0].sock)
    life = {"rank": rank, "world_size": args.world_size, "names": names, "folder": str(folder),
            "timeout": args.timeout, "token": peers and peers.token,
            "join_s": peers and peers.join_s, "sock": sock and sock.fileno(),
            "neighbours": list(neighbours)}
    return subprocess.Popen([sys.executable, __file__, json.dumps(life)], stdin=subprocess.PIPE,
                            bufsize=0, stdout=subprocess.DEVNULL,
                            pass_fds=[sock.fileno()] if sock else [])


def watch_over(rank, world_size, names, folder, timeout, token, join_s, sock, neighbours):
    """The life of the process beside a rank, whose standard input is a pipe from it.

    Args:
        rank, world_size, token, join_s, sock: as for `peers.Peers`; `sock` is a file descriptor,
            or None if the rank is alone.
        folder, timeout: as for `watch.watch`.
        names, neighbours: as for `start`.
    """
    from common.peers import Peers  # here: found in the script's own way, see the end of this file
    from common.watch import BEAT_S, NOTICED, failure, say, watch, word_of

    stopping = []
    # torchrun stops the rank; we end after it.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: stopping.append(True))
    peers = None
    if sock is not None:
        peers = Peers(rank, world_size, token, join_s, socket.socket(fileno=sock))
    folder, the_rank = Path(folder), os.getppid()

    def ended(rank):
        word = os.read(0, 100)
        if word or stopping:
            noticed = [] if word else [failure(rank, "was stopped", NOTICED)]
            return word_of(folder, rank) or noticed
        return [failure(rank, "died; torchrun shows how")]

    verdict = watch({rank: 0}, ended, folder, timeout, peers)
    if peers:
        peers.close(verdict)
    if verdict and not stopping:
        # One line on each machine: from beside the rank to blame, or where that is not here, from
        # the first one.
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
    # The package without its __init__.py, which looks for torch: one such process starts per rank.
    common = sys.modules["common"] = ModuleType("common")
    common.__path__ = [str(Path(__file__).parent)]
    watch_over(**json.loads(sys.argv[1]))
