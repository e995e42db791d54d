"""What a run tells: lines with a role, a progress bar, metrics.json, and the one plot style."""

import contextlib
import json
import math
import os
import platform
import sys
import threading

import torch
from common.worker_env import core_count
from tqdm import tqdm


class Bar(tqdm):
    """A tqdm bar with a plain lock: tqdm's own is a semaphore of the system, and a killed process would leave it."""

    _lock = threading.RLock()


class NotFiniteError(Exception):
    """Says what has happened in words that go on after "rank 0 (trainer) ..."."""


def require_finite(loss, at):
    """The loss, a number, unless training has diverged.

    Args:
        loss: a number, or a tensor with one.
        at: when, in words: "at step 3".

    Raises:
        NotFiniteError: ends the run with one line and status 1.
    """
    loss = loss.item() if isinstance(loss, torch.Tensor) else loss
    if not math.isfinite(loss):
        raise NotFiniteError(f"has a loss of {loss} {at}: training has diverged; give a smaller --lr")
    return loss


def log(role, text):
    """Print one line with its role, above the progress bar if there is one: `[agent] episode 10 ...`."""
    Bar.write(f"[{role}] {text}", file=sys.stdout)
    sys.stdout.flush()


def progress(total, unit, initial=0, show=True):
    """A tqdm bar on a terminal; elsewhere one that shows nothing (`bar.disable`), where plain lines should do.

    Where several ranks have the same loop, only one should `show` its bar.
    """
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Bar(total=total, unit=unit, initial=initial, disable=not (terminal and show), dynamic_ncols=True)


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary path beside `path`, which takes its place at the end: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that has become read-only refuses even what there is not
            temporary.unlink(missing_ok=True)
        raise


def save_metrics(args, metrics, backend, device=None):
    """Write `metrics` and what they ran on to `<output_dir>/metrics.json`; the whole dict.

    Args:
        args: the parsed flags.
        metrics: the example's own keys, with `wall_s` from `launch`.
        backend: gloo, nccl or tensorpipe.
        device: "cpu" where the tensors are in main memory whatever `--device` says.
    """
    on_cpu = "cpu" in (device, args.device) or not torch.cuda.is_available()
    device = "cpu" if on_cpu else torch.cuda.get_device_name()
    ran_on = {"example": args.example, "world_size": args.world_size, "device": device, "backend": backend,
              "seed": args.seed, "torch": torch.__version__, "python": platform.python_version(),
              "cpu_count": core_count()}
    whole = {**ran_on, **metrics}
    with replacing(args.output_dir / "metrics.json") as temporary:
        temporary.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole


def compare(ours, oracle, tolerances, scale_at_least=0.0):
    """Print how far each of our results is from the oracle's; SystemExit(1) if one is further than its tolerance.

    Args:
        ours, oracle: `{what: tensor or list of numbers}`.
        tolerances: `{what: largest allowed difference, as a share of the oracle's largest entry}`.
        scale_at_least: take this for the largest entry where that is smaller, so that noise is not held against noise.

    Returns:
        `{what: that difference}`.
    """
    differences = {}
    for what, tolerance in tolerances.items():
        a, b = (torch.as_tensor(numbers[what], dtype=torch.float64) for numbers in (ours, oracle))
        scale = max(b.abs().max().item(), scale_at_least) or 1.0
        difference = (a - b).abs().max().item() / scale if a.shape == b.shape else float("inf")
        differences[what] = difference
        verdict = "ok" if difference <= tolerance else "FAIL"  # FAIL for NaN too
        log("check", f"{what}: differs by {difference:.1e} (tolerance {tolerance:.0e}) {verdict}")
    if not all(differences[what] <= tolerance for what, tolerance in tolerances.items()):
        raise SystemExit(1)
    return differences


@contextlib.contextmanager
def picture(path, title, xlabel, ylabel):
    """Yield matplotlib axes in the style of this project; save them as the PNG `path`.

    Args:
        path: of the PNG, written whole or not at all.
        title, xlabel, ylabel: with units.
    """
    from matplotlib.figure import Figure  # here: the workers need not pay for the import; no pyplot, no display

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    if axes.get_legend_handles_labels()[1]:  # below the axes, where it hides no point
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
