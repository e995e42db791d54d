"""Find the line of a lesson that a process is in, and the tutorial's cell that it comes from."""

import ast
import functools
import inspect
import json
from pathlib import Path
from types import FrameType

from common import ROOT

NO_LESSONS = ("common", "tracing")
SUPPORT = ("results.py", "measuring.py")  # the lesson is the line that calls them
DEPTH = 3  # functions of the lesson in a place: the innermost and its callers

Place = list[list]  # [file, line, function], the innermost first: ["rpc_rl/main.py", 91, "train"]


@functools.cache
def lesson_file(filename: str) -> str | None:
    """Return `rpc_rl/main.py` for a file in the folder of a lesson, None for any other file."""
    path = Path(filename)
    if not path.is_relative_to(ROOT):
        return None
    path = path.relative_to(ROOT)
    is_lesson = len(path.parts) == 2 and path.parts[0] not in NO_LESSONS
    return path.as_posix() if is_lesson and not path.name.endswith(SUPPORT) else None


def place_of_frame(frame: FrameType | None) -> Place:
    """Return the lesson's lines in a stack; `frame` is the top of it."""
    place = []
    while frame is not None and len(place) < DEPTH:
        path = lesson_file(frame.f_code.co_filename)
        if path is not None:
            place.append([path, frame.f_lineno, frame.f_code.co_qualname])
        frame = frame.f_back
    return place


@functools.cache
def place_of_definition(definition: object) -> Place:
    """Return where the lesson defines a function or class; [] if another library does."""
    definition = inspect.unwrap(definition)
    try:
        path = lesson_file(inspect.getsourcefile(definition) or "")
    except TypeError:  # built into torch
        path = None
    if path is None:
        return []
    return [[path, inspect.getsourcelines(definition)[1], definition.__qualname__]]


# --- the tutorial's cell


@functools.cache
def _cells() -> dict[str, list]:
    """Read `{"rpc_rl/main.py::Policy.forward": ["6_5", 6, heading]}` out of docs/walk."""
    cells = {}
    for walk in sorted((ROOT / "docs" / "walk").glob("*.json")):
        heading = ""
        for row in json.loads(walk.read_text(encoding="utf-8")):
            heading = row.get("heading", heading)
            for name in row["here"]:
                cells.setdefault(name, [walk.stem, row["cell"], heading])
    return cells


@functools.cache
def _bases(path: str) -> dict[str, list[str]]:
    """Return the classes in a file with the names of their bases: `{"FastAgent": ["Agent"]}`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
            for node in tree.body if isinstance(node, ast.ClassDef)}


def cell_of(place: Place) -> list | None:
    """Find the tutorial's cell for a place: the cell of the innermost function that has one.

    A method of a subclass belongs to the cell of the method that it overrides.

    Returns:
        [chapter, number, heading], or None.
    """
    for path, _, function in place:
        name = function.split(".<locals>")[0]
        if f"{path}::{name}" in _cells():
            return _cells()[f"{path}::{name}"]
        owner, _, method = name.rpartition(".")
        for base in _bases(path).get(owner, []):
            for definition, cell in _cells().items():
                if (definition.startswith(f"{Path(path).parent}/")
                        and definition.endswith(f"::{base}.{method}")):
                    return cell
    return None
