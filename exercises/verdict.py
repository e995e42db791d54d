"""What a run has shown, and how the learner is told: the verdict."""

import dataclasses
import re

from exercises.catalog import Exercise
from exercises.costs import waste_in
from exercises.overlay import Copy, Line
from exercises.running import Ended, Rank
from exercises.words import say

FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([\w<>.]+)')
ERROR = re.compile(r"(?:^|\\n)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*?)(?=\\n|$)",
                   re.MULTILINE)
BLAMED = re.compile(r"^error: rank (\d+) \(([^)]+)\)", re.MULTILINE)

Part = tuple[str, dict] | str  # a key in words.toml and its values; or plain text


@dataclasses.dataclass
class Verdict:
    """Keeps what a run has shown, in no language yet.

    Args:
        kind: "passed", "refused" (the file was not run), "finding" (of `--check`), "wasteful" (its
            numbers are right, its costs are not), "raised" (an exception), "waits", "loops",
            "too_long", "no_verdict", "off" (a prediction).
        parts: what is said, in order.
        evidence: the findings or the exception in the words of the lesson.
        message: that of the exercise's messages that fits, a dict; or None.
    """

    kind: str
    parts: list[Part]
    evidence: str = ""
    message: dict | None = None

    @property
    def passed(self) -> bool:
        """Return whether the exercise is solved."""
        return self.kind == "passed"

    def render(self, language: str) -> str:
        """Return the text for the learner."""
        means = [("means", {"words": self.message})] if self.message else []
        return "\n".join(part if isinstance(part, str) else say(part[0], language, **part[1])
                         for part in [*self.parts, *means])


def not_yet(exercise: Exercise, kind: str, parts: list[Part], evidence: str) -> Verdict:
    """Return the verdict on what is not right: with the first of the exercise's messages that fits.

    Args:
        exercise: that is not solved.
        kind, parts, evidence: see `Verdict`.
    """
    fitting = (message for message in exercise.messages
               if re.search(message["finding"], evidence))
    return Verdict(kind, [("not_yet", {}), *parts], evidence, next(fitting, None))


def of_run(ended: Ended, copy: Copy) -> Verdict:
    """Return the verdict on a run of `--check`."""
    findings = re.findall(r"^\[check\] (.*)$", ended.output, re.MULTILINE)
    if ended.status == 0 and re.search("^check passed: ", ended.output, re.MULTILINE):
        return Verdict("passed", [("passed", {"findings": len(findings)})])
    if ended.why:
        return _hanging(ended, copy)
    failed = [finding.removesuffix(": FAIL") for finding in findings if finding.endswith(": FAIL")]
    if not failed:
        return _raised(ended, copy)
    waste = waste_in(failed)
    if waste == []:
        return Verdict("passed", [("passed", {"findings": len(findings)})])
    if waste:
        return not_yet(copy.exercise, "wasteful", [("wasteful", {}), *waste], "\n".join(failed))
    return _finding(failed, copy.exercise)


def _finding(failed: list[str], exercise: Exercise) -> Verdict:
    """Return the verdict on comparisons that do not hold; one is shown."""
    verdict = not_yet(exercise, "finding", [("finding", {})], "\n".join(failed))
    telling = [finding for finding in failed
               if verdict.message and re.search(verdict.message["finding"], finding)]
    verdict.parts.append(f"  {(telling or failed)[0]}")
    if len(failed) > 1:
        verdict.parts.append(("more", {"number": len(failed) - 1}))
    return verdict


def _hanging(ended: Ended, copy: Copy) -> Verdict:
    """Return the verdict on a run that was ended: in which line each rank is."""
    where = [_where(rank, ended.why) for rank in ended.ranks if rank.has_ended or rank.threads]
    evidence = " ".join(str(values) for _, values in where)
    return not_yet(copy.exercise, ended.why,
                   [(ended.why, {"seconds": ended.seconds}), *where], evidence)


def _where(rank: Rank, why: str) -> Part:
    """Return in which line a rank is, of the learner's if possible, rather not of the oracle's."""
    who = {"rank": rank.number, "role": rank.role}
    if rank.has_ended:
        return "rank_ended", who
    thread = min(rank.threads.values(), key=lambda thread: not thread.is_own)
    if thread.is_own:
        line = next(line for line in thread.lines if line.is_own)
        key, seconds = (("rank_waits", thread.still_s) if why == "waits" else
                        ("rank_loops", thread.inside_s))
        return key, {**who, **_words(line), "seconds": seconds}
    line = min(thread.lines, key=lambda line: bool(re.search("check|record", line.file)))
    return "rank_elsewhere", {**who, **_words(line)}


def _raised(ended: Ended, copy: Copy) -> Verdict:
    """Return the verdict on an exception: the learner's lines of its traceback.

    Of the lesson's lines, the last one is shown where there are none of the learner. A traceback
    that came over RPC is one line, with a backslash and an n between its lines.
    """
    frames = [(copy.origin(file, int(number)), function)
              for file, number, function in dict.fromkeys(FRAME.findall(ended.output))]
    frames = [(line, function) for line, function in frames if line]
    own = [("own_line", {**_words(line), "function": function})
           for line, function in frames if line.is_own]
    of_lesson = [("lessons_line", _words(line)) for line, _ in frames]
    blamed = BLAMED.search(ended.output)
    who = ("raised_on", {"rank": blamed[1], "role": blamed[2]}) if blamed else ("raised", {})
    last = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    error = (ERROR.findall(ended.output) or last)[-1:]
    if not frames and not error:
        shown = [f"  {line}" for line in ended.output.splitlines()[-5:]]
        return not_yet(copy.exercise, "no_verdict",
                       [("no_verdict", {"status": ended.status}), *shown], "\n".join(shown))
    return not_yet(copy.exercise, "raised", [who, *(own or of_lesson[-1:]),
                                             *(f"  {line}" for line in error)],
                   "\n".join([*error, *last]))


def _words(line: Line) -> dict:
    """Return what is said of a line: its file, number and text."""
    return {"file": line.file, "line": line.number, "text": line.text.strip()}
