"""What a run prints and writes: lines with a role, a bar, metrics.json. See also picture.py."""

import contextlib
import json
import math
import os
import platform
import sys
import threading

import torch
from tqdm import tqdm


class Bar(tqdm):
    """A tqdm bar with a plain lock: tqdm's own is a semaphore, which a killed process leaves."""

    _lock = threading.RLock()


class NotFiniteError(Exception):
    """Says what has happened in words that go on after "rank 0 (trainer) ..."."""


def require_finite(loss, at, what="a loss"):
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


def log(role, text):
    """Print a line with its role, above the bar if there is one: `[agent] episode 10 ...`."""
    Bar.write(f"[{role}] {text}", file=sys.stdout)
    sys.stdout.flush()


def progress(total, unit, initial=0, show=True):
    """A tqdm bar on a terminal; elsewhere one that shows nothing (`bar.disable`): print lines.

    Where several ranks have the same loop, only one should `show` its bar.
    """
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Bar(total=total, unit=unit, initial=initial, disable=not (terminal and show),
               dynamic_ncols=True)


@contextlib.contextmanager
def replacing(path):
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


def machine(args, device=None):
    """What a run computes on, for metrics.json and captions: `device`, `cpu_count`, `torch`.

    Args:
        args: the parsed flags.
        device: "cpu" where the tensors are in main memory whatever `--device` says.
    """
    import joblib  # here: it takes a tenth of a second, and only who writes metrics needs it

    on_cpu = "cpu" in (device, args.device) or not torch.cuda.is_available()
    return {"device": "cpu" if on_cpu else torch.cuda.get_device_name(),
            "cpu_count": joblib.cpu_count(), "torch": torch.__version__}


def save_metrics(args, metrics, backend, device=None):
    """Write `metrics` and what they ran on to `<output_dir>/metrics.json`; the whole dict.

    Args:
        args: the parsed flags.
        metrics: the example's own keys, with `wall_s` from `launch`.
        backend: gloo, nccl or tensorpipe.
        device: "cpu" where the tensors are in main memory whatever `--device` says.
    """
    ran_on = {"example": args.example, "world_size": args.world_size, **machine(args, device),
              "backend": backend, "seed": args.seed, "python": platform.python_version()}
    whole = {**ran_on, **metrics}
    with replacing(args.output_dir / "metrics.json") as temporary:
        temporary.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole
