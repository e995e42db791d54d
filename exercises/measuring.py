"""Judge a prediction: the learner's numbers first, then the runs that measure them."""

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

from exercises import overlay
from exercises.catalog import LANGUAGES, ROOT
from exercises.checking import Verdict, judge, run_in
from exercises.refusing import reason_to_refuse
from exercises.words import say

PREDICT_S = 20.0  # an endless loop is found before, and in which line


def measure(exercise, learners_file, patience=1.0, show=lambda part: None):
    """Ask the learner's `predict` for each case, then run and compare.

    Args:
        exercise: of the kind measure: its `cases` have the `arguments` of `predict`, the `flags` of
            the program, or of a `program` of its own, and `measured`, an expression on the
            `metrics` of its metrics.json.
        learners_file: its path.
        patience: multiplies all limits, for a busy machine.
        show: called with parts to show before the verdict: the predictions.
    """
    refused = reason_to_refuse(exercise, learners_file.read_text())
    if refused:
        return Verdict("refused", [("not_yet", {}), refused], refused[0])
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        tree = Path(os.path.realpath(folder))
        overlay.lay(exercise, learners_file, tree)
        predicted = predictions(exercise, learners_file, tree, patience)
        if isinstance(predicted, Verdict):
            return predicted
        show(("your_predictions", {}))
        for case, number in zip(exercise.cases, predicted, strict=True):
            show(("prediction", {"arguments": _call(case), "predicted": _short(number)}))
        show(("measures", {}))
        measured = measurements(exercise, tree, patience)
        return measured if isinstance(measured, Verdict) else compare(exercise, predicted, measured)


def predictions(exercise, learners_file, tree, patience):
    """A number for each case, or the verdict where there is none."""
    asked = "".join(json.dumps(case["arguments"]) + "\n" for case in exercise.cases)
    command = [sys.executable, str(tree / f"{overlay.INSIDE}.py")]
    ended = run_in(command, tree, patience, exercise, text=asked, limit_s=PREDICT_S)
    if ended.status != 0:
        return judge(ended, tree, learners_file)
    lines = re.findall(r"^predicted: (.*)$", ended.output, re.MULTILINE)
    answers = [json.loads(line) for line in lines]
    for case, answer in zip(exercise.cases, answers, strict=True):
        if isinstance(answer, str):
            values = {"arguments": _call(case), "predicted": answer}
            return Verdict("off", [("not_yet", {}), ("no_number", values)], "no number")
    return answers


def measurements(exercise, tree, patience):
    """A number for each case; cases with the same program and flags share a run."""
    runs, numbers = {}, []
    for case in exercise.cases:
        flags = (case.get("program", exercise.program), *map(str, case["flags"]))
        if flags not in runs:
            output = tree / "outputs" / str(len(runs))
            command = [sys.executable, ROOT / flags[0], *flags[1:], "--output_dir", output]
            ended = run_in(command, tree, patience, exercise, python_path=ROOT)
            if ended.status != 0:
                parts = [("no_verdict", {"status": ended.status}), *ended.output.splitlines()[-5:]]
                return Verdict("no_verdict", parts, ended.output[-2000:])
            runs[flags] = json.loads((output / "metrics.json").read_text())
        numbers.append(eval(case["measured"], {"metrics": runs[flags], "math": math}))
    return numbers


def compare(exercise, predicted, measured):
    """The verdict: each prediction beside what was measured."""
    rows, evidence = [], []
    for case, number, truth in zip(exercise.cases, predicted, measured, strict=True):
        relative, absolute = exercise.text.get("relative", 0.0), exercise.text.get("absolute", 0.0)
        off = abs(number - truth)
        holds = off <= max(absolute, relative * abs(truth))
        allowed = _short(absolute) if absolute else f"{relative:.0%}"
        share = f"{off / abs(truth):.0%}" if truth and not absolute else _short(off)
        words = {language: say("ok" if holds else "wrong", language) for language in LANGUAGES}
        rows.append(("measured", {"arguments": _call(case), "predicted": _short(number),
                                  "measured": _short(truth), "off": share, "allowed": allowed,
                                  "holds": words}))
        if not holds:
            ratio = number / truth if truth else math.inf
            evidence.append(f"{_call(case)}: predicted {number!r}, measured {truth!r}, "
                            f"ratio {ratio:.3f}")
    parts = [("not_yet", {}), ("off", {}), *rows]
    if not evidence and len({*predicted}) == 1 < len({*measured}):  # within a wide tolerance
        parts, evidence = [*parts, ("constant", {})], ["all alike"]
    if evidence:
        return Verdict("off", parts, "\n".join(evidence))
    return Verdict("passed", [*rows, ("predicted", {})])


def _call(case):
    return ", ".join(f"{name}={value!r}" for name, value in case["arguments"].items())


def _short(number):
    whole = isinstance(number, int) or float(number).is_integer()
    return f"{number:,}" if whole else f"{number:.3g}"
