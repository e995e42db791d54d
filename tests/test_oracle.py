"""The comparison that every `--check` makes: it finds what differs, where, and by how much."""

import math

from common.oracle import Comparison, verdict

import pytest
import torch


def compared(run, oracle, tolerance=1e-6, **options):
    findings = Comparison("3 processes")
    difference = findings.close("weights", run, oracle, tolerance, "float32 sums", **options)
    (finding,) = findings.findings
    return difference, finding["holds"], finding["says"]


def test_close():
    run = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0 + 2e-6])}]
    oracle = [{"w": [1.0, 2.0]}, {"w": [3.0, 4.0]}]
    difference, holds, says = compared(run, oracle)
    assert holds
    assert difference == pytest.approx(5e-7, rel=0.1)
    assert "4 numbers of 2 steps" in says
    assert "float32 sums" in says


def test_it_says_where_the_first_difference_is():
    run = [{"w": torch.zeros(2, 2)}, {"w": torch.tensor([[0.0, 0.0], [0.5, 0.0]])}, {"w": torch.full((2, 2), 9.0)}]
    difference, holds, says = compared(run, [{"w": torch.zeros(2, 2)}] * 3, unit="episode", scale_at_least=1.0)
    assert not holds
    assert difference == 9
    assert "first differs at episode 2, w[1, 0]: 0.5 in 3 processes, 0 in one process" in says


@pytest.mark.parametrize(("run", "oracle", "words"), [
    ([[1.0, 2.0]], [[1.0, 2.0, 3.0]], "shape [2] in 3 processes, [3] in one process"),
    ([1.0], [1.0, 2.0], "1 step in 3 processes, 2 steps in one process"),
    ([1.0, 2.0], [1.0], "2 steps in 3 processes, 1 step in one process"),
    ([{"a": 1.0}], [{"b": 1.0}], "a, b on one side only"),
    ([math.nan], [1.0], "nan in 3 processes"),
    ([math.nan], [math.nan], "nan in 3 processes"),
    ([math.inf], [1.0], "inf in 3 processes"),
    ([[math.inf, 1.0]], [[math.inf, 2.0]], "[1]: 1 in 3 processes, 2 in one process"),
    ([0.5], [1.0], "first differs at step 1: 0.5 in 3 processes"),
    ([[[0, 1], [2, 3]]], [[[0, 1], [2, 9]]], "first differs at step 1, [1, 1]: 3 in 3 processes"),
    ([[[0, 1], [2]]], [[[0, 1], [3]]], "first differs at step 1, 1[0]: 2 in 3 processes"),
    ([[torch.ones(2), torch.ones(3)]], [[torch.ones(2), torch.zeros(3)]], "step 1, 1[0]: 1 in 3 processes"),
    ([], [], "nothing was recorded"),
])
def test_what_can_never_be_equal(run, oracle, words):
    _, holds, says = compared(run, oracle, tolerance=0)
    assert not holds
    assert words in says


def test_equal_has_no_tolerance():
    findings = Comparison("3 processes")
    assert findings.equal("actions", [[0, 1]], [[0, 1]], "same draws") == 0
    assert findings.equal("actions", [[0.0, 1.0]], [[0, 1 + 1e-15]], "same draws") > 0


def test_each_name_has_its_own_scale():
    """A large weight must not hide what is wrong with a small one."""
    _, holds, says = compared([{"large": 1e6, "small": 1e-3}], [{"large": 1e6, "small": 1.1e-3}])
    assert not holds
    assert "small" in says


def test_verdict(capsys):
    findings = Comparison("3 processes")
    findings.equal("actions", [1], [1], "same draws")
    assert verdict(findings.as_dict()) == {"actions": 0.0}
    findings.holds("updates", False, "7 were sent and 6 arrived")
    with pytest.raises(SystemExit, match="^1$"):
        verdict(findings.as_dict())
    out = capsys.readouterr().out
    assert "[check] updates: 7 were sent and 6 arrived: FAIL\n" in out
    assert out.endswith("check FAILED: 3 processes against one process: 1 of 2 comparisons do not hold: updates\n")
    assert verdict(None) is None
