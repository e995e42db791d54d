"""A copy of the lesson in which the learner's function stands in the place of the answer."""

import json
import shutil

from exercises.catalog import HERE, ROOT, place_of

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.md")
INSIDE = "exercise_inside"  # the name of inside.py in the copy


def lay(exercise, learners_file, tree):
    """Fill the folder `tree`: the lesson's folder, common/, and what calls the learner's file.

    The copy does not hold the answer. The learner's file keeps its own path, for tracebacks.

    Args:
        exercise: what is solved.
        learners_file: the path of the learner's file.
        tree: the folder of the copy.
    """
    shutil.copyfile(HERE / "inside.py", tree / f"{INSIDE}.py")
    (tree / "seen").mkdir()
    given = {"path": str(learners_file.resolve()), "source": learners_file.read_text(),
             "program": exercise.program, "function": exercise.function}
    (tree / "exercise.json").write_text(json.dumps(given))
    if exercise.kind != "measure":  # of these, only the learner's own function runs here
        for folder in ("common", exercise.program.split("/")[0]):
            shutil.copytree(ROOT / folder, tree / folder, ignore=NOT_COPIED)
        path, _, qualified = exercise.target.partition("::")
        (tree / path).write_text(with_learners((ROOT / path).read_text(), qualified))


def with_learners(text, qualified):
    """A lesson's file that takes a function from the learner; other lines keep their numbers."""
    first, last, indent = place_of(text, qualified)
    *classes, name = qualified.split(".")
    taken = "method" if classes else "function"
    call = f"{' ' * indent}{name} = __import__({INSIDE!r}).{taken}({name!r}, globals())"
    lines = text.splitlines()
    lines[first - 1 : last] = [call, *[""] * (last - first)]
    return "\n".join(lines) + "\n"
