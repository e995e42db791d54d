"""Judge a prediction: compare the learner's numbers with those that a run has measured."""

import ast
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common import ROOT

from exercises.catalog import Desk, Exercise
from exercises.judging import Verdict, not_yet, reason_to_refuse, run

LIMIT_S = 60.0
ASK = """
import json, runpy, sys
predict = runpy.run_path(sys.argv[1])["predict"]
answers = [predict(**arguments) for arguments in json.loads(sys.argv[2])]
print("\\n" + json.dumps([x if isinstance(x, int | float) else repr(x) for x in answers]))
"""


def judge(exercise: Exercise, file: Path, desk: Desk, patience: float = 1.0,
          show: Callable[[str, dict], None] = lambda key, values: None) -> Verdict:
    """Judge the learner's `predict`: first its numbers, then, unless it is known, the run.

    Args:
        exercise: An exercise of the kind predict.
        file: The learner's file.
        desk: It keeps what was measured, and the number of wrong tries.
        patience: Factor of the time limits.
        show: Called with what is shown before the verdict: a key of words.toml, and its values.
    """
    source = file.read_bytes()
    if refused := reason_to_refuse(exercise, source):
        return not_yet(exercise, {"refused", refused[0]}, refused)
    if ast.dump(ast.parse(source)) == ast.dump(ast.parse(exercise.stub.read_bytes())):
        return not_yet(exercise, {"untouched"}, ("untouched", {}))
    predicted = predictions(exercise, file, patience)
    if isinstance(predicted, Verdict):
        return predicted
    for case, number in zip(exercise.cases, predicted, strict=True):
        show("prediction", {"arguments": call(case), "predicted": short(number)})
    measured = [measure(exercise, case, desk, patience, show) for case in exercise.cases]
    return compare(exercise, desk, predicted, measured)


def predictions(exercise: Exercise, file: Path, patience: float) -> list[float] | Verdict:
    """Return the learner's number for each case, or the verdict if there is none."""
    arguments = json.dumps([case["arguments"] for case in exercise.cases])
    try:
        done = subprocess.run([sys.executable, "-c", ASK, file, arguments], capture_output=True,
                              encoding="utf-8", timeout=LIMIT_S * patience / 4)
        answers = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        seconds = LIMIT_S * patience / 4
        return not_yet(exercise, {"does not end"}, ("does_not_end", {"seconds": seconds}))
    except (ValueError, IndexError):
        return not_yet(exercise, {"raises"}, ("raised", {}), *done.stderr.splitlines()[-3:])
    for case, answer in zip(exercise.cases, answers, strict=True):
        if isinstance(answer, str) or not math.isfinite(answer):
            values = {"arguments": call(case), "predicted": answer}
            return not_yet(exercise, {"no number"}, ("no_number", values))
    return answers


def measure(exercise: Exercise, case: dict, desk: Desk, patience: float,
            show: Callable[[str, dict], None]) -> float:
    """Return what the run of a case has measured; each run is made once, and kept."""
    command = [exercise.program, *map(str, case["flags"])]
    key = " ".join(command)
    if (metrics := desk.measured(key)) is None:
        show("measures", {"command": f"python {key}"})
        folder = desk.folder / ".measuring"
        folder.mkdir(exist_ok=True)
        status, output = run([sys.executable, ROOT / command[0], *command[1:], "--output_dir",
                              folder], folder, LIMIT_S * patience)
        if status != 0:
            raise SystemExit(output[-2000:])
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        desk.keep_measured(key, metrics)
    return eval(case["measured"], {"metrics": metrics})


def compare(exercise: Exercise, desk: Desk, predicted: list[float],
            measured: list[float]) -> Verdict:
    """Return the verdict; the first wrong try learns the direction, the second one the numbers."""
    relative, absolute = (exercise.text.get(key, 0.0) for key in ("relative", "absolute"))
    first_try, rows, seen = desk.progress(exercise)["tries"] == 0, [], set()
    for number, (case, ours, truth) in enumerate(zip(exercise.cases, predicted, measured,
                                                     strict=True), start=1):
        values = {"arguments": call(case), "predicted": short(ours)}
        if abs(ours - truth) <= max(absolute, relative * abs(truth)):
            rows.append(("right", values))
            continue
        direction = "too large" if ours > truth else "too small"
        seen |= {direction, f"case {number} {direction}"}
        values |= {"factor": factor(ours, truth), "measured": short(truth)}
        rows.append((direction.replace(" ", "_") if first_try else "measured", values))
    if not seen and len({*predicted}) == 1 < len({*measured}):  # within a wide tolerance
        seen, rows = {"constant"}, [("constant", {})]
    if not seen:
        return Verdict(set(), [*rows, ("predicted", {})])
    desk.change(exercise, tries=desk.progress(exercise)["tries"] + 1)
    return not_yet(exercise, seen, *rows)


def call(case: dict) -> str:
    """Return the arguments of a case as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in case["arguments"].items())


def factor(ours: float, truth: float) -> str:
    """Return by which factor two numbers differ."""
    if ours * truth <= 0:
        return "?"
    return f"{max(ours / truth, truth / ours):.2g}"


def short(number: float) -> str:
    """Write a number with few digits."""
    if isinstance(number, int) or float(number).is_integer():
        return f"{number:,.0f}"
    return f"{number:,.1f}" if abs(number) >= 100 else f"{number:.3g}"
