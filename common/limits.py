"""Refuse in one line, before any process starts, what this machine cannot hold or write."""

import argparse
import os
import resource
import stat
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

# Open files of a process: a constant, and a number for each rank. (Measured on Linux with torch
# 2.13 and 3 to 10 ranks: 84 + 57, 126 + 9 and 15 + 1; the launcher has 18 + 4.)
FILES = {"rpc": (100, 60), "uv": (140, 10), "gloo": (30, 5)}
MOST_THREADS = 1024  # of one process: more than any machine has cores


def refuse(sentence: str, rank: int | str | None = 0) -> NoReturn:
    """End with status 2 and one whole sentence: "error: --rank 1 requires --master_addr HOST".

    Under torchrun, all ranks call this function, or only the rank that needs the refused value. The
    rank `rank` prints the line. If machines may differ, `rank` is None, and the first rank of each
    machine prints it.
    """
    name, speaker = ("LOCAL_RANK", 0) if rank is None else ("RANK", rank)
    if not dist.is_torchelastic_launched() or os.environ[name] == str(speaker):
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def shortened(text: object, length: int = 80) -> str:
    """Return a value as the user gave it, shortened to what a line can show."""
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
    """Refuse `flags` if this machine cannot hold `number` processes.

    Torchrun and manual launches are not checked, because they may use several machines.

    Args:
        flags: Text with the flags that ask for the processes, and their values.
        number: Number of processes.
        rpc: Whether the processes use RPC.
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
    """Refuse an OMP_NUM_THREADS that would fill the machine with threads."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > MOST_THREADS:
        refuse(f"OMP_NUM_THREADS={shortened(setting)} must be at most {MOST_THREADS}", None)


def require_memory(args: argparse.Namespace, flags: list[str], n_bytes: float,
                   rank: int | None = None) -> None:
    """Refuse `flags` if their tensors do not fit into the memory of this machine.

    Args:
        args: Parsed flags.
        flags: Names of the flags that ask for the memory.
        n_bytes: Least number of bytes that all `ranks_here` allocate together.
        rank: See `refuse`.
    """
    if n_bytes > memory_bytes():
        refuse(f"{given(args, *flags)} would need {n_bytes / 1e9:.3g} GB of memory or more, and "
               f"this machine has {memory_bytes() / 1e9:.3g} GB; give smaller numbers", rank)


def require_writable_folder(flag: str, folder: Path, shown: Path | None = None,
                            rank: int | None = 0) -> None:
    """Create `folder` if it is missing; refuse `flag` if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(shown or folder)} must be a place where files can be written "
               f"({shortened(folder)}: {reason_of(error)})", rank)


def require_file(flag: str, path: Path, rank: int | None = 0) -> bool:
    """Return whether the file exists; refuse `flag` if `path` cannot be a regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe could block forever
            refuse(f"{flag} {shortened(path)} must be a file, not a folder, a pipe or a device",
                   rank)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(path)} must be a file ({reason_of(error)})", rank)
    return True


def require_writable_file(flag: str, path: Path, rank: int | None = 0) -> None:
    """Refuse `flag` if `path` cannot be written, because of its folder, its name or its type."""
    require_writable_folder(flag, path.parent, path, rank)
    if not require_file(flag, path, rank):
        # `report.replacing` first writes a file with a longer name to the same folder.
        longest = os.pathconf(path.parent, "PC_NAME_MAX") - 30
        if 0 < longest < len(os.fsencode(path.name)):
            refuse(f"{flag} {shortened(path)} must have a shorter name", rank)


def reason_of(error: Exception) -> str:
    """Put into words why a file cannot be used."""
    return (getattr(error, "strerror", None) or "not a file name").lower()
