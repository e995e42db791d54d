"""`make learn`: shows the next unsolved exercise, and judges the file whenever it is saved."""

import queue
import sys
import threading
import time
from pathlib import Path

import watchfiles

from exercises.catalog import Desk, Exercise
from exercises.checking import check
from exercises.words import say

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
    """Print what there is to do."""
    words = exercise.text[language]
    kind = say(exercise.kind, language)
    print(say("title", language, number=exercise.number, title=words["title"]))
    cell = exercise.text.get("cell")
    print(say("where" if cell else "where_no_cell", language, chapter=exercise.chapter, cell=cell,
              kind=kind, minutes=exercise.minutes))
    print(f"\n{words['task'].strip()}\n")
    print(say("edit", language, file=file))
    sys.stdout.flush()


def judge(exercise: Exercise, desk: Desk, language: str, patience: float = 1.0) -> bool:
    """Check an exercise, print the verdict and what comes after it; return if it has passed.

    As long as nothing is changed, what is seen is said, and not what it means.
    """
    file = desk.file(exercise)
    words = exercise.text[language]
    print(say("checks", language, name=file.name), flush=True)
    verdict = check(exercise, file, patience,
                    lambda key, values: print(say(key, language, **values), flush=True))
    is_shipped = file.read_bytes() == exercise.stub.read_bytes()
    if is_shipped:
        verdict.message = None
    print(verdict.render(language), flush=True)
    if is_shipped:
        print(say("shows", language, symptom=words["symptom"].strip()), flush=True)
    if verdict.passed:
        desk.solve(exercise)
        print(say("after", language, number=exercise.number, command=exercise.after))
        print(f"  {words['look'].strip()}")
        print(say("question", language, question=words["question"].strip()))
        print(say("unfold", language, number=exercise.number), flush=True)
    return verdict.passed


def give_hint(exercise: Exercise, desk: Desk, language: str) -> None:
    """Print the next hint."""
    hints, number = exercise.text[language]["hints"], desk.next_hint(exercise)
    hint = hints[number].strip()
    print(say("hint", language, number=number + 1, all=len(hints), hint=hint), flush=True)


def give_answer(exercise: Exercise, desk: Desk, language: str) -> None:
    """Print the answer to the question behind an exercise, once that is solved."""
    if desk.solved(exercise):
        answer = exercise.text[language]["answer"].strip()
        print(say("answer", language, answer=answer), flush=True)
    else:
        print(say("only_passed", language), flush=True)
