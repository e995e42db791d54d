"""What a run prints and writes: lines with a role, a bar, metrics.json. See also picture.py."""

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

SILENT_S = 6.0  # after so long without a line, a bar that nobody sees prints one
_printed = 0.0  # when this process has last printed a line, of `time.monotonic()`


class Bar(tqdm):
    """Shows how far a run is; see `progress`.

    With a plain lock: tqdm's own is a semaphore, which a killed process would leave behind.
    """

    _lock = threading.RLock()
    role, since = None, 0.0  # who prints lines in place of the bar, and since when

    def update(self, n: int = 1) -> bool | None:
        """Go on by `n`; see tqdm."""
        if self.role is not None:
            self.n += n
            if time.monotonic() - max(self.since, _printed) > SILENT_S:
                log(self.role, f"{self.unit} {self.n} of {self.total}")
        return super().update(n)


class NotFiniteError(Exception):
    """Carries what has happened, in words that go on after "rank 0 (trainer) ..."."""


def require_finite(loss: float | torch.Tensor, at: str, what: str = "a loss") -> float:
    """Return the loss, a number, unless training has diverged.

    Args:
        loss: a number, or a tensor with one.
        at: when, in words: "at step 3".
        what: what it is, if it is no loss.

    Raises:
        NotFiniteError: ends the run with one line and status 1.
    """
    loss = loss.item() if isinstance(loss, torch.Tensor) else loss
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"has {what} of {loss} {at}: training has diverged; give a smaller --lr")
    return loss


def log(role: str, text: str) -> None:
    """Print a line with its role, above the bar if there is one: `[agent] episode 10 ...`."""
    global _printed
    _printed = time.monotonic()
    Bar.write(f"[{role}] {text}", file=sys.stdout)
    sys.stdout.flush()


def progress(total: int, unit: str, initial: int = 0, show: bool = True,
             role: str | None = None) -> Bar:
    """Make a tqdm bar on a terminal; elsewhere one that shows nothing (`bar.disable`).

    Args:
        total: where it ends.
        unit: what it counts: "epoch", "step".
        initial: where it begins.
        show: whether this process has it. Where several ranks have the same loop, one should.
        role: for the line `[role] step 48 of 120` that takes the place of the bar where nothing has
            been printed for some seconds; None where the program prints lines often enough.
    """
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    bar = Bar(total=total, unit=unit, initial=initial, disable=not (terminal and show),
              dynamic_ncols=True)
    if show and not terminal:
        bar.unit, bar.role, bar.since = unit, role, time.monotonic()
    return bar


class Clock:
    """Seconds spent inside `with clock:`, summed over all such blocks: `clock.seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "Clock":
        self._entered = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._entered


def per_second(count: float, seconds: float) -> float | None:
    """Return a speed for metrics.json; None if nothing was left to do, as in a resumed run."""
    return count / seconds if count else None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which takes the place of `path` in the end: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        # A disk that has become read-only refuses to remove even what there is not.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def machine(args: argparse.Namespace, device: str | None = None) -> dict:
    """Return what a run computes on, for metrics.json and captions: `device`, `cpu_count`, `torch`.

    Args:
        args: the parsed flags.
        device: "cpu" where the tensors are in main memory whatever `--device` is.
    """
    import joblib  # here: it takes a tenth of a second, and only who writes metrics needs it

    on_cpu = "cpu" in (device, args.device) or not torch.cuda.is_available()
    return {"device": "cpu" if on_cpu else torch.cuda.get_device_name(),
            "cpu_count": joblib.cpu_count(), "torch": torch.__version__}


def save_metrics(args: argparse.Namespace, metrics: dict, backend: str | None,
                 device: str | None = None) -> dict:
    """Write `metrics` and what they ran on to `<output_dir>/metrics.json`; return the whole dict.

    Args:
        args: the parsed flags.
        metrics: the example's own keys, with `wall_s` from `launch`.
        backend: gloo, nccl or tensorpipe; None where there is none.
        device: "cpu" where the tensors are in main memory whatever `--device` is.
    """
    ran_on = {"example": args.example, "world_size": args.world_size, **machine(args, device),
              "backend": backend, "seed": args.seed, "python": platform.python_version()}
    whole = {**ran_on, **metrics}
    with replacing(args.output_dir / "metrics.json") as temporary:
        temporary.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n",
                             encoding="utf-8")
    return whole
