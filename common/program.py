"""The end of every program's `main()`: run, or compare with a single process."""

import atexit
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common import ROOT
from common.launch import end_now, launch
from common.limits import refuse

import torch.distributed as dist


def role_name(rank: int, world_size: int) -> str:
    """Name a rank of a program whose ranks all do the same."""
    return f"rank{rank}"


def run_program(run_worker: Callable[[int, int, Namespace], dict | None], args: Namespace,
                role_name: Callable[[int, int], str],
                finish: Callable[[dict, Namespace], dict],
                start: Callable | None = None) -> dict | None:
    """Launch a program in all of its processes, or with `--check` compare it with its oracle.

    Args:
        run_worker: Function of each process, `run_worker(rank, world_size, args)`.
        args: Parsed flags.
        role_name: `role_name(rank, world_size)`, the name of a rank in messages.
        finish: `finish(metrics, args)`, which shows and saves what a rank has returned.
        start: Function that starts the processes and returns the metrics, in place of `launch`.

    Returns:
        The result of `finish` (with `--check`, the differences) in the process that reports; None
        elsewhere.

    Raises:
        SystemExit: 1 after one line if a rank or the check fails.
    """
    program = program_of(run_worker)
    if not hasattr(sys.modules[run_worker.__module__], run_worker.__name__):
        run_worker = getattr(program, run_worker.__name__)  # under cProfile, `__main__` is cProfile
    try:
        if args.check:
            result = check(program, args)
        else:
            result = (start or launch)(run_worker, args, role_name)
            if result is not None:
                result = finish(result, args)
                print(f"results: {args.output_dir}", flush=True)
    except BrokenPipeError:  # `| head -1` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it at its end
        print("error: cannot print, because the output is closed", file=sys.stderr)
        raise SystemExit(1) from None
    if run_worker.__module__ == "__main__" and (
            dist.is_torchelastic_launched() or args.rank is not None):
        # This process is a rank. Python would take itself apart around torch's threads, and one run
        # in three aborted on a busy machine.
        atexit.register(end_now, 0)
    return result


def program_of(run_worker: Callable) -> ModuleType:
    """Import the program that defines `run_worker` by its name, "rpc_rl.main".

    Raises:
        SystemExit: 2 after one line, if the program is not a file of a lesson in the checkout of
            this module. Otherwise, `--check` would judge a different file from the given one.
    """
    file = run_worker.__globals__.get("__file__")
    if file is None or not Path(file).is_file():
        refuse("the processes must import the program: start it by its file, such as "
               "python rpc_rl/main.py")
    file = Path(file).resolve()
    if file.parents[1] != ROOT:
        refuse(f"{file} is outside of the checkout that `common` comes from, {ROOT}: run the "
               f"program there, or set PYTHONPATH={file.parents[1]}")
    program = importlib.import_module(f"{file.parent.name}.{file.stem}")
    if Path(program.__file__).resolve() != file:
        refuse(f"{file} is not the file that Python imports as {program.__name__}, "
               f"{program.__file__}: set PYTHONPATH={ROOT}")
    return program


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Compare a program with its oracle; return the differences.

    The oracle of `X/train_flat.py` is `check(program, args)` in the first of these files that
    exists: `X/train_flat_check.py`, `X/train_check.py`, `X/check.py`.
    """
    oracle = belonging_to(Path(program.__file__), "check")
    return importlib.import_module(f"{program.__package__}.{oracle}").check(program, args)


def belonging_to(file: Path, what: str) -> str:
    """Find the module with a program's "check" or "results" in the program's folder.

    Args:
        file: Path of the program, `X/train_flat.py`.
        what: Last word of the module's name.

    Returns:
        The first existing name of `train_flat_<what>` and `train_<what>`, otherwise `<what>`.
    """
    words = file.stem.split("_")
    names = ("_".join([*words[:n], what]) for n in range(len(words), 0, -1))
    return next((name for name in names if file.with_name(f"{name}.py").exists()), what)
