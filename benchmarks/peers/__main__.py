"""CartPole from a cold start until solved: batch_rl against other libraries, on the same cores.

Each runs as a command of its own, in turns, with other random numbers in each round. Counted are
the seconds from its start until it says that it has solved CartPole, imports and processes
included. The others have environments of their own, which are made here at the first time (pinned
versions in torchrl.txt, sample_factory.txt; 2 GB). The programs with_torchrl.py and
with_sample_factory.py have the settings that their makers, or the RL Baselines3 Zoo, publish for
CartPole.

    python -m benchmarks.peers                 five rounds
    python -m benchmarks.peers --only batch_rl torchrl --rounds 1

Solved is, with TorchRL and Sample Factory, a mean above 475 of the last 100 episodes; with the
agent of batch_rl, a running reward above 475; half of it comes from the newest episode of each
environment.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report
from common.cli import PlainParser, bounded, require_writable_folder

from benchmarks.peers import environments
from benchmarks.peers.environments import HERE, ROOT, python_of

LIMIT_S = 600  # of one run
OURS = {"batch_rl": "batch_rl/until_solved.py"}  # a program of this repository
PEERS = {  # name: (program, which takes the seed; requirements)
    "torchrl": ("with_torchrl.py", "torchrl.txt"),
    "sample_factory": ("with_sample_factory.py", "sample_factory.txt"),
}


def ours(python, command, seed, folder):
    """Seconds of a command of this repository, and the environment's steps; None if unsolved."""
    started = time.time()
    subprocess.run([python, *command.split(), "--seed", str(seed), "--output_dir", folder],
                   cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S,
                   env=environments.ours())
    seconds = time.time() - started
    metrics = json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))
    return (seconds, metrics["env_steps"]) if metrics["solved"] else None


def peers(python, program, seed, folder):
    """The same of a program beside this one, until it says so."""
    started = time.time()
    process = subprocess.Popen([python, HERE / program, str(seed)], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               start_new_session=True, env={**os.environ, "TMPDIR": folder})
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has started
        process.wait()
        for environ in Path("/proc").glob("[0-9]*/environ"):  # also what has left its session
            with contextlib.suppress(OSError):
                if f"TMPDIR={folder}".encode() in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
    said = [json.loads(line) for line in out.splitlines() if line.startswith('{"at"')]
    solved = said and said[-1]["mean"] > 475
    return (said[-1]["at"] - started, said[-1]["env_steps"]) if solved else None


def build_parser():
    """Return the parser of the flags."""
    parser = PlainParser(__doc__)
    parser.set_defaults(example="benchmark_peers", device="cpu", seed=0, world_size=None)
    add, names = parser.add_argument, [*OURS, *PEERS]
    add("--only", choices=names, nargs="+", default=names, metavar="NAME",
        help=f"of {', '.join(names)}")
    add("--rounds", type=bounded(int, at_least=1), default=5, metavar="N", help="seeds")
    add("--environments", type=Path, default=environments.DEFAULT, metavar="DIR",
        help="where the others are installed")
    add("--output_dir", type=Path, default=Path("outputs", "benchmark_peers"), metavar="DIR",
        help="for metrics.json")
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    require_writable_folder("--output_dir", args.output_dir)
    pythons = {name: python_of(PEERS[name][1], args.environments.resolve())
               if name in PEERS else sys.executable for name in args.only}
    runs = {name: [] for name in args.only}
    with report.progress(args.rounds * len(runs), "run") as bar:
        for seed in range(args.rounds):
            for name, of_name in runs.items():
                bar.set_description(name)
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    run, command = ((peers, PEERS[name][0]) if name in PEERS
                                    else (ours, OURS[name]))
                    of_name.append(run(pythons[name], command, seed, folder))
                bar.update()
    rows = [row_of(name, of_name) for name, of_name in runs.items()]
    metrics = report.save_metrics(args, {"rounds": args.rounds, "rows": rows}, backend="several")
    for row in rows:
        print(f"{row['name']:22}{row['solved']} of {args.rounds} solved"
              + (f", in {row['seconds']:6.1f} s ({row['low']:.1f} to {row['high']:.1f}), with "
                 f"{row['env_steps']:,.0f} environment steps" if row["solved"] else ""))
    return metrics


def row_of(name, runs):
    """Medians and range of what was solved."""
    solved = [run for run in runs if run is not None]
    row = {"name": name, "solved": len(solved)}
    if solved:
        seconds, env_steps = zip(*solved, strict=True)
        row |= {"seconds": statistics.median(seconds), "low": min(seconds), "high": max(seconds),
                "env_steps": statistics.median(env_steps)}
    return row


if __name__ == "__main__":
    main()
