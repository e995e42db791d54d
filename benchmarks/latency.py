"""When does it pay to hide a message? Two variants on machines that are further and further apart.

    prefetch.py         5 round trips a step instead of 7 of rpc_rnn/main.py
    double_buffering.py an observer plays with one half of its environments while the other half
                        waits for its actions (batch_rl/double_buffering.py)

On one machine both have little to hide. Here two network namespaces are the machines
(two_machines.py), with a core for each, and a cable that adds to each round trip. The result is how
many times the steps per second a variant makes, in turns with the same without it: those of
`benchmarks.rpc_rnn`, and of `benchmarks.batch_rl` with one observer.

    sudo .venv/bin/python -m benchmarks.latency                     about eight minutes
    sudo .venv/bin/python -m benchmarks.latency --round_trips 0 1   milliseconds
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from common import picture, report
from common.cli import PlainParser, bounded, refuse, require_writable_folder

from benchmarks.two_machines import two_machines, why_not

ROOT = Path(__file__).resolve().parent.parent
PORT = 29500  # where nobody else listens: the machines are new ones
RNN = "-m benchmarks.rpc_rnn --rounds {turns}"
RL = ("-m benchmarks.batch_rl --observers 1 --envs_per_observer {envs} --envs sync --one_core "
      "--num_episode {turns} --num_steps {steps}")
WORDS = {
    "en": {"title": "Two machines: what hiding messages saves", "y": "steps/s, without = 1",
           "x": "what the cable adds to a round trip (ms)", "prefetch": "rpc_rnn/prefetch.py",
           "double_buffering": "batch_rl/double_buffering.py, {envs} environments"},
    "ja": {"title": "2台のマシン：通信の待ち時間を隠すと何倍速くなるか",
           "y": "ステップ/秒（隠さない場合＝1）",
           "x": "ケーブルが往復に加える時間（ミリ秒）", "prefetch": "rpc_rnn/prefetch.py",
           "double_buffering": "batch_rl/double_buffering.py、環境{envs}個"},
}


def measure(machines, words, reporting_rank):
    """Run a program of two ranks, one on each machine; its metrics."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in machines]
        runs = []
        for rank, (machine, folder) in enumerate(zip(machines, folders, strict=True)):
            command = machine.command(
                "taskset", "--cpu-list", cores[rank % len(cores)], sys.executable, *words,
                "--world_size", 2, "--rank", rank, "--master_addr", machines[0].address,
                "--master_port", PORT, "--output_dir", folder)
            run = stack.enter_context(subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            stack.callback(run.terminate)  # nothing, where it has ended
            runs.append(run)
        said = [run.communicate()[1] for run in runs]
        for run, err in zip(runs, said, strict=True):
            if run.returncode:
                raise SystemExit(f"error: {' '.join(words)} ended with status {run.returncode}: "
                                 f"{err[-1000:]}")
        return json.loads(Path(folders[reporting_rank], "metrics.json").read_text())


def row_of(milliseconds, args):
    """What both variants make of a round trip that takes so much longer."""
    row = {"round_trip_ms": milliseconds}
    with two_machines(round_trip_s=milliseconds / 1000) as machines:
        rnn = measure(machines, RNN.format(turns=args.turns).split(), reporting_rank=1)
        row |= {"plain_ms": rnn["ms_per_step"]["this lesson"],
                "prefetch_ms": rnn["ms_per_step"]["prefetch"],
                "prefetch_ratio": rnn["prefetch_ratio"]}
        words = RL.format(envs=args.envs_per_observer, turns=args.turns, steps=args.steps)
        rl = measure(machines, words.split(), reporting_rank=0)
        row |= {f"{name}_per_s": steps for name, steps in rl["medians"].items()}
        row["double_buffering_ratio"] = rl["double_buffering_gain"]
    return row


def plot(runs, args):
    """Draw `latency.png`, from the metrics of one or several runs."""
    for axes, texts in picture.in_each_language(args.output_dir / "latency.png", WORDS, runs,
                                                envs=args.envs_per_observer):
        added = [row["round_trip_ms"] for row in runs[0]["rows"]]
        for colour, name in (("C0", "prefetch"), ("C1", "double_buffering")):
            ratios = [[row[f"{name}_ratio"] for row in run["rows"]] for run in runs]
            picture.line(axes, range(len(added)), ratios, color=colour, label=texts[name])
        axes.axhline(1, color=picture.GREY, linewidth=1)
        axes.set_xticks(range(len(added)), [f"{ms:g}" for ms in added])


def build_parser():
    """How far apart, and how often."""
    parser = PlainParser(__doc__)
    parser.set_defaults(example="benchmark_latency", device="cpu", seed=0, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--round_trips", type=bounded(float, at_least=0), nargs="+", metavar="MS",
        default=[0, 1, 2, 5, 10, 20], help="milliseconds that the cable adds")
    add("--envs_per_observer", type=bounded(int, at_least=2), default=512, metavar="K",
        help="of batch_rl: an even number; 512 play for about 5 ms a step")
    add("--turns", type=count, default=5, metavar="N", help="of each way, in each run")
    add("--steps", type=count, default=100, metavar="N", help="of an episode of batch_rl")
    add("--output_dir", type=Path, default=Path("outputs", "benchmark_latency"), metavar="DIR",
        help="for metrics.json and the picture")
    return parser


def main(argv=None):
    """Measure, draw, print the table, write metrics.json."""
    args = build_parser().parse_args(argv)
    require_writable_folder("--output_dir", args.output_dir)
    if args.envs_per_observer % 2:
        refuse(f"--envs_per_observer {args.envs_per_observer} must be even for double buffering")
    if reason := why_not(round_trip_s=0):
        refuse(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the machines would stay
    rows = []
    with report.progress(len(args.round_trips), "distance") as bar:
        for milliseconds in args.round_trips:
            rows.append(row_of(milliseconds, args))
            bar.update()
    metrics = report.save_metrics(args, {"rows": rows}, backend="tensorpipe")
    plot([metrics], args)
    print("round trip   rpc_rnn, ms a step: plain, prefetch.py        "
          "batch_rl, environment steps/s: plain, double_buffering.py")
    for row in rows:
        print(f"+ {row['round_trip_ms']:4g} ms {row['plain_ms']:26.1f} {row['prefetch_ms']:8.1f}: "
              f"{row['prefetch_ratio']:.2f} {row['vector_per_s']:37.0f} "
              f"{row['double_buffering_per_s']:8.0f}: {row['double_buffering_ratio']:.2f}")
    return metrics


if __name__ == "__main__":
    main()
