"""The oracle of `deadlock.py`: the run ends, and its line names the ranks and lines that wait.

Both forms of a kind run as commands of their own. Where each rank was built to wait is read from
the source; what each rank of the mended form holds is computed by one process.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common.launch import ROOT, START_S
from common.oracle import Comparison, verdict
from common.report import log

# Where rank 0 waits, and where all others do: in which function, at which call.
WAITS = {
    "send_first": (("send_first", "dist.send"), ("send_first", "dist.send")),
    "other_collective": (("other_collective", "dist.all_reduce"),
                         ("other_collective", "dist.broadcast")),
    "other_shape": (("other_shape", "dist.all_reduce"), ("other_shape", "dist.all_reduce")),
    "one_fewer": (("one_fewer", "dist.barrier"), ("one_fewer", "dist.recv")),
    "rpc": (("ask_all", "call.wait"), ("add_own_number", "rpc.rpc_sync")),
}
SHOWN = 4  # ranks that the line names, at most


def single_process(args: Namespace) -> list[list[float]]:
    """Compute what each rank of the mended form holds in the end; of rpc, rank 0 alone."""
    numbers = [rank + 1.0 for rank in range(args.world_size)]
    return {"send_first": [[number] for number in [numbers[-1], *numbers[:-1]]],
            "other_collective": [[sum(numbers)] for _ in numbers],
            "other_shape": [[sum(numbers), numbers[0]] for _ in numbers],
            "one_fewer": [[numbers[0]] for _ in numbers],
            "rpc": [[numbers[0] + number for number in numbers[1:]]]}[args.kind]


def place(file: Path, function: str, call: str) -> str:
    """Return where `function` calls `call`, which it does once: "FILE:LINE, `code`"."""
    source = file.read_text()
    (line,) = [node.lineno for definition in ast.parse(source).body
               if isinstance(definition, ast.FunctionDef) and definition.name == function
               for node in ast.walk(definition)
               if isinstance(node, ast.Call) and ast.unparse(node.func) == call]
    return f"{file.relative_to(ROOT)}:{line}, `{source.splitlines()[line - 1].strip()}`"


def run(program: ModuleType, args: Namespace, folder: Path,
        *more: str) -> subprocess.CompletedProcess:
    """Run the program as a user does; its output is text, and its status None if it has no end."""
    command = [sys.executable, program.__file__, "--kind", args.kind, "--start_method",
               args.start_method, "--world_size", str(args.world_size), "--timeout",
               str(args.timeout), "--output_dir", str(folder), *more]
    # With it, torch itself would end some kinds, and at once.
    environ = {name: os.environ[name] for name in os.environ if name != "TORCH_DISTRIBUTED_DEBUG"}
    limit_s = min(2 * START_S + args.timeout, 1e6)  # more milliseconds than a C int has
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end without it
            return subprocess.CompletedProcess(command, None, "", f"no end within {limit_s:g} s")
        except KeyboardInterrupt:  # it was interrupted, too, and ends its ranks
            process.communicate()
            print("\ninterrupted; stopped 1 process", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}`."""
    findings = Comparison(f"{args.kind} on {args.world_size} ranks", "its source and one process")
    with tempfile.TemporaryDirectory() as folder:
        log("check", f"{args.kind} runs until its ranks have waited for {args.timeout:g} s")
        compare_deadlock(findings, run(program, args, Path(folder)), Path(program.__file__), args)
        log("check", f"{args.kind} --mended runs to its end")
        mended, written = run(program, args, Path(folder), "--mended"), Path(folder, "metrics.json")
        held = json.loads(written.read_text())["held"] if written.exists() else []
    findings.holds("mended", (mended.returncode, mended.stderr) == (0, ""),
                   f"status {mended.returncode} {mended.stderr}".strip())
    findings.equal("numbers", held, single_process(args), "what was exchanged", unit="rank")
    return verdict(findings.as_dict())


def compare_deadlock(findings: Comparison, ended: subprocess.CompletedProcess, file: Path,
                     args: Namespace) -> None:
    """Hold how a deadlock ended, and its one line; which of the ranks it begins with is chance."""
    line = (ended.stderr.splitlines() or ["nothing was printed"])[-1]
    ranks = [int(rank) for rank in re.findall(r"rank (\d+) \(", line)]
    places = [place(file, *where) for where in WAITS[args.kind]]
    said = [f"has waited for {args.timeout:g} s", *["is"] * (SHOWN - 1)]
    parts = [f"rank {rank} (rank{rank}) {how} at {places[min(rank, 1)]}"
             for rank, how in zip(ranks, said, strict=False)]
    # Some other ranks may have given up, too; the launcher had to stop the remaining ones.
    line = re.sub(r"; stopped \d+ other process(es)?$", "", line)
    findings.holds("status", ended.returncode == 1, f"status {ended.returncode}")
    findings.holds("ranks", len({*ranks} & {*range(args.world_size)}) == len(ranks)
                   == min(args.world_size, SHOWN), f"{ranks} are named")
    findings.holds("line", line == f"error: {'; '.join(parts)}", line)
