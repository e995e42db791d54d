"""What a learner's file may not have: the answer from elsewhere, or a change of what judges it.

It guards against a slip and a short cut; it is no prison. The copy in which the file runs does not
hold the answer anyway (see overlay.py).
"""

import ast

from exercises.catalog import ROOT

MODULES = {"collections", "common", "contextlib", "copy", "dataclasses", "datetime", "functools",
           "gymnasium", "itertools", "math", "numpy", "operator", "random", "statistics",
           "threading", "time", "torch", "typing"}
REFUSED_MODULES = {f"common.{name}" for name in (
    "oracle", "launch", "workers", "life", "watch", "beside", "meeting", "peers")}
CALLS = {"exec", "eval", "compile", "open", "__import__", "globals", "locals", "vars", "setattr",
         "breakpoint", "exit", "quit", "input"}
DUNDERS = {"__init__", "__class__", "__enter__", "__exit__", "__len__", "__name__", "__iter__"}
STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


def reason_to_refuse(exercise, source):
    """Why a learner's file is not run, as (key in words.toml, its values); None if it is run.

    Args:
        exercise: whose file it is.
        source: its text.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line, text = getattr(error, "lineno", None) or 1, getattr(error, "text", None) or ""
        why = getattr(error, "msg", str(error))
        return "syntax", {"line": line, "text": text.strip(), "why": why}
    refused = [*_imports(tree), *_calls(tree, exercise), *_top_level(tree, exercise)]
    if refused:
        return min(refused, key=lambda reason: reason[1]["line"])
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if exercise.function not in defined:
        return "no_function", {"name": exercise.function}
    return None


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            refused = any(f"{name}.".startswith(f"{module}.") for module in REFUSED_MODULES)
            if name.split(".")[0] not in MODULES or refused:
                yield "imports", {"line": node.lineno, "name": name.removesuffix(".*")}


def _calls(tree, exercise):
    refused = {one["call"]: one for one in exercise.text.get("refused", [])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in CALLS:
            yield "calls", {"line": node.lineno, "name": node.id}
        elif isinstance(node, ast.Attribute) and _is_dunder(node.attr) and node.attr not in DUNDERS:
            yield "calls", {"line": node.lineno, "name": node.attr}
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.Name | ast.Attribute) and name in refused:
            yield "refused_here", {"line": node.lineno, "name": name, "words": refused[name]}


def _is_dunder(name):
    return name.startswith("__") and name.endswith("__")


def _top_level(tree, exercise):
    """Only definitions, and none of a name that the lesson has."""
    theirs = _names_of_lesson(exercise) - {exercise.function}
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, STATEMENTS):
            yield "top_level", {"line": node.lineno}
        for name in _defined_by(node):
            if name in theirs:
                yield "lessons_name", {"line": node.lineno, "name": name}


def _defined_by(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _names_of_lesson(exercise):
    """What the lesson's file defines at its top: functions, classes, constants."""
    if exercise.kind == "measure":
        return set()
    tree = ast.parse((ROOT / exercise.target.partition("::")[0]).read_text())
    return {name for node in tree.body for name in _defined_by(node)}
