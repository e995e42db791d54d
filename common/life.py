"""The life of a rank, whoever started it: its beats, the report of its failure, its end."""

import os
import re
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import connection

from common import watch
from common.checkpoint import NotSavedError
from common.report import NotFiniteError

# How torch says that another process is gone or does not answer.
NOTICED = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed ?out|timeout|tensorpipe|gloo|NCCL|RPCErr|"
    r"Broken pipe|\beof\b|failed to connect|rendezvous|Socket|store")


def beat(rank, folder, launcher, args, beside=None):
    """Say every second that this process lives; end it when nobody watches, or one is to blame.

    Args:
        rank: of this process.
        folder: of the run, where `watch.Beats` looks.
        launcher: what becomes ready when the launcher is gone; None under torchrun.
        args: the parsed flags.
        beside: under torchrun, the process beside this rank.
    """
    parent, over = os.getppid(), (folder / "verdict").exists
    while True:
        with suppress(OSError):
            (folder / f"beat{rank}").touch()
        if launcher is None:
            time.sleep(watch.BEAT_S)
            unwatched = beside.poll() is not None and not beside.stdin.closed and not over()
            gone = os.getppid() != parent or unwatched
        else:
            gone = bool(connection.wait([launcher], watch.BEAT_S))
        if gone:
            shutil.rmtree(folder, ignore_errors=True)
            remove_leftovers([os.getpid()], args)
            os.kill(os.getpid(), signal.SIGKILL)
        if over():
            exit_now(1)


def exit_now(status):
    """End this process at once.

    Not by sys.exit: taking torch apart costs more than a second, and a live RPC agent may wait for
    peers that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def remove_leftovers(pids, args):
    """Remove what ranks were writing when they were killed.

    `report.replacing` puts the id of its process into the name.
    """
    checkpoint = getattr(args, "checkpoint", None)
    for folder in {args.output_dir, args.output_dir if checkpoint is None else checkpoint.parent}:
        for pid in pids:
            for leftover in folder.glob(f".*.{pid}.tmp"):
                leftover.unlink(missing_ok=True)


def story_of(rank, error):
    """The failure that an exception in `rank` means.

    Its own, that of the worker where an RPC raised, or only a notice of another one's.
    """
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
