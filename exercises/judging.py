"""Judge a learner's file: put its function into a copy of the lesson, and run `--check` there.

The learner's file keeps its name and its line numbers in every traceback: in the copy, a line that
executes the file stands in the place of the lesson's function.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT
from common.launch import CAUSE, WAITED

import psutil

from exercises.catalog import Exercise, place_of, say

WAIT_S = 8.0  # what a rank may wait for another one: on two cores no exercise needs half of it
LIMIT_S = 60.0  # of a whole run, which takes 20 s at most
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.md")
FRAME = re.compile(r'File "([^"]+)", line (\d+),? in ([\w<>.]+)')  # of Python, of faulthandler
ERROR = re.compile(r"(?:^|\\n)((?:\w+\.)*(\w*(?:Error|Exception|Interrupt))\b.*?)(?=\\n|$)",
                   re.MULTILINE)
RANK = re.compile(r"^rank (\d+) \(([\w-]+)\)(?:, the innermost line first)?:\n", re.MULTILINE)
BLAMED = re.compile(r"^error: rank (\d+) \(([\w-]+)\)", re.MULTILINE)
COSTS = {"calls", "bytes sent", "in flight", "bubble", "weights held", "gradients held",
         "state held", "weights held at most", "gradients held at most", "state held at most"}
MB = 1e6


@dataclass
class Verdict:
    """The result of a run.

    Attributes:
        seen: Names of the findings that do not hold; or "waits", "does not end", "raises" with the
            name of the exception, "refused", "costs", "too large", "too small", "no number".
        parts: What is said, in order: a text, or a key of words.toml with its values.
        mistake: The exercise's mistake that this means, or None.
    """

    seen: set[str]
    parts: list[str | tuple[str, dict]] = field(default_factory=list)
    mistake: dict | None = None

    @property
    def passed(self) -> bool:
        """Whether the exercise is solved."""
        return not self.seen

    def render(self, language: str) -> str:
        """Return the text for the learner."""
        means = [("means", {"words": self.mistake})] if self.mistake else []
        return "\n".join(part if isinstance(part, str) else say(part[0], language, **part[1])
                         for part in [*self.parts, *means])


def not_yet(exercise: Exercise, seen: set[str], *parts: str | tuple[str, dict]) -> Verdict:
    """Return a verdict that is not right, with the first of the exercise's mistakes that fits."""
    fitting = (one for one in exercise.mistakes
               if seen >= {*one["seen"]} and not seen & {*one.get("unseen", [])})
    return Verdict(seen, [("not_yet", {}), *parts], next(fitting, None))


def judge(exercise: Exercise, file: Path, patience: float = 1.0) -> Verdict:
    """Judge the learner's file of an exercise of the kind write or fix; nothing is left running.

    Args:
        exercise: The exercise.
        file: The learner's file.
        patience: Factor of all time limits, for a busy machine.
    """
    if refused := reason_to_refuse(exercise, file.read_bytes()):
        return not_yet(exercise, {"refused", refused[0]}, refused)
    with copy_of(exercise, file) as tree:
        for flags in (exercise.text.get("flags", []), *exercise.text.get("again", [])):
            verdict = judged_run(exercise, file, tree, flags, patience)
            if not verdict.passed:
                break
        return verdict


# --- before a run


def reason_to_refuse(exercise: Exercise, source: bytes) -> tuple[str, dict] | None:
    """Return why a learner's file is not run: a key of words.toml and its values; or None."""
    try:
        text = source.decode("utf-8-sig")
        compile(text, exercise.name, "exec")  # finds more than a parser: a `return` on its own
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return "syntax", {"line": getattr(error, "lineno", None) or 1,
                          "text": (getattr(error, "text", None) or "").strip(),
                          "why": getattr(error, "msg", str(error))}
    if exercise.function not in functions_of(tree):
        return "no_function", {"name": exercise.function}
    refused = exercise.text.get("refused", {})
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(node, ast.Name | ast.Attribute) and name in refused:
            return "refused_here", {"line": node.lineno, "name": name, "words": refused[name]}
    if exercise.kind != "predict":
        lesson = ROOT.joinpath(exercise.target.partition("::")[0]).read_text(encoding="utf-8")
        theirs = functions_of(ast.parse(lesson)).keys() - {exercise.function}
        for name in functions_of(tree).keys() & theirs:
            return "lessons_name", {"line": functions_of(tree)[name], "name": name}
    return None


def functions_of(tree: ast.Module) -> dict[str, int]:
    """Return the names of the functions and classes of a file, with their lines."""
    return {node.name: node.lineno for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@contextlib.contextmanager
def copy_of(exercise: Exercise, file: Path) -> Iterator[Path]:
    """Copy the lesson and `common` to a temporary folder, with the learner's function in it."""
    path, _, qualified = exercise.target.partition("::")
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder).resolve()
        for name in ("common", path.partition("/")[0]):
            shutil.copytree(ROOT / name, tree / name, ignore=NOT_COPIED)
        target = tree / path
        target.write_text(merged(target.read_text(encoding="utf-8"), qualified, file.resolve()),
                          encoding="utf-8")
        yield tree


def merged(lesson: str, qualified: str, file: Path) -> str:
    """Return a lesson's text that takes one function from the learner's file.

    The number of lines stays, so that tracebacks show the lesson's own numbers.
    """
    lines = lesson.split("\n")
    outer, _, name = qualified.rpartition(".")
    first, last, indent = place_of(lesson, qualified)
    execute = (f"exec(compile(open({str(file)!r}, encoding='utf-8-sig').read(), {str(file)!r}, "
               "'exec'), globals())")
    lines[first - 1 : last] = [""] * (last - first + 1)
    if outer:  # into the namespace of the file first: helpers and imports belong there
        named = f"getattr({name}, '__func__', {name}).__qualname__ = {qualified!r}"  # to be pickled
        lines[first - 1] = f"{' ' * indent}{execute}; {name} = globals().pop({name!r}); {named}"
    else:
        lines[first - 1] = execute
    return "\n".join(lines)


# --- the run


def judged_run(exercise: Exercise, file: Path, tree: Path, flags: list,
               patience: float) -> Verdict:
    """Run `--check` in the copy, and return what it means."""
    result = tree / "result.json"
    result.unlink(missing_ok=True)
    module = exercise.program.removesuffix(".py").replace("/", ".")
    waits = [] if "single_machine" in module else ["--timeout", WAIT_S * patience]
    command = [sys.executable, "-m", "common.judged", str(result), module, *flags, *waits,
               "--output_dir", tree / "outputs"]
    status, output = run(command, tree, LIMIT_S * patience)
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "passed" in found:
        return Verdict(set(), [("passed", {"findings": found["passed"]})])
    if "findings" in found:
        return of_findings(exercise, found["findings"])
    if status is None:
        ended = ("does_not_end", {"seconds": LIMIT_S * patience})
        return not_yet(exercise, {"does not end"}, ended, *places(output, file, tree))
    if found.get("kind", CAUSE) == WAITED:
        return not_yet(exercise, {"waits"}, ("waits", {}), *places(output, file, tree))
    return raised(exercise, output, file, tree)


def run(command: list, folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Run a command with nothing left of it; return its status (None after the limit) and output.

    After the limit, every process shows first where it is (`faulthandler`, SIGUSR1).
    """
    folder.joinpath("tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder / "tmp"),
               "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    with open(folder / "output", "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen([*map(str, command)], cwd=folder, env=environ, stdout=output,
                                   stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            for child in psutil.Process(process.pid).children(recursive=True)[::-1]:
                with contextlib.suppress(psutil.Error):
                    child.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


# --- what it means


def of_findings(exercise: Exercise, failed: list[dict]) -> Verdict:
    """Return the verdict on comparisons that do not hold; one is shown."""
    names = {finding["what"] for finding in failed}
    if all(cost_of(finding) for finding in failed):
        wasted = [in_words(finding) for finding in failed
                  if finding.get("run", 0) > finding.get("oracle", 0)]
        if not wasted:  # it costs less than the lesson's own function
            return Verdict(set(), [("passed", {"findings": len(failed)})])
        return not_yet(exercise, {"costs", *names}, ("wasteful", {}), *wasted)
    verdict = not_yet(exercise, names, ("finding", {}))
    telling = verdict.mistake["seen"] if verdict.mistake else []
    shown = next((one for one in failed if one["what"] in telling), failed[0])
    verdict.parts.append(f"  {shown['what']}: {shown['says']}")
    if len(failed) > 1:
        verdict.parts.append(("more", {"number": len(failed) - 1}))
    return verdict


def cost_of(finding: dict) -> str:
    """Return what a finding counts if it is a cost, "bytes sent", else ""."""
    cost = finding["what"].rpartition(", ")[2]
    return cost if cost in COSTS else ""


def in_words(finding: dict) -> tuple[str, dict]:
    """Return what costs too much: a key of words.toml and its values."""
    cost, ours, theirs = cost_of(finding), finding["run"], finding["oracle"]
    if "held" in cost or "bytes" in cost:
        ours, theirs = f"{ours / MB:.4g}", f"{theirs / MB:.4g}"
    key = "cost_held" if "held" in cost else f"cost_{cost.replace(' ', '_')}"
    return key, {"ours": ours, "theirs": theirs, "name": finding["entry"].partition("[")[0],
                 "what": cost.partition(" held")[0]}


def places(output: str, file: Path, tree: Path) -> list[tuple[str, dict]]:
    """Return in which line each rank is: in the learner's file if possible.

    The launcher prints the stack of each rank after its name; the traceback of the rank that has
    given up comes last, before its `error:` line.
    """
    blamed = BLAMED.search(output)
    until = output.rfind("Traceback (most", 0, blamed.start()) if blamed else len(output)
    _, *pieces = RANK.split(output[:until] if until > 0 else output)
    stacks = [*zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)]
    if blamed and until > 0:
        stacks.append((blamed[1], blamed[2], output[until : blamed.start()]))
    found = []
    for rank, role, stack in sorted(stacks):
        if place := place_in(stack, file, tree, innermost_first="Traceback (most" not in stack):
            key = "rank_waits" if place["own"] else "rank_elsewhere"
            found.append((key, {"rank": rank, "role": role, **place}))
    if not found and (place := place_in(output, file, tree)):
        found = [("own_line" if place["own"] else "lessons_line", place)]
    return found


def place_in(stack: str, file: Path, tree: Path, innermost_first: bool = False) -> dict | None:
    """Return the innermost line of a traceback that is the learner's, or else the lesson's."""
    frames = FRAME.findall(stack) if innermost_first else FRAME.findall(stack)[::-1]
    inside = [frame for frame in frames if frame[0] == str(file.resolve())
              or frame[0].startswith(str(tree)) and "/common/" not in frame[0]]
    if not inside:
        return None
    path, number, function = next((one for one in inside if one[0] == str(file.resolve())),
                                  inside[0])
    line = Path(path).read_text(encoding="utf-8-sig").splitlines()[int(number) - 1].strip()
    own = path == str(file.resolve())
    return {"file": file.name if own else str(Path(path).relative_to(tree)), "line": number,
            "function": function, "text": line, "own": own}


def raised(exercise: Exercise, output: str, file: Path, tree: Path) -> Verdict:
    """Return the verdict on an exception, or on an end without one: the learner's line of it."""
    errors = ERROR.findall(output)
    last = [line for line in output.splitlines() if line.startswith("error: ")][-1:]
    place = place_in(output, file, tree)
    if not place and not errors and not last:
        return not_yet(exercise, {"no verdict"}, ("no_verdict", {}), *output.splitlines()[-5:])
    shown = [("own_line" if place["own"] else "lessons_line", place)] if place else []
    says = [f"  {errors[-1][0]}"] if errors else [f"  {line}" for line in last]
    return not_yet(exercise, {"raises", *(name for _, name in errors[-1:])}, ("raised", {}),
                   *shown, *says)
