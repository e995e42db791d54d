"""What every tutorial repeats and none teaches. Where nothing of it can run, this says so."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

PYTHON, TORCH = (3, 11), (2, 11)  # the oldest


def why_not(platform=sys.platform, python=sys.version_info[:2]):
    """Why these examples cannot run here, as one sentence, or None."""
    if platform == "win32":
        return ("torch has no RPC on Windows; use WSL, Windows' own Linux: `wsl --install`, then "
                "the same commands there (https://learn.microsoft.com/windows/wsl/install)")
    if python < PYTHON:
        return f"Python {python[0]}.{python[1]} is too old; use {PYTHON[0]}.{PYTHON[1]} or newer"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "torch is missing; run `pip install -r requirements.txt`"
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < TORCH:
        return (f"torch {torch} is too old; use {TORCH[0]}.{TORCH[1]} or newer "
                "(`pip install -U torch torchvision`)")
    return None


if reason := why_not():
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)
