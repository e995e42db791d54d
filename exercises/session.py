"""The learner at work: files, progress, and what is said about them."""

import contextlib
import json
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from exercises import judging, predicting
from exercises.catalog import Exercise, exercises, say

POLL_S = 0.2  # how often the file is looked at; an editor may need as long to write it


class Session:
    """Judges the files of a learner in a folder, and keeps there what is solved.

    Args:
        folder: Of the files and of `.progress.json`.
        language: "ja" or "en".
        patience: Factor of all time limits.
    """

    def __init__(self, folder: Path, language: str, patience: float = 1.0) -> None:
        self.folder, self.language, self.patience = folder, language, patience
        folder.mkdir(parents=True, exist_ok=True)

    # --- what is kept

    def file(self, exercise: Exercise) -> Path:
        """Return the learner's file; if it is missing, make it from the stub."""
        path = self.folder / f"{exercise.name}.py"
        if not path.exists():
            shutil.copyfile(exercise.stub, path)
        return path

    def is_untouched(self, exercise: Exercise) -> bool:
        """Return whether the learner's file is the stub as it is shipped."""
        return self.file(exercise).read_bytes() == exercise.stub.read_bytes()

    @contextlib.contextmanager
    def progress(self, exercise: Exercise) -> Iterator[dict]:
        """Yield what is known of an exercise, and keep what the block changes."""
        path, known = self.folder / ".progress.json", {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
        known[exercise.name] = {"solved": False, "hints": 0, "tries": 0, "measured": {},
                                **known.get(exercise.name, {})}
        before = json.dumps(known)
        yield known[exercise.name]
        if (text := json.dumps(known)) != before:
            path.write_text(text, encoding="utf-8")

    def is_solved(self, exercise: Exercise) -> bool:
        """Return whether the learner has solved an exercise."""
        with self.progress(exercise) as known:
            return known["solved"]

    def next_unsolved(self, after: str = "") -> Exercise | None:
        """Return the first unsolved exercise after a number, or else the first one; or None."""
        open_ones = [one for one in exercises().values() if not self.is_solved(one)]
        later = [one for one in open_ones if one.number > after]
        return next(iter(later + open_ones), None)

    # --- the commands

    def say(self, key: str, **values: object) -> None:
        """Print words in the learner's language."""
        print(say(key, self.language, **values), flush=True)

    def show_list(self) -> None:
        """Print a line for each exercise, and how many are solved."""
        for one in exercises().values():
            path = say("afternoon", self.language, place=one.afternoon) if one.afternoon else ""
            self.say("listed", mark="*" if self.is_solved(one) else "-", number=one.number,
                     title=one.text[self.language]["title"], chapter=one.chapter,
                     kind=say(one.kind, self.language), minutes=one.minutes, path=path)
        solved = sum(map(self.is_solved, exercises().values()))
        self.say("counted", solved=solved, all=len(exercises()))

    def run(self, exercise: Exercise) -> bool:
        """Judge an exercise, after its task if nothing is written yet; return if it has passed."""
        if self.is_untouched(exercise):
            self.introduce(exercise)
        return self.judge(exercise)

    def hint(self, exercise: Exercise) -> None:
        """Print the next hint; the last one again and again."""
        hints = exercise.text[self.language]["hints"]
        with self.progress(exercise) as known:
            known["hints"] = number = min(known["hints"] + 1, len(hints))
        self.say("hint", number=number, all=len(hints), hint=hints[number - 1])

    def answer(self, exercise: Exercise) -> None:
        """Print the lesson's own function, why it is so, and the answer to the question."""
        text, path, line = exercise.solution()
        self.say("answer", file=path, line=line, text=text, **exercise.text[self.language])

    def reset(self, exercise: Exercise) -> None:
        """Bring the stub back; the learner's text stays beside it, as NN_name.py.old."""
        file = self.file(exercise)
        if not self.is_untouched(exercise):
            file.replace(f"{file}.old")
        with self.progress(exercise) as known:
            known.update(hints=0, tries=0, measured={})
        self.say("reset", file=self.file(exercise), old=f"{file.name}.old")

    def learn(self, exercise: Exercise | None) -> None:
        """Show an exercise and judge its file on each save; go on until the learner quits."""
        while exercise is not None:
            self.introduce(exercise)
            self.say("watching")
            exercise = self.work_on(exercise)

    def work_on(self, exercise: Exercise) -> Exercise | None:
        """Judge the learner's file on each save; return the next exercise, or None to end."""
        file, saved_at = self.file(exercise), self.saved_at(exercise)
        while True:
            typed, _, _ = select.select([sys.stdin], [], [], POLL_S)
            key = (sys.stdin.readline() or "q").strip().lower() if typed else ""
            if key == "r" or file.exists() and self.saved_at(exercise) != saved_at:
                time.sleep(POLL_S)  # an editor may write a file in several steps
                saved_at = self.saved_at(exercise)
                if self.judge(exercise):
                    self.say("go_on")
            if key == "h":
                self.hint(exercise)
            elif key == "a":
                self.answer(exercise)
            elif key == "n":
                following = self.next_unsolved(after=exercise.number)
                if following is None:
                    self.say("all_solved")
                return following
            elif key == "q":
                self.say("bye")
                return None

    def saved_at(self, exercise: Exercise) -> int:
        """Return when the learner's file was written."""
        return self.file(exercise).stat().st_mtime_ns

    # --- task and verdict

    def introduce(self, exercise: Exercise) -> None:
        """Print the task."""
        cell = say("cell", self.language, cell=exercise.cell) if exercise.cell else ""
        self.say("task", number=exercise.number, chapter=exercise.chapter, cell=cell,
                 kind=say(exercise.kind, self.language), minutes=exercise.minutes,
                 file=self.file(exercise), **exercise.text[self.language])

    def judge(self, exercise: Exercise) -> bool:
        """Print the verdict and what comes after it; return whether the exercise has passed.

        For the untouched stub, the verdict says what is wrong, but not what that means.
        """
        file, words = self.file(exercise), exercise.text[self.language]
        self.say("checks", name=file.name)
        with self.progress(exercise) as known:
            if exercise.kind == "predict":
                verdict = predicting.judge(exercise, file, known, self.patience, self.say)
            else:
                verdict = judging.judge(exercise, file, self.patience)
            known["solved"] |= verdict.passed
        if untouched := self.is_untouched(exercise):
            verdict.mistake = None
        print(verdict.render(self.language), flush=True)
        if untouched:
            self.say("shows", **words)
        if verdict.passed:
            self.say("after", number=exercise.number, command=exercise.after, **words)
        return verdict.passed
