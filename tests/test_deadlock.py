"""Deadlocks on purpose: the launcher's line tells who waits for whom, and the mended forms end."""

import os
import re
from subprocess import CompletedProcess

from common.oracle import Comparison

import pytest

from p2p_collectives import deadlock, deadlock_check
from tests.helpers import ROOT, errors_of, run, script, torchrun

PROGRAM = "p2p_collectives/deadlock.py"


@pytest.mark.parametrize("kind", deadlock.KINDS)
def test_a_remedy_stands_above_a_line_that_waits(kind):
    places = [deadlock_check.place(ROOT / PROGRAM, *where) for where in deadlock_check.WAITS[kind]]
    numbers = [int(re.match(rf"{PROGRAM}:(\d+), ", place)[1]) for place in places]
    lines = (ROOT / PROGRAM).read_text().splitlines()
    assert any(lines[number - 2].strip().startswith("# Way out: ") for number in numbers)


def test_under_torchrun(tmp_path):
    """A rank that has failed is named where it failed, not where its process went on to."""
    result = run(torchrun(2, PROGRAM, "--output_dir", tmp_path), tmp_path)
    [line] = errors_of(result.stderr)
    send = re.escape("`dist.send(mine, dst=(rank + 1) % size)`")
    assert len(re.findall(rf"rank \d \(rank\d\) .*? at {PROGRAM}:\d+, {send}", line)) == 2, line


@pytest.mark.slow
def test_torch_names_other_collectives(tmp_path):
    """As the program's docstring promises; torch reads the variable while it is imported."""
    result = run(script(PROGRAM, "--kind", "other_collective"), tmp_path, env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert result.returncode == 1
    assert "Op type: ALLREDUCEvs BROADCAST" in result.stderr
    assert re.fullmatch(r"error: rank \d \(rank\d\) raised RuntimeError; stopped 1 other process", result.stderr.splitlines()[-1])


@pytest.mark.parametrize(("status", "wrong", "fails"), [
    (1, lambda line: line, []),
    (0, lambda line: line, ["status"]),
    (1, lambda line: "", ["ranks", "line"]),
    (1, lambda line: line.replace("rank 1 (rank1)", "rank 2 (rank2)"), ["ranks"]),  # another rank waits there, too
    (1, lambda line: line.replace("; stopped", "; rank 2 (rank2) is at x.py:1, `y`; stopped"), ["ranks", "line"]),
    (1, lambda line: line.replace("dist.recv", "dist.send"), ["line"]),
    (1, lambda line: re.sub(r"\.py:\d+", ".py:1", line, count=1), ["line"]),
], ids=range(7))
def test_the_oracle_sees_a_wrong_line(status, wrong, fails):
    args = deadlock.build_parser().parse_args(["--kind", "one_fewer"])
    barrier, recv = (deadlock_check.place(ROOT / PROGRAM, "one_fewer", call) for call in ("dist.barrier", "dist.recv"))
    line = f"error: rank 0 (rank0) has waited for 5 s at {barrier}; rank 1 (rank1) is at {recv}; stopped 1 other process"
    findings = Comparison("a run", "its source")
    ended = CompletedProcess([], status, "", f"Traceback\n{wrong(line)}\n")
    deadlock_check.compare_deadlock(findings, ended, ROOT / PROGRAM, args)
    assert [finding["what"] for finding in findings.findings if not finding["holds"]] == fails
