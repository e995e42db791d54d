"""Under torchrun: this process is a rank, and a fork of it watches over it.

    torchrun --- starts ---> rank 1 --- forks ---> the process that watches over rank 1: a Follower
    torchrun --- starts ---> rank 0 --- forks ---> ... over rank 0: serves the store, and decides

It is not frozen when its rank is, and outlives it.
"""

import atexit
import contextlib
import os
import signal
import socket
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection

import joblib
import torch.distributed as dist
from common.launcher import channel, environment, network, watch, worker
from common.launcher.channel import BEAT_S

_launches = 0


def be_one_rank(run_worker: Callable, args: Namespace, names: list[str]) -> dict | None:
    """Run `run_worker` in this process, watched over; see `common.launcher.launch`."""
    global _launches
    _launches += 1
    environment.begin()
    me, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    environment.enter(args, me, local_rank, local_world_size, "env://", joblib.cpu_count())
    neighbours = range(me - local_rank, me - local_rank + local_world_size)
    address, listener, store = _meet(me, args, local_world_size == args.world_size)
    watcher = Watcher(me, args, names, neighbours, address, listener)
    heartbeat = watcher.heartbeat = worker.Heartbeat(me, watcher.unwatched, args)
    heartbeat.start()
    heartbeat.connect(store or channel.open_store(*address))
    # At its end Python ends this thread wherever it is: within C++, that aborts the process.
    atexit.register(heartbeat.lock.acquire, timeout=watch.GRACE_S)
    worker.watch_calls(heartbeat)
    try:
        result = run_worker(me, args.world_size, args)
    except BaseException as error:
        heartbeat.fail(error)
        # Meanwhile, the heartbeat ends this process as soon as it is known whom to blame.
        time.sleep(3 * watch.GRACE_S)
        worker.exit_now(1)
    heartbeat.leave()
    watcher.leave()
    return result


def _meet(me: int, args: Namespace, one_machine: bool,
          ) -> tuple[tuple[str, int], socket.socket | None, dist.TCPStore | None]:
    """Find the store of the launchers through torchrun's own, which ends with its machine.

    Returns:
        Its host and port; on rank 0 the socket on which it will be served, and None; elsewhere
        None, and the store.
    """
    host = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]
    limit_s = max(args.timeout, channel.START_S)
    theirs, _, _ = next(dist.rendezvous("env://", me, args.world_size,
                                        timeout=timedelta(seconds=limit_s)))
    # torchrun's store outlives the ranks that it starts anew; several machines count their attempts
    # apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else ""
    key, deadline = f"launchers {attempt} {_launches}", time.monotonic() + limit_s
    if me == 0:
        listener = network.listen(host, 0)
        port = listener.getsockname()[1]
        theirs.set(key, str(port))
        _keep.append(theirs)
        return (host, port), listener, None
    while True:
        port = int(theirs.get(key))
        with contextlib.suppress(OSError, RuntimeError):
            store = channel.open_store(host, port)
            if not channel.ours(store).get("verdict"):
                return (host, port), None, store
        if time.monotonic() > deadline:  # the address of an earlier attempt
            raise ConnectionError(f"no launcher of rank 0 at {host}:{port}")
        time.sleep(0.1)


_keep = []  # rank 0 may be the one that serves torchrun's store, until the end


class Watcher:
    """Forks from a rank the process that watches over it, and listens to it.

    Args:
        me, args, names: of this rank, the parsed flags, the role of each rank.
        neighbours: the ranks of this machine.
        address, listener: of `_meet`.
    """

    def __init__(self, me: int, args: Namespace, names: list[str], neighbours: range,
                 address: tuple[str, int], listener: socket.socket | None) -> None:
        self.me, self.args, self.names, self.left = me, args, names, False
        self.parent, self.heartbeat = os.getppid(), None
        self.heard = self.looked = time.monotonic()
        self.link, theirs = socket.socketpair()
        with warnings.catch_warnings():
            # Of a process with threads. The fork calls Python and the store, no more.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            try:
                watch_over(Parent(me, args, theirs), names, neighbours, address, listener)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        if listener is not None:
            listener.close()

    def unwatched(self, seconds: float) -> bool:
        """Wait for so long; return whether torchrun is gone. End the rank if there is a verdict.

        The watcher writes "." at each beat, and "!" when it is known whom to blame.
        """
        ready, failure = connection.wait([] if self.left else [self.link], seconds), None
        heard = self.link.recv(100) if ready and not self.left else b""
        if b"!" in heard:
            worker.exit_now(1)
        now, away = time.monotonic(), time.monotonic() - self.looked > watch.AWAY_S
        self.looked = now
        if heard or self.left or away:  # away: Ctrl-Z has stopped this process, too
            self.heard = now
        elif ready:
            failure = "was killed"
        elif now - self.heard > max(self.args.timeout, channel.SUSPECT_S):
            failure = f"has not answered for {now - self.heard:.0f} s"
        if failure:
            failure = watch.Failure(self.me, f"is not watched: the process beside it {failure}")
            self.heartbeat.write(failure=failure)
            watch.report(failure, self.names)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            worker.exit_now(1)
        return os.getppid() != self.parent

    def leave(self) -> None:
        """Let the watcher know that the rank has left; it ends when it is not needed any more."""
        self.left = True
        self.link.shutdown(socket.SHUT_WR)


class Parent:
    """Shows the rank to the process that watches over it; see `watch.Launcher.watch`.

    Args:
        rank: which.
        args: the parsed flags.
        link: a socket to it, which is at its end when the rank has ended or left.
    """

    def __init__(self, rank: int, args: Namespace, link: socket.socket) -> None:
        self.rank, self.args, self.sentinel, self.stopping = rank, args, link, False
        self.pid = os.getppid()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._stop)  # torchrun stops the rank; we end after it

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def beat(self) -> None:
        """Let the rank know that this process lives, until it ends."""
        with contextlib.suppress(OSError):
            while True:
                self.sentinel.send(b".")
                time.sleep(BEAT_S)

    def gone(self) -> bool:
        """Return whether it has ended; the sentinel does not fail."""
        return False

    def lives(self) -> bool:
        """Return whether its process is there, maybe frozen."""
        return os.getppid() == self.pid

    def wait(self, seconds: float, also_stopping: bool = False) -> None:
        """Wait for so long until it has ended, or with `also_stopping` torchrun is ending it."""
        deadline = time.monotonic() + seconds
        while (self.lives() and not (also_stopping and self.stopping)
               and time.monotonic() < deadline):
            time.sleep(BEAT_S / 10)

    def failure(self) -> watch.Failure:
        """Remove what it was writing; return how it ended.

        It is removed now, not with the verdict: torchrun may be over before there is one. What
        torchrun does itself, such as to stop a rank, it also reports itself.
        """
        worker.remove_leftovers([self.pid], self.args)
        if self.stopping:
            return watch.Failure(self.rank, "was stopped", watch.NOTICED)
        return watch.Failure(self.rank, "died; torchrun shows how")


def watch_over(parent: Parent, names: list[str], neighbours: range,
               address: tuple[str, int], listener: socket.socket | None) -> None:
    """Be the process that watches over a rank."""
    environment.wake_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    me, timeout = parent.rank, parent.args.timeout
    launcher = watch.launcher_of(me, channel.open_store(*address, listener), names, timeout,
                                 max(timeout, channel.START_S))
    channel.in_thread(parent.beat)
    verdict = launcher.watch({me: parent})
    if verdict is None:
        launcher.close(None)
        return
    # One line on each machine: from beside the rank to blame, or where that is not here, from the
    # first one, unless that has left. None if torchrun has begun to end all ranks: it shows why.
    reporter = verdict.rank if verdict.rank in neighbours else neighbours[0]
    if me == reporter and not parent.stopping:
        with contextlib.suppress(OSError):  # nobody may read it any more
            watch.report(verdict, names)
    launcher.close(verdict)
    if me != reporter:  # torchrun takes the first rank that ends for the cause, and ends the others
        parent.wait(5.0, also_stopping=True)
    parent.sentinel.setblocking(False)  # full, where a frozen rank has not taken minutes of beats
    with contextlib.suppress(OSError):
        parent.sentinel.send(b"!")  # the rank ends
    parent.wait(3.0)
    if parent.lives():  # frozen; torchrun would wait for half a minute
        os.kill(parent.pid, signal.SIGKILL)
    worker.remove_leftovers([parent.pid], parent.args)
