"""Refuse in one line, before any process starts, what this machine cannot hold or cannot write."""

import argparse
import os
import resource
import stat
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

# Open files of a process: at least, and for each rank. (Linux, torch 2.13, 3 to 10 ranks: 84 + 57,
# 126 + 9 and 15 + 1; the launcher has 18 + 4.)
FILES = {"rpc": (100, 60), "uv": (140, 10), "gloo": (30, 5)}
MOST_THREADS = 1024  # of one process: more than any machine has cores


def refuse(sentence: str, rank: int | str | None = 0) -> NoReturn:
    """End with status 2 and one whole sentence: "error: --rank 1 requires --master_addr HOST".

    Under torchrun every rank gets here, or only the one that needs what is wrong: rank `rank`
    prints the line, for all. Where machines may differ, it is None, and the first rank of each
    machine does.
    """
    name, speaker = ("LOCAL_RANK", 0) if rank is None else ("RANK", rank)
    if not dist.is_torchelastic_launched() or os.environ[name] == str(speaker):
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def shortened(text: object, length: int = 80) -> str:
    """Return a value as the user gave it, but not longer than a line can show."""
    text = str(text)
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 4 :]}"


def given(args: argparse.Namespace, *flags: str) -> str:
    """Return flags with their values, as on a command line."""
    words = []
    for flag in flags:
        value = getattr(args, flag)
        value = " ".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"--{flag} {shortened(value)}")
    return " ".join(words)


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_processes(flags: str, number: int, rpc: bool) -> None:
    """Refuse `flags`, a text, if this machine cannot hold so many processes.

    Not for torchrun and manual launches: they may have several machines.

    Args:
        flags: Those that ask for the processes, with their values.
        number: How many processes.
        rpc: Whether they use RPC.
    """
    kind = "gloo" if not rpc else "uv" if os.environ.get("RPC_TRANSPORTS") == "uv" else "rpc"
    base, each = FILES[kind]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = memory_bytes() // 100_000_000
    files = memory if hard == resource.RLIM_INFINITY else (hard - base) // each
    most = max(2, min(files, memory))
    if number > most:
        refuse(f"{flags} is too much for this machine, which can hold at most {most} processes "
               f"({'open files: ulimit -Hn' if files < memory else 'memory'})")


def require_threads() -> None:
    """Refuse an OMP_NUM_THREADS with which torch would start threads until the machine is full."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > MOST_THREADS:
        refuse(f"OMP_NUM_THREADS={shortened(setting)} must be at most {MOST_THREADS}", None)


def require_memory(args: argparse.Namespace, flags: list[str], n_bytes: float,
                   rank: int | None = None) -> None:
    """Refuse what does not fit into the memory of this machine.

    Args:
        args: the parsed flags.
        flags: the names of those that ask for it.
        n_bytes: what all `ranks_here` together allocate, at least.
        rank: see `refuse`.
    """
    if n_bytes > memory_bytes():
        refuse(f"{given(args, *flags)} would need {n_bytes / 1e9:.3g} GB of memory or more, and "
               f"this machine has {memory_bytes() / 1e9:.3g} GB; give smaller numbers", rank)


def require_writable_folder(flag: str, folder: Path, shown: Path | None = None,
                            rank: int | None = 0) -> None:
    """Create `folder` if need be; refuse `flag` if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(shown or folder)} must be a place where files can be written "
               f"({shortened(folder)}: {reason_of(error)})", rank)


def require_file(flag: str, path: Path, rank: int | None = 0) -> bool:
    """Return whether the file exists; refuse `flag` if it is no file, or `path` no file's name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to use a pipe could mean to wait for ever
            refuse(f"{flag} {shortened(path)} must be a file, not a folder, a pipe or a device",
                   rank)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(path)} must be a file ({reason_of(error)})", rank)
    return True


def require_writable_file(flag: str, path: Path, rank: int | None = 0) -> None:
    """Refuse `flag` if `path` cannot be written: its folder, too long a name, not a file."""
    require_writable_folder(flag, path.parent, path, rank)
    if not require_file(flag, path, rank):
        # `report.replacing` writes to the same folder, to a name that is longer.
        longest = os.pathconf(path.parent, "PC_NAME_MAX") - 30
        if 0 < longest < len(os.fsencode(path.name)):
            refuse(f"{flag} {shortened(path)} must have a shorter name", rank)


def reason_of(error: Exception) -> str:
    """Put into words why a file cannot be used."""
    return (getattr(error, "strerror", None) or "not a file name").lower()
