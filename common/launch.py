"""Start a program in all of its processes, and name the rank that failed.

    local      python X/main.py --world_size 3              `mp.start_processes`, watched from here
    torchrun   torchrun --nproc_per_node 3 X/main.py        torchrun has started this one rank
    manual     python X/main.py --world_size 3 --rank 1 ... this terminal is one rank

One idea serves all three launch modes. All ranks connect to one TCPStore. A thread of each rank
writes its state there every second: a beat, whether the rank has left, and how it has failed.

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
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe, active_children, connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, NoReturn

from common import ROOT, environment
from common.limits import shortened

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp

BEAT_S = 1.0
SILENT_S = 3.5  # a rank that is silent for this long while another rank waits is to blame
GRACE_S = 4.0  # after a failure that may follow from another rank's, look for the cause this long
START_S = 60.0  # a process may need this long until its first beat, because it imports torch
JOIN_S = 8.0  # manual launch: a rank may join this much later than --timeout, for the same reason
LONGEST = 100_000  # characters of a traceback
PIECE = 2**22  # bytes of a result in one value of the store, which refuses 8 MiB
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
CAUSE, SILENT, WAITED, LOST = range(4)  # kinds of failures: the lowest one is to blame

# How torch says that another process is gone, and that it has not answered in time.
SAYS_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed ?out|timeout|tensorpipe|gloo|NCCL|RPCErr|"
    r"Broken pipe|\beof\b|failed to connect|rendezvous|Socket|store")
SAYS_WAITED = re.compile(r"[Tt]imed ?out(?! connecting)|timeout")
# How an exception that came over RPC names the worker that raised it.
ORIGIN = re.compile(
    r"On WorkerInfo\(id=(?P<rank>\d+), name=[\w:-]+\):\s*(?P<kind>\w+)\((?P<message>.*)")
IN_WORDS = {"NotSavedError", "NotFiniteError"}  # of common: their messages say everything
# In a traceback: frames of this launcher and of the tracer; the last line of a lesson.
OWN_FRAMES = re.compile(rf'^ *File "{re.escape(str(ROOT))}/(?:common/launch\.py|tracing/).*\n'
                        r"(?: {4}.*\n)*", re.MULTILINE)
PLACE = re.compile(rf'File "{re.escape(str(ROOT))}/(?!common/|tracing/|\.)(.+?)", line (\d+)')


class RunFailedError(SystemExit):
    """Ends the launching process with status 1; `failure` says which rank failed, and how."""

    def __init__(self, failure: "Failure") -> None:
        super().__init__(1)
        self.failure = failure


class Failure(NamedTuple):
    """How a rank failed; `what` continues the sentence "rank 2 (observer2) ..."."""

    kind: int
    rank: int
    what: str
    traceback: str = ""


def launch(run_worker: Callable[[int, int, Namespace], dict | None], args: Namespace,
           role_name: Callable[[int, int], str]) -> dict | None:
    """Run `run_worker(rank, world_size, args)` in every process of the program.

    Args:
        run_worker: Module-level function. One role returns a dict that JSON can hold; all other
            roles return None.
        args: Parsed flags (`common.cli.Parser`).
        role_name: `role_name(rank, world_size)`, the name of a rank in messages.

    Returns:
        That dict with `wall_s` (seconds, start included) in the process that reports: the one that
        started the ranks; under torchrun and in a manual launch the rank itself. None elsewhere.

    Raises:
        RunFailedError: A rank failed; one line has named it. (A `SystemExit` with status 1.)
        SystemExit: 1 after one line if a process cannot be started, 2 if this machine cannot
            connect to itself, 130 after Ctrl-C, SIGTERM or SIGHUP.
    """
    started = time.perf_counter()
    names = [role_name(rank, args.world_size) for rank in range(args.world_size)]
    environment.raise_open_files()
    if dist.is_torchelastic_launched() or args.rank is not None:
        result = be_one_rank(run_worker, args, names)
    else:
        store, address = environment.serve("localhost", 0)
        states = States(store, names, args.timeout, START_S)
        environment.prepare_fork_server(run_worker)
        stacks = Pipe(duplex=False)
        with stopping_all(args):
            # `mp.spawn` is short for start_method="spawn": each process imports torch by itself.
            # With "forkserver", one process imports torch, and all ranks are forked from it.
            job = (run_worker, args, address, environment.of_launcher(), stacks[1])
            start = in_thread(lambda: mp.start_processes(
                run_rank, job, args.world_size, join=False, start_method=args.start_method))
            failure, others = watch(processes_of(start), states, stacks[0])
            result = None if failure else states.result()
        if failure:
            report(failure, names, f"; stopped {count(others, 'other ')}" if others else "")
            raise RunFailedError(failure)
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


# --- a local run: start, watch, stop


def processes_of(start: Future) -> list[BaseProcess]:
    """Wait until `mp.start_processes` has returned; return its processes, rank 0 first."""
    try:
        return start.result().processes
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "the fork server has ended"
        print(f"error: cannot start the processes: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def watch(processes: list[BaseProcess], states: "States",
          stacks: connection.Connection) -> tuple[Failure | None, int]:
    """Wait until every rank has left, or one has failed.

    Args:
        processes: Those of all ranks, rank 0 first.
        states: What the ranks write.
        stacks: Where a rank writes its Python stacks when it gets SIGUSR1.

    Returns:
        The failure to blame, or None; and how many other processes still run.
    """
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running or states.failures():
        ended = connection.wait([*running], BEAT_S / 2)
        states.read()
        for rank in [running.pop(sentinel) for sentinel in ended]:
            processes[rank].join()
            if not states.is_over(rank):
                states.found.append(Failure(CAUSE, rank, how_ended(processes[rank].exitcode)))
        if failure := states.verdict():
            pids = {rank: processes[rank].pid for rank in sorted(running.values())}
            if failure.kind == WAITED:
                failure = with_the_others(failure, states, pids, stacks)
            return failure, len(pids.keys() - {failure.rank})
    return None, 0


def how_ended(status: int) -> str:
    """Say how a process ended that has not written why."""
    if status < 0:
        known = -status in {*signal.Signals}  # a real-time signal is not
        return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return f"exited with status {status}" + ("" if status else " before its work was done")


@contextmanager
def stopping_all(args: Namespace) -> Iterator[None]:
    """End every process that the block has started, whatever ends the block.

    Raises:
        SystemExit: 130 after one line, if a signal has ended it.
    """
    before, before_all = set(active_children()), set(psutil.Process().children(recursive=True))
    on_main_thread = threading.current_thread() is threading.main_thread()
    heard = [signum for signum in STOP_SIGNALS  # nohup ignores SIGHUP
             if on_main_thread and signal.getsignal(signum) is not signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, interrupt) for signum in heard}
    ranks, interrupted = [], False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for signum in heard:  # a second Ctrl-C must not leave a process behind
            signal.signal(signum, signal.SIG_IGN)
        ranks = set(active_children()) - before
        stopped = sum(process.is_alive() for process in ranks)
        for process in ranks:
            process.kill()  # SIGTERM would not end a frozen one
        if interrupted:  # while they started, perhaps: the fork server, too
            for child in set(psutil.Process().children(recursive=True)) - before_all:
                with suppress(psutil.Error):
                    # Not multiprocessing's resource tracker, which ends by itself.
                    if not any("resource_tracker" in word for word in child.cmdline()):
                        child.kill()
        for process in ranks:
            process.join(SILENT_S)
        environment.remove_half_written(args, [os.getpid(), *(rank.pid for rank in ranks)])
        for signum in heard:
            # A second signal must not disturb the way out; but a notebook, and pytest, go on.
            if not interrupted or handlers[signum] is signal.default_int_handler:
                signal.signal(signum, handlers[signum])
    if interrupted:
        more = f"; stopped {count(stopped)}" if stopped else ""
        print(f"\ninterrupted{more}", file=sys.stderr, flush=True)
        raise SystemExit(130)


def interrupt(*_: object) -> NoReturn:
    """Handle Ctrl-C, SIGTERM and SIGHUP alike."""
    raise KeyboardInterrupt


def in_thread(call: Callable) -> Future:
    """Call in a thread that no signal interrupts; return the future of its result.

    What the thread starts inherits that these signals are blocked: no process prints a traceback
    if Ctrl-C comes while it imports torch.
    """
    future = Future()

    def run():
        try:
            with suppress(ImportError, AttributeError):
                # Now, because it unblocks the signals when multiprocessing starts it. (Not
                # documented. Without it, such a Ctrl-C shows tracebacks.)
                from multiprocessing import resource_tracker
                resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def run_rank(rank: int, run_worker: Callable, args: Namespace, address: str, launcher: tuple,
             stack_writer: connection.Connection) -> NoReturn:
    """Be a started process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears it, and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    environment.inherit(*launcher)
    faulthandler.register(signal.SIGUSR1, file=stack_writer.fileno())
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
        end_now(1)
    end_now(0)


# --- torchrun and manual: this process is one rank


def be_one_rank(run_worker: Callable, args: Namespace, names: list[str]) -> dict | None:
    """Run `run_worker` in this process, while threads of it watch all ranks; see `launch`."""
    torchrun = dist.is_torchelastic_launched()
    if torchrun:
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
    environment.begin()
    environment.enter(args, rank, local_rank, local_world_size, init_method)
    member = Member(store, rank, names, args, START_S if torchrun else JOIN_S)
    with member.interruptible():
        try:
            result = run_worker(rank, args.world_size, args)
        except BaseException as error:
            with suppress(RuntimeError):  # the store is gone
                member.write(failure=failure_of(rank, error, args.timeout))
            while True:  # until a thread of `member` knows whom to blame, and ends this process
                time.sleep(BEAT_S)
        member.leave()
    return result


def join(args: Namespace, names: list[str]) -> tuple[dist.Store, str]:
    """Serve the store of a manual launch on rank 0, else connect to it; return its address, too."""
    if args.rank == 0:
        return environment.serve(args.master_addr, args.master_port)
    seconds = args.timeout + JOIN_S
    address = f"{environment.address_of(args.master_addr)}:{args.master_port}"
    deadline = time.monotonic() + seconds
    connecting = in_thread(lambda: environment.connect(address, deadline))
    try:
        # torch would wait forever for a port that accepts and does not answer.
        while not connecting.done() and time.monotonic() < deadline:
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    if connecting.done() and not connecting.exception():
        return connecting.result(), address
    print(f"error: rank 0 ({names[0]}) cannot be reached: {args.master_addr}:{args.master_port} "
          f"has not answered for {seconds:g} s", file=sys.stderr, flush=True)
    raise SystemExit(1)


# --- what a rank writes


class Beats(threading.Thread):
    """Writes the state of this rank; ends the process when the store is gone.

    A state is a dict: `beat` (int), `left` (bool), `failure` (a `Failure`, or None), `pieces` (int,
    those of the result in the store).

    Args:
        store: That of the run.
        rank: Of this process.
        args: The parsed flags.
    """

    def __init__(self, store: dist.Store, rank: int, args: Namespace) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.args, self.lock = of_states(store), rank, args, threading.Lock()
        self.state = {"beat": 0, "left": False, "failure": None, "pieces": 0}
        self.over = threading.Event()

    def write(self, **changes: object) -> None:
        """Write the state with `changes`, and wait until the store has it."""
        with self.lock:
            self.state |= {"beat": self.state["beat"] + 1, **changes}
            self.store.set(str(self.rank), json.dumps(self.state))
            self.store.check([str(self.rank)])  # `set` itself does not wait

    def write_result(self, result: dict | None) -> None:
        """Write that this rank has left, and what it returns."""
        text = "" if result is None else json.dumps(result)
        pieces = [text[start:start + PIECE] for start in range(0, len(text), PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"result {self.rank} {number}", piece)
        self.write(left=True, pieces=len(pieces))

    def run(self) -> None:
        """Beat; see `threading.Thread.start`."""
        while True:
            try:
                self.write()
            except RuntimeError:
                environment.remove_half_written(self.args, [os.getpid()])
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(BEAT_S)


class Member(Beats):
    """Writes the state of this rank, reads those of all ranks, and ends the process if one fails.

    Args:
        store, rank, args: See `Beats`.
        names: Role of each rank.
        join_s: Seconds after --timeout within which every rank must have joined.
    """

    def __init__(self, store: dist.Store, rank: int, names: list[str], args: Namespace,
                 join_s: float) -> None:
        # torchrun may restart the ranks; a program may launch several times.
        launches = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')} {next(LAUNCHES)}"
        store = dist.PrefixStore(f"launch {launches}", store)
        super().__init__(store, rank, args)
        self.states, self.names = States(store, names, args.timeout, join_s), names
        self.torchrun = dist.is_torchelastic_launched()
        self.answered = time.monotonic()  # when the store has last answered
        self.start()
        threading.Thread(target=self.guard, daemon=True).start()

    def run(self) -> None:
        """Beat, and decide."""
        while True:
            try:
                self.write()
                self.states.read()
            except RuntimeError:
                self.end(Failure(CAUSE, 0, "is gone"))
            self.answered = time.monotonic()
            if failure := self.states.verdict():
                self.end(failure)
            if self.over.wait(BEAT_S):
                return

    def guard(self) -> None:
        """End this process if the store is silent: its machine is lost, or frozen."""
        while not self.over.wait(BEAT_S):
            silence = time.monotonic() - self.answered
            if silence > self.states.limit_s + BEAT_S:
                failure = Failure(SILENT, 0, f"has not answered for {silence:.0f} s")
                self.end(failure, store_answers=False)

    def end(self, failure: Failure, store_answers: bool = True) -> None:
        """Report a failure, and end this process."""
        own = failure.rank == self.rank
        if failure.kind == WAITED:
            here = self.state["failure"]
            if here is None:  # this rank still waits
                print(stacks_here(), file=sys.stderr, flush=True)
            elif not (own or self.torchrun):
                print(here.traceback, file=sys.stderr, flush=True)
            failure = with_the_others(failure, self.states, {}, None)
        with suppress(RuntimeError):
            # In a manual launch each terminal prints the line; under torchrun one rank does, on
            # each machine if the store does not answer.
            if not (self.torchrun and store_answers) or self.store.add("told", 1) == 1:
                shown = own or self.torchrun
                report(failure if shown else failure._replace(traceback=""), self.names)
        environment.remove_half_written(self.args, [os.getpid()])
        if not own if self.torchrun else self.rank == 0:
            # torchrun reports the rank that ends first, and ends all others. In a manual launch,
            # rank 0 serves the store, in which the other ranks read this.
            time.sleep(3 * BEAT_S)
        end_now(1)

    def leave(self) -> None:
        """Write that this rank has left; on rank 0, which serves the store, wait for the others."""
        self.write(left=True)
        while self.rank == 0 and not all(map(self.states.is_over, range(len(self.names)))):
            time.sleep(BEAT_S / 20)
            with suppress(RuntimeError):
                self.states.read()
        self.over.set()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End this rank at once on Ctrl-C and SIGTERM, also while it waits in C++ of torch."""
        if self.torchrun:  # whose agent ends all ranks, and reports
            for signum in STOP_SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)

        def listen():
            while (heard := os.read(reader, 1)) and heard[0] not in STOP_SIGNALS:
                pass
            if heard:
                with suppress(RuntimeError):
                    self.write(failure=Failure(CAUSE, self.rank, "was interrupted"))
                environment.remove_half_written(self.args, [os.getpid()])
                print("\ninterrupted", file=sys.stderr, flush=True)
                end_now(130)

        before = signal.set_wakeup_fd(writer)
        handlers = {signum: signal.signal(signum, lambda *_: None) for signum in STOP_SIGNALS}
        threading.Thread(target=listen, daemon=True).start()
        yield
        signal.set_wakeup_fd(before)
        os.close(writer)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


LAUNCHES = itertools.count()  # of this process


# --- what is read: whom to blame


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
        self.store, self.names = of_states(store), names
        self.limit_s, self.first_s = max(timeout, SILENT_S), timeout + join_s
        self.keys = [str(rank) for rank in range(len(names))]
        self.texts, self.states = [b"{}"] * len(names), [{} for _ in names]
        self.changed = [time.monotonic() + self.first_s - self.limit_s] * len(names)
        self.found, self.since = [], None  # failures that a rank could not write; since the first
        for key in self.keys:
            self.store.compare_set(key, "", "{}")  # to read a key that is not there is to wait

    def read(self) -> None:
        """Take in what the ranks have written.

        Raises:
            RuntimeError: The store is gone.
        """
        for rank, text in enumerate(self.store.multi_get(self.keys)):
            if text != self.texts[rank]:
                self.texts[rank], self.changed[rank] = text, time.monotonic()
                self.states[rank] = json.loads(text)

    def failures(self) -> list[Failure]:
        """Return all that is known, in the order of the ranks."""
        written = [state["failure"] for state in self.states if state.get("failure")]
        return sorted([*self.found, *(Failure(*failure) for failure in written)],
                      key=lambda failure: failure.kind)

    def is_over(self, rank: int) -> bool:
        """Return whether a rank has left or has failed."""
        state = self.states[rank]
        return bool(state.get("left") or state.get("failure")
                    or any(failure.rank == rank for failure in self.found))

    def silent(self) -> Failure | None:
        """Return the failure of the rank that has been silent for the longest time."""
        now = time.monotonic()
        ages = {rank: now - changed for rank, changed in enumerate(self.changed)
                if not self.is_over(rank)}
        if not ages:
            return None
        rank = max(ages, key=ages.get)
        what = (f"has not answered for {ages[rank]:.0f} s" if self.states[rank]
                else f"has not joined within {self.first_s:g} s")
        return Failure(SILENT, rank, what)

    def verdict(self) -> Failure | None:
        """Return the failure to blame as soon as it is known: the cause, not a consequence.

        A rank that has ended or raised an error of its own comes first, then a rank that has been
        silent for --timeout. "Connection closed" only says that another rank is gone. After such a
        notice, a rank that falls silent within `GRACE_S` is to blame, or one that has never joined,
        or else the one with the notice.
        """
        failures, silent, now = self.failures(), self.silent(), time.monotonic()
        if failures and failures[0].kind == CAUSE:
            return failures[0]
        age = now - self.changed[silent.rank] if silent else 0.0
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


def of_states(store: dist.Store) -> dist.PrefixStore:
    """Return the part of a store in which the states are, apart from what torch puts there."""
    return dist.PrefixStore("states", store)


def failure_of(rank: int, error: BaseException, timeout: float) -> Failure:
    """Return the failure that an exception in `rank` means.

    It is its own, or that of the worker where an RPC raised it, or a notice of another rank's end.
    """
    message, kind = str(error), type(error).__name__
    text = OWN_FRAMES.sub("", "".join(traceback.format_exception(error)))
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Failure(CAUSE, rank, how_ended(status))
    if isinstance(error, BrokenPipeError) and nobody_reads():
        return Failure(CAUSE, rank, "cannot print, because its output is closed")
    origins = [*ORIGIN.finditer(message)]
    if origins:  # the last one is where the error was raised
        rank, kind = int(origins[-1]["rank"]), origins[-1]["kind"]
        message = origins[-1]["message"].rstrip(")").strip("\"'")
    if kind in IN_WORDS:
        return Failure(CAUSE, rank, message)
    if kind == "TimeoutError" and message.startswith("timed out: "):  # of a lesson, and for whom
        return Failure(WAITED, rank, message, text)
    lost = isinstance(error, ConnectionError) or (
        isinstance(error, (RuntimeError, OSError)) and SAYS_LOST.search(message))
    if not lost:
        return Failure(CAUSE, rank, f"raised {kind}", text)
    if kind != "TimeoutError" and SAYS_WAITED.search(message):
        if waited := re.search(r"waiting (\d+)ms", message):  # gloo's limit may be another one
            timeout = int(waited[1]) / 1000
        place = last_place(PLACE.findall(text))
        return Failure(WAITED, rank, f"has waited for {timeout:g} s{place}", text)
    return Failure(LOST, rank, f"raised {kind}", text)


# --- what the user sees


def with_the_others(failure: Failure, states: States, pids: dict[int, int],
                    stacks: connection.Connection | None) -> Failure:
    """Add to the failure of a rank that has waited where all other ranks are.

    Args:
        failure: That of the rank.
        states: Some other ranks may have waited, too, and have failed.
        pids: `{rank: process id}` of the ranks of a local run that still run.
        stacks: Where a rank writes its Python stacks when it gets SIGUSR1.
    """
    texts, sentences = [failure.traceback], [failure.what]
    waited = {other.rank: other.traceback for other in states.failures()}
    for rank in sorted((waited.keys() | pids.keys()) - {failure.rank}):
        who = f"rank {rank} ({states.names[rank]})"
        text = waited.get(rank, "")
        places = PLACE.findall(text)[-1:]
        if rank in pids and not text:
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGUSR1)
            while stacks.poll(0.3):
                text += os.read(stacks.fileno(), 2**16).decode(errors="replace")
            threads = threads_of(text)
            # The main thread is the last one. If it only waits in rpc.shutdown until all ranks are
            # done, this rank is where it serves a call.
            serves = threads and len(threads) > 1 and " in shutdown" in threads[-1]
            places = PLACE.findall(threads[0 if serves else -1])[:1] if threads else []
            text = "".join([f"{who}, the innermost line first:\n", *threads])
        texts.append(text)
        sentences.append(f"{who} is{last_place(places) or ' outside of the lesson'}")
    return failure._replace(what="; ".join(sentences[:4]), traceback="\n".join(texts))


def threads_of(stacks: str) -> list[str]:
    """Return the threads in the output of faulthandler that are in a lesson, the main one last."""
    # The innermost line is the first one: `run_rank` and what has called it come after the lesson.
    threads = [thread.partition(f'  File "{ROOT}/common/launch.py"')[0].strip() + "\n"
               for thread in stacks.split("\n\n")]
    return [OWN_FRAMES.sub("", thread) for thread in threads if PLACE.search(thread)]


def stacks_here() -> str:
    """Return where the threads of this process are."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "".join(threads_of(file.read().decode(errors="replace")))


def last_place(places: list[tuple[str, str]]) -> str:
    """Return " at FILE:LINE, `code`" of the last of some places, or "" without any."""
    if not places:
        return ""
    path, line = places[-1]
    return f" at {path}:{line}, `{linecache.getline(str(ROOT / path), int(line)).strip()}`"


def report(failure: Failure, names: Sequence[str], more: str = "") -> None:
    """Print the traceback of a failure, if there is one, and its one line."""
    line = f"error: rank {failure.rank} ({names[failure.rank]}) {failure.what}{more}\n"
    # In one piece, because other processes may print, too.
    print(shortened(failure.traceback, LONGEST) + line, end="", file=sys.stderr, flush=True)


def count(number: int, kind: str = "") -> str:
    """Return "1 other process" or "3 other processes"."""
    return f"{number} {kind}process{'es' if number != 1 else ''}"


def nobody_reads() -> bool:
    """Return whether the standard output is a pipe that nobody reads, as after `| head -1`."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def end_now(status: int) -> NoReturn:
    """End this process at once: an RPC agent could wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
