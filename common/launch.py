"""Start the processes of one example, bring them all into the same state, and know which of them failed.

Three ways in, and a worker never knows which one was taken:

    local      python X/main.py --world_size 3                  one process per rank, started here with mp.spawn
    torchrun   torchrun --nproc_per_node 3 X/main.py            torchrun started us: this process *is* one rank
    by hand    python X/main.py --world_size 3 --rank 1 ...     the one rank of this terminal or machine

Whichever it is, `run_worker(rank, world_size, args)` finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and
INIT_METHOD in its environment, and has its fair share of the CPU threads.
"""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_GRACE_S = 3.0  # a process that SIGTERM has not ended by then gets SIGKILL
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def launch(run_worker, args, role_name):
    """Run `run_worker(rank, world_size, args)` in every process of the example.

    Args:
        run_worker: module-level function; exactly one role returns a dict (which JSON can hold), the others None.
        args: the parsed flags (`common.cli.parse`).
        role_name: `role_name(rank, world_size) -> str`, the name of a rank in messages.

    Returns:
        That dict, with `wall_s` (seconds, start-up included) added, in the process that reports: the one that
        started the workers, or under torchrun the rank itself. None elsewhere.

    Raises:
        SystemExit: 1 if a worker failed (its traceback and one line have been printed, the others are stopped and
            gone), 130 after Ctrl-C, 143 after SIGTERM.
    """
    started = time.perf_counter()
    if dist.is_torchelastic_launched():
        result = _run_rank_of_torchrun(run_worker, args)
    else:
        result = _run_ranks_started_here(run_worker, args, role_name)
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


def _run_rank_of_torchrun(run_worker, args):
    try:
        _enter_worker(os.environ, "env://")
        return run_worker(int(os.environ["RANK"]), args.world_size, args)
    except Exception:
        traceback.print_exc()
        _exit_now(1)  # torchrun sees the status and stops the other ranks


def _run_ranks_started_here(run_worker, args, role_name):
    by_hand = args.rank is not None
    ranks = [args.rank] if by_hand else list(range(args.world_size))
    with _run_folder() as folder, _signals_raise():
        init_method = f"tcp://{args.master_addr}:{args.master_port}" if by_hand else f"file://{folder}/store"
        here = len(ranks)
        if by_hand and is_loopback(args.master_addr):
            here = args.world_size  # one rank per terminal, but all on this machine: they share its cores
        places = [_place(rank, args.world_size, rank if here == args.world_size else 0, here) for rank in ranks]
        # Nothing may interrupt the start half-way. The children inherit the block until they have imported torch.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        spawned = (run_worker, args, places, init_method, folder)
        with _quiet_survivors():
            processes = mp.spawn(_run_spawned, spawned, nprocs=len(ranks), join=False).processes
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            failed = _wait_for_failure(dict(zip(ranks, processes, strict=True)))
        except (KeyboardInterrupt, _Terminated) as stop:
            status, what = (143, str(stop)) if isinstance(stop, _Terminated) else (130, "interrupted")
            print(f"\n{what}; stopped {len(ranks)} process{'es'[: 2 * (len(ranks) != 1)]}", file=sys.stderr, flush=True)
            raise SystemExit(status) from None
        finally:
            _stop(processes)
        if failed:
            rank, reason = _first_failure(failed, ranks, folder)
            others = len(ranks) - 1
            stopped = f"; stopped {others} other process{'es'[: 2 * (others != 1)]}" if others else ""
            print(f"error: rank {rank} ({role_name(rank, args.world_size)}) {reason}{stopped}", file=sys.stderr)
            raise SystemExit(1)
        results = list(folder.glob("result"))
        return json.loads(results[0].read_text()) if results else None


def _run_spawned(index, run_worker, args, places, init_method, folder):
    """The life of one spawned process: `run_worker`, then its result or its traceback left in the run's folder."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even inside C++; the parent does the talking
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.update(places[index])
    try:
        _enter_worker(os.environ, init_method)
        result = run_worker(int(os.environ["RANK"]), args.world_size, args)
        if result is not None:
            (folder / "result").write_text(json.dumps(result))
    except Exception as error:
        story = {"at": time.time(), "type": type(error).__name__, "traceback": traceback.format_exc().rstrip()}
        (folder / f"error{os.environ['RANK']}").write_text(json.dumps(story))
        _exit_now(1)


def _place(rank, world_size, local_rank, local_world_size):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    # Set by hand, the local two win: only the user knows how many ranks were started on each of several machines.
    if local_world_size < world_size:
        place |= {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ}
    return {name: str(value) for name, value in place.items()}


def _enter_worker(place, init_method):
    os.environ["INIT_METHOD"] = init_method
    local_world_size = int(place["LOCAL_WORLD_SIZE"])
    if local_world_size == int(place["WORLD_SIZE"]):
        # One machine: gloo and RPC stay on the loopback interface. RPC executes what it is sent, so it must not
        # listen where others can reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("TP_SOCKET_IFNAME", LOOPBACK)
    if "OMP_NUM_THREADS" not in os.environ:
        # Every process would take all cores otherwise: the largest single cost of RPC examples on small machines.
        torch.set_num_threads(max(1, core_count() // local_world_size))
    # init_rpc hands its own gloo Backend to a collective that would rather have a ProcessGroup; torch's business.
    warnings.filterwarnings("ignore", message=r"You are using a Backend .* as a ProcessGroup")


def core_count():
    """CPU cores this process may use: fewer than the machine has, in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def is_loopback(address):
    """Whether a master address means this very machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _exit_now(status):
    # Not sys.exit: the teardown of a live RPC agent may wait for peers that are not there any more.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait_for_failure(processes):
    """Wait until a process fails or all have ended well; `{rank: exit status}` of those that have failed by then."""
    running = {process.sentinel: process for process in processes.values()}
    while running:
        ended = [running.pop(sentinel) for sentinel in connection.wait(list(running))]
        for process in ended:
            process.join()
        if any(process.exitcode for process in ended):
            return {rank: process.exitcode for rank, process in processes.items() if process.exitcode}
    return {}


def _stop(processes):
    """End the processes that still run; the number of them."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return len(running)


def _first_failure(failed, ranks, folder):
    """Which rank failed first, and how; prints its traceback if it left one and it has not been shown yet."""
    told = {rank: folder / f"error{rank}" for rank in ranks if (folder / f"error{rank}").exists()}
    for rank, status in failed.items():
        if rank not in told:  # it ended without a word; if others raised, it was because they had lost it
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            return rank, how
    stories = {rank: json.loads(path.read_text()) for rank, path in told.items()}
    rank, story = min(stories.items(), key=lambda item: item[1]["at"])
    # What came over RPC names the worker where it was raised; RPC has shown the traceback there.
    origin = re.findall(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\s*(\w+)", story["traceback"])
    if origin and int(origin[-1][0]) in ranks:
        return int(origin[-1][0]), f"raised {origin[-1][1]}"
    print(story["traceback"], file=sys.stderr)
    return (int(origin[-1][0]), f"raised {origin[-1][1]}") if origin else (rank, f"raised {story['type']}")


@contextlib.contextmanager
def _run_folder():
    """A folder of this run alone, for the store, the result and the tracebacks: two runs never meet."""
    with tempfile.TemporaryDirectory(prefix="distributed-tutorials-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _quiet_survivors():
    """Start processes that do not each warn, in C++, of every connection a dead peer has closed: we say it once."""
    level = "TORCH_CPP_LOG_LEVEL"
    if level in os.environ:
        yield
        return
    os.environ[level] = "ERROR"
    try:
        yield
    finally:
        del os.environ[level]


class _Terminated(BaseException):
    """SIGTERM or SIGHUP reached the process that started the workers."""


@contextlib.contextmanager
def _signals_raise():
    """Let SIGTERM and a closed terminal end the run as Ctrl-C does: workers stopped, folder removed."""

    def terminate(signum, _frame):
        raise _Terminated(f"ended by {signal.Signals(signum).name}")

    heard = [signum for signum in STOP_SIGNALS[1:] if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup
    before = {signum: signal.signal(signum, terminate) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
