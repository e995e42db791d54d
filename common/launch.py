"""Start a program in all of its processes, and name the rank that failed.

    local      python X/main.py --world_size 3              `mp.start_processes`, watched from here
    torchrun   torchrun --nproc_per_node 3 X/main.py        torchrun has started this one rank
    manual     python X/main.py --world_size 3 --rank 1 ... this terminal is one rank

One idea serves all three launch modes. All ranks connect to one TCPStore. A thread of each rank
writes its state there every second: a heartbeat, whether the rank has left, and how it has failed.

    rank 0 -- state --> +-------+
    rank 1 -- state --> | store | -- all states --> the launcher (local), or every rank (torchrun,
    rank 2 -- state --> +-------+                   manual), which decides: `States.verdict`

A rank ends as soon as its store is gone. Therefore no rank waits forever.
"""

import faulthandler
import itertools
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, NoReturn

from common import ROOT, environment

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp

BEAT_S = 1.0
SILENT_S = 3.5  # a rank that is silent for this long while another rank waits is to blame
GRACE_S = 4.0  # after a failure that may follow from another rank's, look for the cause this long
START_S = 60.0  # a process may need this long until its first beat, because it imports torch
JOIN_S = 8.0  # manual launch: a rank may join this much later than --timeout, for the same reason
LINGER_S = 4.0  # the rank that must end last waits this long, so that all others read the reason
DUMP_S = 0.1  # within this time, a rank prints where its threads are
INNERMOST = "the innermost line first"  # how faulthandler prints a thread
PIECE = 2**22  # bytes of a result in one value of the store, which refuses 8 MiB
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
CAUSE, SILENT, WAITED, LOST = range(4)  # kinds of failures: the lowest one is to blame
LAUNCHES = itertools.count()  # of this process

# How torch says that another process is gone, and that it has not answered in time.
SAYS_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed ?out|timeout|tensorpipe|gloo|NCCL|RPCErr|"
    r"Broken pipe|\beof\b|failed to connect|rendezvous|Socket|store")
SAYS_WAITED = re.compile(r"[Tt]imed ?out(?! connecting)|timeout")
# How an exception that came over RPC names the worker that raised it.
ORIGIN = re.compile(
    r"On WorkerInfo\(id=(?P<rank>\d+), name=[\w:-]+\):\s*(?P<kind>\w+)\((?P<message>.*)")
IN_WORDS = {"NotSavedError", "NotFiniteError"}  # of common: their messages say everything
# In a traceback: frames of this launcher and of the tracer; a line of a lesson.
OWN_FRAMES = re.compile(rf'^ *File "{re.escape(str(ROOT))}/(?:common/launch\.py|tracing/).*\n'
                        r"(?: {4}.*\n)*", re.MULTILINE)
PLACE = re.compile(rf'File "{re.escape(str(ROOT))}/(?!common/|tracing/|\.)(.+?)", line (\d+)')


class Failure(NamedTuple):
    """How a rank failed; `what` continues the sentence "rank 2 (observer2) ..."."""

    kind: int
    rank: int
    what: str
    traceback: str = ""


class RunFailedError(SystemExit):
    """Ends the launching process with status 1; `failure` says which rank failed, and how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(1)
        self.failure = failure


def launch(run_worker: Callable[[int, int, Namespace], dict | None], args: Namespace,
           role_name: Callable[[int, int], str]) -> dict | None:
    """Run `run_worker(rank, world_size, args)` in every process of the program.

    Args:
        run_worker: Module-level function. One role returns a JSON-serializable dict; all other
            roles return None.
        args: Parsed flags (`common.cli.Parser`).
        role_name: `role_name(rank, world_size)`, the name of a rank in messages.

    Returns:
        That dict, with `wall_s` (seconds, including the start), in the reporting process: the
        launcher, or (under torchrun and in a manual launch) that role's rank. None elsewhere.

    Raises:
        RunFailedError: A rank failed; one line has named it. (A `SystemExit` with status 1.)
        SystemExit: 1 after one line if the processes cannot be started, or rank 0 of a manual
            launch cannot be reached; 2 if this machine cannot connect to itself; 130 after Ctrl-C,
            SIGTERM or SIGHUP.
    """
    started = time.perf_counter()
    names = [role_name(rank, args.world_size) for rank in range(args.world_size)]
    environment.raise_open_files()
    if dist.is_torchelastic_launched() or args.rank is not None:
        result = be_one_rank(run_worker, args, names)
    else:
        store, address = environment.serve("localhost", 0)
        states = States(store, names, args.timeout, START_S)
        environment.prepare_start(run_worker)
        stacks, writer = connection.Pipe(duplex=False)
        with stopping_all(args) as processes:
            environment.share_socket_folder()
            # `mp.spawn` is short for start_method="spawn": each process imports torch by itself.
            # With "forkserver", one process imports torch, and all ranks are forked from it.
            job = (run_worker, args, address, environment.of_launcher(), writer)
            start = in_thread(lambda: mp.start_processes(
                run_rank, job, args.world_size, join=False, start_method=args.start_method))
            processes += processes_of(start)
            failure, others = watch_processes(processes, states, stacks)
            result = None if failure else states.result()
        if failure:
            print_failure(failure, states, others)
            raise RunFailedError(failure)
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


def watch(states: "States", goes_on: Callable[[], bool]) -> Failure | None:
    """Return the failure to blame as soon as it is known; None when `goes_on`, a wait, is false."""
    while goes_on():
        if failure := states.verdict():
            return failure
    return None


# --- a local run: start, watch, stop


def processes_of(start: Future) -> list[BaseProcess]:
    """Return the processes that `mp.start_processes` has started, rank 0 first."""
    try:
        return start.result().processes
    except (OSError, EOFError) as error:  # a limit of the system, or the fork server has ended
        reason = getattr(error, "strerror", None) or "the fork server has ended"
        print(f"error: cannot start the processes: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def in_thread(call: Callable) -> Future:
    """Run `call` in a thread that no signal interrupts; return a future for its result.

    Processes that the thread starts inherit the blocked signals. Therefore no process prints a
    traceback if Ctrl-C is pressed while it imports torch.
    """
    future = Future()

    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def watch_processes(processes: list[BaseProcess], states: "States",
                    stacks: connection.Connection) -> tuple[Failure | None, int]:
    """Wait until every rank has left, or one has failed.

    Returns:
        The failure to blame, or None; and how many other processes still run.
    """
    running = dict(enumerate(processes))

    def goes_on():
        sentinels = [process.sentinel for process in running.values()]
        ended = connection.wait([*sentinels, stacks], BEAT_S / 2)
        show(stacks)
        states.read()
        for rank in [rank for rank, process in running.items() if process.sentinel in ended]:
            running.pop(rank).join()
            if not states.is_over(rank):
                states.found.append(Failure(CAUSE, rank, how_ended(processes[rank].exitcode)))
        return running or states.failures()

    failure = watch(states, goes_on)
    if failure:
        running.pop(failure.rank, None)
        if failure.kind == WAITED:
            show_others(failure, states, running, stacks)
    return failure, len(running)


def show_others(failure: Failure, states: "States", running: dict[int, BaseProcess],
                stacks: connection.Connection) -> None:
    """Print where all ranks but the blamed one are, because it takes two to wait for each other."""
    for other in states.failures():
        if other.rank != failure.rank:
            print(f"{states.name(other.rank)}:\n{other.traceback}", file=sys.stderr, flush=True)
    for rank, process in running.items():
        print(f"{states.name(rank)}, {INNERMOST}:", file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)  # see `run_rank`
        time.sleep(DUMP_S)
        show(stacks)


def show(stacks: connection.Connection) -> None:
    """Print what ranks have written after SIGUSR1, without frames of launcher and tracer."""
    while stacks.poll():
        text = os.read(stacks.fileno(), 2**16).decode(errors="replace")
        print(OWN_FRAMES.sub("", text), end="", file=sys.stderr, flush=True)


def how_ended(status: int) -> str:
    """Say how a process ended that has not written why."""
    if status < 0:
        with suppress(ValueError):  # a real-time signal has no name
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
    return f"exited with status {status}" + ("" if status else " before its work was done")


@contextmanager
def stopping_all(args: Namespace) -> Iterator[list[BaseProcess]]:
    """End every process that the block has started, whatever ends the block.

    Yields:
        A list for the processes of the ranks.

    Raises:
        SystemExit: 130 after one line, if a signal has ended the block.
    """
    before = set(psutil.Process().children(recursive=True))
    handlers = handle(STOP_SIGNALS, interrupt)
    ranks, interrupted = [], False
    try:
        yield ranks
    except KeyboardInterrupt:
        interrupted = True
    finally:
        handle(handlers, signal.SIG_IGN)  # a second Ctrl-C must not leave a process behind
        stopped = sum(rank.is_alive() for rank in ranks)
        if interrupted or not ranks:  # the ranks may still start: the fork server must end, too
            others = set(psutil.Process().children(recursive=True)) - before
        else:
            others = [child for rank in ranks for child in children_of(rank.pid)]
        for process in [*ranks, *others]:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # SIGTERM would not end a frozen one
        for rank in ranks:
            rank.join(SILENT_S)
        environment.remove_half_written(args, [os.getpid(), *(rank.pid for rank in ranks)])
        for signum, handler in handlers.items():
            # A second signal must not disturb the way out; but a notebook, and pytest, go on.
            if not interrupted or handler is signal.default_int_handler:
                signal.signal(signum, handler)
    if interrupted:
        more = f"; stopped {count(stopped)}" if stopped else ""
        print(f"\ninterrupted{more}", file=sys.stderr, flush=True)
        raise SystemExit(130)


def handle(signums: Iterable[int], handler: Callable | int) -> dict:
    """Set the handler of all signals that are not ignored, as SIGHUP is after `nohup`.

    Returns:
        `{signal: handler that it had}`.
    """
    return {signum: signal.signal(signum, handler) for signum in signums
            if signal.getsignal(signum) is not signal.SIG_IGN}


def interrupt(*_: object) -> NoReturn:
    """Handle Ctrl-C, SIGTERM and SIGHUP alike."""
    raise KeyboardInterrupt


def run_rank(rank: int, run_worker: Callable, args: Namespace, address: str, launcher: tuple,
             stacks: connection.Connection) -> NoReturn:
    """Be a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears it, and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    environment.inherit(*launcher)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())  # the launcher shows them
    try:
        beats = Beats(environment.connect(address), rank, args)
    except (RuntimeError, OSError):  # the launcher has been killed meanwhile
        end_now(1)
    beats.start()
    try:
        environment.enter(args, rank, rank, args.world_size, f"{environment.SCHEME}://{address}")
        beats.write_result(run_worker(rank, args.world_size, args))
    except BaseException as error:
        beats.write(failure=failure_of(rank, error, args.timeout))
        end_with_children(1)
    end_with_children(0)


# --- torchrun and manual: this process is one rank


def be_one_rank(run_worker: Callable, args: Namespace, names: list[str]) -> dict | None:
    """Run `run_worker` in this process, while threads of it watch all ranks; see `launch`."""
    environment.begin()
    if dist.is_torchelastic_launched():
        rank, local_rank, local_world_size = (
            int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        limit = timedelta(seconds=max(args.timeout, START_S))
        store, _, _ = next(dist.rendezvous("env://", rank, args.world_size, timeout=limit))
        init_method = "env://"
    else:
        rank = args.rank
        # Only for ranks on loopback is it known that they share a machine.
        together = environment.is_loopback(args.master_addr)
        local_rank, local_world_size = (rank, args.world_size) if together else (0, 1)
        store, address = join(args, names)
        init_method = f"{environment.SCHEME}://{address}"
    environment.enter(args, rank, local_rank, local_world_size, init_method)
    member = Member(store, rank, names, args)
    try:
        result = run_worker(rank, args.world_size, args)
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone
            member.write(failure=failure_of(rank, error, args.timeout))
        while True:  # until a thread of `member` knows which rank to blame, and ends this process
            time.sleep(BEAT_S)
    member.leave()
    return result


def join(args: Namespace, names: list[str]) -> tuple[dist.Store, str]:
    """Serve the store of a manual launch on rank 0, else connect to it; return its address, too."""
    if args.rank == 0:
        return environment.serve(args.master_addr, args.master_port)
    seconds = args.timeout + JOIN_S
    address = f"{environment.address_of(args.master_addr)}:{args.master_port}"
    # In a thread, because torch waits forever for a port that accepts and does not answer.
    connecting = in_thread(lambda: environment.connect(address, time.monotonic() + seconds))
    try:
        return connecting.result(seconds), address
    except (RuntimeError, OSError):  # a TimeoutError, too
        print(f"error: rank 0 ({names[0]}) cannot be reached: {args.master_addr}:"
              f"{args.master_port} has not answered for {seconds:g} s", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


# --- what a rank writes


class Beats(threading.Thread):
    """Writes the state of this rank; ends the process when the store is gone.

    A state is a dict: `beat` (int), `left` (bool), `failure` (a `Failure`, or None), `pieces` (int,
    those of the result in the store).

    Args:
        store: That of the run.
        rank: Of this process.
        args: Parsed flags.
    """

    def __init__(self, store: dist.Store, rank: int, args: Namespace) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.args, self.lock = store, rank, args, threading.Lock()
        self.state = {"beat": 0, "left": False, "failure": None, "pieces": 0}

    def write(self, **changes: object) -> None:
        """Write the state with `changes`, and wait until the store has it; a first failure stays.

        (After Ctrl-C, `run_worker` may still raise, because the other ranks have ended.)
        """
        with self.lock:
            first = self.state["failure"] or changes.get("failure")
            self.state |= {"beat": self.state["beat"] + 1, **changes, "failure": first}
            self.store.set(f"state {self.rank}", json.dumps(self.state))
            self.store.check([f"state {self.rank}"])  # `set` itself does not wait

    def write_result(self, result: dict | None) -> None:
        """Write that this rank has left, and what it returns."""
        text = "" if result is None else json.dumps(result)
        pieces = [text[start:start + PIECE] for start in range(0, len(text), PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"result {self.rank} {number}", piece)
        self.write(left=True, pieces=len(pieces))

    def run(self) -> None:
        """Beat; see `threading.Thread.start`."""
        with suppress(RuntimeError):
            while True:
                self.write()
                time.sleep(BEAT_S)
        environment.remove_half_written(self.args, [os.getpid()])
        os.kill(os.getpid(), signal.SIGKILL)


class Member(Beats):
    """Writes the state of this rank, reads those of all ranks, and ends the process if one fails.

    Args:
        store, rank, args: See `Beats`.
        names: Role of each rank.
    """

    def __init__(self, store: dist.Store, rank: int, names: list[str], args: Namespace) -> None:
        # torchrun may restart the ranks; a program may launch several times.
        launches = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')} {next(LAUNCHES)}"
        store = dist.PrefixStore(f"launch {launches}", store)
        super().__init__(store, rank, args)
        self.torchrun, self.over = dist.is_torchelastic_launched(), threading.Event()
        self.states = States(store, names, args.timeout, START_S if self.torchrun else JOIN_S)
        self.handlers = self.hear_signals()
        self.start()
        threading.Thread(target=self.watch, daemon=True).start()

    def run(self) -> None:
        """Beat, and read the states."""
        try:
            while not self.over.is_set():
                self.write()
                self.states.read()
                self.over.wait(BEAT_S)
        except RuntimeError:
            self.states.found.append(Failure(CAUSE, 0, "is gone"))

    def watch(self) -> None:
        """End this process if a rank fails."""
        if failure := watch(self.states, lambda: not self.over.wait(BEAT_S / 2)):
            self.end(failure)

    def end(self, failure: Failure) -> NoReturn:
        """Report a failure, and end this process."""
        own, given_up = failure.rank == self.rank, self.state["failure"]
        if failure.kind == WAITED:
            if given_up and not own:
                print(given_up.traceback, file=sys.stderr, flush=True)
            elif not own:  # this rank still waits
                print(f"{self.states.name(self.rank)}, {INNERMOST}:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=2)
            time.sleep(2 * BEAT_S)  # until every rank has printed where it is
        with suppress(RuntimeError):
            # In a manual launch each terminal prints the line; under torchrun one rank does, on
            # each machine if the store does not answer.
            if not self.torchrun or self.states.is_cut_off() or self.store.add("told", 1) == 1:
                shown = own or self.torchrun
                print_failure(failure if shown else failure._replace(traceback=""), self.states)
        environment.remove_half_written(self.args, [os.getpid()])
        # torchrun reports the rank that ends first, and ends all others. In a manual launch, rank 0
        # serves the store, in which the other ranks read this.
        ends_last = not own if self.torchrun else self.rank == 0
        time.sleep(LINGER_S if ends_last else 0)
        end_now(1)

    def leave(self) -> None:
        """Write that this rank has left; on rank 0, which serves the store, wait for the others."""
        self.write(left=True)
        while self.rank == 0 and not all(map(self.states.is_over, range(self.args.world_size))):
            time.sleep(BEAT_S / 20)
            with suppress(RuntimeError):
                self.states.read()
        self.over.set()
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)

    def hear_signals(self) -> dict:
        """Let Ctrl-C and SIGTERM end this rank at once, even if it waits in C++; see `handle`."""
        if self.torchrun:  # its agent ends all ranks, and reports
            return handle(STOP_SIGNALS, signal.SIG_DFL)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # Python writes the number of a signal there, even then
        threading.Thread(target=self.listen, args=(reader,), daemon=True).start()
        return handle(STOP_SIGNALS, lambda *_: None)

    def listen(self, reader: int) -> None:
        """Read the numbers of signals; end this process after one of `STOP_SIGNALS`."""
        while os.read(reader, 1)[0] not in STOP_SIGNALS:
            pass
        self.over.set()  # this rank reports no failure, not even its own
        with suppress(RuntimeError):
            self.write(failure=Failure(CAUSE, self.rank, "was interrupted"))
        environment.remove_half_written(self.args, [os.getpid()])
        print("\ninterrupted", file=sys.stderr, flush=True)
        if self.rank == 0:
            time.sleep(LINGER_S)  # the other ranks read this in the store, which rank 0 serves
        end_now(130)


# --- what is read: which rank to blame


class States:
    """The states of all ranks, as one process reads them.

    Args:
        store: That of the run.
        names: Role of each rank.
        timeout: Seconds for which a rank may be silent.
        join_s: Seconds more that a rank has until its first beat.
    """

    def __init__(self, store: dist.Store, names: Sequence[str], timeout: float,
                 join_s: float) -> None:
        self.store, self.names = store, names
        self.limit_s, self.first_s = max(timeout, SILENT_S), timeout + join_s
        self.keys = [f"state {rank}" for rank in range(len(names))]
        self.texts, self.states = [b"{}"] * len(names), [{} for _ in names]
        self.read_at = time.monotonic()
        self.changed = [self.read_at + self.first_s - self.limit_s] * len(names)
        self.found, self.since = [], None  # failures that a rank could not write; since the first
        for key in self.keys:
            self.store.compare_set(key, "", "{}")  # to read a key that is not there is to wait

    def read(self) -> None:
        """Take in what the ranks have written.

        Raises:
            RuntimeError: The store is gone.
        """
        texts = self.store.multi_get(self.keys)
        self.read_at = time.monotonic()
        for rank, text in enumerate(texts):
            if text != self.texts[rank]:
                self.texts[rank], self.changed[rank] = text, self.read_at
                self.states[rank] = json.loads(text)

    def name(self, rank: int) -> str:
        """Return "rank 1 (observer1)"."""
        return f"rank {rank} ({self.names[rank]})"

    def failures(self) -> list[Failure]:
        """Return all that is known, the most telling kind first, then in the order of the ranks."""
        written = [state["failure"] for state in self.states if state.get("failure")]
        return sorted([*self.found, *(Failure(*failure) for failure in written)],
                      key=lambda failure: failure.kind)

    def is_over(self, rank: int) -> bool:
        """Return whether a rank has left or has failed."""
        state = self.states[rank]
        return bool(state.get("left") or state.get("failure")
                    or any(failure.rank == rank for failure in self.found))

    def is_cut_off(self) -> bool:
        """Return whether the store is silent: the machine of rank 0 is lost, or frozen."""
        return time.monotonic() - self.read_at > self.limit_s + BEAT_S

    def verdict(self) -> Failure | None:
        """Return the failure to blame as soon as it is known: the cause, not a consequence.

        A rank that has ended or raised an error of its own comes first, then a rank that has been
        silent for --timeout. "Connection closed" only says that another rank is gone. After such a
        notice, a rank that falls silent within `GRACE_S` is to blame, or one that has never joined,
        or else the one with the notice.
        """
        failures, now = self.failures(), self.read_at
        if failures and failures[0].kind == CAUSE:
            return failures[0]
        if self.is_cut_off():
            return Failure(SILENT, 0, f"has not answered for {time.monotonic() - now:.0f} s")
        ages = {rank: now - changed for rank, changed in enumerate(self.changed)
                if not self.is_over(rank)}
        rank = max(ages, key=ages.get, default=0)
        age = ages.get(rank, 0.0)
        silent = Failure(SILENT, rank, f"has not answered for {age:.0f} s" if self.states[rank]
                         else f"has not joined within {self.first_s:g} s")
        if age > self.limit_s:
            return silent
        if not failures:
            return None
        self.since = self.since or now
        if now - self.since < GRACE_S:
            return None
        if age > SILENT_S:
            return silent
        missing = [rank for rank, state in enumerate(self.states) if not state]
        return Failure(SILENT, missing[0], "has not joined") if missing else failures[0]

    def result(self) -> dict | None:
        """Return what the rank that reports has returned."""
        for rank, state in enumerate(self.states):
            if state.get("pieces"):
                keys = [f"result {rank} {number}" for number in range(state["pieces"])]
                return json.loads(b"".join(map(self.store.get, keys)))
        return None


def failure_of(rank: int, error: BaseException, timeout: float) -> Failure:
    """Return the failure that an exception in `rank` means.

    It is the rank's own, or that of the worker where an RPC raised it, or a notice that another
    rank is gone.
    """
    message, kind = str(error), type(error).__name__
    text = OWN_FRAMES.sub("", "".join(traceback.format_exception(error)))
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Failure(CAUSE, rank, how_ended(status))
    if isinstance(error, BrokenPipeError):  # as after `| head -1`
        return Failure(CAUSE, rank, "cannot print, because its output is closed")
    origins = [*ORIGIN.finditer(message)]
    if origins:  # the last one is where the error was raised
        rank, kind = int(origins[-1]["rank"]), origins[-1]["kind"]
        message = origins[-1]["message"].rstrip(")").strip("\"'")
    if kind in IN_WORDS:
        return Failure(CAUSE, rank, message)
    if kind == "TimeoutError" and message.startswith("timed out: "):  # of a lesson, in words
        return Failure(WAITED, rank, message, text)
    lost = isinstance(error, ConnectionError) or (
        isinstance(error, (RuntimeError, OSError)) and SAYS_LOST.search(message))
    if not lost:
        return Failure(CAUSE, rank, f"raised {kind}", text)
    if kind == "TimeoutError" or not SAYS_WAITED.search(message):
        return Failure(LOST, rank, f"raised {kind}", text)
    if waited := re.search(r"waiting (\d+)ms", message):  # gloo's limit may be another one
        timeout = int(waited[1]) / 1000
    place = ""
    if places := PLACE.findall(text):  # the innermost line of the lesson is the last one
        path, line = places[-1]
        place = f" at {path}:{line}, `{linecache.getline(str(ROOT / path), int(line)).strip()}`"
    return Failure(WAITED, rank, f"has waited for {timeout:g} s{place}", text)


# --- what the user sees


def print_failure(failure: Failure, states: States, stopped: int = 0) -> None:
    """Print the traceback of a failure and its one line; `stopped` counts the other processes."""
    more = f"; stopped {count(stopped, 'other ')}" if stopped else ""
    line = f"error: {states.name(failure.rank)} {failure.what}{more}\n"
    # In one piece, because other processes may print, too.
    print(failure.traceback + line, end="", file=sys.stderr, flush=True)


def count(number: int, kind: str = "") -> str:
    """Return "1 other process" or "3 other processes"."""
    return f"{number} {kind}process{'es' if number != 1 else ''}"


def children_of(pid: int) -> list[psutil.Process]:
    """Return what a rank has started, such as the workers of a DataLoader."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def end_with_children(status: int) -> NoReturn:
    """End this process and its children, which by themselves may never notice that it is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler would raise here
    for child in children_of(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    end_now(status)


def end_now(status: int) -> NoReturn:
    """End this process at once: an RPC agent could wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
