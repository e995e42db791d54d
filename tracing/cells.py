"""Finds the tutorial's cell that a line of the lessons belongs to."""

import ast
import functools
import json
from pathlib import Path

from tracing.timeline import ROOT


@functools.cache
def _cells() -> dict[str, list]:
    """Read `{"rpc_rl/main.py::Policy.forward": ["6_5", 6, heading]}` out of docs/walk."""
    cells = {}
    for walk in sorted((ROOT / "docs" / "walk").glob("*.json")):
        chapter, heading = walk.stem, ""
        for row in json.loads(walk.read_text(encoding="utf-8")):
            heading = row.get("heading", heading)
            for name in row["here"]:
                cells.setdefault(name, [chapter, row["cell"], heading])
    return cells


@functools.cache
def _bases(path: str) -> dict[str, list[str]]:
    """Return the classes of a file, and what they are subclasses of: `{"FastAgent": ["Agent"]}`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
            for node in tree.body if isinstance(node, ast.ClassDef)}


def cell_of(where: list[list]) -> list | None:
    """Find the tutorial's cell of a span: that of its function, or of the first caller with one.

    A method of a subclass belongs to the cell of the method in its place there.

    Returns:
        [chapter, number, heading], or None.
    """
    return _cell_of(tuple((path, function.split(".<locals>")[0]) for path, _, function in where))


@functools.cache
def _cell_of(where: tuple[tuple[str, str], ...]) -> list | None:
    for path, function in where:
        if f"{path}::{function}" in _cells():
            return _cells()[f"{path}::{function}"]
        owner, _, method = function.rpartition(".")
        for base in _bases(path).get(owner, []):
            for name, cell in _cells().items():
                if (name.startswith(f"{Path(path).parent}/")
                        and name.endswith(f"::{base}.{method}")):
                    return cell
    return None
