"""Judge a learner's file: run the lesson's `--check` with it, or measure what it predicts."""

from collections.abc import Callable
from pathlib import Path

from exercises import measuring
from exercises.catalog import Exercise
from exercises.overlay import copy_of
from exercises.refusing import reason_to_refuse
from exercises.running import run
from exercises.verdict import Verdict, not_yet, of_run


def check(exercise: Exercise, learners_file: Path, patience: float = 1.0,
          show: Callable[[str, dict], None] = lambda key, values: None) -> Verdict:
    """Judge a learner's file; nothing is left running.

    Args:
        exercise: what is solved.
        learners_file: its path.
        patience: multiplies all limits, for a busy machine.
        show: called with what is shown before the verdict: a key in words.toml, and its values.
    """
    refused = reason_to_refuse(exercise, learners_file.read_bytes())
    if refused:
        return not_yet(exercise, "refused", [refused], refused[0])
    with copy_of(exercise, learners_file) as copy:
        if exercise.kind == "measure":
            return measuring.measure(copy, patience, show)
        for flags in (exercise.text.get("flags", []), *exercise.text.get("again", [])):
            ended = run(copy, copy.tree / exercise.program, "--check",
                        "--output_dir", copy.tree / "outputs", *flags, patience=patience)
            verdict = of_run(ended, copy)
            if not verdict.passed:
                break
        return verdict
