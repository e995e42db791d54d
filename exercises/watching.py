"""`make learn`: shows the next unsolved exercise, and judges the file whenever it is saved."""

import queue
import sys
import threading
import time
from pathlib import Path

import watchfiles

from exercises import judging, predicting
from exercises.catalog import Desk, Exercise, say

SETTLE_S = 0.2  # an editor may write a file in several steps


class Session:
    """Goes through one exercise after the other, in a terminal.

    Args:
        desk: the learner's files and progress.
        language: "ja" or "en".
        patience: for `check`.
    """

    def __init__(self, desk: Desk, language: str, patience: float = 1.0) -> None:
        self.desk, self.language, self.patience = desk, language, patience
        self.events = queue.Queue()  # pairs: ("saved", the name of a file), ("typed", a line)

    def run(self, exercise: Exercise) -> None:
        """Show this exercise and the next ones until the learner quits, or all are solved."""
        stop = threading.Event()
        for listen in (self._listen_to_files, self._listen_to_keys):
            threading.Thread(target=listen, args=(stop,), daemon=True).start()
        try:
            while exercise is not None:
                exercise = self._work_on(exercise)
        finally:
            stop.set()

    def _listen_to_files(self, stop):
        for changes in watchfiles.watch(self.desk.folder, recursive=False, stop_event=stop,
                                        raise_interrupt=False):
            for kind, path in changes:
                if kind != watchfiles.Change.deleted:
                    self.events.put(("saved", path))

    def _listen_to_keys(self, stop):
        for line in sys.stdin:
            self.events.put(("typed", line.strip().lower()))
        self.events.put(("typed", "q"))

    def _work_on(self, exercise):
        """Return the next exercise, or None to end."""
        file = self.desk.file(exercise)
        print()
        introduce(exercise, file, self.language)
        self._say("watching")
        self._drain()  # the copy of the stub has been "saved", too
        while True:
            kind, what = self.events.get()
            if kind == "saved" and what.endswith(f"/{file.name}") or what == "r":
                self._drain()
                if judge(exercise, self.desk, self.language, self.patience):
                    self._say("go_on")
            elif what == "h":
                give_hint(exercise, self.desk, self.language)
            elif what == "a":
                give_answer(exercise, self.desk, self.language)
            elif what == "n":
                following = self.desk.next_unsolved(after=exercise)
                if following is None:
                    self._say("all_solved")
                return following
            elif what == "q":
                self._say("bye")
                return None

    def _drain(self):
        """Forget the saves until now; what was typed stays."""
        time.sleep(SETTLE_S)
        typed = []
        while not self.events.empty():
            event = self.events.get()
            if event[0] == "typed":
                typed.append(event)
        for event in typed:
            self.events.put(event)

    def _say(self, key):
        print(say(key, self.language), flush=True)


def introduce(exercise: Exercise, file: Path, language: str) -> None:
    """Print the task."""
    words = exercise.text[language]
    cell = exercise.text.get("cell")
    print(say("title", language, number=exercise.number, title=words["title"]))
    print(say("where" if cell else "where_no_cell", language, chapter=exercise.chapter, cell=cell,
              kind=say(exercise.kind, language), minutes=exercise.minutes))
    print(f"\n{words['task'].strip()}\n")
    print(say("edit", language, file=file), flush=True)


def judge(exercise: Exercise, desk: Desk, language: str, patience: float = 1.0) -> bool:
    """Judge an exercise, print the verdict and what comes after it; return if it has passed.

    For the untouched stub, the verdict says what is wrong, but not what that means.
    """
    def show(key, values):
        print(say(key, language, **values), flush=True)

    file, words = desk.file(exercise), exercise.text[language]
    show("checks", {"name": file.name})
    verdict = (predicting.judge(exercise, file, desk, patience, show)
               if exercise.kind == "predict" else judging.judge(exercise, file, patience))
    is_shipped = file.read_bytes() == exercise.stub.read_bytes()
    if is_shipped:
        verdict.mistake = None
    print(verdict.render(language), flush=True)
    if is_shipped:
        show("shows", {"symptom": words["symptom"].strip()})
    if verdict.passed:
        desk.change(exercise, solved=True)
        show("after", {"number": exercise.number, "command": exercise.after})
        print(f"  {words['look'].strip()}")
        show("question", {"question": words["question"].strip()})
        show("unfold", {"number": exercise.number})
    return verdict.passed


def give_hint(exercise: Exercise, desk: Desk, language: str) -> None:
    """Print the next hint; the last one again and again."""
    hints = exercise.text[language]["hints"]
    number = min(desk.progress(exercise)["hints"] + 1, len(hints))
    desk.change(exercise, hints=number)
    hint = hints[number - 1].strip()
    print(say("hint", language, number=number, all=len(hints), hint=hint), flush=True)


def give_answer(exercise: Exercise, desk: Desk, language: str) -> None:
    """Print the answer to the question that follows a solved exercise."""
    if desk.progress(exercise)["solved"]:
        answer = exercise.text[language]["answer"].strip()
        print(say("answer", language, answer=answer), flush=True)
    else:
        print(say("only_passed", language), flush=True)
