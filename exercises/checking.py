"""Judge a learner's file: run the lesson's `--check` on the overlay, and find out what it means."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from exercises import overlay
from exercises.refusing import reason_to_refuse
from exercises.words import say

LIMIT_S = 60.0  # for a run on a slow machine; on two cores none takes longer than 20 s
STANDSTILL_S = 5.0  # all ranks wait for so long: nothing will ever happen
LOOP_S = 10.0  # seconds of computing in one call of a function that takes milliseconds
POLL_S = 0.1
TELLING = "the finding to show"  # a part that is chosen when the exercise's messages are known
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
ERROR = re.compile(r"(?:^|\\n)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*?)(?=\\n|$)",
                   re.MULTILINE)
BLAMED = re.compile(r"^error: rank (\d+) \(([^)]+)\)", re.MULTILINE)


@dataclasses.dataclass
class Verdict:
    """What a run has shown, in no language yet.

    Args:
        kind: "passed", "refused" (the file was not run), "finding" (of `--check`), "raised" (an
            exception), "waits", "loops", "too_long", "no_verdict", "off" (a prediction).
        parts: what is said, in order: pairs (key in words.toml, its values), or plain text.
        evidence: the findings or the exception in the words of the lesson; the exercise's messages
            are looked up with it.
    """

    kind: str
    parts: list = dataclasses.field(default_factory=list)
    evidence: str = ""

    @property
    def passed(self):
        """Whether the exercise is solved."""
        return self.kind == "passed"

    def render(self, exercise, language):
        """The text for the learner."""
        lines = []
        for part in self.parts:
            if isinstance(part, str):
                lines.append(f"  {self._telling(exercise)}" if part is TELLING else part)
                continue
            key, values = part
            said = {name: value[language] if isinstance(value, dict) else value
                    for name, value in values.items()}
            lines.append(say(key, language, **said))
        message = self.message(exercise)
        if message:
            lines.append(say("means", language, words=message[language]))
        return "\n".join(lines)

    def _telling(self, exercise):
        """Of several findings, the one that the message is about; by default the first."""
        findings, message = self.evidence.splitlines(), self.message(exercise)
        telling = [line for line in findings if message and re.search(message["finding"], line)]
        return (telling or findings)[0]

    def message(self, exercise):
        """The first of the exercise's messages that fits, or None."""
        if self.passed:
            return None
        fitting = (one for one in exercise.messages if re.search(one["finding"], self.evidence))
        return next(fitting, None)


def check(exercise, learners_file, patience=1.0):
    """Judge a learner's file; at most `LIMIT_S` seconds, nothing is left running.

    Args:
        exercise: what is solved.
        learners_file: its path.
        patience: multiplies all limits, for a busy machine.
    """
    refused = reason_to_refuse(exercise, learners_file.read_text())
    if refused:
        return Verdict("refused", [("not_yet", {}), refused], refused[0])
    with tempfile.TemporaryDirectory(prefix="exercise-", ignore_cleanup_errors=True) as folder:
        tree = Path(os.path.realpath(folder))
        overlay.lay(exercise, learners_file, tree)
        flags = ["--check", "--output_dir", tree / "outputs", *exercise.text.get("flags", [])]
        command = [sys.executable, tree / exercise.program, *flags]
        ended = run_in(command, tree, patience, exercise)
        return judge(ended, tree, learners_file)


@dataclasses.dataclass
class Ended:
    """A run that is over."""

    status: int | None  # None if it was ended here
    output: str
    why: str  # it was ended here: "waits", "loops" or "too_long"
    ranks: list  # see `ranks_of`
    seconds: float


def run_in(command, tree, patience, exercise, text="", limit_s=LIMIT_S, python_path=None):
    """Run a command in the copy `tree`, and end it, with all its processes, where it stands still.

    Args:
        command: with its arguments.
        tree: the copy.
        patience: multiplies all limits.
        exercise: which may have a `loop_s` of its own.
        text: its standard input.
        limit_s: seconds that it may take.
        python_path: where its modules are; by default in the copy.
    """
    (tree / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(python_path or tree), "TMPDIR": str(tree / "tmp"),
               "PYTHONDONTWRITEBYTECODE": "1"}
    loop_s = exercise.text.get("loop_s", LOOP_S) * patience
    began, why, living = time.monotonic(), "", None
    (tree / "input").write_text(text)
    with open(tree / "output", "w+") as output, open(tree / "input") as given:
        process = subprocess.Popen(list(map(str, command)), cwd=tree, env=environ, stdin=given,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and not why:
                time.sleep(POLL_S)
                ranks, now = ranks_of(tree), time.monotonic()
                before, living = living, [rank["pid"] for rank in ranks if not rank["ended"]]
                if living != before:
                    changed = now
                why = _why_to_end(ranks, patience, loop_s, now - changed)
                why = why or ("too_long" if now - began > limit_s * patience else "")
            ranks = ranks_of(tree)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what has lost its parent
            process.wait()
        output.seek(0)
        return Ended(None if why else process.returncode, output.read(), why, ranks,
                     time.monotonic() - began)


def ranks_of(tree):
    """What each rank has last written of itself (see inside.py), with `ended`."""
    ranks = []
    for path in sorted((tree / "seen").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            ranks.append(json.loads(path.read_text()))
    for rank in ranks:
        rank["ended"] = True
        with contextlib.suppress(OSError):
            os.kill(rank["pid"], 0)
            rank["ended"] = False
    return ranks


def _why_to_end(ranks, patience, loop_s, settled_s):
    threads = [thread for rank in ranks if not rank["ended"] for thread in rank["threads"]]
    if any(thread["own"] and thread["inside_s"] > loop_s and thread["computed_s"] > loop_s / 10
           for thread in threads):
        return "loops"
    # A server waits for its trainers all the time: when the last has just ended, it ends next.
    still = min((settled_s, *(thread["still_s"] for thread in threads))) if threads else 0.0
    return "waits" if still > STANDSTILL_S * patience else ""


def judge(ended, tree, learners_file):
    """The verdict of a run of `--check`."""
    findings = re.findall(r"^\[check\] (.*)$", ended.output, re.MULTILINE)
    if ended.status == 0 and re.search("^check passed: ", ended.output, re.MULTILINE):
        return Verdict("passed", [("passed", {"findings": len(findings)})])
    if ended.why:
        where = who_waits(ended, tree, learners_file)
        parts = [("not_yet", {}), (ended.why, {"seconds": ended.seconds}), *where]
        return Verdict(ended.why, parts, " ".join(str(values) for _, values in where))
    failed = [finding.removesuffix(": FAIL") for finding in findings if finding.endswith(": FAIL")]
    if failed:
        more = [("more", {"number": len(failed) - 1})] if len(failed) > 1 else []
        parts = [("not_yet", {}), ("finding", {}), TELLING, *more]
        return Verdict("finding", parts, "\n".join(failed))
    return _raised(ended, tree, learners_file)


def who_waits(ended, tree, learners_file):
    """A part for each rank: in which line it is, of the learner's file if it is there."""
    parts = []
    for rank in ended.ranks:
        who = {"rank": rank["rank"], "role": rank["role"]}
        if rank["ended"]:
            parts.append(("rank_ended", who))
        for thread in [] if rank["ended"] else rank["threads"][:1]:
            if thread["own"]:
                waits = ended.why == "waits"
                text = _line(learners_file, thread["line"])
                where = {"line": thread["line"], "text": text,
                         "seconds": thread["still_s" if waits else "inside_s"]}
                parts.append(("rank_waits" if waits else "rank_loops", who | where))
            else:
                text = _line(tree / thread["file"], thread["line"])
                where = {"file": thread["file"], "line": thread["line"], "text": text}
                parts.append(("rank_elsewhere", who | where))
    return parts


def _raised(ended, tree, learners_file):
    """The learner's own lines of a traceback, and the exception; none of the lesson's frames.

    A traceback that came over RPC is one line, with a backslash and an n between its lines.
    """
    frames = list(dict.fromkeys(FRAME.findall(ended.output)))
    own = [frame for frame in frames if frame[0] == str(learners_file.resolve())]
    of_lesson = [frame for frame in frames if _is_lessons(frame[0], tree)]
    blamed = BLAMED.search(ended.output)
    who = ("raised_on", {"rank": blamed[1], "role": blamed[2]}) if blamed else ("raised", {})
    parts = [("not_yet", {}), who]
    for file, line, function in own:
        where = {"file": Path(file).name, "line": line, "text": _line(Path(file), int(line))}
        parts.append(("own_line", {**where, "function": function}))
    if not own and of_lesson:
        file, line, _ = of_lesson[-1]
        where = {"file": os.path.relpath(file, tree), "line": line}
        parts.append(("lessons_line", {**where, "text": _line(Path(file), int(line))}))
    last = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    said = (ERROR.findall(ended.output) or last)[-1:]
    if not own and not of_lesson and not said:
        shown = [f"  {line}" for line in ended.output.splitlines()[-5:]]
        parts = [("not_yet", {}), ("no_verdict", {"status": ended.status}), *shown]
        return Verdict("no_verdict", parts, "\n".join(shown))
    parts += [f"  {line}" for line in said]
    return Verdict("raised", parts, "\n".join([*said, *last]))


def _is_lessons(file, tree):
    """Whether a file is of the lesson's folder in the copy."""
    return file.startswith(str(tree)) and "/common/" not in file and overlay.INSIDE not in file


def _line(path, number):
    with contextlib.suppress(OSError, IndexError):
        return path.read_text().splitlines()[number - 1].strip()
    return ""
