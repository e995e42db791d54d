"""Where should a table live: on a server, or spread over the trainers?

`main.py`, `sharded_table.py` and `sharded_table_dtensor.py` of ddp_rpc_hybrid, in turns, for tables
of several sizes, with as many trainers each. Beside the steps per second, the memory of the process
that holds most of the table: its rows, and the gradient that one backward pass makes of them.

    python -m benchmarks.ddp_rpc_hybrid_tables --rounds 3
"""

import importlib
import statistics
from unittest import mock

from common import picture, report
from common.cli import Parser, bounded
from common.launcher import launch
from tqdm import tqdm

from ddp_rpc_hybrid.data import require_parts, require_tables

SERVER = "ddp_rpc_hybrid.main"
WAYS = {"server": SERVER, "all_to_all": "ddp_rpc_hybrid.sharded_table",
        "dtensor": "ddp_rpc_hybrid.sharded_table_dtensor"}
RUNS = [(way, gradient) for way in WAYS for gradient in ("dense", "sparse")
        if (way, gradient) != ("dtensor", "sparse")]  # which there is not
COLUMNS = ("steps_per_s", "bytes_per_step", "table_bytes", "table_gradient_bytes", "held_mb")
WORDS = {
    "en": {"title": "Where should a table live? {trainers} trainers", "x": "rows of the table",
           "y": "steps/s of each trainer", "y2": "rows and gradient (MB)",
           "server": "server, RPC", "all_to_all": "spread, all-to-all",
           "dtensor": "spread, DTensor", "dense": "dense", "sparse": "sparse", "label": "%s, %s",
           "one": "Median of {rounds} rounds",
           "several": "Median of {{n}} runs of {rounds} rounds with their range"},
    "ja": {"title": "埋め込みテーブルをどこに置くか（トレーナー{trainers}個）",
           "x": "テーブルの行数", "y": "各トレーナーのステップ/秒", "y2": "行と勾配（MB）",
           "server": "サーバー、RPC", "all_to_all": "分割、all-to-all", "dtensor": "分割、DTensor",
           "dense": "密", "sparse": "疎", "label": "%s、%s", "one": "{rounds}回の測定の中央値",
           "several": "{{n}}回（各{rounds}回の中央値）の測定の中央値と範囲"},
}


def build_parser():
    """How large, how often, and for how long."""
    name, count = "benchmark_ddp_rpc_hybrid_tables", bounded(int, at_least=1)
    parser = Parser(name, __doc__, distributed=False)
    add = parser.add_argument
    add("--rows", type=bounded(int, at_least=2), nargs="+", metavar="N",
        default=[10**power for power in range(2, 7)], help="of the tables")
    add("--trainers", type=bounded(int, at_least=1, at_most=64), default=2, metavar="N",
        help="the server's way has two processes more")
    add("--rounds", type=count, default=3, metavar="N", help="runs of each kind")
    add("--epochs", type=count, default=10, metavar="N", help="of ten batches of each trainer")
    return parser


def flags_of(way, gradient, rows, args):
    """The flags of one run, parsed by its program: what that refuses is refused here."""
    program = WAYS[way]
    processes = args.trainers + (2 if program == SERVER else 0)
    words = {"world_size": processes, "num_embeddings": rows, "epochs": args.epochs,
             "device": args.device, "seed": args.seed, "output_dir": args.output_dir}
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    flags += ["--sparse"] if gradient == "sparse" else []
    parsed = importlib.import_module(program).build_parser().parse_args(flags)
    require = require_tables if program == SERVER else require_parts
    require(parsed, importlib.import_module(program).role_name)
    parsed.program = program
    return parsed


def run_worker(rank, world_size, args):
    """That of the program, which need not say how far it is."""
    program = importlib.import_module(args.program)
    with mock.patch.object(report, "log"):
        return program.run_worker(rank, world_size, args)


def train(way, gradient, rows, args):
    """One run; its numbers by the names of COLUMNS."""
    flags = flags_of(way, gradient, rows, args)
    metrics = launch(run_worker, flags, importlib.import_module(flags.program).role_name)
    of_server = {"table_bytes": 4 * rows * flags.embedding_dim}  # all rows, in float32
    metrics = {**of_server, **metrics}
    metrics["held_mb"] = (metrics["table_bytes"] + metrics["table_gradient_bytes"]) / 1e6
    return {name: metrics[name] for name in COLUMNS}


def main(argv=None):
    """Print and write the medians of all rounds, and draw them."""
    args = build_parser().parse_args(argv)
    kinds = [(way, gradient, rows) for rows in args.rows for way, gradient in RUNS]
    for kind in kinds:
        flags_of(*kind, args)
    results = {kind: [] for kind in kinds}
    bar = tqdm(total=args.rounds * len(kinds), unit="run", disable=None)
    for _ in range(args.rounds):
        for kind in kinds:
            results[kind].append(train(*kind, args))
            bar.update()
    bar.close()
    tables = [{"way": way, "gradient": gradient, "rows": rows, "steps_per_s_of_rounds":
               [run["steps_per_s"] for run in runs],
               **{name: statistics.median(run[name] for run in runs) for name in COLUMNS}}
              for (way, gradient, rows), runs in results.items()]
    print(f"{'rows':>9}  {'way':10}  {'gradient':8}" + "".join(f"{name:>22}" for name in COLUMNS))
    for table in tables:
        print("{rows:9}  {way:10}  {gradient:8}".format(**table)
              + "".join(f"{table[name]:22,.1f}" for name in COLUMNS))
    metrics = report.save_metrics(args, {"tables": tables, "rounds": args.rounds,
                                         "trainers": args.trainers}, backend="")
    plot([metrics], args)
    return metrics


def plot(runs, args):
    """Draw `tables.png`: steps per second and memory over the rows of the table."""
    path, values = args.output_dir / "tables.png", {"trainers": args.trainers,
                                                    "rounds": args.rounds}
    for (upper, lower), words in picture.in_each_language(path, WORDS, runs, panels=2, height=7,
                                                          **values):
        for colour, way in enumerate(WAYS):
            for gradient, style in (("dense", "o-"), ("sparse", "s--")):
                if (way, gradient) not in RUNS:
                    continue
                of_runs = [[table for table in run["tables"]
                            if (table["way"], table["gradient"]) == (way, gradient)]
                           for run in runs]
                label = words["label"] % (words[way], words[gradient])
                for axes, name in ((upper, "steps_per_s"), (lower, "held_mb")):
                    picture.line(axes, [table["rows"] for table in of_runs[0]],
                                 [[table[name] for table in run] for run in of_runs],
                                 style, markersize=5, color=f"C{colour}", label=label)
        upper.set_xscale("log")
        upper.set_ylim(bottom=0)
        lower.set_yscale("log")
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set_xticks(args.rows, [f"{rows:,}" for rows in args.rows])
        lower.minorticks_off()


if __name__ == "__main__":
    main()
