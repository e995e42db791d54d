"""The workbook in a terminal.

    python -m exercises                the next unsolved exercise, judged on each save
    python -m exercises list           all exercises, and which are solved
    python -m exercises run 08         judge one
    python -m exercises hint 08        the next hint
    python -m exercises solution 08    the lesson's function, and why it is so
    python -m exercises answer 08      the answer to the question behind a solved one
    python -m exercises real 08        the lesson's program, with your function
    python -m exercises reset 08       the stub as it was shipped
"""

import argparse
import locale
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from common import ROOT

from exercises import watching
from exercises.catalog import HERE, LANGUAGES, Desk, Exercise, exercises, named, say
from exercises.judging import copy_of


def language_of_the_user() -> str:
    """Return "ja" if the locale is Japanese, otherwise "en"."""
    settings = [os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG")]
    setting = next(filter(None, settings), None) or locale.getlocale()[0] or ""
    return "ja" if setting.lower().startswith("ja") else "en"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands."""
    parser = argparse.ArgumentParser(prog="python -m exercises", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ["learn", "list", "run", "hint", "solution", "answer", "real", "reset"]
    add = parser.add_argument
    add("command", nargs="?", choices=commands, default="learn", help="(default: learn)")
    add("number", nargs="?", help="of an exercise, or its name (default: the next unsolved one)")
    add("--lang", choices=LANGUAGES, default=language_of_the_user(), help="(default: the locale's)")
    add("--folder", type=Path, default=HERE, metavar="DIR",
        help="where your files are (default: %(default)s)")
    add("--patience", type=float, default=1.0, metavar="N",
        help="multiplies all time limits, for a slow machine (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 1 if an exercise is not solved yet."""
    args = build_parser().parse_args(argv)
    language = args.lang
    try:
        desk = Desk(args.folder)
        if args.command == "list":
            return show_list(desk, language)
        exercise = named(args.number) if args.number else desk.next_unsolved()
        if exercise is None and args.number:
            print(say("unknown", language, name=args.number), file=sys.stderr)
            return 2
        if exercise is None:
            print(say("all_solved", language))
            return 0
        return run(args, desk, exercise)
    except PermissionError as error:  # the checkout may belong to another user
        print(say("not_writable", language, path=error.filename), file=sys.stderr)
        return 2


def run(args: argparse.Namespace, desk: Desk, exercise: Exercise) -> int:
    """Run a command on one exercise; return the exit status."""
    language, file = args.lang, desk.file(exercise)
    if args.command == "learn":
        watching.Session(desk, language, args.patience).run(exercise)
    elif args.command == "run":
        if file.read_bytes() == exercise.stub.read_bytes():  # nothing is written yet
            watching.introduce(exercise, file, language)
        return 0 if watching.judge(exercise, desk, language, args.patience) else 1
    elif args.command == "hint":
        watching.give_hint(exercise, desk, language)
    elif args.command == "answer":
        watching.give_answer(exercise, desk, language)
    elif args.command == "real":
        return run_really(exercise, file)
    elif args.command == "solution":
        text, lesson, line = exercise.solution()
        print(say("solution", language, file=lesson, line=line))
        print(f"\n{text}")
        print(say("why", language, why=exercise.text[language]["why"].strip()))
    else:
        desk.reset(exercise)
        print(say("reset", language, file=file, old=f"{file.name}.old"))
    return 0


def show_list(desk: Desk, language: str) -> int:
    """Print a line for each exercise, and how many are solved."""
    solved = [one for one in exercises() if desk.progress(one)["solved"]]
    for one in exercises():
        path = say("afternoon", language, place=one.afternoon) if "afternoon" in one.text else ""
        print(say("listed", language, mark="*" if one in solved else "-", number=one.number,
                  title=one.text[language]["title"], chapter=one.chapter,
                  kind=say(one.kind, language), minutes=one.minutes, path=path))
    print(say("counted", language, solved=len(solved), all=len(exercises())))
    return 0


def run_really(exercise: Exercise, file: Path) -> int:
    """Run the command `after` with the learner's function in the lesson; return its status.

    A prediction is part of no program: the lesson runs as it is.
    """
    command = [sys.executable, *shlex.split(exercise.after)[1:]]
    if exercise.kind == "predict":
        return subprocess.run(command, cwd=ROOT).returncode
    command += ["--output_dir", str(Path("outputs/exercises", exercise.name).absolute())]
    with copy_of(exercise, file) as tree:
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        return subprocess.run(command, cwd=tree, env=environ).returncode


if __name__ == "__main__":
    for signum in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: end everything that was started
        signal.signal(signum, signal.default_int_handler)
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print()
        status = 130
    except BrokenPipeError:  # `| head -4` reads no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    sys.exit(status)
