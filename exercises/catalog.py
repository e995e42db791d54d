"""The exercises: for each a stub, `stubs/NN_name.py`, and its texts, `texts/NN_name.toml`.

    kind, chapter, cell, minutes    write, fix or predict; the notebook's cell (without a notebook,
                                    `chapter` is the program); the minutes it takes
    afternoon                       its place on the path of an afternoon, for eight exercises
    target                          the lesson's function: "rpc_rl/main.py::Agent.finish_episode"
    program, flags, again           the program whose `--check` judges it, and its flags; flags of
                                    further runs
    limit                           seconds of a run; less than 60 if a mistake lasts until then
    after                           the command that shows the lesson at work
    shipped                         what is seen of the untouched stub (see `judging.Verdict.seen`)
    [ja], [en]                      title, task, symptom, hints, why, look, question, answer
    [refused.NAME]                  a name that this exercise does not allow, and why
    [[mistakes]]                    an attempt that learners make: `old` and `new` text of the
                                    solution, or `text`; what it means is shown if all of `seen`
                                    and nothing of `unseen` was seen
    [[right]]                       an answer in another style, which passes
    [[cases]]                       predict: arguments, flags of a run, `measured`, an expression
    tolerance                       predict: an expression, too
    solution                        predict: the answer
"""

import ast
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT

HERE = Path(__file__).parent
LANGUAGES = ("ja", "en")
WORDS = tomllib.loads(HERE.joinpath("words.toml").read_text(encoding="utf-8"))
DEFAULTS = {"cell": None, "afternoon": None, "flags": [], "again": [], "limit": 60, "refused": {},
            "right": [], "tolerance": "0"}


def say(key: str, language: str, **values: object) -> str:
    """Return the words of a key of words.toml, its braces filled; a dict has both languages."""
    said = {name: value[language] if isinstance(value, dict) else value
            for name, value in values.items()}
    return WORDS[language][key].format(**said)


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
        return "predict" if self.kind == "predict" else self.target.split(":")[-1].split(".")[-1]

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
def exercises() -> dict[str, Exercise]:
    """Return all exercises by their numbers, in order."""
    return {path.stem[:2]: Exercise(path.stem, DEFAULTS | tomllib.loads(path.read_text("utf-8")))
            for path in sorted(HERE.glob("texts/*.toml"))}
