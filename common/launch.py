"""Start the processes of one example, all in the same state, and know which one failed.

Three ways in, and a worker never knows which one was taken:

    local      python X/main.py --world_size 3              one process per rank, started here
    torchrun   torchrun --nproc_per_node 3 X/main.py        torchrun started us: we *are* one rank
    manual     python X/main.py --world_size 3 --rank 1 ... the one rank of this terminal or machine

Whichever it is, `run_worker(rank, world_size, args)` finds RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE and INIT_METHOD in its environment, and has its fair share of the CPU threads.

    workers.py, life.py        the processes of this machine; what each rank does beside its work
    watch.py, beside.py        who has failed; the process that watches over a rank of torchrun
    meeting.py, peers.py       how launchers of several terminals find each other; what they say
    worker_env.py, network.py  the state that every worker is in; addresses
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from common import beside, life, meeting, watch, worker_env, workers

_launches = 0


def launch(run_worker, args, role_name):
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
    global _launches
    _launches += 1
    started = time.perf_counter()
    names = [role_name(rank, args.world_size) for rank in range(args.world_size)]
    if dist.is_torchelastic_launched():
        result = _be_one_rank(run_worker, args, names)
    else:
        prefix = worker_env.run_prefix()
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            result = _start_ranks(run_worker, args, names, Path(folder))
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


# --- local and manual: this process is the launcher


def _start_ranks(run_worker, args, names, folder):
    """Start all ranks, or the one of `--rank`, and watch over them.

    `folder` is this run's alone: no two runs meet.
    """
    ranks, peers, store = list(range(args.world_size)), None, None
    # The store of a local run is a file: a port could be taken, and its server would listen where
    # others could call.
    init_method = f"file://{folder}/store"
    # Survivors would each warn, from C++, of every connection that a dead peer has closed. We say
    # it once.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    processes, verdict = {}, None
    with _interruptible() as interruptible:
        try:
            if args.rank is not None:
                ranks = [args.rank]
                with interruptible():
                    init_method, store, peers = meeting.meet_manually(args)
            try:
                processes = workers.start(run_worker, args, ranks, init_method, folder)
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or str(error) or "the fork server has ended"
                print(f"error: cannot start {_count(ranks)}: {why}", file=sys.stderr, flush=True)
                raise SystemExit(1) from None
            sentinels = {rank: process.sentinel for rank, process in processes.items()}
            with interruptible():
                verdict = watch.watch(
                    sentinels, lambda rank: _end_of(rank, processes[rank], folder), folder,
                    args.timeout, peers)
        except KeyboardInterrupt:
            verdict = watch.failure(ranks[0], "was interrupted")
            print(f"\ninterrupted; stopped {_count(ranks)}", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        finally:
            if peers:
                peers.close(verdict)
            workers.stop(processes.values())
            life.remove_leftovers([process.pid for process in processes.values()], args)
            del store
    if verdict:
        watch.say(verdict, names, len([rank for rank in ranks if rank != verdict["rank"]]))
        raise SystemExit(1)
    result = folder / "result"
    return json.loads(result.read_text()) if result.exists() else None


def _end_of(rank, process, folder):
    """The failures of a rank whose process has ended: what it left word of, or how it ended."""
    process.join()
    status = process.exitcode
    how = (f"was killed by {signal.Signals(-status).name}" if status < 0
           else f"exited with status {status}")
    return watch.word_of(folder, rank) or ([watch.failure(rank, how)] if status else [])


@contextmanager
def _interruptible():
    """Keep SIGINT, SIGTERM and SIGHUP for the places that can be interrupted.

    Yields:
        A context manager for such a place. The first signal raises KeyboardInterrupt there, once:
        what comes later finds us stopping.
    """
    interrupted = threading.Event()
    listening, told_to_end = False, False

    def interrupt(signum, _):
        nonlocal told_to_end
        told_to_end |= signum != signal.SIGINT
        first = not interrupted.is_set()
        interrupted.set()
        if listening and first:
            raise KeyboardInterrupt

    @contextmanager
    def here():
        nonlocal listening
        listening = True
        if interrupted.is_set():
            raise KeyboardInterrupt
        try:
            yield
        finally:
            listening = False

    if threading.current_thread() is not threading.main_thread():  # others never hear a signal
        yield here
        return
    heard = [signum for signum in workers.STOP_SIGNALS  # nohup ignores one
             if signal.getsignal(signum) is not signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, interrupt) for signum in heard}
    try:
        yield here
    finally:
        for signum, handler in handlers.items():
            # A second SIGTERM must not kill us on the way out.
            signal.signal(signum, signal.SIG_IGN if told_to_end else handler)


def _count(ranks):
    return f"{len(ranks)} process{'es' if len(ranks) != 1 else ''}"


# --- torchrun: this process is a rank


def _be_one_rank(run_worker, args, names):
    """Under torchrun: it started this process, and stops the others when this one fails."""
    rank, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    one_machine = local_world_size == args.world_size
    first = rank - local_rank  # of this machine
    folder = Path(tempfile.mkdtemp(prefix=worker_env.run_prefix()))
    worker_env.enter(rank, args.world_size, local_rank, local_world_size, "env://",
                     os.environ["MASTER_ADDR"])
    worker_env.reproducible(args)
    limit_s = max(args.timeout, watch.START_S)
    try:
        store, peers = None, None  # kept until the end: this process may be the one that serves it
        if args.world_size > 1:
            store, peers = meeting.meet_under_torchrun(
                rank, args.world_size, one_machine, limit_s, _launches)
        watcher = beside.start(rank, args, names, folder, peers,
                               neighbours=range(first, first + local_world_size))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    threading.Thread(target=life.beat, args=(rank, folder, None, args, watcher),
                     daemon=True).start()
    try:
        result = run_worker(rank, args.world_size, args)
        watcher.stdin.write(b"left")
        watcher.stdin.close()
        return result
    except Exception as error:
        watch.leave_word(folder, rank, life.story_of(rank, error))
        with suppress(OSError):
            os.write(watcher.stdin.fileno(), b"!")
        # Meanwhile, `life.beat` ends this process as soon as it is known whom to blame.
        time.sleep(2 * watch.GRACE_S)
        life.exit_now(1)
