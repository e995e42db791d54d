"""A copy of the lesson with the learner's function in the place of the answer.

The learner's text stands in the lesson's file: `super()`, decorators and pickling by name work as
in any file. Each line of the copy knows where it comes from.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from exercises.catalog import ASKING, HERE, ROOT, Exercise, place_of

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.md")
OBSERVER = "exercise_observer"  # the name of observer.py in the copy
OBSERVED = f"import {OBSERVER}; {OBSERVER}.lesson = globals()"


class Line(NamedTuple):
    """Is a line of code, and where its reader finds it."""

    file: str  # the name of the learner's, the path of a lesson's from the root
    number: int  # from 1
    text: str
    is_own: bool = False  # whether the learner has written it


class Copy:
    """Fills an empty folder with what an exercise runs.

    Args:
        exercise: what is solved.
        learners_file: the path of the learner's file.
        tree: the folder.
    """

    def __init__(self, exercise: Exercise, learners_file: Path, tree: Path) -> None:
        self.exercise, self.tree = exercise, tree.resolve()
        path, _, qualified = exercise.target.partition("::")
        self.target = self.tree / path
        if exercise.target == ASKING:  # the lesson is not needed
            self.target.parent.mkdir()
        else:
            for folder in ("common", self.target.parent.name):
                shutil.copytree(ROOT / folder, self.tree / folder, ignore=NOT_COPIED)
        lesson = [file.relative_to(self.tree) for file in self.target.parent.glob("*.py")]
        self.lines = {self.tree / file: lines_of(ROOT / file, str(file)) for file in lesson}
        learners = lines_of(learners_file, learners_file.name, is_own=True)
        self.lines[self.target] = merged(lines_of(ROOT / path, path), learners, qualified)
        self.target.write_text(text_of(self.lines[self.target]), encoding="utf-8")
        shutil.copyfile(HERE / "observer.py", self.tree / f"{OBSERVER}.py")
        (self.tree / "seen").mkdir()

    def origin(self, file: str, number: int) -> Line | None:
        """Return where a line comes from; None if it is of neither the learner nor the lesson."""
        lines = self.lines.get(Path(file))
        return lines and lines[number - 1]


@contextlib.contextmanager
def copy_of(exercise: Exercise, learners_file: Path) -> Iterator[Copy]:
    """Make a copy in a temporary folder, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        yield Copy(exercise, learners_file, Path(folder))


def merged(lesson: list[Line], learners: list[Line], qualified: str) -> list[Line]:
    """Return a lesson's lines with the learner's function in place of its own.

    What else is in the learner's file, imports and helpers, comes before the function, or before
    the class of a method. A method is indented, with the lines of strings in it.

    Args:
        lesson: the lines of the file that has the function.
        learners: those of the learner's file.
        qualified: "average_gradients" or "ParameterServer.forward".
    """
    outer, _, name = qualified.rpartition(".")
    first, last, indent = place_of(text_of(lesson), qualified)
    top, _, _ = place_of(text_of(lesson), outer or name)
    begin, end, _ = place_of(text_of(learners), name)
    function = [line._replace(text=" " * indent + line.text) for line in learners[begin - 1 : end]]
    others = [*learners[: begin - 1], Line(OBSERVER, 1, OBSERVED), *learners[end:]]
    return [*lesson[: top - 1], *others, *lesson[top - 1 : first - 1], *function, *lesson[last:]]


def lines_of(path: Path, file: str, is_own: bool = False) -> list[Line]:
    """Return the lines of a file, which a reader finds in `file`."""
    texts = path.read_text(encoding="utf-8-sig").split("\n")
    return [Line(file, number, text, is_own) for number, text in enumerate(texts, start=1)]


def text_of(lines: list[Line]) -> str:
    """Return lines as the text of a file."""
    return "\n".join(line.text for line in lines)
