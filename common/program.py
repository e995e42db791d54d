"""What the `main()` of every program ends with: it runs, or is held against one process."""

import atexit
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from common.launcher import launch
from common.launcher.worker import exit_now


def role_name(rank: int, world_size: int) -> str:
    """Name a rank, where all do the same."""
    return f"rank{rank}"


def run_program(run_worker: Callable[[int, int, Namespace], dict | None], args: Namespace,
                role_name: Callable[[int, int], str],
                finish: Callable[[dict, Namespace], dict]) -> dict | None:
    """Launch a program in all of its processes, or with `--check` hold it against its oracle.

    Args:
        run_worker: what each process runs, `run_worker(rank, world_size, args)`.
        args: the parsed flags.
        role_name: `role_name(rank, world_size)`, for the messages.
        finish: `finish(metrics, args)` makes of what a rank has returned what the user sees.

    Returns:
        In the process that reports, what `finish` returns, or the differences of the check; None in
        all others.

    Raises:
        SystemExit: 1 after one line if a rank fails, or if the check does.
    """
    if args.check:
        result = check(run_worker, args)
    else:
        result = conclude(launch(run_worker, args, role_name), args, finish)
    end_at_once(run_worker)
    return result


def conclude(metrics: dict | None, args: Namespace,
             finish: Callable[[dict, Namespace], dict]) -> dict | None:
    """Show what a run has returned, in the process that reports; see `run_program`."""
    if metrics is None:
        return None
    result = finish(metrics, args)
    print(f"results: {args.output_dir}")
    return result


def end_at_once(run_worker: Callable) -> None:
    """Under torchrun, where this process is a rank, let its end be as that of any other rank.

    Python would take itself apart around the threads of torch and of the launcher, which aborted
    one run in three on a busy machine.
    """
    if dist.is_torchelastic_launched() and run_worker.__module__ == "__main__":
        atexit.register(exit_now, 0)


def check(run_worker: Callable, args: Namespace) -> dict[str, float] | None:
    """Hold the program that defines `run_worker` against its oracle.

    The oracle of `X/train_flat.py` is `check(program, args)` in the first of these files that there
    is: `X/train_flat_check.py`, `X/train_check.py`, `X/check.py`.
    """
    file = Path(sys.modules[run_worker.__module__].__file__)  # `__main__`, if it is a script
    oracle = belonging_to(file, "check")
    program = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return importlib.import_module(f"{file.parent.name}.{oracle}").check(program, args)


def belonging_to(file: Path, what: str) -> str:
    """Find the module of a program's folder that has its "check" or its "results".

    Args:
        file: the path of the program, `X/train_flat.py`.
        what: the last word of the module's name.

    Returns:
        The first that there is of `train_flat_<what>`, `train_<what>`; `<what>` if there is none.
    """
    words = file.stem.split("_")
    names = ("_".join([*words[:n], what]) for n in range(len(words), 0, -1))
    return next((name for name in names if file.with_name(f"{name}.py").exists()), what)
