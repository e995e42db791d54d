"""The workbook in a terminal.

    python -m exercises                the next unsolved exercise, judged on each save
    python -m exercises list           all exercises, and which are solved
    python -m exercises run 08         judge one
    python -m exercises hint 08        the next hint
    python -m exercises answer 08      the lesson's function, and why; the question's answer
    python -m exercises reset 08       the stub as it was shipped
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from exercises.catalog import HERE, LANGUAGES, Exercise, exercises
from exercises.session import Session


def language_of_the_user() -> str:
    """Return "ja" if the locale is Japanese, otherwise "en"."""
    settings = map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "ja" if next(filter(None, settings), "").lower().startswith("ja") else "en"


def named(word: str) -> Exercise:
    """Return the exercise of a number, or of the name of its file."""
    number = Path(word).name.partition("_")[0].zfill(2)
    if number not in exercises():
        raise argparse.ArgumentTypeError(f"{word} must be a number from 01 to {len(exercises())}")
    return exercises()[number]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands."""
    parser = argparse.ArgumentParser(prog="python -m exercises", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ["learn", "list", "run", "hint", "answer", "reset"]
    add = parser.add_argument
    add("command", nargs="?", choices=commands, default="learn", help="(default: learn)")
    add("exercise", nargs="?", type=named, help="its number (default: the next unsolved one)")
    add("--lang", choices=LANGUAGES, default=language_of_the_user(), help="(default: the locale's)")
    add("--folder", type=Path, default=HERE, metavar="DIR",
        help="where your files are (default: %(default)s)")
    add("--patience", type=float, default=1.0, metavar="N",
        help="multiplies all time limits, for a slow machine (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 1 if an exercise is not solved yet."""
    args = build_parser().parse_args(argv)
    session = Session(args.folder, args.lang, args.patience)
    if args.command == "list":
        session.show_list()
        return 0
    exercise = args.exercise or session.next_unsolved()
    if exercise is None:
        session.say("all_solved")
        return 0
    return int(getattr(session, args.command)(exercise) is False)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # end all that was started
        signal.signal(signum, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head -4` reads no more
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
