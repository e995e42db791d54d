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
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT

import psutil

from exercises.catalog import Exercise, place_of, say

WAIT_S = 8.0  # what a rank may wait for another one: on two cores no exercise needs half of it
SHOW_S = 5.0  # within this time, a process on a busy machine begins to show where it is
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.md")
FRAME = re.compile(r'File "([^"]+)", line (\d+),? in ([\w<>.]+)')  # of Python, of faulthandler
NOT_SHOWN = re.compile(r"/common/|check\.py|recording\.py")  # files of the copy that judge
RANK = re.compile(r"^(rank \d+ \([\w-]+\)).*:\n", re.MULTILINE)
ERROR = re.compile(r"^(?:\w+\.)*([A-Z]\w+)(?:: .*)?$", re.MULTILINE)  # ends a traceback
COST = re.compile(r"(calls|bytes sent|in flight|bubble|held|held at most)$")  # names of findings


@dataclass
class Verdict:
    """The result of a run.

    Attributes:
        seen: Names of the findings that do not hold; or "waits", "does not end" (with "own_line" if
            the learner's code was running), "raises" with the name of the exception, "refused",
            "costs", "too large", "too small", "no number".
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
    if refused := reason_to_refuse(exercise, file):
        return refused
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder).resolve()
        copy_lesson(exercise, file.resolve(), tree)
        for flags in (exercise.flags, *exercise.again):
            verdict = judged_run(exercise, flags, file.resolve(), tree, patience)
            if not verdict.passed:
                break
        return verdict


def reason_to_refuse(exercise: Exercise, file: Path) -> Verdict | None:
    """Return the verdict on a file that is not run, or None."""
    source = file.read_bytes()
    try:
        compile(source, file.name, "exec")  # finds more than a parser: a `return` on its own
    except (SyntaxError, ValueError) as error:
        says = traceback.format_exception_only(error)
        return not_yet(exercise, {"refused", "syntax"}, ("syntax", {}), "".join(says).rstrip())
    tree = ast.parse(source)
    if exercise.function not in [getattr(node, "name", None) for node in tree.body]:
        says = "no_function", {"name": exercise.function}
        return not_yet(exercise, {"refused", "no_function"}, says)
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if name in exercise.refused:
            values = {"line": node.lineno, "name": name, "words": exercise.refused[name]}
            return not_yet(exercise, {"refused", name}, ("refused_here", values))
    return None


# --- the run


def copy_lesson(exercise: Exercise, file: Path, tree: Path) -> None:
    """Copy the lesson and `common` to the folder `tree`, with the learner's function in it."""
    path, _, qualified = exercise.target.partition("::")
    for name in ("common", path.partition("/")[0]):
        shutil.copytree(ROOT / name, tree / name, ignore=NOT_COPIED)
    lesson = tree.joinpath(path).read_text(encoding="utf-8")
    tree.joinpath(path).write_text(merged(lesson, qualified, file), encoding="utf-8")


def merged(lesson: str, qualified: str, file: Path) -> str:
    """Return a lesson's text that takes one function from the learner's file.

    The number of lines stays, so that tracebacks show the lesson's own numbers.
    """
    lines = lesson.split("\n")
    outer, _, name = qualified.rpartition(".")
    first, last, indent = place_of(lesson, qualified)
    execute = f"exec(compile(open({str(file)!r}, 'rb').read(), {str(file)!r}, 'exec'), globals())"
    lines[first - 1 : last] = [""] * (last - first + 1)
    if outer:  # into the namespace of the file first: helpers and imports belong there
        named = f"getattr({name}, '__func__', {name}).__qualname__ = {qualified!r}"  # to be pickled
        lines[first - 1] = f"{' ' * indent}{execute}; {name} = globals().pop({name!r}); {named}"
    else:
        lines[first - 1] = execute
    return "\n".join(lines)


def judged_run(exercise: Exercise, flags: list, file: Path, tree: Path,
               patience: float) -> Verdict:
    """Run `--check` in the copy, and return what it means."""
    result = tree / "result.json"
    result.unlink(missing_ok=True)
    module = exercise.program.removesuffix(".py").replace("/", ".")
    waits = [] if "single_machine" in module else ["--timeout", WAIT_S * patience]
    status, output = run(["-m", "common.judged", result, module, *flags, *waits,
                          "--output_dir", tree / "outputs"], tree, exercise.limit * patience)
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if "passed" in found:
        return Verdict(set(), [("passed", {})])
    if "findings" in found:
        return of_findings(exercise, found["findings"])
    if status is not None and found.get("waited"):
        places = [line_of(stack, file, tree, rank)
                  for rank, stack in sorted(stacks(output, found["traceback"]).items())]
        return not_yet(exercise, {"waits"}, ("waits", {}), *sum(places, []))
    if status is not None and "failure" in found:
        return raised(exercise, found["traceback"] or output, file, tree, found["failure"])
    return no_result(exercise, status, output, exercise.limit * patience,
                     *line_of(output, file, tree))


def run(command: list, folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Run Python with nothing left of it; return its status (None after the limit) and output.

    After the limit, every process shows first where it is (`faulthandler`, SIGUSR1).
    """
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUTF8": "1"}
    with open(folder / "output", "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen([sys.executable, *map(str, command)], cwd=folder, env=environ,
                                   stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            launcher = psutil.Process(process.pid)
            for asked in (launcher.children(recursive=True), [launcher]):  # the ranks first
                shown, before = time.monotonic() + SHOW_S, os.fstat(output.fileno()).st_size
                for one in asked:
                    with contextlib.suppress(psutil.Error):
                        one.send_signal(signal.SIGUSR1)
                while (asked and time.monotonic() < shown
                       and os.fstat(output.fileno()).st_size == before):
                    time.sleep(0.1)
                time.sleep(0.5)  # the rest of what is printed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


# --- what it means


def of_findings(exercise: Exercise, failed: list[dict]) -> Verdict:
    """Return the verdict on comparisons that do not hold; one is shown."""
    names, says = {finding["what"] for finding in failed}, "finding"
    if all(map(COST.search, names)):
        failed = [one for one in failed if one.get("run", 0) > one.get("oracle", 0)]
        if not failed:  # it costs less than the lesson's own function
            return Verdict(set(), [("passed", {})])
        names, says = names | {"costs"}, "wasteful"
    verdict = not_yet(exercise, names, (says, {}))
    telling = verdict.mistake["seen"] if verdict.mistake else names
    shown = next((one for one in failed if one["what"] in telling), failed[0])
    verdict.parts.append(f"  {shown['what']}: {shown['says']}")
    return verdict


def stacks(output: str, blamed: str) -> dict[str, str]:
    """Return where each rank is, by its name: "rank 0 (trainer)".

    The launcher prints the stack of each rank after its name. The traceback of the rank that has
    given up, `blamed`, comes last, before the line `error: rank 1 (ps) has waited ...`.
    """
    others, _, line = output.rpartition(f"{blamed}error: ")
    _, *pieces = RANK.split(others)
    return {**dict(zip(pieces[::2], pieces[1::2], strict=True)),
            f"{line.partition(')')[0]})": blamed}


def line_of(stack: str, file: Path, tree: Path, rank: str = "") -> list[tuple[str, dict]]:
    """Return the innermost line of a stack that is the learner's, or else the lesson's, if any."""
    frames = [frame for frame in FRAME.findall(stack) if frame[0] == str(file)
              or frame[0].startswith(str(tree)) and not NOT_SHOWN.search(frame[0])]
    if "most recent call first" in stack:  # faulthandler
        frames.reverse()
    frames.sort(key=lambda frame: frame[0] == str(file))
    if not frames:
        return []
    path, number, function = frames[-1]
    own = path == str(file)
    text = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[int(number) - 1]
    return [("own_line" if own else "lessons_line", {
        "rank": rank and f"{rank}: ", "file": file.name if own else Path(path).relative_to(tree),
        "line": number, "function": function, "text": text.strip()})]


def raised(exercise: Exercise, trace: str, file: Path, tree: Path, failure: str = "") -> Verdict:
    """Return the verdict on an exception, or else a `failure`: "rank 1 was killed by SIGABRT"."""
    # An exception that came over RPC holds the traceback of the other process as its text.
    last = [*ERROR.finditer(trace.replace("\\n", "\n"))][-1:]
    return not_yet(exercise, {"raises", *(error[1] for error in last)}, ("raised", {}),
                   *line_of(trace, file, tree), f"  {last[0][0] if last else failure}")


def no_result(exercise: Exercise, status: int | None, output: str, limit_s: float,
              *places: tuple[str, dict]) -> Verdict:
    """Return the verdict on a run that has not ended in time, or has ended without a result."""
    if status is None:
        says = "does_not_end", {"seconds": limit_s}
        return not_yet(exercise, {"does not end", *(key for key, _ in places)}, says, *places)
    return not_yet(exercise, {"no result"}, ("no_result", {}), *output.splitlines()[-5:])
