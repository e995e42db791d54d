"""Measure the numbers of the pages again.

    python -m benchmarks                    all (`make bench`; two hours and more on 2 cores)
    python -m benchmarks rpc_rl ddp_skew    some

`docs/results/NAME.json` holds a command, the medians and ranges of several runs, the machine and
the commit. A new measurement begins as a file that holds only `{"command": "python ..."}`, and
`"rows_by"`, the keys that name an entry, if its metrics.json has a list of dicts.

All commands run once, then all run again, so that a slow hour does not hit one command alone. An
interrupted measurement continues where it was; without `outputs/benchmarks/running/` it begins
anew. The pictures and the printed lines on the pages are those of the run of median duration.
`python -m benchmarks.docs` then writes the numbers into the pages.
"""

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from common import ROOT, report
from common.cli import PlainParser, bounded, refuse

from tqdm import tqdm

from benchmarks import docs, outputs

RESULTS = ROOT / "docs" / "results"
KEPT = ROOT / "outputs" / "benchmarks"
ONLY_BY_NAME = "peers"  # these measurements install packages


def names_of_all() -> list[str]:
    """Return the names of all measurements."""
    return sorted(path.stem for path in RESULTS.glob("*.json") if "command" in read(path.stem))


def read(name: str) -> dict:
    """Return what `docs/results/NAME.json` holds."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def scalars(metrics: dict, rows_by: list[str], name: str = "") -> dict[str, float]:
    """Return the numbers of a metrics.json, without its long lists.

    Args:
        metrics: Content of metrics.json, or a dict in it.
        rows_by: Keys that name an entry of a list of dicts.
        name: Path of `metrics` in the file.

    Returns:
        `{"rows.fast.env_steps_per_s": 1700.0}`.
    """
    found = {}
    for key, value in metrics.items():
        path = f"{name}.{key}".replace(" ", "_") if name else key.replace(" ", "_")
        if isinstance(value, dict):
            found |= scalars(value, rows_by, path)
        elif isinstance(value, list) and rows_by and all(isinstance(row, dict) for row in value):
            for row in value:
                labels = [str(row[key]).replace(" ", "_") for key in rows_by if key in row]
                found |= scalars(row, rows_by, ".".join([path, *labels]))
        elif isinstance(value, bool | int | float):
            found[path] = value
    return found


def measure(command: str, folder: Path) -> None:
    """Run a command once; `folder` holds its output if it has come to its end."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    words = command.removeprefix("python ").split()
    with subprocess.Popen(
            [sys.executable, *words, "--output_dir", str(unfinished)], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            printed, _ = process.communicate()
        finally:
            process.terminate()  # after Ctrl-C the command must end its own processes
    if process.returncode:
        raise SystemExit(
            f"error: {command} ended with status {process.returncode}: {printed[-1000:]}")
    printed = printed.replace(str(unfinished), outputs.folder_of(command))
    (unfinished / "printed.txt").write_text(printed, encoding="utf-8")
    unfinished.rename(folder)


def runs_in(folder: Path) -> list[dict]:
    """Return the metrics of the finished runs of a measurement, in order."""
    finished = sorted((run for run in folder.iterdir() if run.name.isdecimal()),
                      key=lambda run: int(run.name))
    return [json.loads((run / "metrics.json").read_text(encoding="utf-8")) for run in finished]


def finish(name: str, folder: Path) -> None:
    """Write `docs/results/NAME.json`, the pictures that pages show, and the printed lines."""
    before, runs = read(name), runs_in(folder)
    rows = [scalars(run, before.get("rows_by", [])) for run in runs]
    numbers = {key: [row[key] for row in rows if key in row] for key in rows[0]}
    here = report.machine(Namespace(device="auto"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            encoding="utf-8").stdout.strip()
    text = json.dumps({
        **{key: before[key] for key in ("command", "rows_by") if key in before}, "commit": commit,
        "machine": {"cores": here["cpu_count"], "system": platform.system(),
                    "device": here["device"]},
        "versions": {"torch": here["torch"], "python": platform.python_version()},
        "median": {key: statistics.median(values) for key, values in numbers.items()},
        "range": {key: [min(values), max(values)] for key, values in numbers.items()},
        "runs": len(runs)}, indent=1)
    text = re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", text)  # a range on one line
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    show(name, before["command"], folder / str(middle_run(runs)))


def middle_run(runs: list[dict]) -> int:
    """Return the number of the run of median duration; of the last run if none says it."""
    seconds = [run.get("wall_s") for run in runs]
    return len(runs) if None in seconds else 1 + seconds.index(statistics.median_low(seconds))


def show(name: str, command: str, run: Path) -> None:
    """Keep the printed lines of a run, and its pictures that a page shows."""
    outputs.keep(command, (run / "printed.txt").read_text(encoding="utf-8"))
    shown = "".join(page.read_text(encoding="utf-8") for page in docs.pages())
    for picture in run.glob("*.png"):
        if f"{name}/{picture.name}" in shown:
            (RESULTS / name).mkdir(exist_ok=True)
            shutil.copyfile(picture, RESULTS / name / picture.name)


def main(argv: list[str] | None = None) -> None:
    """Measure; write JSON and pictures."""
    known = names_of_all()
    parser = PlainParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"measurements (default: all but {ONLY_BY_NAME}*): {' '.join(known)}")
    parser.add_argument("--rounds", type=bounded(int, at_least=1), default=3,
                        help="number of runs of each command")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(known):
        refuse(f"NAME {min(unknown)} must be one of {', '.join(known)}", None)
    names = args.names or [name for name in known if not name.startswith(ONLY_BY_NAME)]
    os.environ["PICTURE_LANGUAGES"] = "en,ja"  # for the commands
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the command would run on
    bar = tqdm(total=args.rounds * len(names), unit="run")
    for number in range(1, 1 + args.rounds):
        for name in names:
            bar.set_description(name)
            folder = KEPT / "running" / name / str(number)
            if not folder.exists():
                measure(read(name)["command"], folder)
            bar.update()
    for name in names:
        finish(name, KEPT / "running" / name)
        shutil.rmtree(KEPT / "running" / name)


if __name__ == "__main__":
    main()
