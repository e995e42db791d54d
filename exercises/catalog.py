"""The exercises: for each a stub, `stubs/NN_name.py`, and its texts, `texts/NN_name.toml`.

    kind, chapter, cell, minutes    write, fix or predict; the notebook's cell (without a notebook,
                                    `chapter` is the program); the minutes it takes
    afternoon                       its place on the path of an afternoon, for eight exercises
    target                          the lesson's function: "rpc_rl/main.py::Agent.finish_episode"
    program, flags                  whose `--check` judges it, and with what flags
    again                           flags of further runs
    after                           the command of the real run
    shipped                         what is seen of the untouched stub (see `judging.Verdict.seen`)
    [ja], [en]                      title, task, symptom, hints, why, look, question, answer
    [refused.NAME]                  a name that this exercise does not allow, and why
    [[mistakes]]                    an attempt that learners make: `old` and `new` text of the
                                    solution, or `text`; what it means is shown if all of `seen`
                                    and nothing of `unseen` was seen
    [[right]]                       an answer in another style, which passes
    [[cases]]                       predict: arguments, flags of a run, `measured`, an expression
    relative, absolute              predict: the tolerance
    solution                        predict: the answer
"""

import ast
import functools
import json
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT
from common.report import replacing

HERE = Path(__file__).parent
LANGUAGES = ("ja", "en")
WORDS = tomllib.loads(HERE.joinpath("words.toml").read_text(encoding="utf-8"))


def say(key: str, language: str, **values: object) -> str:
    """Return the words of a key of words.toml, its braces filled; a dict has both languages."""
    said = {name: value[language] if isinstance(value, dict) else value
            for name, value in values.items()}
    return WORDS[key][language].format(**said)


@dataclass(frozen=True)
class Exercise:
    """An exercise; what its toml holds are attributes, too.

    Attributes:
        name: Name with its number, "08_average_gradients".
        text: Content of its toml.
    """

    name: str
    text: dict

    def __getattr__(self, key: str) -> Any:
        """Return what the toml has: `kind`, `chapter`, `mistakes`, ..."""
        try:
            return self.text[key]
        except KeyError:
            raise AttributeError(f"{self.name}.toml has no {key}") from None

    @property
    def number(self) -> str:
        """Two digits, "08"."""
        return self.name[:2]

    @property
    def function(self) -> str:
        """Name of the learner's function."""
        if self.kind == "predict":
            return "predict"
        return self.target.partition("::")[2].split(".")[-1]

    @property
    def stub(self) -> Path:
        """Path of the stub as it is shipped."""
        return HERE / "stubs" / f"{self.name}.py"

    def solution(self) -> tuple[str, str, int]:
        """Return the text of the answer, its file (from the root) and its first line."""
        if self.kind == "predict":
            return self.text["solution"], f"exercises/texts/{self.name}.toml", 1
        path, _, qualified = self.target.partition("::")
        text = ROOT.joinpath(path).read_text(encoding="utf-8")
        first, last, indent = place_of(text, qualified)
        lines = text.splitlines()[first - 1 : last]
        return "\n".join(line[indent:] for line in lines) + "\n", path, first


def place_of(text: str, qualified: str) -> tuple[int, int, int]:
    """Return the first line (with decorators), the last line and the indent of a definition.

    Args:
        text: Text of a Python file.
        qualified: "average_gradients" or "ParameterServer.forward".
    """
    body = ast.parse(text).body
    for name in qualified.split("."):
        node = [node for node in body if getattr(node, "name", None) == name][-1]
        body = node.body
    first = min(part.lineno for part in (node, *node.decorator_list))
    return first, node.end_lineno, node.col_offset


@functools.cache
def exercises() -> list[Exercise]:
    """Return all exercises, in order."""
    return [Exercise(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
            for path in sorted(HERE.joinpath("texts").glob("[0-9][0-9]_*.toml"))]


def named(word: str) -> Exercise | None:
    """Return the exercise of a number or a name, "8" or "08_average_gradients"."""
    number = word.zfill(2) if word.isdigit() else Path(word).stem
    return next((one for one in exercises() if number in (one.number, one.name)), None)


class Desk:
    """The learner's files, and what is solved, in a folder.

    Args:
        folder: By default `exercises/` itself.
    """

    def __init__(self, folder: Path = HERE) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def file(self, exercise: Exercise) -> Path:
        """Return the learner's file; if it is missing, make it from the stub."""
        path = self.folder / f"{exercise.name}.py"
        if not path.exists():
            shutil.copyfile(exercise.stub, path)
        return path

    def reset(self, exercise: Exercise) -> Path:
        """Bring the stub back; the learner's text stays beside it, as NN_name.py.old."""
        path = self.file(exercise)
        path.replace(path.with_suffix(".py.old"))
        self.change(exercise, hints=0, tries=0)
        return self.file(exercise)

    def progress(self, exercise: Exercise) -> dict:
        """Return `solved`, the number of `hints` given, of wrong `tries` of a prediction."""
        nothing = {"solved": False, "hints": 0, "tries": 0}
        return nothing | self._read("progress").get(exercise.name, {})

    def change(self, exercise: Exercise, **new: object) -> None:
        """Change what `progress` returns."""
        self._write("progress", exercise.name, self.progress(exercise) | new)

    def measured(self, key: str) -> dict | None:
        """Return the metrics kept under a key (`keep_measured`), or None."""
        return self._read("measured").get(key)

    def keep_measured(self, key: str, metrics: dict) -> None:
        """Keep the metrics of a run that does not depend on the learner's answer."""
        self._write("measured", key, metrics)

    def next_unsolved(self, after: Exercise | None = None) -> Exercise | None:
        """Return the first unsolved exercise (after another one), or None."""
        order = exercises()
        start = order.index(after) + 1 if after else 0
        return next((one for one in order[start:] + order[:start]
                     if not self.progress(one)["solved"]), None)

    def _read(self, what: str) -> dict:
        try:
            found = json.loads(self.folder.joinpath(f".{what}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, what: str, key: str, value: dict) -> None:
        with replacing(self.folder / f".{what}.json") as temporary:
            text = json.dumps(self._read(what) | {key: value}, indent=1)
            temporary.write_text(text, encoding="utf-8")
