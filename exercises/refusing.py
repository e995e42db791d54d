"""What keeps a learner's file from being run, and is said before: a slip, or a way round the point.

It is no guard: the copy in which the file runs does not hold the answer anyway (see overlay.py).
"""

import ast
from collections.abc import Iterator

from exercises.catalog import ROOT, Exercise


def reason_to_refuse(exercise: Exercise, source: bytes) -> tuple[str, dict] | None:
    """Return why a learner's file is not run, as (key in words.toml, its values).

    Args:
        exercise: whose file it is.
        source: what it holds.
    """
    try:
        text = source.decode("utf-8-sig")
        compile(text, exercise.name, "exec")  # finds more than a parser: a `return` on its own
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, text = getattr(error, "lineno", None) or 1, getattr(error, "text", None) or ""
        why = getattr(error, "msg", str(error))
        return "syntax", {"line": line, "text": text.strip(), "why": why}
    refused = [*_refused_here(tree, exercise), *_names_of_lesson(tree, exercise)]
    if refused:
        return min(refused, key=lambda reason: reason[1]["line"])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if exercise.function not in functions:
        return "no_function", {"name": exercise.function}
    return None


def _refused_here(tree: ast.Module, exercise: Exercise) -> Iterator[tuple[str, dict]]:
    """Find the names that this exercise does not allow."""
    refused = exercise.text.get("refused", {})
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.Name | ast.Attribute) and name in refused:
            yield "refused_here", {"line": node.lineno, "name": name, "words": refused[name]}


def _names_of_lesson(tree: ast.Module, exercise: Exercise) -> Iterator[tuple[str, dict]]:
    """Find the names that the lesson's file defines, too."""
    lesson = ast.parse((ROOT / exercise.target.partition("::")[0]).read_text())
    theirs = {name for name, _ in _defined(lesson)} - {exercise.function}
    for name, line in _defined(tree):
        if name in theirs:
            yield "lessons_name", {"line": line, "name": name}


def _defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Find what a file defines at its top, functions, classes and constants, and in which line."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((target.id, node.lineno) for target in targets
                    if isinstance(target, ast.Name))
