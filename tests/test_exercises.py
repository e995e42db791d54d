"""The workbook: each exercise fails as shipped, passes when solved, and says what is wrong."""

import ast
import difflib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from common.oracle import load_float64

import pytest

from exercises import catalog, overlay
from exercises.__main__ import language_of_the_user, main
from exercises.catalog import HERE, LANGUAGES, ROOT, Desk, exercises, named
from exercises.checking import check
from exercises.costs import waste_in
from exercises.refusing import reason_to_refuse
from exercises.verdict import not_yet
from exercises.words import WORDS, say
from tests.helpers import SOON_S, all_end, processes

PATIENCE = 3.0  # several tests run beside each other
ALL = exercises()
TEXTS = {"title", "task", "symptom", "hints", "why", "look", "question", "answer"}
LONGEST_ANSWER = 15  # lines that are to be written
MISTAKE_LINES = 6  # that a stub of the kind mend may differ from the lesson
each = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
attempts = pytest.mark.parametrize(("exercise", "wrong"), [
    pytest.param(one, wrong, id=f"{one.name} {wrong['name']}")
    for one in ALL for wrong in one.wrong])

others = pytest.mark.parametrize(("exercise", "right"), [
    pytest.param(one, right, id=f"{one.name} {right['name']}")
    for one in ALL for right in one.text.get("right", [])])


def judged(exercise, text, folder, patience=PATIENCE):
    """The verdict on a learner's file with this text."""
    file = folder / f"{exercise.name}.py"
    file.write_text(text)
    return check(exercise, file, patience)


def attempt(exercise, wrong):
    """The text of a wrong attempt."""
    if "text" in wrong:
        return wrong["text"]
    solution = exercise.solution()[0]
    assert solution.count(wrong["old"]) == 1, f"{wrong['name']}: {wrong['old']!r}"
    return solution.replace(wrong["old"], wrong["new"])


def expect(verdict, expected):
    """Hold a verdict, in both languages, against what the toml says of it."""
    assert not verdict.passed
    shown = {language: verdict.render(language) for language in LANGUAGES}
    assert re.search("[ぁ-ん]", shown["ja"])
    assert shown["en"].startswith("Not yet.")
    if "message" in expected:
        assert verdict.message, verdict.evidence
        assert verdict.message["name"] == expected["message"], verdict.evidence
        assert all(verdict.message[language] in shown[language] for language in LANGUAGES)
    if "verdict" in expected:
        assert verdict.kind == expected["verdict"], shown["en"]
    if "finding" in expected:
        assert re.search(expected["finding"], verdict.evidence), verdict.evidence
    assert not re.search(r"common/|exercise[s_]", shown["en"]), "our own frames help no learner"


def function_of(exercise, text):
    """The node of the learner's function, without its docstring."""
    node = next(node for node in ast.parse(text).body
                if getattr(node, "name", None) == exercise.function)
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return node


# --- without a run


def test_static_numbers():
    assert [one.number for one in ALL] == sorted({one.number for one in ALL})
    assert {one.stub.name for one in ALL} == {path.name for path in (HERE / "stubs").glob("*.py")}


@each
def test_static_texts(exercise):
    """All words are there in both languages, and the stub and the attempts reach every message."""
    assert exercise.kind in ("write", "mend", "measure")
    assert {"chapter", "minutes", "program", "after"} <= exercise.text.keys()
    cells = [row["cell"] for walk in (ROOT / "docs/walk").glob(f"{exercise.chapter}*.json")
             for row in json.loads(walk.read_text())]
    if cells:
        assert exercise.cell in cells
    else:  # a program of a lesson that has no notebook
        assert exercise.program == exercise.chapter
        assert (ROOT / exercise.chapter).is_file()
        assert "cell" not in exercise.text
    for language in LANGUAGES:
        words = exercise.text[language]
        assert words.keys() == TEXTS
        assert all(words.values())
        assert len(words["hints"]) in (2, 3)
        assert (re.search("[ぁ-ん]", str(words)) is not None) == (language == "ja")
    names = {message["name"] for message in exercise.messages}
    expected = [exercise.shipped, *exercise.wrong]
    assert len(exercise.wrong) >= 2
    assert all(one.keys() & {"message", "verdict", "finding"} for one in expected)
    assert {one["message"] for one in expected if "message" in one} == names
    for message in exercise.messages:
        re.compile(message["finding"])
        assert message["ja"] != message["en"]


@each
def test_static_stub(exercise):
    """It has the lesson's parameters and both languages, and is not refused, nor the answer."""
    stub, solution = exercise.stub.read_text(), exercise.solution()[0]
    ours, theirs = function_of(exercise, stub), function_of(exercise, solution)
    functions = [node for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)]
    docstring = ast.get_docstring(functions[0])
    assert re.search("[ぁ-ん]", docstring.split("\n")[0])
    assert re.search(r"^[A-Z][a-z ,]+", docstring, re.MULTILINE)
    assert ast.unparse(ours.args) == ast.unparse(theirs.args)
    assert reason_to_refuse(exercise, stub.encode()) is None
    assert reason_to_refuse(exercise, solution.encode()) is None
    assert ast.dump(ours) != ast.dump(theirs)
    if exercise.kind == "write":
        assert len(ast.unparse(theirs.body).splitlines()) <= LONGEST_ANSWER
    if exercise.kind == "mend":
        lines = [ast.unparse(node).splitlines() for node in (ours, theirs)]
        different = [line for line in difflib.unified_diff(*lines, n=0, lineterm="")
                     if re.match("[-+](?![-+])", line)]
        allowed = exercise.text.get("mistake_lines", MISTAKE_LINES)
        assert 1 <= len(different) <= allowed, "\n".join(different)


@each
def test_static_copy(exercise, tmp_path):
    """The copy in which the learner's file runs has no answer; each line knows where it comes from."""
    copy = overlay.Copy(exercise, exercise.stub, tmp_path)
    path, _, qualified = exercise.target.partition("::")
    if exercise.kind == "measure":
        assert not (tmp_path / "common").exists(), "a prediction needs nothing of the lesson"
    text, lesson, stub = (file.read_text() for file in (tmp_path / path, ROOT / path, exercise.stub))
    first, last, _ = catalog.place_of(lesson, qualified)
    answer = lesson.split("\n")[first:last]
    assert "\n".join(answer) not in text
    origins = [copy.origin(str(copy.target), number + 1) for number in range(text.count("\n") + 1)]
    assert [line.text for line in origins] == text.split("\n")
    for whole, file, left_out in ((lesson, path, range(first, last + 1)), (stub, exercise.stub.name, [])):
        found = sorted(line.number for line in origins if line.file == file)
        assert found == [number for number in range(1, whole.count("\n") + 2) if number not in left_out]
    written = catalog.place_of(text, qualified)
    assert origins[written[0] - 1].number == catalog.place_of(stub, exercise.function)[0]
    assert all(line.is_own for line in origins[written[0] - 1 : written[1]])


def test_static_copy_of_a_method(tmp_path):
    """Helpers and imports come before the class; `super()`, a decorator and the name are a method's."""
    mine, lesson = tmp_path / "mine.py", tmp_path / "lesson.py"
    mine.write_text("import math\nSCALE = 2\n\n\n@staticmethod\ndef forward(x):\n    return helper(x)\n\n\n"
                    "def helper(x):\n    return SCALE * math.floor(x)\n")
    lesson.write_text("class Net:\n    def train(self):\n        pass\n\n    def forward(self, x):\n        return 0\n\nend = 1\n")
    lines = overlay.merged(*(overlay.lines_of(file, file.name) for file in (lesson, mine)), "Net.forward")
    names = {}
    exec(overlay.text_of(lines).replace(overlay.OBSERVED, ""), names)
    assert names["Net"].forward(1.5) == 2
    assert names["Net"].forward.__qualname__ == "Net.forward"
    assert names["end"] == 1


@attempts
def test_static_wrong(exercise, wrong):
    assert attempt(exercise, wrong) != exercise.solution()[0]


@pytest.mark.parametrize("number", ["03", "07"])
def test_static_batch(number):
    """Of the oracle's images, two ranks have unequal shares, and only the larger one has one image more than its batch."""
    exercise = next(one for one in ALL if one.number == number)
    train, _ = load_float64(SimpleNamespace(dataset="digits"))
    batch = exercise.text["flags"][exercise.text["flags"].index("--global_batch_size") + 1] // 2
    assert (len(train) // 2, -(-len(train) // 2)) == (batch, batch + 1)


@each
def test_static_readme(exercise):
    """Its row in both tables."""
    for language, page in (("en", "README.md"), ("ja", "README.ja.md")):
        title, kind = exercise.text[language]["title"], say(exercise.kind, language)
        cell = exercise.text.get("cell")
        where = f"{exercise.chapter}, {cell}" if cell else exercise.chapter
        row = f"| {exercise.number} | [{title}](stubs/{exercise.name}.py) | {where} | {kind} |"
        assert f"{row} {exercise.minutes} |" in (HERE / page).read_text()


def test_static_words():
    """The engine's words have the same braces in both languages."""
    for key, words in WORDS.items():
        assert words.keys() == set(LANGUAGES), key
        braces = [sorted(re.findall(r"{\w+", words[language])) for language in LANGUAGES]
        assert braces[0] == braces[1], key


@pytest.mark.parametrize(("failed", "wasted"), [
    (["zero2, bytes sent: first differs at rank 0: 3.2e+07 in 5 processes, 1.6e+07 in one process (1 numbers"],
     ["it sends 32.00 MB in a step, where 16.00 MB are enough."]),
    (["uneven, bytes sent: first differs at rank 0: 1231344 in 3 processes, 1231200 in one process (1 numbers"],
     ["it sends 1.2313 MB in a step, where 1.2312 MB are enough."]),
    (["zero3, weights held at most: first differs at rank 0: 8e+06 in 3 processes, 5e+06 in one process (1"],
     ["it holds up to 8.00 MB of weights, where 5.00 MB are enough."]),
    (["overlap, calls: first differs at rank 0, all_reduce: 68 in 2 processes, 5 in one process (1 numbers"],
     ["it calls `all_reduce` 68 times in a step, where 5 are enough."]),
    (["1f1b, in flight: first differs at rank 0: 1 in 3 processes, 3 in one process (1 numbers of 1 step;",
      "1f1b, bubble: first differs at rank 0: 0.6666667 in 3 processes, 0.3333333 in one process (1 numb"],
     ["it is idle for 67% of the time, where 33% are enough."]),
    (["sequence, calls: first differs at rank 0, all_reduce: 3 in 3 processes, 14 in one process (3 numbers"], []),
    (["tensor, calls: first differs at rank 0: all_gather, all_reduce on one side only (1 numbers of 1 step;"], []),
    (["zero2, bytes sent: first differs at rank 0: 1.6e+07 in 5 processes, 3.2e+07 in one process (1 numbers"], None),
    (["zero2, gradients: first differs at step 1, unit 0[0]: 2 in 5 processes, 1 in one process (1 numbers",
      "zero2, bytes sent: first differs at rank 0: 3.2e+07 in 5 processes, 1.6e+07 in one process (1 numbers"], None),
])
def test_static_waste(failed, wasted):
    """More than it has to be is waste; less is none; a wrong number is no cost at all."""
    found = waste_in(failed)
    assert (found and [say(key, "en", **values).strip() for key, values in found]) == wasted


@pytest.mark.parametrize(("number", "source", "key", "line"), [
    ("08", "def average_gradients(model, share)\n    pass\n", "syntax", 1),
    ("08", "import torch\nreturn 1\n", "syntax", 2),
    ("08", "# \x82\xa0\n".encode("latin-1"), "syntax", 1),  # not UTF-8
    ("08", "def average(model, share):\n    pass\n", "no_function", None),
    ("08", "def average_gradients(model, share):\n    pass\ndef run_worker():\n    pass\n", "lessons_name", 3),
    ("04", "def demo_checkpoint(rank, world_size, args):\n    time.sleep(1)\n", "refused_here", 2),
])
def test_static_refusals(number, source, key, line):
    exercise, source = named(number), source if isinstance(source, bytes) else source.encode()
    reason = reason_to_refuse(exercise, source)
    assert reason[0] == key
    assert reason[1].get("line") == line
    for language in LANGUAGES:
        assert say("not_yet", language) in not_yet(exercise, "refused", [reason], key).render(language)


def test_static_desk(tmp_path, capsys):
    """What is solved and what was hinted at is kept; a broken file of it is no harm."""
    desk, first = Desk(tmp_path), ALL[0]
    assert desk.next_unsolved() is first
    desk.solve(first)
    assert Desk(tmp_path).next_unsolved() is ALL[1]
    assert main(["list", "--folder", str(tmp_path), "--lang", "en"]) == 0
    assert f"* {first.number}" in capsys.readouterr().out
    hints = [desk.next_hint(first) for _ in range(5)]
    assert hints[:2] == [0, 1]
    assert hints[-1] == len(first.text["en"]["hints"]) - 1
    desk.file(first).write_text("mine")
    desk.reset(first)
    assert desk.file(first).read_text() == first.stub.read_text()
    assert (tmp_path / f"{first.name}.py.old").read_text() == "mine"
    assert not desk.solved(first)
    (tmp_path / ".progress.json").write_text("{")
    assert desk.next_unsolved() is first


def test_static_desk_of_old_numbers(tmp_path, capsys):
    """Progress and files from before the exercises were renumbered count for none of today's."""
    old = ("05_ring_bytes", "03_average_gradients", "06_replicas_drift")  # the first one has left
    progress = {name: {"solved": True, "hints": 3} for name in old}
    (tmp_path / ".progress.json").write_text(json.dumps(progress))
    for name in old:
        (tmp_path / f"{name}.py").write_text("mine")
    desk = Desk(tmp_path)
    assert not any(desk.solved(one) for one in ALL)
    assert desk.next_unsolved() is ALL[0]
    assert [desk.next_hint(one) for one in ALL] == [0] * len(ALL)
    assert all(desk.file(one).read_text() == one.stub.read_text() for one in ALL)
    for language, none in (("en", f"0 of {len(ALL)} are solved."), ("ja", f"0 / {len(ALL)} 問")):
        assert main(["list", "--folder", str(tmp_path), "--lang", language]) == 0
        shown = capsys.readouterr().out
        assert none in shown
        assert "* " not in shown
    assert main(["run", "05_ring_bytes", "--folder", str(tmp_path)]) == 2
    desk.solve(named("03"))
    assert [one.name for one in ALL if desk.solved(one)] == ["03_survive_a_kill"]
    assert all((tmp_path / f"{name}.py").read_text() == "mine" for name in old)


def test_static_commands(tmp_path, capsys, monkeypatch):
    """`solution` names the lesson's line; `answer` waits for it to be solved; the locale counts."""
    common = ["--folder", str(tmp_path), "--lang", "ja"]
    assert main(["solution", "8", *common]) == 0
    shown = capsys.readouterr().out
    assert "p2p_collectives/train.py" in shown
    assert "dist.all_reduce(param.grad" in shown
    assert main(["answer", "8", *common]) == 0
    assert say("only_passed", "ja") in capsys.readouterr().out
    assert main(["hint", "99", *common]) == 2
    for setting, language in (("ja_JP.UTF-8", "ja"), ("C.UTF-8", "en")):
        monkeypatch.setenv("LC_ALL", setting)
        assert language_of_the_user() == language


def test_static_run_introduces(tmp_path, capsys, monkeypatch):
    """In Colab `run` is all that one sees: as long as nothing is written, it shows the task."""
    monkeypatch.setattr("exercises.watching.judge", lambda *_: False)
    command = ["run", "08", "--folder", str(tmp_path), "--lang", "ja"]
    task = named("08").text["ja"]["task"].strip()
    assert main(command) == 1
    assert task in capsys.readouterr().out
    (tmp_path / "08_average_gradients.py").write_text("def average_gradients(model, share):\n    pass\n")
    assert main(command) == 1
    assert capsys.readouterr().out == ""


# --- all exercises: make learn-check


@pytest.mark.learn
@pytest.mark.timeout(400)
@each
def test_as_shipped(exercise, tmp_path):
    expect(judged(exercise, exercise.stub.read_text(), tmp_path), exercise.shipped)


@pytest.mark.learn
@pytest.mark.timeout(400)
@each
def test_solution(exercise, tmp_path):
    verdict = judged(exercise, exercise.solution()[0], tmp_path)
    assert verdict.passed, verdict.render("en")


@pytest.mark.learn
@pytest.mark.timeout(400)
@others
def test_right(exercise, right, tmp_path):
    verdict = judged(exercise, attempt(exercise, right), tmp_path)
    assert verdict.passed, verdict.render("en")


@pytest.mark.learn
@pytest.mark.timeout(400)
@attempts
def test_wrong(exercise, wrong, tmp_path):
    expect(judged(exercise, attempt(exercise, wrong), tmp_path), wrong)


# --- of the engine: part of make test

def test_a_session_in_a_terminal(tmp_path):
    """Save the stub: the symptom. Save the solution: it passes. Then the next one."""
    exercise = named("04")
    command = [sys.executable, "-m", "exercises", "learn", "04", "--lang", "en",
               "--folder", str(tmp_path), "--patience", str(PATIENCE)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True)
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for("It is checked whenever you save the file")
        time.sleep(1.0)  # until files are watched
        file = tmp_path / f"{exercise.name}.py"
        file.write_text(exercise.stub.read_text() + "\n")
        screen.wait_for("FileNotFoundError")
        screen.wait_for("That means")
        os.write(ours, b"h\n")
        screen.wait_for("Hint 1 of")
        replacement = file.with_suffix(".tmp")  # as many editors save
        replacement.write_text(exercise.solution()[0])
        replacement.replace(file)
        screen.wait_for("Right.")
        screen.wait_for("n and Enter go on")
        os.write(ours, b"a\n")
        screen.wait_for("The answer:")
        os.write(ours, b"n\n")
        following = Desk(tmp_path).next_unsolved(after=exercise)
        screen.wait_for(following.text["en"]["title"])
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


def test_a_deadlock_says_who_waits(tmp_path):
    exercise = named("08")
    wrong = next(wrong for wrong in exercise.wrong if wrong.get("verdict") == "waits")
    text = attempt(exercise, wrong)
    verdict = judged(exercise, text, tmp_path, patience=1.0)
    assert verdict.kind == "waits"
    line = text[: text.index("dist.all_reduce")].count("\n") + 1
    assert re.search(rf"rank 0 \(rank0\) has waited for \d+ s in line {line} of your code: .*all",
                     verdict.render("en"))


def test_an_endless_prediction_ends(tmp_path):
    exercise = named("20")
    text = "def predict(way, n_ranks, n_bytes):\n    while True:\n        pass\n"
    assert judged(exercise, text, tmp_path, patience=0.1).kind in ("loops", "too_long")


@pytest.mark.parametrize(("text", "kind"), [("print('predicted: 7') or 'seven'", "off"), ("__import__('sys').exit()", "no_verdict")])
def test_a_prediction_that_prints_or_exits(text, kind, tmp_path):
    assert judged(named("20"), f"def predict(*_, **__):\n    return {text}\n", tmp_path).kind == kind


def test_a_learners_exception_shows_their_line(tmp_path):
    exercise = named("08")
    text = "def average_gradients(model, share):\n    share.oops()\n"
    shown = judged(exercise, text, tmp_path).render("en")
    assert "08_average_gradients.py, line 2, in average_gradients: share.oops()" in shown
    assert "AttributeError" in shown
    assert shown.count("line ") == 1


def test_the_real_run_has_the_learners_function(tmp_path, capfd):
    (tmp_path / "05_nonblocking.py").write_text("def run_nonblocking(*_):\n    raise ArithmeticError('mine')\n")
    assert main(["real", "05", "--folder", str(tmp_path)]) == 1
    assert "ArithmeticError: mine" in "".join(capfd.readouterr())


def test_interrupt_ends_all(tmp_path):
    """Ctrl-C while a check runs: status 130, and nothing is left."""
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "exercises", "run", "04", "--folder", str(tmp_path / "desk")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))

    def in_folder(process):  # its environment names the folder, or did when it was forked
        return any(str(tmp_path) in value for value in process.environ().values())

    deadline = time.monotonic() + 60
    while len(processes(in_folder)) < 3:  # it, the check, its ranks or their server
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=SOON_S) == 130
    all_end(in_folder)
    assert not list((tmp_path / "tmp").iterdir())
