"""The workbook: each exercise fails as shipped, passes when it is solved, and says what a mistake means."""

import ast
import difflib
import os
import pty
import re
import subprocess
import sys
import time

from common import ROOT

import pytest

from exercises import judging, predicting
from exercises.__main__ import main
from exercises.catalog import LANGUAGES, WORDS, exercises, place_of
from exercises.session import Session
from tests.helpers import SOON_S

PATIENCE = 3.0  # several tests run beside each other
ALL = [*exercises().values()]
MEASURED = {}  # by the runs of predictions
TEXTS = {"title", "task", "symptom", "hints", "why", "look", "question", "answer"}
SAMPLE = ("10", "20")  # judged in `make test`; `make learn-check` judges all
each = pytest.mark.parametrize("exercise", [
    pytest.param(one, marks=() if one.number in SAMPLE else pytest.mark.learn) for one in ALL], ids=lambda one: one.name)
each_text = pytest.mark.parametrize("exercise", ALL, ids=lambda one: one.name)


def judged(exercise, text, folder, patience=PATIENCE):
    """The verdict on a learner's file with this text."""
    file = folder / f"{exercise.name}.py"
    file.write_text(text, encoding="utf-8")
    if exercise.kind == "predict":
        return predicting.judge(exercise, file, {"measured": MEASURED, "tries": 0}, patience)
    return judging.judge(exercise, file, patience)


def attempt(exercise, mistake):
    """The text of a learner's attempt."""
    if "text" in mistake:
        return mistake["text"]
    solution = exercise.solution()[0]
    assert solution.count(mistake["old"]) == 1, mistake["old"]
    return solution.replace(mistake["old"], mistake["new"])


# --- without a run


@each_text
def test_texts(exercise):
    """Both languages have all words; at most five mistakes; three hints."""
    assert exercise.kind in ("write", "fix", "predict")
    assert {"chapter", "minutes", "program", "after", "shipped"} <= exercise.text.keys()
    assert (ROOT / exercise.program).exists()
    assert exercise.cell or exercise.text.get("target", exercise.program).startswith(exercise.chapter)
    for language in LANGUAGES:
        words = exercise.text[language]
        assert words.keys() == TEXTS
        assert all(words.values())
        assert len(words["hints"]) == 3
        assert (re.search("[ぁ-ん]", str(words)) is not None) == (language == "ja")
    assert 1 <= len(exercise.mistakes) <= 5
    for mistake in exercise.mistakes:
        assert mistake["seen"]
        assert mistake["ja"] != mistake["en"]
        assert attempt(exercise, mistake) != exercise.solution()[0]


@each_text
def test_stub(exercise):
    """It defines or imports each name that it uses, has the lesson's parameters, and is not the answer."""
    stub, solution = exercise.stub.read_text(encoding="utf-8"), exercise.solution()[0]
    ours, theirs = (next(node for node in ast.parse(text).body if getattr(node, "name", None) == exercise.function)
                    for text in (stub, solution))
    assert re.search("[ぁ-ん]", ast.get_docstring(ours))
    assert ast.unparse(ours.args) == ast.unparse(theirs.args)
    assert ast.dump(ours) != ast.dump(theirs)
    assert subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", exercise.stub],
                          capture_output=True).returncode == 0
    assert judging.reason_to_refuse(exercise, exercise.stub) is None


def test_an_afternoon_is_eight_exercises():
    assert sorted(one.afternoon for one in ALL if one.afternoon) == [*range(1, 9)]


def test_words():
    """The engine's words have the same braces in both languages."""
    braces = [{key: sorted(re.findall(r"{\w+", words)) for key, words in WORDS[language].items()} for language in LANGUAGES]
    assert braces[0] == braces[1]


@each_text
def test_the_copy_has_no_answer_and_keeps_line_numbers(exercise):
    if exercise.kind != "predict":
        path, _, qualified = exercise.target.partition("::")
        lesson = (ROOT / path).read_text(encoding="utf-8")
        copy, (first, last, _) = judging.merged(lesson, qualified, exercise.stub), place_of(lesson, qualified)
        changed = [line for line in difflib.ndiff(lesson.split("\n"), copy.split("\n")) if line.startswith(("+ ", "- "))]
        assert len(copy.split("\n")) == len(lesson.split("\n"))
        assert copy.split("\n")[last:] == lesson.split("\n")[last:]
        assert not any(line in copy for line in lesson.split("\n")[first:last] if len(line) > 30 and lesson.count(line) == 1)
        assert changed


def test_helpers_and_imports_of_a_method(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import math\nSCALE = 2\n\n\n@staticmethod\ndef forward(x):\n    return helper(x)\n\n\n"
                    "def helper(x):\n    return SCALE * math.floor(x)\n", encoding="utf-8")
    names = {}
    exec(judging.merged("class Net:\n    def forward(self, x):\n        return 0\n\nend = 1\n", "Net.forward", mine), names)
    assert (names["Net"].forward(1.5), names["end"]) == (2, 1)


@pytest.mark.parametrize(("number", "source", "seen", "says"), [
    ("08", b"def average_gradients(model, share)\n    pass\n", "syntax", "line 1"),
    ("08", b"import torch\nreturn 1\n", "syntax", "line 2"),
    ("08", b"def average(model, share):\n    pass\n", "no_function", "`average_gradients`"),
    ("04", b"def demo_checkpoint(rank, world_size, args):\n    time.sleep(1)\n", "sleep", "Line 2, `sleep`"),
])
def test_refusals(number, source, seen, says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_bytes(source)
    verdict = judging.reason_to_refuse(exercises()[number], path)
    assert verdict.seen == {"refused", seen}
    assert says in verdict.render("en")


def test_progress(tmp_path, capsys):
    """What is solved is kept, also by `reset`; a broken file of it is no harm."""
    session, first = Session(tmp_path, "en"), ALL[0]
    with session.progress(first) as known:
        known["solved"] = True
    assert Session(tmp_path, "en").next_unsolved() is ALL[1]
    assert main(["list", "--folder", str(tmp_path), "--lang", "en"]) == 0
    assert f"* {first.number}" in capsys.readouterr().out
    session.file(first).write_text("mine", encoding="utf-8")
    session.reset(first)
    assert session.is_untouched(first)
    assert (tmp_path / f"{first.name}.py.old").read_text(encoding="utf-8") == "mine"
    assert session.is_solved(first)
    (tmp_path / ".progress.json").write_text("{", encoding="utf-8")
    assert session.next_unsolved() is first


def test_commands(tmp_path, capsys):
    """`answer` names the lesson's line; hints go on to the last one."""
    common = ["--folder", str(tmp_path), "--lang", "ja"]
    assert main(["answer", "8", *common]) == 0
    assert "p2p_collectives/train.py" in capsys.readouterr().out
    for _ in range(5):
        assert main(["hint", "8", *common]) == 0
    assert "ヒント3/3" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit, match="2"):
        main(["hint", "99", *common])


@pytest.mark.parametrize(("number", "words"), [(5e-17, "0"), (0.2727, "0.273"), (1671588, "1,671,588"), (123.44, "123.4")])
def test_numbers(number, words):
    assert predicting.short(number) == words


# --- with runs: a sample in `make test`, all in `make learn-check`


@pytest.mark.timeout(400)
@each
def test_as_shipped(exercise, tmp_path):
    verdict = judged(exercise, exercise.stub.read_text(encoding="utf-8"), tmp_path)
    assert verdict.seen >= {*exercise.shipped}, verdict.render("en")
    assert not verdict.passed


@pytest.mark.timeout(400)
@each
def test_solution(exercise, tmp_path):
    for text in (exercise.solution()[0], *(attempt(exercise, right) for right in exercise.text.get("right", []))):
        verdict = judged(exercise, text, tmp_path)
        assert verdict.passed, verdict.render("en")


@pytest.mark.timeout(400)
@each
def test_mistakes(exercise, tmp_path):
    """The first mistake that fits is the one that was made."""
    for mistake in exercise.mistakes:
        verdict = judged(exercise, attempt(exercise, mistake), tmp_path)
        assert not verdict.passed
        assert verdict.mistake is mistake, (mistake["en"], verdict.seen, verdict.render("en"))
        shown = verdict.render("en")
        assert shown.startswith("Not yet.")
        assert not re.search(r"common/|exercises/", shown), "our own frames help no learner"


def test_a_deadlock_says_who_waits(tmp_path):
    text = exercises()["08"].solution()[0].replace("    for param", "    if dist.get_rank() == 1:\n        return\n    for param")
    verdict = judged(exercises()["08"], text, tmp_path, patience=1.0)
    line = text[: text.index("dist.all_reduce")].count("\n") + 1
    assert "waits" in verdict.seen
    assert re.search(rf"rank 0 \(rank0\): 08_average_gradients.py, line {line}, in average_gradients: .*all_reduce", verdict.render("en"))
    assert "rank 1 (rank1): outside your code, in the lesson's p2p_collectives/train.py" in verdict.render("en")


def test_an_endless_function_ends(tmp_path):
    endless = "    while True:\n        pass\n"
    text = f"def average_gradients(model, share):\n{endless}"
    verdict = judged(exercises()["08"], text, tmp_path, patience=0.4)
    assert verdict.seen & {"does not end", "waits"}
    assert "08_average_gradients.py, line" in verdict.render("en")
    assert "does not end" in judged(exercises()["20"], f"def predict(way, n_ranks, n_bytes):\n{endless}", tmp_path, patience=0.1).seen


@pytest.mark.parametrize(("text", "seen"), [("print('7') or 'seven'", "no number"), ("__import__('sys').exit()", "no result"), ("1 / 0", "ZeroDivisionError")])
def test_a_prediction_that_prints_or_exits(text, seen, tmp_path):
    assert seen in judged(exercises()["20"], f"def predict(*_, **__):\n    return {text}\n", tmp_path).seen


def test_a_learners_exception_shows_their_line(tmp_path):
    shown = judged(exercises()["08"], "def average_gradients(model, share):\n    share.oops()\n", tmp_path).render("en")
    assert "08_average_gradients.py, line 2, in average_gradients: share.oops()" in shown
    assert "AttributeError" in shown


def test_a_session_in_a_terminal(tmp_path):
    """Save a mistake: what it means. Save the solution: it passes. Then the next exercise."""
    exercise = exercises()["04"]
    command = [sys.executable, "-m", "exercises", "learn", "04", "--lang", "en",
               "--folder", str(tmp_path), "--patience", str(PATIENCE)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for("whenever you save it")
        file = tmp_path / f"{exercise.name}.py"
        file.write_text(attempt(exercise, exercise.mistakes[0]), encoding="utf-8")
        screen.wait_for("That means")
        os.write(ours, b"h\n")
        screen.wait_for("Hint 1 of")
        replacement = file.with_suffix(".tmp")  # as many editors save
        replacement.write_text(exercise.solution()[0], encoding="utf-8")
        replacement.replace(file)
        screen.wait_for("Correct.")
        os.write(ours, b"a\n")
        screen.wait_for("Solution: ddp_basic/main.py")
        os.write(ours, b"n\n")
        screen.wait_for(exercises()["05"].text["en"]["title"])
        os.write(ours, b"q\n")
        assert process.wait(timeout=SOON_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class Screen:
    """What a terminal has shown."""

    def __init__(self, descriptor):
        self.descriptor, self.shown = descriptor, b""
        os.set_blocking(descriptor, False)

    def wait_for(self, words, within_s=90):
        """Until these words have come; forget everything up to them."""
        deadline = time.monotonic() + within_s
        while words.encode() not in self.shown:
            assert time.monotonic() < deadline, self.shown.decode()
            try:
                self.shown += os.read(self.descriptor, 10_000)
            except BlockingIOError:
                time.sleep(0.05)
        self.shown = self.shown.partition(words.encode())[2]
