"""Measure the numbers of the pages again.

Every headline command runs several times, one round after the other.

    python -m benchmarks                    all (`make bench`; about an hour on 2 cores)
    python -m benchmarks rpc_rl batch_rl    some
    python -m benchmarks --quick            each once, with flags that make it short
    python -m benchmarks --draw             only the pictures again, from the last measurement

`docs/results/NAME.json` keeps what each run measured, on what, at which commit, with medians and
ranges; a run that is interrupted continues where it was. `docs/results/NAME/` has the pictures in
both languages. `python -m benchmarks.docs` then writes the numbers into the pages. `--quick` writes
into `outputs/benchmarks/quick/` instead.
"""

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import report
from common.cli import PlainParser, bounded, refuse
from common.worker_env import core_count
from tqdm import tqdm

from benchmarks import pictures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
KEPT = ROOT / "outputs" / "benchmarks"
HEADLINES = {  # name: (command, what makes it short, the keys that name the rows of its tables)
    "start": ("-m benchmarks.start --commands", "--ranks 2 --rounds 1", ()),
    "rpc_rl": ("rpc_rl/main.py --world_size 3", "--max_episodes 2", ()),
    "rpc_rl_agents": ("-m benchmarks.rpc_rl --world_size 3", "--rounds 2 --min_steps 1",
                      ("agent",)),
    "rpc_rnn": ("rpc_rnn/main.py", "--epochs 1", ()),
    "rpc_rnn_protocols": ("-m benchmarks.rpc_rnn", "", ()),
    "batch_rl": ("batch_rl/main.py", "--observers 1 --num_episode 1 --num_steps 20",
                 ("observers", "mode")),
    "batch_rl_16": ("batch_rl/main.py --observers 5 --envs_per_observer 16",
                    "--num_episode 1 --num_steps 20", ("observers", "mode")),
    "batch_rl_train": ("batch_rl/main.py --mode train --observers 2 --envs_per_observer 8",
                       "--num_steps 50 --reward_threshold 10 --max_episodes 2", ()),
    "param_server": ("param_server/main.py", "--epochs 1", ()),
    "param_server_lock": ("param_server/main.py --consistency lock", "--epochs 1", ()),
    "param_server_4": ("param_server/main.py --world_size 5", "--epochs 1", ()),
    "param_server_4_lock": ("param_server/main.py --world_size 5 --consistency lock", "--epochs 1",
                            ()),
    "param_server_consistency": ("-m benchmarks.param_server", "", ()),
    "batch_update": ("param_server/batch_update.py --timeline",
                     "--arch resnet18 --image_size 32 --world_size 2 --num_updates 2", ()),
    "batch_update_tensors": ("param_server/batch_update.py --send tensors",
                             "--arch resnet18 --image_size 32 --world_size 2 --num_updates 2", ()),
    "ddp_rpc_hybrid": ("ddp_rpc_hybrid/main.py", "--epochs 2", ()),
    "ddp_rpc_hybrid_large": ("ddp_rpc_hybrid/main.py --num_embeddings 1000000 --epochs 20",
                             "--epochs 2", ()),
    "ddp_rpc_hybrid_sparse": (
        "ddp_rpc_hybrid/main.py --sparse --num_embeddings 1000000 --epochs 20", "--epochs 2", ()),
    "ddp_basic": ("ddp_basic/main.py --world_size 2", "--steps 2", ()),
    "ddp_skew": ("ddp_basic/main.py --demo skew --slow_rank 1 --delay 0.5 --timeout 2", "", ()),
    "ddp_skew_even": ("ddp_basic/main.py --demo skew --slow_rank 1 --delay 0 --timeout 2", "", ()),
    "ddp_elastic": ("ddp_basic/elastic.py", "--epochs 1", ()),
    "p2p_collectives": ("p2p_collectives/main.py --world_size 4", "--demo blocking", ()),
    "p2p_train": ("p2p_collectives/train.py --world_size 2 --timeline", "--epochs 1", ()),
    "p2p_train_per_parameter": (
        "p2p_collectives/train.py --world_size 2 --sync per_parameter --timeline", "--epochs 1",
        ()),
    "p2p_train_ddp": ("p2p_collectives/train.py --world_size 2 --sync ddp --timeline",
                      "--epochs 1", ()),
    "p2p_init_methods": ("p2p_collectives/init_methods.py --world_size 3", "", ()),
    "ring": ("p2p_collectives/ring_allreduce.py", "--sizes 65536 --repeats 2 --world_size 2",
             ("world_size", "bytes", "algorithm")),
    "ring_sizes": (
        "p2p_collectives/ring_allreduce.py --repeats 3 --sizes "
        + " ".join(str(4**power) for power in range(6, 15)),  # 4 KiB to 256 MiB
        "--sizes 4096 65536 1048576 --repeats 2 --world_size 2",
        ("world_size", "bytes", "algorithm")),
    "single_machine": ("model_parallel_resnet/single_machine.py", "--batch_size 4 --image_size 33",
                       ("model",)),
    "pipeline": ("model_parallel_resnet/main.py --num_splits 1 2 4 8 --timeline",
                 "--arch resnet18 --image_size 64 --num_splits 2 --num_batches 1", ("num_split",)),
    "pipeline_schedules": ("-m benchmarks.model_parallel_resnet --num_splits 4",
                           "--arch resnet18 --image_size 64 --batch_size 8 --num_batches 1",
                           ("way", "num_split")),
}


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


def command_of(name, quick):
    """The words of a headline command."""
    command, short, _ = HEADLINES[name]
    return f"{command} {short}".strip() if quick else command


def measure(name, folder, quick):
    """Run a headline command once; what it leaves lies in `folder`, if it has come to its end."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    command = command_of(name, quick)
    ended = subprocess.run(
        [sys.executable, *command.split(), "--output_dir", str(unfinished)], cwd=ROOT,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if ended.returncode:
        raise SystemExit(
            f"error: {command} ended with status {ended.returncode}: {ended.stderr[-1000:]}")
    unfinished.rename(folder)


def summary(name, runs):
    """What `docs/results/NAME.json` holds."""
    numbers = {key: [run[key] for run in runs if key in run] for key in runs[0]}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            text=True)
    return {"command": f"python {HEADLINES[name][0]}", "commit": commit.stdout.strip(),
            "machine": {"cores": core_count(), "system": platform.system(), "device": device()},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "median": {key: statistics.median(values) for key, values in numbers.items()},
            "range": {key: [min(values), max(values)] for key, values in numbers.items()},
            "runs": runs}


def device():
    """Where the models computed."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main(argv=None):
    """Measure; write JSON and pictures."""
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(HEADLINES)} (default: all)")
    add("--rounds", type=bounded(int, at_least=1), default=3, help="runs of each command")
    add("--quick", action="store_true", help="each once, short; leaves docs/ alone")
    add("--draw", action="store_true", help="measure nothing; draw the last measurement again")
    add("--fresh", action="store_true", help="do not continue an interrupted measurement")
    args = parser.parse_args(argv)
    unknown = set(args.names) - set(HEADLINES)
    if unknown:
        refuse(f"NAME {unknown.pop()} must be one of {', '.join(HEADLINES)}", None)
    names = args.names or list(HEADLINES)
    os.environ["PICTURE_LANGUAGES"] = "en,ja"  # for the commands, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the command would run on
    kept, results = (KEPT / "quick", KEPT / "quick") if args.quick else (KEPT, RESULTS)
    rounds = range(1, 1 + (1 if args.quick else args.rounds))
    folders = {name: kept / "running" / name for name in names}
    if args.draw:
        folders = {name: kept / "finished" / name for name in names}
    else:
        if args.fresh or args.quick:
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
        bar = tqdm(total=len(rounds) * len(names), unit="run")
        for number in rounds:  # round by round: a slow hour does not hit one command alone
            for name in names:
                bar.set_description(name)
                if not (folders[name] / str(number)).exists():
                    measure(name, folders[name] / str(number), args.quick)
                bar.update()
        folders = {name: finish(name, folder, results) for name, folder in folders.items()}
    draw(folders, results, args.quick)


def finish(name, folder, results):
    """Write `NAME.json`; the folder of the runs, moved to the finished ones."""
    runs = [scalars(metrics, HEADLINES[name][2]) for metrics in runs_in(folder)]
    results.mkdir(parents=True, exist_ok=True)
    with report.replacing(results / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(summary(name, runs), indent=1) + "\n")
    finished = folder.parent.parent / "finished" / name
    shutil.rmtree(finished, ignore_errors=True)
    finished.parent.mkdir(exist_ok=True)
    return folder.rename(finished)


def runs_in(folder):
    """The metrics of the runs that are kept there, in their order."""
    return [json.loads((run / "metrics.json").read_text())
            for run in sorted(folder.iterdir(), key=lambda run: int(run.name))]


def draw(folders, results, quick):
    """Draw the pictures of commands, or take them from their last run, into `results/NAME/`.

    Args:
        folders: `{name: where its runs are}`.
        results: the folder.
        quick: whether they were short.
    """
    runs = {name: runs_in(folder) for name, folder in folders.items()}
    for name, folder in folders.items():
        drawn = sorted((folder / str(len(runs[name]))).glob("*.png"))
        if drawn:
            (results / name).mkdir(exist_ok=True)
        for path in drawn:
            shutil.copyfile(path, results / name / path.name)
        if name in pictures.FROM_ALL_RUNS:
            pictures.draw(name, command_of(name, quick), runs[name], results / name)
    if set(sum(pictures.CONSISTENCY.values(), ())) <= set(runs):
        pictures.draw_consistency(runs, results / "param_server" / "consistency.png")


if __name__ == "__main__":
    main()
