"""Judge a prediction: compare the learner's numbers with those that a run has measured."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import ROOT

from exercises.catalog import LANGUAGES, Exercise, say
from exercises.judging import Verdict, no_result, not_yet, raised, reason_to_refuse, run

PREDICT_S = 15.0
MEASURE = 3  # times the limit of an exercise, because a command is measured only once
HIDDEN = 2  # wrong tries that learn only whether a number is too large or too small
ASK = """
import json, runpy, sys
predict = runpy.run_path(sys.argv[1])["predict"]
answers = [predict(**arguments) for arguments in json.loads(sys.argv[2])]
print("\\n" + json.dumps([x if isinstance(x, int | float) else repr(x) for x in answers]))
"""


def judge(exercise: Exercise, file: Path, kept: dict, patience: float = 1.0,
          show: Callable[..., None] = lambda key, **values: None) -> Verdict:
    """Judge the learner's `predict`: first its numbers, then, unless it is known, the run.

    Args:
        exercise: An exercise of the kind predict.
        file: The learner's file.
        kept: What is kept between calls: `measured`, the metrics by the command, and `tries`, the
            number of wrong answers.
        patience: Factor of the time limits.
        show: Called with what is shown before the verdict: a key of words.toml, and its values.
    """
    if refused := reason_to_refuse(exercise, file):
        return refused
    if file.read_bytes() == exercise.stub.read_bytes():
        return not_yet(exercise, {"untouched"}, ("untouched", {}))
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder).resolve()
        arguments = json.dumps([case["arguments"] for case in exercise.cases])
        status, output = run(["-c", ASK, file.resolve(), arguments], tree, PREDICT_S * patience)
        if "Traceback (most recent" in output:
            return raised(exercise, output, file.resolve(), tree)
        if status != 0 or not output.endswith("]\n"):
            return no_result(exercise, status, output, PREDICT_S * patience)
        predicted = json.loads(output.splitlines()[-1])
        for case, number in zip(exercise.cases, predicted, strict=True):
            if isinstance(number, str) or not math.isfinite(number):
                values = {"arguments": call(case), "predicted": number}
                return not_yet(exercise, {"no number"}, ("no_number", values))
            show("prediction", arguments=call(case), predicted=short(number))
        for case in exercise.cases:
            if (key := command(exercise, case)) not in kept["measured"]:
                show("measures", command=f"python {key}")
                limit_s = MEASURE * exercise.limit * patience
                status, output = run([ROOT / exercise.program, *case["flags"], "--output_dir",
                                      tree], tree, limit_s)
                if status is None:
                    return Verdict({"not measured"}, [("not_measured", {"seconds": limit_s})])
                if status != 0:
                    return no_result(exercise, status, output, limit_s)
                metrics = tree.joinpath("metrics.json").read_text(encoding="utf-8")
                kept["measured"][key] = json.loads(metrics)
    return compare(exercise, predicted, kept)


def compare(exercise: Exercise, predicted: list[float], kept: dict) -> Verdict:
    """Return the verdict; the first wrong tries learn directions, the next one the numbers."""
    rows, seen = [], set()
    for number, (case, ours) in enumerate(zip(exercise.cases, predicted, strict=True), start=1):
        ours = round(ours, 6)  # a difference may leave 5e-17
        names = {"metrics": kept["measured"][command(exercise, case)]}
        truth, tolerance = eval(case["measured"], names), eval(exercise.tolerance, names)
        values = {"arguments": call(case), "predicted": short(ours), "measured": short(truth),
                  "by": by_factor(ours, truth)}
        if abs(ours - truth) <= tolerance:
            rows.append(("right", values))
            continue
        direction = "too large" if ours > truth else "too small"
        seen |= {direction, f"case {number} {direction}"}
        key = "measured" if kept["tries"] >= HIDDEN else direction.replace(" ", "_")
        rows.append((key, values))
    if not seen:
        return Verdict(set(), [*rows, ("predicted", {})])
    kept["tries"] += 1
    return not_yet(exercise, seen, *rows)


def command(exercise: Exercise, case: dict) -> str:
    """Return the program and the flags of the run of a case."""
    return " ".join(map(str, [exercise.program, *case["flags"]]))


def call(case: dict) -> str:
    """Return the arguments of a case as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in case["arguments"].items())


def by_factor(ours: float, truth: float) -> dict[str, str] | str:
    """Say in both languages by which factor two numbers differ, if both are above 0."""
    if min(ours, truth) <= 0:
        return ""
    ratio = max(ours / truth, truth / ours)
    factor = f"{ratio:.2g}" if ratio >= 1.05 else f"{ratio:.7g}"
    return {language: say("by_factor", language, factor=factor) for language in LANGUAGES}


def short(number: float) -> str:
    """Write a number with few digits."""
    number = round(number, 6)
    if float(number).is_integer():
        return f"{number:,.0f}"
    return f"{number:,.1f}" if abs(number) >= 100 else f"{number:.3g}"
