"""The check of `deadlock.py`: the run ends, and it names the code at which its ranks wait.

The source says where each rank should wait. One process computes what each rank of the fixed code
holds in the end.
"""

import ast
import contextlib
import os
import re
import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import ROOT
from common.launch import RunFailedError, launch
from common.oracle import Comparison, verdict
from common.report import log

# Where rank 0 waits, and where all other ranks wait: the function, and the call in it.
WAITS = {
    "send_first": (("send_first", "dist.send"), ("send_first", "dist.send")),
    "other_collective": (("other_collective", "dist.all_reduce"),
                         ("other_collective", "dist.broadcast")),
    "other_shape": (("other_shape", "dist.all_reduce"), ("other_shape", "dist.all_reduce")),
    "one_fewer": (("one_fewer", "dist.barrier"), ("one_fewer", "dist.recv")),
    "rpc": (("ask_all", "call.wait"), ("add_own_number", "rpc.rpc_sync")),
}


def single_process(args: Namespace) -> list[list[float]]:
    """Compute what each rank of the fixed code holds in the end; for rpc, only rank 0."""
    numbers = [rank + 1.0 for rank in range(args.world_size)]
    return {"send_first": [[number] for number in [numbers[-1], *numbers[:-1]]],
            "other_collective": [[sum(numbers)] for _ in numbers],
            "other_shape": [[sum(numbers), numbers[0]] for _ in numbers],
            "one_fewer": [[numbers[0]] for _ in numbers],
            "rpc": [[numbers[0] + number for number in numbers[1:]]]}[args.kind]


def place(file: Path, function: str, call: str) -> tuple[int, str]:
    """Return the line at which `function` calls `call`, which it does once, and its code."""
    source = file.read_text(encoding="utf-8")
    (line,) = [node.lineno for definition in ast.parse(source).body
               if isinstance(definition, ast.FunctionDef) and definition.name == function
               for node in ast.walk(definition)
               if isinstance(node, ast.Call) and ast.unparse(node.func) == call]
    return line, source.splitlines()[line - 1].strip()


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}`."""
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # with it, torch itself ends some kinds
    findings = Comparison(f"{args.kind} on {args.world_size} ranks", "its source and one process")
    log("check", f"{args.kind} runs until its ranks have waited for {args.timeout:g} s")
    rank, what, printed = deadlock(program, args)
    compare_deadlock(findings, rank, what, printed, Path(program.__file__), args)
    log("check", f"{args.kind} --fixed runs to its end")
    args.fixed = True
    metrics = launch(program.run_worker, args, program.role_name)
    findings.equal("numbers", metrics["held"], single_process(args), "what was exchanged", "rank")
    return verdict(findings.as_dict())


def deadlock(program: ModuleType, args: Namespace) -> tuple[int, str, str]:
    """Run until the launcher names a rank; return that rank, how it failed, and all of stderr."""
    rank, what, stderr = -1, "the run has not failed", os.dup(2)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 2)  # the ranks inherit it
        try:
            launch(program.run_worker, args, program.role_name)
        except RunFailedError as error:
            rank, what = error.failure.rank, error.failure.what
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        return rank, what, file.read()


def compare_deadlock(findings: Comparison, rank: int, what: str, printed: str, file: Path,
                     args: Namespace) -> None:
    """Compare the place of the named rank, and all printed places, with the source.

    Args:
        findings: Receives the findings.
        rank, what: The named rank, which differs from run to run, and the words for its failure.
        printed: The output on stderr.
        file: The program.
        args: The parsed flags.
    """
    places = [place(file, *where) for where in WAITS[args.kind]]
    line, code = places[min(rank, 1)]
    expected = f"has waited for {args.timeout:g} s at {file.relative_to(ROOT)}:{line}, `{code}`"
    findings.holds("line", rank in range(args.world_size) and what == expected,
                   f"rank {rank} {what}")
    lines = {int(number) for number in re.findall(rf'{file.name}", line (\d+)', printed)}
    findings.holds("places", {line for line, _ in places} <= lines,
                   f"the tracebacks show the lines {sorted(lines)} of {file.name}")
