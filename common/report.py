"""Output of a run: lines with a role, a progress bar, metrics.json; pictures: picture.py."""

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

SILENT_S = 6.0  # without a terminal, a bar prints a line after this many seconds of silence
_printed = 0.0  # `time.monotonic()` of the last line of this process


class Bar(tqdm):
    """A progress bar; see `progress`.

    tqdm's own lock is a semaphore, which a killed process would leave behind. This is a plain one.
    """

    _lock = threading.RLock()
    role, since = None, 0.0  # role that prints lines instead of the bar, and since when

    def update(self, n: int = 1) -> bool | None:
        """Advance by `n`; see tqdm."""
        if self.role is not None:
            self.n += n
            if time.monotonic() - max(self.since, _printed) > SILENT_S:
                log(self.role, f"{self.unit} {self.n} of {self.total}")
        return super().update(n)


class NotFiniteError(Exception):
    """The reason, in words that continue "rank 0 (trainer) ..."."""


def require_finite(loss: float | torch.Tensor, at: str, what: str = "a loss") -> float:
    """Return the loss as a number, unless training has diverged.

    Args:
        loss: A number, or a tensor of one element.
        at: The moment in words: "at step 3".
        what: Name of the number, if it is not a loss.

    Raises:
        NotFiniteError: The loss is infinite or NaN; the run ends with one line and status 1.
    """
    loss = loss.item() if isinstance(loss, torch.Tensor) else loss
    if not math.isfinite(loss):
        raise NotFiniteError(
            f"has {what} of {loss} {at}: training has diverged; give a smaller --lr")
    return loss


def log(role: str, text: str) -> None:
    """Print a line with its role, `[agent] episode 10 ...`, above the bar if there is one."""
    global _printed
    _printed = time.monotonic()
    Bar.write(f"[{role}] {text}", file=sys.stdout)
    sys.stdout.flush()


def progress(total: int, unit: str, initial: int = 0, show: bool = True,
             role: str | None = None) -> Bar:
    """Make a tqdm bar on a terminal; elsewhere, a bar that shows nothing (`bar.disable`).

    Args:
        total: Last value of the count.
        unit: Unit of the count: "epoch", "step".
        initial: First value of the count.
        show: Whether this process shows it; if several ranks run the same loop, one should.
        role: Role for the line `[role] step 48 of 120`, which replaces the bar without a terminal
            after some seconds of silence; None if the program prints lines often enough.
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
    """Yield a temporary path that replaces `path` in the end, so no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        # A read-only disk refuses to remove even a file that does not exist.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def machine(args: argparse.Namespace, device: str | None = None) -> dict:
    """Return `device`, `cpu_count` and `torch` of a run, for metrics.json and captions.

    Args:
        args: Parsed flags.
        device: "cpu" if the tensors are in main memory whatever `--device` says.
    """
    import joblib  # here: it takes a tenth of a second, and only the writer of metrics needs it

    on_cpu = "cpu" in (device, args.device) or not torch.cuda.is_available()
    return {"device": "cpu" if on_cpu else torch.cuda.get_device_name(),
            "cpu_count": joblib.cpu_count(), "torch": torch.__version__}


def save_metrics(args: argparse.Namespace, metrics: dict, backend: str | None,
                 device: str | None = None) -> dict:
    """Write the metrics and the machine to `<output_dir>/metrics.json`; return the whole dict.

    Args:
        args: Parsed flags.
        metrics: The example's own keys, with `wall_s` from `launch`.
        backend: gloo, nccl or tensorpipe; None for a single process.
        device: "cpu" if the tensors are in main memory whatever `--device` says.
    """
    ran_on = {"example": args.example, "world_size": args.world_size, **machine(args, device),
              "backend": backend, "seed": args.seed, "python": platform.python_version()}
    whole = {**ran_on, **metrics}
    with replacing(args.output_dir / "metrics.json") as temporary:
        temporary.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n",
                             encoding="utf-8")
    return whole
