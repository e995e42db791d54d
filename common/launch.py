"""Start the processes of one example, bring them all into the same state, and know which of them failed.

Three ways in, and a worker never knows which one was taken:

    local      python X/main.py --world_size 3                  one process per rank, started here with mp.spawn
    torchrun   torchrun --nproc_per_node 3 X/main.py            torchrun started us: this process *is* one rank
    by hand    python X/main.py --world_size 3 --rank 1 ...     the one rank of this terminal or machine

Whichever it is, `run_worker(rank, world_size, args)` finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and
INIT_METHOD in its environment, and has its fair share of the CPU threads.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from common import place

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_GRACE_S = 3.0  # a process that SIGTERM has not ended by then gets SIGKILL


def launch(run_worker, args, role_name):
    """Run `run_worker(rank, world_size, args)` in every process of the example.

    Args:
        run_worker: module-level function; exactly one role returns a dict (which JSON can hold), the others None.
        args: the parsed flags (`common.cli.Parser`).
        role_name: `role_name(rank, world_size) -> str`, the name of a rank in messages.

    Returns:
        That dict, with `wall_s` (seconds, start-up included) added, in the process that reports: the one that
        started the workers, or under torchrun the rank itself. None elsewhere.

    Raises:
        SystemExit: 1 if a worker failed (its traceback and one line have been printed, the others are stopped and
            gone), 130 after Ctrl-C or SIGTERM.
    """
    started = time.perf_counter()
    if dist.is_torchelastic_launched():
        result = _be_one_rank(run_worker, args)
    else:
        with tempfile.TemporaryDirectory(prefix="distributed-tutorials-") as folder:
            result = _start_ranks(run_worker, args, role_name, Path(folder))
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


def _be_one_rank(run_worker, args):
    """Under torchrun: it has started this process, watches over it, and stops the others when it fails."""
    rank, local_rank, local_world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    try:
        place.enter(rank, args.world_size, local_rank, local_world_size, "env://", os.environ["MASTER_ADDR"])
        return run_worker(rank, args.world_size, args)
    except Exception:
        traceback.print_exc()
        _exit_now(1)


def _start_ranks(run_worker, args, role_name, folder):
    """Start all ranks, or the one of `--rank`, and watch over them; `folder` is this run's alone: no two runs meet."""
    ranks = list(range(args.world_size)) if args.rank is None else [args.rank]
    # The store of a local run is a file: a port could be taken, and its server would listen on every interface.
    init_method = f"file://{folder}/store" if args.rank is None else f"tcp://{args.master_addr}:{args.master_port}"
    # Survivors would each warn, from C++, of every connection that a dead peer has closed. We say it once.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Nothing may interrupt the start half-way; the children inherit the block until they have imported torch.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    spawned = (run_worker, args, ranks, init_method, folder)
    processes = dict(zip(ranks, mp.spawn(_run_rank, spawned, len(ranks), join=False).processes, strict=True))
    heard = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores one
    handlers = {signum: signal.signal(signum, signal.default_int_handler) for signum in heard}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        failed = _wait_for_failure(processes)
    except KeyboardInterrupt:
        print(f"\ninterrupted; stopped {_count(len(ranks), 'process')}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    finally:
        _stop(processes.values())
        _remove_leftovers(processes.values(), args)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if failed:
        rank, reason = _first_failure(failed, ranks, folder)
        stopped = f"; stopped {_count(len(ranks) - 1, 'other process')}" if len(ranks) > 1 else ""
        print(f"error: rank {rank} ({role_name(rank, args.world_size)}) {reason}{stopped}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    result = folder / "result"
    return json.loads(result.read_text()) if result.exists() else None


def _run_rank(index, run_worker, args, ranks, init_method, folder):
    """The life of one spawned process: `run_worker`, then its result or its failure left in the run's folder."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even inside C++; the parent does the talking
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    rank, local_rank, local_world_size = ranks[index], index, len(ranks)
    try:
        if args.rank is not None and place.is_loopback(args.master_addr):
            local_rank, local_world_size = rank, args.world_size  # one rank per terminal, but all on this machine
        elif args.rank is not None:  # on several machines, only the user knows how many ranks are on each
            local_rank, local_world_size = (int(os.environ.get(*setting)) for setting in
                                            (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        place.enter(rank, args.world_size, local_rank, local_world_size, init_method, args.master_addr)
        result = run_worker(rank, args.world_size, args)
        if result is not None:
            (folder / "result").write_text(json.dumps(result))
        _exit_now(0)
    except Exception as error:
        story = {"at": time.time(), "type": type(error).__name__, "traceback": traceback.format_exc().rstrip()}
        (folder / f".error{rank}").write_text(json.dumps(story))
        os.replace(folder / f".error{rank}", folder / f"error{rank}")  # whole or not at all
        _exit_now(1)


def _exit_now(status):
    # Not sys.exit: taking torch apart costs more than a second, and a live RPC agent may wait for peers that are gone.
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
    """End the processes that still run."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _remove_leftovers(processes, args):
    """Remove what a rank was writing when it was killed: `report.replacing` puts its process id into the name."""
    checkpoint = getattr(args, "checkpoint", None)
    for folder in {args.output_dir, args.output_dir if checkpoint is None else checkpoint.parent}:
        for process in processes:
            for leftover in folder.glob(f".*.{process.pid}.tmp"):
                leftover.unlink(missing_ok=True)


def _first_failure(failed, ranks, folder):
    """Which rank failed first, and how; prints its traceback if it left one that has not been shown yet."""
    told = {rank: folder / f"error{rank}" for rank in ranks if (folder / f"error{rank}").exists()}
    for rank, status in failed.items():
        if rank not in told:  # it ended without a word; if others raised, it was because they had lost it
            killed = status < 0
            return rank, f"was killed by {signal.Signals(-status).name}" if killed else f"exited with status {status}"
    stories = {rank: json.loads(path.read_text()) for rank, path in told.items()}
    rank, story = min(stories.items(), key=lambda item: item[1]["at"])
    kind = story["type"]
    # What came over RPC names the worker where it was raised; there, RPC has already shown the traceback.
    origin = re.findall(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\s*(\w+)", story["traceback"])
    if origin:
        rank, kind = int(origin[-1][0]), origin[-1][1]
    if not origin or rank not in ranks:
        print(story["traceback"], file=sys.stderr)
    return rank, f"raised {kind}"


def _count(number, things):
    return f"{number} {things}" if number == 1 else f"{number} {things}es"
