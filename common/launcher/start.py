"""The processes of a local run, or the one of a manual launch: started, watched over, ended."""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, current_process, forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp
from common.launcher import channel, environment, network, watch, worker
from common.limits import refuse

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_GRACE_S = 3.0  # a process that is killed is gone by then
IMPORT_S = 8.0  # a tight --timeout is not for the seconds in which another terminal imports torch
LONGEST_TEMPDIR = 70  # bytes: the name of a Unix socket has 107, of which 32 come after the folder
# What every worker imports, the last one when it makes its first optimizer. The fork server does so
# once for all. (If that private one goes, it is passed over: each worker imports it for itself.)
PRELOAD = ["torch", "torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo"]


def launch(run_worker: Callable[[int, int, Namespace], dict | None], args: Namespace,
           role_name: Callable[[int, int], str]) -> dict | None:
    """Run `run_worker(rank, world_size, args)` in every process of the example.

    Args:
        run_worker: module-level function; exactly one role returns a dict (which JSON can hold),
            the others None.
        args: the parsed flags (`common.cli.Parser`).
        role_name: `role_name(rank, world_size) -> str`, the name of a rank in messages.

    Returns:
        That dict, with `wall_s` (seconds, start-up included) added, in the process that reports:
        the one that started the workers, or under torchrun the rank itself. None elsewhere.

    Raises:
        SystemExit: 1 if a worker failed (its traceback and one line have been printed, the others
            are stopped and gone), 2 if the processes cannot be started as the flags say, 130 after
            Ctrl-C or SIGTERM.
    """
    started = time.perf_counter()
    names = [role_name(rank, args.world_size) for rank in range(args.world_size)]
    if dist.is_torchelastic_launched():
        from common.launcher.torchrun import be_one_rank as run
    else:
        run = _start_and_watch
    result = run(run_worker, args, names)
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


def _start_and_watch(run_worker: Callable, args: Namespace, names: list[str]) -> dict | None:
    """Start all ranks, or the one of `--rank`; return the result of the rank that has one."""
    ranks = list(range(args.world_size)) if args.rank is None else [args.rank]
    environment.quiet_cpp()
    with Interruption() as interruption:
        launcher, processes, verdict = None, Processes(args), None
        try:
            store, init_method, launcher = _meet(args, names, interruption)
            processes.start(run_worker, ranks, init_method, interruption)
            verdict = launcher.watch(processes.by_rank, interruption.reader)
            # Before this launcher leaves: then that of rank 0, which serves the store, may end.
            results = [] if verdict else [
                channel.read_result(store, rank, pieces) for rank in ranks
                if (pieces := launcher.status(rank)["pieces"])]
        except channel.LostError:
            verdict = launcher.of_lost_store()
        except KeyboardInterrupt:
            verdict = watch.Failure(ranks[0], "was interrupted")
        except CannotStartError as error:
            verdict = watch.Failure(args.rank, f"cannot start {count(ranks)}: {error}")
        except Exception as error:
            verdict = watch.Failure(ranks[0], f"was left: its launcher raised {error!r}")
            raise
        finally:
            if launcher:
                launcher.close(verdict)
            processes.stop()
        if interruption.happened:
            stopped = ranks if processes.by_rank else []  # or it was before any had started
            print(f"\ninterrupted; stopped {count(stopped)}", file=sys.stderr, flush=True)
            raise SystemExit(130)
        if verdict:
            started = [process.rank for process in processes.by_rank.values()]
            watch.report(verdict, names, sum(rank not in (None, verdict.rank) for rank in started))
            raise SystemExit(1)
    return results[0] if results else None


class CannotStartError(Exception):
    """Carries the reason why the processes of a run cannot be started, in words."""


def count(ranks: Sequence[int]) -> str:
    """Return "1 process" or "3 processes"."""
    return f"{len(ranks)} process{'es' if len(ranks) != 1 else ''}"


# --- where the ranks and the launchers meet


def _meet(args: Namespace, names: list[str],
          interruption: "Interruption") -> tuple[dist.TCPStore, str, watch.Launcher]:
    """Serve the store of this run, or connect to it.

    Returns:
        The store, the init method of the ranks, and who watches: `watch.Decider` or `Follower`.

    Raises:
        SystemExit: after one line; 2 if rank 0's port cannot be opened, 1 if rank 0 does not answer
            within `--timeout` and a few seconds.
        KeyboardInterrupt: if `interruption` comes first.
    """
    if args.rank is None:
        listener = network.listen("localhost", 0)
        host, port, join_s = *listener.getsockname(), None
    else:
        host, port = network.address_of(args.master_addr), args.master_port
        listener, join_s = None, args.timeout + IMPORT_S
    if args.rank == 0:
        try:
            listener = network.listen(args.master_addr, port)
        except OSError as error:
            refuse(f"--master_port {port} cannot be opened on {args.master_addr} "
                   f"({os.strerror(error.errno).lower()}); give another port to all ranks")
    if listener is not None:
        store = channel.open_store(host, port, listener)
    elif (store := _connect(host, port, join_s, interruption)) is None:
        print(f"error: rank 0 cannot be reached: {args.master_addr}:{port} has not answered "
              f"for {join_s:g} s", file=sys.stderr, flush=True)
        raise SystemExit(1)
    launcher = watch.launcher_of(args.rank, store, names, args.timeout, join_s)
    return store, f"tcp://{host}:{port}", launcher


def _connect(host: str, port: int, seconds: float,
             interruption: "Interruption") -> dist.TCPStore | None:
    """Connect to the store that the launcher of rank 0 serves, or return None in the end.

    In a thread: where a port accepts and never answers, torch would wait for ever.
    """
    deadline = time.monotonic() + seconds

    def attempt():
        while time.monotonic() < deadline:
            with suppress(RuntimeError, OSError, ValueError):
                return channel.open_store(host, port)
            time.sleep(0.1)
        return None

    store = channel.in_thread(attempt)
    while not store.done() and time.monotonic() < deadline:
        if connection.wait([interruption.reader], 0.05):
            raise KeyboardInterrupt
    return store.result() if store.done() else None


# --- processes


class Processes:
    """Holds the processes of this machine, from the first fork to the last kill."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.by_rank = args, {}

    def start(self, run_worker: Callable, ranks: list[int], init_method: str,
              interruption: "Interruption") -> None:
        """Start the processes of `ranks`: none is left behind if one of them cannot be started.

        `mp.spawn` starts each process from nothing: each imports torch, which takes seconds. It is
        short for `start_processes(..., start_method="spawn")`. With "forkserver" one process
        imports torch, and all ranks are forked from it, with what it has imported: eleven ranks
        start in less than half the time. A CUDA context does not survive a fork; the fork server,
        unlike this process, has never had one.

        Raises:
            CannotStartError: out of files, of processes, of memory; of the fork server, too.
            KeyboardInterrupt: if `interruption` comes first.
        """
        method, before = self.args.start_method, set(multiprocessing.active_children())
        limit_s, started = channel.START_S + self.args.timeout, time.monotonic()

        def give_up():
            """Kill the fork server: who waits for one that is frozen, or imports, goes on."""
            forkserver.set_forkserver_preload([])  # if the next rank starts another one, at once
            signal_fork_server(signal.SIGKILL)

        late = threading.Timer(limit_s, give_up)
        late.daemon = True
        late.start()
        interruption.unblock = give_up
        try:
            resource_tracker.ensure_running()  # now: as it starts, it unblocks the signals
            # Inherited: no worker ends, with a traceback, half started.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            if method == "forkserver":
                start_fork_server(run_worker)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            import joblib  # here, while the fork server imports torch

            # A forked worker has the fork server's environment and output, which may be others.
            streams = [connection.Connection(os.dup(number), readable=False)  # which can be sent
                       for number in (1, 2)]
            job = (run_worker, self.args, ranks, init_method, joblib.cpu_count(), dict(os.environ),
                   streams)
            worker.flush()
            if not interruption.happened:  # before there was a fork server to end
                processes = mp.start_processes(run_rank, job, len(ranks), join=False,
                                               start_method=method).processes
                self.by_rank = {rank: Process(rank, process)
                                for rank, process in zip(ranks, processes, strict=True)}
        except (EOFError, OSError) as error:
            reason = ("the fork server has ended" if isinstance(error, EOFError)
                      else error.strerror or str(error))
            if time.monotonic() - started > limit_s:
                reason = f"the fork server has not answered for {limit_s:g} s"
            if not interruption.happened:
                raise CannotStartError(reason) from error
        finally:
            late.cancel()
            interruption.unblock = None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            if not self.by_rank:  # some of them, perhaps
                children = set(multiprocessing.active_children()) - before
                self.by_rank = {child.pid: Process(None, child) for child in children}
        if interruption.happened:
            signal_fork_server(signal.SIGKILL)
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End the processes that still run, and remove what they were writing."""
        running = [process for process in self.by_rank.values() if not process.gone()]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.handle.kill()  # SIGTERM would not reach one that is frozen
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and not all(process.gone() for process in running):
            time.sleep(0.01)
        signal_fork_server(signal.SIGCONT)  # if it is frozen: it reports their ends
        for process in self.by_rank.values():
            process.process.join(STOP_GRACE_S)
        pids = [process.process.pid for process in self.by_rank.values()]
        worker.remove_leftovers([os.getpid(), *pids], self.args)


class Process:
    """Shows a started rank to `watch.Decider` and `Follower`.

    Args:
        rank: which; None if it is only to be stopped.
        process: of multiprocessing.
    """

    def __init__(self, rank: int | None, process: BaseProcess) -> None:
        self.rank, self.process, self.sentinel = rank, process, process.sentinel
        self.handle = None
        with suppress(psutil.NoSuchProcess):
            self.handle = psutil.Process(process.pid)

    def gone(self) -> bool:
        """Return whether it has ended, whatever the fork server reports."""
        try:
            return self.handle is None or self.handle.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def failure(self) -> watch.Failure:
        """Return how it ended."""
        deadline = time.monotonic() + channel.BEAT_S
        while not self.gone():  # its end of the pipe is closed a moment before it is gone
            if time.monotonic() > deadline:
                return watch.Failure(None, "the fork server was killed")
            time.sleep(0.01)
        signal_fork_server(signal.SIGCONT)
        self.process.join(STOP_GRACE_S)
        status = self.process.exitcode
        if status is None or status == 255:  # of the fork server, for "I do not know"
            return watch.Failure(self.rank, "died")
        if status >= 0:
            return watch.Failure(self.rank, watch.exited(status))
        named = -status in {*signal.Signals}  # not a real-time signal
        name = signal.Signals(-status).name if named else f"signal {-status}"
        return watch.Failure(self.rank, f"was killed by {name}")


def start_fork_server(run_worker: Callable) -> None:
    """Start it unless it is there: a later launch of this Python process costs only the forks."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPDIR:
        # The name of its socket would be too long for the system. This is where multiprocessing
        # keeps its temporary folder. (Without this private name, such a run would not start.)
        config = current_process()._config
        if "tempdir" not in config:
            folder = config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    main = getattr(sys.modules["__main__"], "__file__", None)
    modules = [*PRELOAD, run_worker.__module__, "common.launcher.fork_server"]
    os.environ[environment.MAIN_PATH] = main if main and run_worker.__module__ == "__main__" else ""
    forkserver.set_forkserver_preload([module for module in modules if module != "__main__"])
    os.environ[environment.LAUNCHER] = str(os.getpid())
    forkserver.ensure_running()
    for name in (environment.MAIN_PATH, environment.LAUNCHER):
        os.environ.pop(name, None)


def wake_resource_tracker() -> None:
    """Let it end with this process, if it is frozen. (Without this private name, it stays.)"""
    with suppress(AttributeError, TypeError, ProcessLookupError):
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGCONT)


util.Finalize(None, wake_resource_tracker, exitpriority=-100)


def signal_fork_server(signum: int) -> None:
    """Kill the fork server of this process (the next launch starts another one), or wake it.

    (Without this private name, one that is frozen would keep a run from ending.)
    """
    if pid := getattr(forkserver._forkserver, "_forkserver_pid", None):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def run_rank(index: int, run_worker: Callable, args: Namespace, ranks: list[int], init_method: str,
             cores: int, environ: dict[str, str], streams: list[connection.Connection]) -> NoReturn:
    """Be a started process: run `run_worker`, then write its result or failure into the store."""
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    environment.begin()
    # Ctrl-C ends it even inside C++; the launcher prints the message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    launcher = multiprocessing.parent_process().sentinel
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    heartbeat = worker.Heartbeat(
        ranks[index], lambda seconds: bool(connection.wait([launcher], seconds)), args)
    heartbeat.start()
    try:
        store = channel.join_store(host, int(port))
    except RuntimeError:  # the launcher has been killed
        worker.exit_now(1)
    heartbeat.connect(store)
    worker.watch_calls(heartbeat)
    try:
        environment.enter(args, ranks[index], *_place(index, args, ranks), init_method, cores)
        result = run_worker(ranks[index], args.world_size, args)
        pieces = 0 if result is None else channel.write_result(store, ranks[index], result)
        heartbeat.leave(pieces)
        worker.exit_now(0)
    except BaseException as error:
        heartbeat.fail(error)
        worker.exit_now(1)


def _place(index: int, args: Namespace, ranks: list[int]) -> tuple[int, int]:
    """Return the local rank and the local world size."""
    if args.rank is None:
        return index, len(ranks)
    if network.is_loopback(args.master_addr):  # one rank per terminal, but all on this machine
        return args.rank, args.world_size
    # On several machines, only the user knows how many ranks are on each.
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Interruption:
    """Turns Ctrl-C, SIGTERM and SIGHUP into what the main thread can wait for.

    What comes later finds us stopping.
    """

    def __init__(self) -> None:
        self.happened, self.told_to_end, self.handlers = False, False, {}
        self.unblock = None  # what to call where the main thread waits for something else

    def __enter__(self) -> "Interruption":
        self.reader, self.writer = os.pipe()
        if threading.current_thread() is threading.main_thread():  # others never hear a signal
            heard = [signum for signum in STOP_SIGNALS  # nohup ignores one
                     if signal.getsignal(signum) is not signal.SIG_IGN]
            self.handlers = {signum: signal.signal(signum, self._note) for signum in heard}
        return self

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.told_to_end |= signum != signal.SIGINT
        if not self.happened:
            self.happened = True
            os.write(self.writer, b"!")
        if self.unblock:
            self.unblock()

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.handlers.items():
            # A second SIGTERM must not kill us on the way out.
            signal.signal(signum, signal.SIG_IGN if self.told_to_end else handler)
        with suppress(OSError):
            os.close(self.reader)
            os.close(self.writer)
