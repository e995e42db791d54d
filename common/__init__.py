"""Helpers of all lessons. If no program can run on this machine, importing them says why."""

import os
import re
import signal
import sys
from pathlib import Path


def interrupted(*_: object) -> None:
    """End a program that gets Ctrl-C while it imports torch, in one line; `launch` takes over."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


ROOT = Path(__file__).resolve().parents[1]
main_file = getattr(sys.modules["__main__"], "__file__", None)
if (main_file and Path(main_file).resolve().parent.parent == ROOT
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
    signal.signal(signal.SIGINT, interrupted)  # only in a program: pytest and notebooks go on

# The oldest versions. An older Python must reach the line that refuses it, hence the quotes.
PYTHON, TORCH = (3, 11), (2, 11)


def why_not(platform: str = sys.platform,
            python: "tuple[int, int]" = sys.version_info[:2]) -> "str | None":
    """Explain in a sentence why these examples cannot run here; return None if they can."""
    if platform == "win32":
        return ("torch has no RPC on Windows; use WSL, Windows' own Linux: `wsl --install`, then "
                "the same commands there (https://learn.microsoft.com/windows/wsl/install)")
    if python < PYTHON:
        return f"Python {python[0]}.{python[1]} is too old; use {PYTHON[0]}.{PYTHON[1]} or newer"
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "torch is missing; run `pip install -r requirements.txt`"
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < TORCH:
        return (f"torch {torch} is too old; use {TORCH[0]}.{TORCH[1]} or newer "
                "(`pip install -U torch torchvision`)")
    return None


def open_standard_streams() -> None:
    """Open /dev/null for each closed stream (`2>&-`); otherwise a socket would take its number."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


open_standard_streams()
# torch's C++ reads this when it is imported. With warnings, every rank would print one for each
# rank that is gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # left over: torchrun sets all five variables
if reason := why_not():
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)
