"""Deadlocks on purpose: the check finds a wrong line, and torchrun names the code, too."""

import os
import re

from common.oracle import Comparison

import pytest

from p2p_collectives import deadlock, deadlock_check
from tests.helpers import ROOT, errors_of, run, script, torchrun

PROGRAM = "p2p_collectives/deadlock.py"


@pytest.mark.parametrize("kind", deadlock.KINDS)
def test_a_fix_stands_above_a_line_that_waits(kind):
    numbers = [deadlock_check.place(ROOT / PROGRAM, *where)[0] for where in deadlock_check.WAITS[kind]]
    lines = (ROOT / PROGRAM).read_text().splitlines()
    assert any(lines[number - 2].strip().startswith("# Fix: ") for number in numbers)


def test_under_torchrun(tmp_path):
    result = run(torchrun(2, PROGRAM, "--output_dir", tmp_path), tmp_path)
    [line] = errors_of(result.stderr)
    assert re.search(rf"rank \d \(rank\d\) .*? at {PROGRAM}:\d+, `dist\.send\(mine, dst=\(rank \+ 1\) % size\)`", line)


@pytest.mark.slow
def test_torch_names_other_collectives(tmp_path):
    """As the program's docstring promises; torch reads the variable while it is imported."""
    result = run(script(PROGRAM, "--kind", "other_collective"), tmp_path, env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert result.returncode == 1
    assert "Op type: ALLREDUCEvs BROADCAST" in result.stderr
    assert re.fullmatch(r"error: rank \d \(rank\d\) raised RuntimeError(; stopped 1 other process)?", result.stderr.splitlines()[-1])


@pytest.mark.parametrize(("rank", "old", "new", "printed", "fails"), [
    (0, "", "", "deadlock.py", []),
    (-1, "", "", "deadlock.py", ["line"]),
    (0, "dist.barrier", "dist.send", "deadlock.py", ["line"]),
    (0, "for 5 s", "for 6 s", "deadlock.py", ["line"]),
    (1, "", "", "deadlock.py", ["line"]),  # rank 1 waits at another line
    (0, "", "", "other.py", ["places"]),
], ids=range(6))
def test_the_check_sees_a_wrong_line(rank, old, new, printed, fails):
    args = deadlock.build_parser().parse_args(["--kind", "one_fewer"])
    (barrier, code), (recv, _) = (deadlock_check.place(ROOT / PROGRAM, "one_fewer", call) for call in ("dist.barrier", "dist.recv"))
    what = f"has waited for 5 s at {PROGRAM}:{barrier}, `{code}`".replace(old or "\0", new)
    findings = Comparison("a run", "its source")
    tracebacks = "".join(f'File "/x/{printed}", line {line}, in one_fewer\n' for line in (barrier, recv))
    deadlock_check.compare_deadlock(findings, rank, what, tracebacks, ROOT / PROGRAM, args)
    assert [finding["what"] for finding in findings.findings if not finding["holds"]] == fails
