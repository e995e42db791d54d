"""Run the commands of the pages, and keep what they print: what a page shows was printed.

    python -m benchmarks.outputs                    all of them, one after the other (ten minutes)
    python -m benchmarks.outputs batch_rl p2p_main  some
    python -m benchmarks.outputs --replays          record the messages of short runs instead

A transcript, `docs/results/transcripts/NAME.txt`, begins with its command: `$ python ...`. A
replay, `docs/results/replays/NAME.json`, begins with `{"command": "python -m tracing ...`. A new
one begins as a file that holds only its command; a replay also keeps the picture of its run if
there is an empty `NAME.png`.

`python -m benchmarks.docs` writes them between `<!-- output NAME -->` and `<!-- end -->`, and the
links to the replays after `<!-- replay NAME -->`.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT
from common.cli import PlainParser

from tracing import replay

TRANSCRIPTS, REPLAYS = ROOT / "docs/results/transcripts", ROOT / "docs/results/replays"
FIRST, LAST = 3, 12  # lines of a longer output that are kept


def command_of(path: Path) -> str:
    """Return the command of a transcript or a replay."""
    text = path.read_text(encoding="utf-8")
    return (json.loads(text)["command"] if path.suffix == ".json"
            else text.splitlines()[0].removeprefix("$ "))


def folder_of(command: str) -> str:
    """Return where a command, such as `python rpc_rl/main.py --seed 1`, writes by default."""
    program = Path(next(word for word in command.split() if word.endswith(".py")))
    folder = program.parent if program.stem == "main" else program.with_suffix("")
    return str(Path("outputs/trace" if "-m tracing " in command else "outputs", folder))


def keep(command: str, printed: str) -> None:
    """Write what a command has printed, its middle left out, into its transcripts."""
    lines = printed.splitlines()
    if len(lines) > FIRST + LAST + 1:
        lines[FIRST:-LAST] = ["..."]
    for path in TRANSCRIPTS.glob("*.txt"):
        if command_of(path) == command:
            path.write_text("\n".join([f"$ {command}", *lines]) + "\n", encoding="utf-8")


def run(command: str, *more: str) -> subprocess.CompletedProcess:
    """Run a command of the pages, with the Python of this process."""
    words = [sys.executable, *shlex.split(command)[1:], *more]
    return subprocess.run(words, cwd=ROOT, encoding="utf-8", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          env={**os.environ, "PICTURE_LANGUAGES": "en,ja"})


def print_again(path: Path) -> None:
    """Run the command of a transcript, and keep what it prints."""
    command = command_of(path)
    done = run(command)
    if done.returncode:
        raise SystemExit(f"error: {command} ended with status {done.returncode}: {done.stdout}")
    keep(command, done.stdout)


def record_again(path: Path) -> None:
    """Run the program of a replay, and keep its data; a deadlock ends with status 1."""
    command = command_of(path)
    with tempfile.TemporaryDirectory() as folder:
        done = run(command, "--output_dir", folder)
        if done.returncode != path.name.startswith("deadlock"):
            raise SystemExit(f"error: {command} ended with status {done.returncode}: "
                             f"{done.stdout}")
        data = replay.data_of(Path(folder, "replay.html").read_text(encoding="utf-8"))
        path.write_text(f'{{"command":{json.dumps(command)},{data[1:]}\n', encoding="utf-8")
        if path.with_suffix(".png").exists():
            for picture in Path(folder).glob("timeline*.png"):
                kept = picture.name.replace("timeline", path.stem)
                path.with_name(kept).write_bytes(picture.read_bytes())


def main(argv: list[str] | None = None) -> None:
    """Run the commands, and write what they print."""
    parser = PlainParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="transcripts or replays")
    parser.add_argument("--replays", action="store_true", help="record the messages of short runs")
    args = parser.parse_args(argv)
    folder, again = (REPLAYS, record_again) if args.replays else (TRANSCRIPTS, print_again)
    known = {path.stem: path for path in sorted(folder.glob("*.json" if args.replays else "*.txt"))}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    for name in args.names or known:
        again(known[name])
        print(f"{name}: {known[name].relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
