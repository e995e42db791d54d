"""Measure the numbers of the pages again.

Every headline command runs several times, one round after the other.

    python -m benchmarks                    all (`make bench`; two hours and more on 2 cores)
    python -m benchmarks rpc_rl ddp_skew    some

`docs/results/NAME.json` has medians and ranges, of how many runs, on what, at which commit. A
measurement that is interrupted continues where it was (without `outputs/benchmarks/running/` it
begins anew). What the pages show of one run, its pictures in `docs/results/NAME/` and what it
printed, is of the run in the middle, the slowest and the fastest left out. `python -m
benchmarks.docs` then writes the numbers into the pages.
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

from common import report
from common.cli import PlainParser, bounded, refuse

from tqdm import tqdm

from benchmarks import docs, outputs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
KEPT = ROOT / "outputs" / "benchmarks"
HEADLINES = {  # name: (command, the keys that name the rows of its tables)
    "rpc_rl": ("rpc_rl/main.py --world_size 3", ()),
    "rpc_rl_fast": ("rpc_rl/fast.py --world_size 3", ()),
    "rpc_rl_agents": ("-m benchmarks.rpc_rl --world_size 3", ("agent",)),
    "rpc_rnn": ("rpc_rnn/main.py", ()),
    "batch_rl_16": ("batch_rl/vector.py --observers 5 --envs_per_observer 16",
                    ("observers", "mode")),
    "batch_rl_64": ("batch_rl/vector.py --observers 5 --envs_per_observer 64",
                    ("observers", "mode")),
    "batch_rl_one_process": ("-m benchmarks.one_process", ("num_envs",)),
    "batch_rl_train": ("batch_rl/until_solved.py", ()),
    "param_server": ("param_server/async_server.py", ()),
    "param_server_lock": ("param_server/main.py", ()),
    "param_server_4": ("param_server/async_server.py --world_size 5", ()),
    "param_server_4_lock": ("param_server/main.py --world_size 5", ()),
    "batch_update": ("param_server/batch_update.py", ()),
    "batch_update_timeline": ("-m tracing param_server/batch_update.py", ()),
    "ddp_rpc_hybrid": ("ddp_rpc_hybrid/main.py", ()),
    "ddp_rpc_hybrid_large": ("ddp_rpc_hybrid/main.py --num_embeddings 1000000 --epochs 20", ()),
    "ddp_rpc_hybrid_sparse": (
        "ddp_rpc_hybrid/main.py --sparse --num_embeddings 1000000 --epochs 20", ()),
    "hybrid_sharded": ("ddp_rpc_hybrid/sharded_table.py", ()),
    "ddp_basic": ("ddp_basic/main.py --world_size 2", ()),
    "ddp_skew": ("ddp_basic/skew.py --slow_rank 1 --delay 0.5 --timeout 2", ()),
    "ddp_skew_even": ("ddp_basic/skew.py --slow_rank 1 --delay 0 --timeout 2", ()),
    "ddp_elastic": ("ddp_basic/elastic.py", ()),
    "p2p_collectives": ("p2p_collectives/main.py --world_size 4", ()),
    "p2p_train": ("-m tracing p2p_collectives/train_flat.py --world_size 2", ()),
    "p2p_train_per_parameter": ("-m tracing p2p_collectives/train.py --world_size 2", ()),
    "p2p_train_ddp": ("-m tracing p2p_collectives/train_ddp.py --world_size 2", ()),
    "p2p_init_methods": ("p2p_collectives/init_methods.py --world_size 3", ()),
    "ring": ("p2p_collectives/ring_allreduce.py", ("world_size", "bytes", "algorithm")),
    "ring_sizes": (
        "p2p_collectives/ring_allreduce.py --repeats 3 --sizes "
        + " ".join(str(4**power) for power in range(6, 15)),  # 4 KiB to 256 MiB
        ("world_size", "bytes", "algorithm")),
    "shared_memory": ("p2p_collectives/shared_memory.py", ("collective", "bytes", "way")),
    "hierarchical": ("p2p_collectives/shared_memory.py --ranks_per_machine 2",
                     ("collective", "bytes", "way")),
    "peers": ("-m benchmarks.peers --rounds 2", ("name",)),
    "peers_collectives": ("-m benchmarks.peers.collectives --rounds 1",
                          ("world_size", "collective", "bytes", "way")),
    "single_machine": ("model_parallel_resnet/single_machine.py", ("model",)),
    "pipeline": ("-m tracing model_parallel_resnet/main.py --num_splits 1 2 4 8",
                 ("num_split",)),
}
# Not measured unless they are named: they install packages.
ON_REQUEST = {"peers", "peers_collectives"}


def scalars(metrics, labels, name=""):
    """The numbers of a metrics.json, without its long lists.

    Args:
        metrics: the dict.
        labels: the keys that name an entry of a list of dicts.
        name: of what `metrics` stands under.

    Returns:
        `{"rows.fast.env_steps_per_s": 1700.0}`.
    """
    found = {}
    for key, value in metrics.items():
        there = f"{name}.{key}".replace(" ", "_") if name else key.replace(" ", "_")
        if isinstance(value, dict):
            found |= scalars(value, labels, there)
        elif isinstance(value, list) and labels and all(isinstance(row, dict) for row in value):
            for row in value:
                which = ".".join(str(row[label]).replace(" ", "_")
                                 for label in labels if label in row)
                found |= scalars(row, labels, f"{there}.{which}")
        elif isinstance(value, bool | int | float):
            found[there] = value
    return found


def measure(name, folder):
    """Run a headline command once; what it leaves lies in `folder`, if it has come to its end."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    command, _ = HEADLINES[name]
    with subprocess.Popen(
            [sys.executable, *command.split(), "--output_dir", str(unfinished)], cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        try:
            printed, _ = process.communicate()
        finally:
            process.terminate()  # of an interruption it is told once, and ends what it has started
    if process.returncode:
        raise SystemExit(
            f"error: {command} ended with status {process.returncode}: {printed[-1000:]}")
    printed = printed.replace(str(unfinished), outputs.folder_of(command))
    (unfinished / "printed.txt").write_text(printed)
    unfinished.rename(folder)


def summary(name, runs):
    """What `docs/results/NAME.json` holds."""
    numbers = {key: [run[key] for run in runs if key in run] for key in runs[0]}
    here = report.machine(Namespace(device="auto"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            text=True)
    return {"command": f"python {HEADLINES[name][0]}", "commit": commit.stdout.strip(),
            "machine": {"cores": here["cpu_count"], "system": platform.system(),
                        "device": here["device"]},
            "versions": {"torch": here["torch"], "python": platform.python_version()},
            "median": {key: statistics.median(values) for key, values in numbers.items()},
            "range": {key: [min(values), max(values)] for key, values in numbers.items()},
            "runs": len(runs)}


def main(argv=None):
    """Measure; write JSON and pictures."""
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME",
        help=f"of {', '.join(HEADLINES)} (default: all but {', '.join(ON_REQUEST)})")
    add("--rounds", type=bounded(int, at_least=1), default=3, help="runs of each command")
    args = parser.parse_args(argv)
    unknown = set(args.names) - set(HEADLINES)
    if unknown:
        refuse(f"NAME {unknown.pop()} must be one of {', '.join(HEADLINES)}", None)
    names = args.names or [name for name in HEADLINES if name not in ON_REQUEST]
    os.environ["PICTURE_LANGUAGES"] = "en,ja"  # for the commands, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the command would run on
    bar = tqdm(total=args.rounds * len(names), unit="run")
    for number in range(1, 1 + args.rounds):  # a slow hour does not hit one command alone
        for name in names:
            bar.set_description(name)
            folder = KEPT / "running" / name / str(number)
            if not folder.exists():
                measure(name, folder)
            bar.update()
    show({name: finish(name, KEPT / "running" / name) for name in names})


def finish(name, folder):
    """Write `NAME.json`; the folder of the runs, moved to the finished ones."""
    runs = [scalars(metrics, HEADLINES[name][1]) for metrics in runs_in(folder)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    with report.replacing(RESULTS / f"{name}.json") as temporary:
        text = json.dumps(summary(name, runs), indent=1)
        text = re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", text)  # a range on one line
        temporary.write_text(text + "\n")
    finished = folder.parent.parent / "finished" / name
    shutil.rmtree(finished, ignore_errors=True)
    finished.parent.mkdir(exist_ok=True)
    return folder.rename(finished)


def runs_in(folder):
    """The metrics of the runs that have come to their end there, in their order."""
    whole = (run for run in folder.iterdir() if run.name.isdecimal())
    return [json.loads((run / "metrics.json").read_text())
            for run in sorted(whole, key=lambda run: int(run.name))]


def in_the_middle(runs):
    """The number of the run of median duration; where none is reported, of the last.

    Args:
        runs: their metrics, in the order in which they ran.
    """
    seconds = [run.get("wall_s") for run in runs]
    return len(runs) if None in seconds else 1 + seconds.index(statistics.median_low(seconds))


def show(folders):
    """Keep what one run of a command has printed and drawn.

    Pictures go into `RESULTS/NAME/`. Those that no page shows are not kept.

    Args:
        folders: `{name: where its runs are}`.
    """
    shown = "".join(page.read_text() for page in docs.pages())
    for name, folder in folders.items():
        middle = folder / str(in_the_middle(runs_in(folder)))
        outputs.keep(f"python {HEADLINES[name][0]}", (middle / "printed.txt").read_text())
        drawn = sorted(middle.glob("*.png"))
        if drawn:
            (RESULTS / name).mkdir(exist_ok=True)
        for path in drawn:
            shutil.copyfile(path, RESULTS / name / path.name)
        for path in (RESULTS / name).glob("*.png"):
            if f"{name}/{path.name}" not in shown:
                path.unlink()


if __name__ == "__main__":
    main()
