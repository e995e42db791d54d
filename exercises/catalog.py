"""The exercises: for each a stub, `stubs/NN_name.py`, and its texts, `texts/NN_name.toml`.

    kind, chapter, cell, minutes    write, mend or measure; the notebook's cell, or for a chapter
                                    the program, where there is no notebook; how long it takes
    target                          the lesson's function: "rpc_rl/main.py::Agent.finish_episode"
    program, flags                  whose `--check` judges it, and with what flags
    again                           flags of further runs, where one is not enough
    loop_s                          seconds that the function may compute, if it is not a short one
    after                           the command of the real run
    [ja], [en]                      title, task, symptom, hints, why, look, question, answer
    [shipped]                       what is found of the stub: a message, or the kind of a verdict
    [messages.NAME]                 an expression on what was found, and what that means; of all
                                    that fit, the first one is shown
    [wrong.NAME]                    a typical wrong attempt, and what has to be found of it
    [right.NAME]                    an answer in another style, which has to pass
    [refused.NAME]                  a name that this exercise does not allow, and why
    [[cases]]                       of measure: arguments of `predict`, flags of the run, what is
                                    measured; a tolerance: relative or absolute; the solution
"""

import ast
import dataclasses
import functools
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
ASKING = "exercises/asking.py::predict"  # in whose place a prediction stands
LANGUAGES = ("ja", "en")
NAMED = ("messages", "wrong", "right")  # the tables of a toml that hold tables under their names


@dataclasses.dataclass(frozen=True)
class Exercise:
    """Holds one exercise.

    Args:
        name: with its number, "08_average_gradients".
        text: what its toml holds.
    """

    name: str
    text: dict

    def __getattr__(self, key: str) -> Any:
        """Return what the toml has: `kind`, `chapter`, `messages`, ..."""
        try:
            return self.text[key]
        except KeyError:
            raise AttributeError(f"{self.name}.toml has no {key}") from None

    @property
    def number(self) -> str:
        """Return the two digits of its name."""
        return self.name[:2]

    @property
    def target(self) -> str:
        """Return in whose place the learner's function is put."""
        return self.text.get("target", ASKING)

    @property
    def function(self) -> str:
        """Return the name of the learner's function."""
        return re.split("::|[.]", self.target)[-1]

    @property
    def stub(self) -> Path:
        """Return the path of the stub as it is shipped."""
        return HERE / "stubs" / f"{self.name}.py"

    def solution(self) -> tuple[str, str, int | None]:
        """Return the text of the answer, its file (from the root) and its first line.

        For write and mend, it is the lesson's own function; for measure, it stands in the toml.
        """
        if self.kind == "measure":
            return self.text["solution"], f"exercises/texts/{self.name}.toml", None
        path, _, qualified = self.target.partition("::")
        text = (ROOT / path).read_text()
        first, last, indent = place_of(text, qualified)
        lines = text.splitlines()[first - 1 : last]
        return "\n".join(line[indent:] for line in lines) + "\n", path, first


def place_of(text: str, qualified: str) -> tuple[int, int, int]:
    """Return the first line (with decorators), the last line and the indent of a definition.

    Args:
        text: of a Python file.
        qualified: "average_gradients" or "ParameterServer.forward". Of several, the last one
            counts, as in Python.
    """
    body = ast.parse(text).body
    for name in qualified.split("."):
        node = [node for node in body if getattr(node, "name", None) == name][-1]
        body = node.body
    first = min(part.lineno for part in (node, *node.decorator_list))
    return first, node.end_lineno, node.col_offset


@functools.cache
def exercises() -> list[Exercise]:
    """Return all, in order."""
    return [Exercise(path.stem, _read(path))
            for path in sorted((HERE / "texts").glob("[0-9][0-9]_*.toml"))]


def _read(path: Path) -> dict:
    """Return what a toml holds; messages and attempts are lists, in order, each with its `name`."""
    text = tomllib.loads(path.read_text())
    return text | {key: [{"name": name, **table} for name, table in text[key].items()]
                   for key in NAMED if key in text}


def named(word: str) -> Exercise | None:
    """Return the exercise of a number or a name, "8" or "08_average_gradients"."""
    number = word.zfill(2) if word.isdigit() else Path(word).stem
    return next((one for one in exercises() if number in (one.number, one.name)), None)


class Desk:
    """Keeps the learner's files and their progress in a folder.

    Args:
        folder: by default the one where the stubs are copied to, `exercises/`.
    """

    def __init__(self, folder: Path = HERE) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._progress = self.folder / ".progress.json"

    def file(self, exercise: Exercise) -> Path:
        """Return the learner's file, a copy of the stub where it is missing."""
        path = self.folder / f"{exercise.name}.py"
        if not path.exists():
            shutil.copyfile(exercise.stub, path)
        return path

    def reset(self, exercise: Exercise) -> Path:
        """Bring the stub back. What the learner has written stays beside it, as NN_name.py.old."""
        path = self.file(exercise)
        path.replace(path.with_suffix(".py.old"))
        self._change(exercise, solved=False, hints=0)
        return self.file(exercise)

    def solved(self, exercise: Exercise) -> bool:
        """Return whether it has passed once."""
        return self._progress_of(exercise)["solved"]

    def solve(self, exercise: Exercise) -> None:
        """Remember that it has passed."""
        self._change(exercise, solved=True)

    def next_hint(self, exercise: Exercise) -> int:
        """Return the number of the next hint, from 0; the last one again and again."""
        given = self._progress_of(exercise)["hints"]
        last = len(exercise.text["en"]["hints"]) - 1
        self._change(exercise, hints=min(given, last) + 1)
        return min(given, last)

    def next_unsolved(self, after: Exercise | None = None) -> Exercise | None:
        """Return the first unsolved exercise, or the first one behind another; None at the end."""
        order = exercises()
        start = order.index(after) + 1 if after else 0
        return next((one for one in order[start:] + order[:start] if not self.solved(one)), None)

    def _progress_of(self, exercise):
        return {"solved": False, "hints": 0} | self._all().get(exercise.name, {})

    def _all(self):
        try:
            progress = json.loads(self._progress.read_text())
        except (OSError, ValueError):
            return {}
        return progress if isinstance(progress, dict) else {}

    def _change(self, exercise, **new):
        progress = self._all() | {exercise.name: self._progress_of(exercise) | new}
        temporary = self._progress.with_suffix(".tmp")
        temporary.write_text(json.dumps(progress, indent=1))
        temporary.replace(self._progress)
