"""The processes that a launcher starts on this machine, from the first fork to the last kill.

The fork server imports torch once for all ranks; each rank takes its environment and output from
the launcher, joins the run, and leaves its result or its failure in the run's folder.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import current_process, forkserver, reduction, resource_tracker, util

import torch.multiprocessing as mp
from common import life, network, watch, worker_env

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_GRACE_S = 3.0  # a process that SIGTERM has not ended by then gets SIGKILL
LONGEST_TEMPDIR = 70  # bytes: the name of a Unix socket has 107, of which 32 come after the folder
# What every worker imports, the last one when it makes its first optimizer. The fork server does so
# once for all.
PRELOAD = ["torch", "torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo"]


def start(run_worker, args, ranks, init_method, folder):
    """Start the processes of `ranks`: none is left behind if one of them cannot be started.

    `mp.spawn` starts each process from nothing: each imports torch, which takes seconds. It is
    short for `start_processes(..., start_method="spawn")`. With "forkserver" one process imports
    torch, and all ranks are forked from it, with what it has imported: eleven ranks start in less
    than half the time. A CUDA context does not survive a fork; the fork server, unlike this
    process, has never had one.

    Args:
        run_worker, args: as for `launch.launch`.
        ranks: those of this machine.
        init_method: where all ranks meet, for `common.session`.
        folder: of this run.

    Returns:
        `{rank: process}`.

    Raises:
        OSError, EOFError: out of files, of processes, of memory; of the fork server, too.
    """
    before = set(multiprocessing.active_children())
    spawned = (run_worker, args, ranks, init_method, folder, _Inherited())
    # Not inside of what follows: as it starts, it unblocks the signals again.
    resource_tracker.ensure_running()
    # Inherited: no worker ends, with a traceback, half started.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if args.start_method == "forkserver":
            _start_fork_server(run_worker)
        context = mp.start_processes(_run_rank, spawned, len(ranks), join=False,
                                     start_method=args.start_method)
        return dict(zip(ranks, context.processes, strict=True))
    except BaseException:
        stop(set(multiprocessing.active_children()) - before)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _start_fork_server(run_worker):
    """Unless it is there already: a later launch of this Python process costs only the forks."""
    config = current_process()._config
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPDIR and "tempdir" not in config:
        # The name of its socket would be too long for the system.
        folder = config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    main = getattr(sys.modules["__main__"], "__file__", None)
    modules = [*PRELOAD, run_worker.__module__, "common.preload"]
    os.environ[worker_env.MAIN_PATH] = main if main and run_worker.__module__ == "__main__" else ""
    forkserver.set_forkserver_preload([module for module in modules if module != "__main__"])
    forkserver.ensure_running()
    os.environ.pop(worker_env.MAIN_PATH, None)


class _Inherited:
    """What a forked worker would have from the fork server: environment, and where output goes."""

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
    """What a started process does: `run_worker`, then its result or failure goes to `folder`."""
    inherited.take()
    rank, launcher = ranks[index], multiprocessing.parent_process().sentinel
    beats = threading.Thread(target=life.beat, args=(rank, folder, launcher, args), daemon=True)
    # torch asks for SIGINT when the launcher dies; but `life.beat` cleans up before it ends.
    mp._prctl_pr_set_pdeathsig(0)
    beats.start()
    # Ctrl-C ends it even inside C++; the launcher prints the message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        place = _place(index, args, ranks)
        worker_env.enter(rank, args.world_size, *place, init_method, args.master_addr)
        worker_env.reproducible(args)
        result = run_worker(rank, args.world_size, args)
        if result is not None:
            (folder / "result").write_text(json.dumps(result))
        life.exit_now(0)
    except Exception as error:
        watch.leave_word(folder, rank, life.story_of(rank, error))
        life.exit_now(1)


def _place(index, args, ranks):
    """The local rank and the local world size."""
    if args.rank is None:
        return index, len(ranks)
    if network.is_loopback(args.master_addr):  # one rank per terminal, but all on this machine
        return args.rank, args.world_size
    # On several machines, only the user knows how many ranks are on each.
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def stop(processes):
    """End the processes that still run."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
