"""Judge a prediction: the learner's numbers first, then the runs that measure them."""

import json
import math
import re
from collections.abc import Callable

from exercises.catalog import LANGUAGES, ROOT, Exercise
from exercises.overlay import Copy
from exercises.running import run
from exercises.verdict import Verdict, not_yet, of_run
from exercises.words import say


def measure(copy: Copy, patience: float, show: Callable[[str, dict], None]) -> Verdict:
    """Ask the learner's `predict` for each case, then run and compare.

    Args:
        copy: of asking.py with the learner's function. The `cases` of its exercise have the
            `arguments` of `predict`, the `flags` of the program, and `measured`, an expression on
            the `metrics` of its metrics.json.
        patience: multiplies all limits, for a busy machine.
        show: called with what is shown before the verdict: a key in words.toml, and its values.
    """
    exercise = copy.exercise
    predicted = predictions(copy, patience)
    if isinstance(predicted, Verdict):
        return predicted
    show("your_predictions", {})
    for case, number in zip(exercise.cases, predicted, strict=True):
        show("prediction", {"arguments": _call(case), "predicted": _short(number)})
    show("measures", {})
    measured = measurements(copy, patience)
    return measured if isinstance(measured, Verdict) else compare(exercise, predicted, measured)


def predictions(copy: Copy, patience: float) -> list[int | float] | Verdict:
    """Return a number for each case, or the verdict where there is none."""
    cases = copy.exercise.cases
    asked = (json.dumps(case["arguments"]) for case in cases)
    ended = run(copy, copy.target, *asked, patience=patience)
    lines = re.findall(r"^predicted: (.*)$", ended.output, re.MULTILINE)
    if ended.status != 0 or not lines:  # none: it has called sys.exit()
        return of_run(ended, copy)
    answers = json.loads(lines[-1])  # the learner may have printed, too
    for case, answer in zip(cases, answers, strict=True):
        if isinstance(answer, str):
            values = {"arguments": _call(case), "predicted": answer}
            return not_yet(copy.exercise, "off", [("no_number", values)], "no number")
    return answers


def measurements(copy: Copy, patience: float) -> list[int | float] | Verdict:
    """Return a number for each case; cases with the same flags share a run."""
    exercise, runs, numbers = copy.exercise, {}, []
    for case in exercise.cases:
        flags = tuple(case["flags"])
        if flags not in runs:
            output = copy.tree / "outputs" / str(len(runs))
            ended = run(copy, ROOT / exercise.program, *flags, "--output_dir", output,
                        patience=patience)
            if ended.status != 0:
                parts = [("no_verdict", {"status": ended.status}), *ended.output.splitlines()[-5:]]
                return not_yet(exercise, "no_verdict", parts, ended.output[-2000:])
            runs[flags] = json.loads((output / "metrics.json").read_text())
        numbers.append(eval(case["measured"], {"metrics": runs[flags]}))
    return numbers


def compare(exercise: Exercise, predicted: list[int | float],
            measured: list[int | float]) -> Verdict:
    """Return the verdict: each prediction beside what was measured."""
    rows, evidence = [], []
    for case, number, truth in zip(exercise.cases, predicted, measured, strict=True):
        relative, absolute = (exercise.text.get(key, 0.0) for key in ("relative", "absolute"))
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
    parts = [("off", {}), *rows]
    if not evidence and len({*predicted}) == 1 < len({*measured}):  # within a wide tolerance
        parts, evidence = [*parts, ("constant", {})], ["all alike"]
    if evidence:
        return not_yet(exercise, "off", parts, "\n".join(evidence))
    return Verdict("passed", [*rows, ("predicted", {})])


def _call(case: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in case["arguments"].items())


def _short(number: float) -> str:
    whole = isinstance(number, int) or float(number).is_integer()
    return f"{number:,}" if whole else f"{number:,.1f}" if abs(number) >= 100 else f"{number:.3g}"
