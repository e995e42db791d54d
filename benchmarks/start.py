"""What does it cost to start the processes, and what does the fork server save?

Both start methods, in turns. Each measurement is the first `launch` of a Python process of its own:
imports, an optimizer, a process group that all have joined, the end. With the fork server a second
launch follows in the same Python process: it costs only the forks.

    python benchmarks/start.py --ranks 2 4 11 33 --rounds 3
    python benchmarks/start.py --commands                      also two commands of the lessons
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium  # noqa: F401  from here on what the lessons import, and with them every worker
import torch
import torch.distributed as dist
import torch.distributed.autograd  # noqa: F401
from common import report
from common.cli import Parser, PlainParser, bounded, require_processes, require_writable_folder
from common.launcher import launch
from common.session import group_options
from torch.distributed import rpc  # noqa: F401
from torch.distributed.optim import DistributedOptimizer  # noqa: F401
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
SPAWN, FORKSERVER = "spawn", "forkserver"
COMMANDS = ("rpc_rl/main.py --world_size 33 --max_episodes 2 --total_steps_per_episode 16000",
            "batch_rl/fast.py --observers 10 --num_episode 1 --num_steps 50")
PATIENCE = "--timeout", "600"  # a slow start shall be measured, not given up
IN_A_NEW_PROCESS = "from benchmarks.start import time_launches; time_launches()"


def role_name(rank, world_size):
    """The name of a rank in messages."""
    return f"worker{rank}"


def run_worker(rank, world_size, args):
    """What the lessons begin with; rank 0 reports."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports much more
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()
    return {} if rank == 0 else None


def time_launches(argv=None):
    """Print, as JSON, how long this process's first launch takes; with the fork server a second."""
    args = Parser("benchmark_start", __doc__).parse_args(argv)
    launches = 2 if args.start_method == FORKSERVER else 1
    print(json.dumps([launch(run_worker, args, role_name)["wall_s"] for _ in range(launches)]))


def time_ranks(ranks, method):
    """The list that `time_launches` prints."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--world_size", str(ranks), "--start_method", method, "--output_dir", folder]
        command = [sys.executable, "-c", IN_A_NEW_PROCESS, *flags, *PATIENCE]
        process = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout)


def time_command(command, method):
    """The seconds of a whole command, in a list."""
    script, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--start_method", method, "--output_dir", folder, *PATIENCE]
        command = [sys.executable, ROOT / script, *flags]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [time.perf_counter() - started]


def build_parser():
    """What is started, and how often."""
    parser = PlainParser(__doc__)
    parser.set_defaults(example="benchmark_start", device="cpu", seed=0)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--ranks", type=count, nargs="+", default=[2, 4, 11, 33], metavar="N", help="processes")
    add("--rounds", type=count, default=3, metavar="N", help="measurements of each kind")
    add("--commands", action="store_true", help=f"time these, too: {'; '.join(COMMANDS)}")
    add("--output_dir", type=Path, default=Path("outputs", "benchmark_start"), metavar="DIR",
        help="for metrics.json")
    return parser


def measure(args):
    """`{what is started: {method, or "second" for a second launch: the seconds of each round}}`."""
    kinds = {f"{ranks} processes": (time_ranks, ranks) for ranks in args.ranks}
    kinds.update({command: (time_command, command) for command in COMMANDS if args.commands})
    seconds = {name: {FORKSERVER: [], SPAWN: [], "second": []} for name in kinds}
    for round_ in range(1, args.rounds + 1):
        for name, (timed, what) in kinds.items():
            for method in (FORKSERVER, SPAWN):
                first, *second = timed(what, method)
                seconds[name][method].append(first)
                seconds[name]["second"] += second
                report.log("start", f"round {round_}: {name}, {method}: {first:.1f} s")
    return seconds


def row_of(name, seconds):
    """A row of the table: the medians, and what share of another one they are."""
    forked, spawned = (statistics.median(seconds[method]) for method in (FORKSERVER, SPAWN))
    row = {"started": name, "spawn_s": spawned, "forkserver_s": forked, "ratio": forked / spawned}
    if seconds["second"]:
        second = statistics.median(seconds["second"])
        row |= {"second_s": second, "second_ratio": second / forked}
    return row


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    args.world_size = max(args.ranks)
    require_processes(f"--ranks {args.world_size}", args.world_size)
    require_writable_folder("--output_dir", args.output_dir)
    seconds = measure(args)
    rows = [row_of(name, times) for name, times in seconds.items()]
    measured = {"rounds": args.rounds, "seconds": seconds, "rows": rows}
    metrics = report.save_metrics(args, measured, backend="gloo")
    print(f"\nMedians of {args.rounds} rounds on {metrics['cpu_count']} cores, in seconds:\n")
    print("| started | spawn | forkserver | ratio | second launch | ratio to the first |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        second = f"{row['second_s']:.2f} | {row['second_ratio']:.2f}" if "second_s" in row else "|"
        print(f"| {row['started']} | {row['spawn_s']:.1f} | {row['forkserver_s']:.1f} "
              f"| {row['ratio']:.2f} | {second} |")
    return metrics


if __name__ == "__main__":
    main()
