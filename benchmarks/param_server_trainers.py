"""What does waiting for each other cost on a parameter server, and what staleness?

Trainings of as many epochs, by 1, 2 and 4 trainers, which share the same images: one at a time
(lock: main.py), with gradients at most 1 and at most N-1 steps old (bounded_server.py), without a
bound (async_server.py).

    python -m benchmarks.param_server_trainers --trainers 2 4 --epochs 2
"""

from common import picture, report
from common.cli import Parser, bounded, require_processes
from common.data import add_data_flags
from common.launcher import launch

from param_server import async_server, bounded_server, results
from param_server import main as lesson
from param_server.data import require_inputs

PASSED_ON = ("epochs", "batch_size", "lr", "seed", "device", "timeout", "dataset", "data_dir",
             "output_dir")
LOCK, ONE, OTHERS, ASYNC = "lock", "bounded 1", "bounded N-1", "async"
WORDS = {
    "en": {"title": "A parameter server and its trainers ({epochs} epochs)", "x": "trainers (N)",
           "y": "samples/s", "y2": "staleness: mean, dotted: largest", "y3": "test accuracy",
           LOCK: "lock", ONE: "bounded, K = 1", OTHERS: "bounded, K = N - 1", ASYNC: "async"},
    "ja": {"title": "パラメーターサーバーとトレーナーの数（{epochs}エポック）",
           "x": "トレーナーの数（N）", "y": "サンプル/秒", "y2": "陳腐化：平均、点線は最大",
           "y3": "テスト正解率", LOCK: "lock", ONE: "bounded、K = 1", OTHERS: "bounded、K = N - 1",
           ASYNC: "async"},
}


def ways(trainers):
    """`{name: (program, flags)}` of the ways in which so many trainers can train."""
    bounds = {ONE: 1} if trainers == 2 else {ONE: 1, OTHERS: trainers - 1} if trainers > 2 else {}
    return {LOCK: (lesson, []),
            **{name: (bounded_server, [f"--max_staleness={bound}"])
               for name, bound in bounds.items()},
            ASYNC: (async_server, [])}


def flags_of(args):
    """`{(trainers, way): (program, its flags)}`."""
    passed_on = [f"--{name}={getattr(args, name)}" for name in PASSED_ON]
    found = {}
    for trainers in args.trainers:
        for way, (program, more) in ways(trainers).items():
            flags = program.build_parser().parse_args(
                ["--world_size", str(trainers + 1), *more, *passed_on])
            require_inputs(flags, lesson.Net)
            found[trainers, way] = program, flags
    return found


def measure(args):
    """A row for each number of trainers and way."""
    rows = []
    for (trainers, way), (program, flags) in flags_of(args).items():
        metrics = results.summary(launch(program.run_worker, flags, program.role_name), flags)
        # With lock, nobody steps in between.
        staleness = metrics.get("staleness", {"mean": 0.0, "max": 0})
        rows.append({"trainers": trainers, "consistency": way,
                     "samples_per_s": metrics["samples_per_s"],
                     "staleness_mean": staleness["mean"], "staleness_max": staleness["max"],
                     "test_accuracy": metrics["test_accuracy"]})
        report.log("benchmark", f"{trainers} trainers, {way}: "
                   f"{metrics['samples_per_s']:.0f} samples/s")
    return rows


def plot(runs, args):
    """Draw `trainers.png`: throughput, staleness and accuracy over the number of trainers."""
    of_runs = [{(row["trainers"], row["consistency"]): row for row in run["rows"]} for run in runs]
    for rows in of_runs:
        if 2 in args.trainers:
            rows[2, OTHERS] = rows[2, ONE]
    for panels, words in picture.in_each_language(
            args.output_dir / "trainers.png", WORDS, runs, panels=3, height=8,
            epochs=args.epochs):
        for way, colour in zip((LOCK, ONE, OTHERS, ASYNC), picture.COLOURS, strict=False):
            points = [(at, (trainers, way)) for at, trainers in enumerate(args.trainers)
                      if (trainers, way) in of_runs[0]]
            x = [at for at, _ in points]
            look = {"color": colour, "label": words[way]}
            for axes, key in zip(panels, ("samples_per_s", "staleness_mean", "test_accuracy"),
                                 strict=True):
                picture.line(axes, x, [[rows[kind][key] for _, kind in points] for rows in of_runs],
                             **look)
            panels[1].plot(x, [max(rows[kind]["staleness_max"] for rows in of_runs)
                               for _, kind in points], ":", color=colour)
        panels[0].set_ylim(bottom=0)
        panels[-1].set_xticks(range(len(args.trainers)), args.trainers)


def build_parser():
    """What is trained."""
    parser = Parser("benchmark_param_server_trainers", __doc__, distributed=False)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--trainers", type=bounded(int, at_least=1, at_most=64), nargs="+", default=[1, 2, 4],
        metavar="N", help="how many train")
    add("--epochs", type=count, default=6, metavar="N", help="of each training")
    default_of = lesson.build_parser().get_default
    for name, kind in (("batch_size", count), ("lr", bounded(float, above=0)), ("timeout", float)):
        add(f"--{name}", type=kind, default=default_of(name), metavar="X", help="as in the lesson")
    add_data_flags(parser)
    return parser


def main(argv=None):
    """Print the table, draw it, and write metrics.json."""
    args = build_parser().parse_args(argv)
    args.trainers = sorted(set(args.trainers))
    args.world_size = max(args.trainers) + 1
    require_processes(f"--trainers {max(args.trainers)}", args.world_size)
    flags_of(args)  # refuses what cannot run
    metrics = report.save_metrics(args, {"epochs": args.epochs, "rows": measure(args)},
                                  backend="tensorpipe")
    plot([metrics], args)
    print(f"\n{'trainers':8}  {'consistency':11}  samples/s  staleness: mean  largest  accuracy")
    for row in metrics["rows"]:
        print("{trainers:8}  {consistency:11}  {samples_per_s:9.0f}  {staleness_mean:15.2f}  "
              "{staleness_max:7}  {test_accuracy:8.1%}".format(**row))
    return metrics


if __name__ == "__main__":
    main()
