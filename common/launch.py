"""Start the processes of one example, bring them all into the same state, and know which of them failed.

Three ways in, and a worker never knows which one was taken:

    local      python X/main.py --world_size 3                  one process per rank, started here
    torchrun   torchrun --nproc_per_node 3 X/main.py            torchrun started us: this process *is* one rank
    manual     python X/main.py --world_size 3 --rank 1 ...     the one rank of this terminal or machine

Whichever it is, `run_worker(rank, world_size, args)` finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and
INIT_METHOD in its environment, and has its fair share of the CPU threads. `common/watch.py` watches over the ranks.
"""

import json
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, current_process, forkserver, reduction, resource_tracker, util
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from common import watch, worker_env
from common.checkpoint import NotSavedError
from common.cli import refuse
from common.report import NotFiniteError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IMPORT_S = 8.0  # a tight --timeout is not for the seconds in which another terminal imports torch
LONGEST_TEMPDIR = 70  # bytes: the name of a Unix socket has 107, of which 32 come after the folder
STOP_GRACE_S = 3.0  # a process that SIGTERM has not ended by then gets SIGKILL
# What every worker imports, the last one when it makes its first optimizer. The fork server does so once for all.
PRELOAD = ["torch", "torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo"]
# How torch says that another process is gone or does not answer.
NOTICED = re.compile(r"[Cc]onnection (closed|reset|refused)|[Tt]imed ?out|timeout|tensorpipe|gloo|NCCL|RPCErr|"
                     r"Broken pipe|\beof\b|failed to connect|rendezvous|Socket|store")
_launches = 0


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
            gone), 2 if the processes cannot be started as the flags say, 130 after Ctrl-C or SIGTERM.
    """
    global _launches
    _launches += 1
    started = time.perf_counter()
    names = [role_name(rank, args.world_size) for rank in range(args.world_size)]
    if dist.is_torchelastic_launched():
        result = _be_one_rank(run_worker, args, names)
    else:
        with tempfile.TemporaryDirectory(prefix=worker_env.run_prefix(), ignore_cleanup_errors=True) as folder:
            result = _start_ranks(run_worker, args, names, Path(folder))
    return None if result is None else {**result, "wall_s": time.perf_counter() - started}


# --- local and manual: this process is the launcher


def _start_ranks(run_worker, args, names, folder):
    """Start all ranks, or the one of `--rank`, and watch over them; `folder` is this run's alone: no two runs meet."""
    ranks, peers, store = list(range(args.world_size)), None, None
    # The store of a local run is a file: a port could be taken, and its server would listen where others could call.
    init_method = f"file://{folder}/store"
    # Survivors would each warn, from C++, of every connection that a dead peer has closed. We say it once.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    processes, verdict = {}, None
    with _interruptible() as interruptible:
        try:
            if args.rank is not None:
                ranks = [args.rank]
                with interruptible():
                    init_method, store, peers = _meet_manually(args)
            try:
                processes = _start(run_worker, args, ranks, init_method, folder)
            except (OSError, EOFError) as error:  # of the fork server too: out of files, of processes, of memory
                reason = getattr(error, "strerror", None) or str(error) or "the fork server has ended"
                print(f"error: cannot start {_count(len(ranks))}: {reason}", file=sys.stderr, flush=True)
                raise SystemExit(1) from None

            def ended(rank):
                processes[rank].join()
                status = processes[rank].exitcode
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
                return watch.word_of(folder, rank) or ([watch.failure(rank, how)] if status else [])

            sentinels = {rank: process.sentinel for rank, process in processes.items()}
            with interruptible():
                verdict = watch.watch(sentinels, ended, folder, args.timeout, peers)
        except KeyboardInterrupt:
            verdict = watch.failure(ranks[0], "was interrupted")
            print(f"\ninterrupted; stopped {_count(len(ranks))}", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        finally:
            if peers:
                peers.close(verdict)
            _stop(processes.values())
            _remove_leftovers([process.pid for process in processes.values()], args)
            del store
    if verdict:
        watch.say(verdict, names, len([rank for rank in ranks if rank != verdict["rank"]]))
        raise SystemExit(1)
    result = folder / "result"
    return json.loads(result.read_text()) if result.exists() else None


@contextmanager
def _interruptible():
    """Keep SIGINT, SIGTERM and SIGHUP for the places that can be interrupted, where the first one raises.

    Yields:
        A context manager for such a place. It raises KeyboardInterrupt, once: what comes later finds us stopping.
    """
    interrupted = threading.Event()
    listening = False

    def interrupt(*_):
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

    if threading.current_thread() is not threading.main_thread():  # only there can signals be heard
        yield here
        return
    heard = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores one
    handlers = {signum: signal.signal(signum, interrupt) for signum in heard}
    try:
        yield here
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _start(run_worker, args, ranks, init_method, folder):
    """Start the processes of `ranks`, `{rank: process}`: none is left behind if one of them cannot be started.

    `mp.spawn` starts each process from nothing: each imports torch, which takes seconds. It is short for
    `start_processes(..., start_method="spawn")`. With "forkserver" one process imports torch, and all ranks are forked
    from it, with what it has imported: eleven ranks start in less than half the time. A CUDA context does not survive a
    fork; the fork server, unlike this process, has never had one.
    """
    before = set(multiprocessing.active_children())
    spawned = (run_worker, args, ranks, init_method, folder, _Inherited())
    resource_tracker.ensure_running()  # not inside of what follows: as it starts, it unblocks the signals again
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited: no worker ends, with a traceback, half started
    try:
        if args.start_method == "forkserver":
            _start_fork_server(run_worker)
        context = mp.start_processes(_run_rank, spawned, len(ranks), join=False, start_method=args.start_method)
        return dict(zip(ranks, context.processes, strict=True))
    except BaseException:
        _stop(set(multiprocessing.active_children()) - before)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _start_fork_server(run_worker):
    """Unless it is there already: a later launch of this Python process costs only the forks."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPDIR and "tempdir" not in current_process()._config:
        # The name of its socket would be too long for the system.
        folder = current_process()._config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    main = getattr(sys.modules["__main__"], "__file__", None)
    modules = [*PRELOAD, run_worker.__module__, "common.preload"]
    os.environ[worker_env.MAIN_PATH] = main if main and run_worker.__module__ == "__main__" else ""
    forkserver.set_forkserver_preload([module for module in modules if module != "__main__"])
    forkserver.ensure_running()
    os.environ.pop(worker_env.MAIN_PATH, None)


class _Inherited:
    """What a forked worker would otherwise have from the fork server: the environment, and where its output goes."""

    def __getstate__(self):
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):
                stream.flush()
        return dict(os.environ), [reduction.DupFd(descriptor) for descriptor in (1, 2)]

    def __setstate__(self, state):
        self.environ, self.streams = state

    def take(self):
        """In the worker."""
        for descriptor, stream in enumerate(self.streams, start=1):
            duplicate = stream.detach()
            os.dup2(duplicate, descriptor)
            os.close(duplicate)
        os.environ.clear()
        os.environ.update(self.environ)


def _run_rank(index, run_worker, args, ranks, init_method, folder, inherited):
    """The life of one started process: `run_worker`, then its result or its failure left in the run's folder."""
    inherited.take()
    rank, local_rank, local_world_size = ranks[index], index, len(ranks)
    launcher = multiprocessing.parent_process().sentinel
    watched = threading.Thread(target=_beat, args=(rank, folder, launcher, args), daemon=True)
    mp._prctl_pr_set_pdeathsig(0)  # torch asks for SIGINT when the launcher dies; but `_beat` cleans up before it ends
    watched.start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even inside C++; the launcher does the talking
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        if args.rank is not None and worker_env.is_loopback(args.master_addr):
            local_rank, local_world_size = rank, args.world_size  # one rank per terminal, but all on this machine
        elif args.rank is not None:  # on several machines, only the user knows how many ranks are on each
            local_rank, local_world_size = (int(os.environ.get(*setting)) for setting in
                                            (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        worker_env.enter(rank, args.world_size, local_rank, local_world_size, init_method, args.master_addr)
        worker_env.reproducible(args)
        result = run_worker(rank, args.world_size, args)
        if result is not None:
            (folder / "result").write_text(json.dumps(result))
        _exit_now(0)
    except Exception as error:
        watch.leave_word(folder, rank, story_of(rank, error))
        _exit_now(1)


def _exit_now(status):
    # Not sys.exit: taking torch apart costs more than a second, and a live RPC agent may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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


def _remove_leftovers(pids, args):
    """Remove what a rank was writing when it was killed: `report.replacing` puts its process id into the name."""
    checkpoint = getattr(args, "checkpoint", None)
    for folder in {args.output_dir, args.output_dir if checkpoint is None else checkpoint.parent}:
        for pid in pids:
            for leftover in folder.glob(f".*.{pid}.tmp"):
                leftover.unlink(missing_ok=True)


def _count(number):
    return f"{number} process" if number == 1 else f"{number} processes"


def _meet_manually(args):
    """Find the launchers in the other terminals; the init method of the ranks, the store, the peers.

    The launcher of rank 0 serves the store and stays until all others have left, so no rank has to wait for another
    one's shutdown.
    """
    host, port, join_s = worker_env.address_of(args.master_addr), args.master_port, args.timeout + IMPORT_S
    listener = None
    if args.rank == 0:
        try:
            listener = worker_env.listen(host, port)
        except OSError as error:
            refuse(f"--master_port {port} cannot be opened on {args.master_addr} ({os.strerror(error.errno).lower()}); "
                   "give another port to all ranks")

    def connect():
        limit = timedelta(seconds=join_s)
        if listener is None:
            _wait_for_port(host, port, join_s)
        served = {} if listener is None else {"master_listen_fd": listener.detach()}
        store = dist.TCPStore(host, port, None, listener is not None, limit, wait_for_workers=False, **served)
        return store, _meet(store, args.rank, args.world_size, host, join_s, "watch")

    # In a thread: where a port accepts and never answers, torch would wait for ever.
    met = []
    thread = threading.Thread(target=lambda: met.append(_attempt(connect)), daemon=True)
    thread.start()
    deadline = time.monotonic() + join_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)
    if not met or met[0] is None:
        print(f"error: rank 0 cannot be reached: {args.master_addr}:{port} has not answered for {join_s:g} s",
              file=sys.stderr, flush=True)
        raise SystemExit(1)
    store, peers = met[0]
    return f"tcp://{host}:{port}", store, peers


def _wait_for_port(host, port, seconds):
    """Wait until somebody listens; torch, which could wait itself, would print what it thinks of it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=seconds):
            return
        time.sleep(0.1)
    raise ConnectionError(f"nobody listens at {host}:{port}")


def _attempt(function):
    with suppress(RuntimeError, OSError, ValueError):
        return function()


def _meet(store, rank, world_size, host, join_s, key):
    """Connect this launcher with that of rank 0, whose address is in the store.

    Raises:
        RuntimeError, OSError: if that does not succeed within `join_s` seconds.
    """
    if rank == 0:
        listener, token = worker_env.listen(host, 0), secrets.token_hex(8)
        store.set(key, json.dumps([listener.getsockname()[1], token]))
        return watch.Peers(rank, world_size, token, join_s, listener)
    deadline = time.monotonic() + join_s
    while True:
        port, token = json.loads(store.get(key))
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            sock.sendall(json.dumps({"hello": rank, "token": token}).encode() + b"\n")
            if sock.recv(len(watch.WELCOME)):
                return watch.Peers(rank, world_size, token, join_s, sock)
        except OSError:
            pass  # the address of an earlier attempt, whose processes are just ending
        if time.monotonic() > deadline:
            raise ConnectionError(f"no launcher of rank 0 at {host}:{port}")
        time.sleep(0.1)


# --- torchrun: this process is a rank


def _be_one_rank(run_worker, args, names):
    """Under torchrun: it has started this process, watches over it, and stops the others when it fails."""
    rank, local_rank, local_world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    alone = local_world_size == args.world_size  # one machine
    folder = Path(tempfile.mkdtemp(prefix=worker_env.run_prefix()))
    worker_env.enter(rank, args.world_size, local_rank, local_world_size, "env://", os.environ["MASTER_ADDR"])
    worker_env.reproducible(args)
    join_s = max(args.timeout, watch.START_S)
    try:
        store, peers = None, None
        if args.world_size > 1:
            host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
            store, _, _ = next(dist.rendezvous("env://", rank, args.world_size, timeout=timedelta(seconds=join_s)))
            # torchrun's store outlives the ranks that it starts anew; several machines count their attempts apart.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else ""
            peers = _meet(store, rank, args.world_size, host, join_s, f"watch {attempt} {_launches}")
        first = rank - local_rank  # of this machine
        beside = _start_beside(rank, args, names, folder, peers, range(first, first + local_world_size))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    threading.Thread(target=_beat, args=(rank, folder, None, args, beside), daemon=True).start()
    try:
        result = run_worker(rank, args.world_size, args)
        beside.stdin.write(b"left")
        beside.stdin.close()
        return result
    except Exception as error:
        watch.leave_word(folder, rank, story_of(rank, error))
        with suppress(OSError):
            os.write(beside.stdin.fileno(), b"!")
        time.sleep(2 * watch.GRACE_S)  # meanwhile, `_beat` ends this process as soon as it is known whom to blame
        _exit_now(1)


def _start_beside(rank, args, names, folder, peers, neighbours):
    """Start the process that watches over this rank and is connected to those beside the others."""
    sock = peers and (peers.listener or peers.links[0].sock)
    life = {"rank": rank, "world_size": args.world_size, "names": names, "folder": str(folder), "timeout": args.timeout,
            "token": peers and peers.token, "join_s": peers and peers.join_s, "sock": sock and sock.fileno(),
            "neighbours": list(neighbours)}
    return subprocess.Popen([sys.executable, watch.__file__, json.dumps(life)], stdin=subprocess.PIPE, bufsize=0,
                            stdout=subprocess.DEVNULL, pass_fds=[sock.fileno()] if sock else [])


# --- in every rank


def _beat(rank, folder, launcher, args, beside=None):
    """Say every second that this process lives, and end it when its launcher is gone or has found a rank to blame."""
    parent = os.getppid()
    while True:
        with suppress(OSError):
            (folder / f"beat{rank}").touch()
        if launcher is None:  # torchrun's
            time.sleep(watch.BEAT_S)
            unwatched = beside.poll() is not None and not beside.stdin.closed and not (folder / "verdict").exists()
            gone = os.getppid() != parent or unwatched
        else:
            gone = bool(connection.wait([launcher], watch.BEAT_S))
        if gone:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_leftovers([os.getpid()], args)
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "verdict").exists():
            _exit_now(1)


def story_of(rank, error):
    """The failure that an exception in `rank` means: its own, that of the worker where an RPC raised, or a notice."""
    told = "".join(traceback.format_exception(error)).rstrip()
    message, kind = str(error), type(error).__name__
    # What came over RPC names the worker where it was raised, with the traceback from there.
    origin = re.findall(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\s*(\w+)\((.*)", message)
    if origin:
        rank, kind, message = int(origin[-1][0]), *origin[-1][1:]
    if kind in (NotSavedError.__name__, NotFiniteError.__name__):  # in words, which say all
        return watch.failure(rank, message.rstrip(")").strip("\"'") if origin else message)
    noticed = isinstance(error, (RuntimeError, OSError)) and NOTICED.search(message)
    return watch.failure(rank, f"raised {kind}", watch.NOTICED if noticed else watch.CAUSE, told)
