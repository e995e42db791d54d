r"""Read `lesson.toml` of every lesson: what tests, benchmarks and pages know of its programs.

    start = 4                           its place in the order to begin with
    chapters = ["6_5"]                  the pages beside the notebook: docs/lessons/6_5.md
    en = "RPC and RRefs: one agent, many observers"
    ja = "RPCとRRef：1つのエージェントと複数のオブザーバー"

    [main]                              a table for each program, in reading order
    short = "--max_episodes 3"          flags of a run of a few seconds
    says = 'solved in \d+ episodes'     regular expression of the whole summary line
    check = ["--gamma 0.9 --lr 0.02"]   flags under which --check holds; the first row runs by day
    not_compared = { "--repeats" = "the check has its own number" }
    refused = { "--gamma 1.5" = "at most 1" }     flags, and words of the line that refuses them
    saves = { flags = "--max_episodes 40", same = ["rewards"] }   a training with --checkpoint

    [fast]
    like = "main"                       takes check, not_compared and refused from there
"""

import functools
import importlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from common import ROOT

INHERITED = ("check", "not_compared", "refused")


@dataclass(frozen=True)
class Program:
    """A program of a lesson; the fields after `name` are those of its table in lesson.toml.

    Attributes:
        folder: Folder of the lesson, "rpc_rl".
        name: Stem of the program's file, "main".
    """

    folder: str
    name: str
    short: str
    says: str
    like: str = ""
    check: list[str] = field(default_factory=list)
    check_all_by_day: bool = False
    not_compared: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    saves: dict = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path from the root of the repository, "rpc_rl/main.py"."""
        return f"{self.folder}/{self.name}.py"

    @property
    def file(self) -> Path:
        """Absolute path."""
        return ROOT / self.path

    @property
    def module_name(self) -> str:
        """Name to import it by, "rpc_rl.main"."""
        return f"{self.folder}.{self.name}"

    def module(self) -> ModuleType:
        """Import the program."""
        return importlib.import_module(self.module_name)

    def __str__(self) -> str:
        return self.module_name


@dataclass(frozen=True)
class Lesson:
    """A lesson: its folder, place, pages, line in both languages, programs in reading order."""

    folder: str
    start: int
    chapters: list[str]
    en: str
    ja: str
    programs: tuple[Program, ...]


@functools.cache
def lessons() -> tuple[Lesson, ...]:
    """Return all lessons, in the order to begin with.

    Raises:
        TypeError: A table has a key that is not known, or lacks one.
    """
    found = (read(path) for path in ROOT.glob("*/lesson.toml"))
    return tuple(sorted(found, key=lambda lesson: lesson.start))


def programs() -> tuple[Program, ...]:
    """Return the programs of all lessons."""
    return tuple(program for lesson in lessons() for program in lesson.programs)


def read(path: Path) -> Lesson:
    """Return the lesson of one lesson.toml; see `lessons`."""
    whole = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = {name: table for name, table in whole.items() if isinstance(table, dict)}
    own = {name: value for name, value in whole.items() if name not in tables}
    folder, made = path.parent.name, []
    for name, table in tables.items():
        like = tables.get(table.get("like"), {})
        inherited = {key: like[key] for key in INHERITED if key in like}
        made.append(Program(folder, name, **{**inherited, **table}))
    return Lesson(folder, programs=tuple(made), **own)
