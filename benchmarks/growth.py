"""How does the cost of each program grow: with its ranks, rows, bytes, environments?

Each program runs with several sizes, one after the other. What it reports is held against a law,
whose coefficients are fitted to all sizes (none is negative):

    ranks   n / X(n) = a + b (n-1) + c n (n-1)     X: steps per second of all n ranks together
            b: what one of them at a time can do; c: what each pair of them costs
            (the universal scalability law, N. Gunther, "Guerrilla Capacity Planning", 2007)
    ring    T(n) = 2 (n-1) (a + S b / n)           seconds of an all-reduce of S bytes
    size    T(s) = a + b s                         seconds for s rows, or environments

By the first one, X has a largest value: where more ranks stop paying on this machine.

    python -m benchmarks.growth                       all (about ten minutes on 2 cores)
    python -m benchmarks.growth --only rpc_rnn ring   some
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import picture, report
from common.cli import PlainParser, bounded, require_writable_folder

ROOT = Path(__file__).resolve().parent.parent
BY_THE_LAW = (64, 1024)  # ranks
RING_BYTES = 2**24
LAWS = {  # the terms of the seconds, one for each coefficient
    "ranks": lambda n: (1, n - 1, n * (n - 1)),
    "ring": lambda n: (2 * (n - 1), 2 * (n - 1) / n * RING_BYTES),
    "size": lambda size: (1, size),
}


class Growth(NamedTuple):
    """What grows in one program."""

    command: str  # {n}: what grows; {n+1}: with a rank beside those that are counted
    sizes: tuple
    law: str
    done: Callable  # metrics -> units of work per second, of all ranks
    units: Callable  # n -> how many of them the law's seconds are for
    words: tuple  # the unit and what grows, in English and in Japanese
    short: str  # flags that make it quick


def of_row(key, **which):
    """A number of the only row of metrics.json that has these values."""
    def found(metrics):
        (row,) = [row for row in metrics["rows"]
                  if all(row[name] == value for name, value in which.items())]
        return row[key]

    return found


def of_all(metrics):
    """The steps per second of all trainers of a program that reports those of one."""
    return metrics["steps_per_s"] * metrics["trainers"]


batched = of_row("env_steps_per_s", mode="batched")
seconds_of_ring = of_row("median_s", algorithm="RingAllReduce")
ENV_STEPS = ("environment steps", "observers"), ("環境ステップ", "オブザーバー数")
STEPS = (("training steps of all trainers", "trainers"),
         ("全トレーナーの訓練ステップ", "トレーナー数"))
GROWING = {
    "rpc_rl": Growth(
        "rpc_rl/fast.py --world_size {n+1} --max_episodes 6 --reward_threshold 300",
        (1, 2, 4, 8, 15), "ranks", lambda metrics: metrics["env_steps_per_s"], lambda n: n,
        ENV_STEPS, "--max_episodes 1"),
    "batch_rl": Growth(
        "batch_rl/fast.py --observers {n} --num_episode 2 --num_steps 300", (1, 2, 4, 8, 15),
        "ranks", batched, lambda n: n, ENV_STEPS, "--num_episode 1 --num_steps 20"),
    "batch_rl_envs": Growth(
        "batch_rl/vector.py --observers 2 --num_episode 2 --num_steps 200 --envs_per_observer {n}",
        (1, 4, 16, 64, 256), "size", batched, lambda n: 2 * n,
        (("environment steps", "environments of each of 2 observers"),
         ("環境ステップ", "オブザーバー（2個）あたりの環境数")), "--num_episode 1 --num_steps 20"),
    "rpc_rnn": Growth(
        "rpc_rnn/several_trainers.py --world_size {n+1} --epochs 1", (1, 2, 4, 8, 15), "ranks",
        of_all, lambda n: n, STEPS, "--bptt 200"),
    "param_server": Growth(
        "param_server/async_server.py --world_size {n+1} --epochs 2", (1, 2, 4, 8, 15), "ranks",
        lambda metrics: metrics["samples_per_s"], lambda n: n,
        (("samples", "trainers"), ("サンプル", "トレーナー数")), "--epochs 1"),
    "ddp_rpc_hybrid": Growth(
        "ddp_rpc_hybrid/main.py --world_size {n+2} --epochs 10", (1, 2, 4, 8, 14), "ranks", of_all,
        lambda n: n, STEPS, "--epochs 2"),
    "ddp_rpc_hybrid_rows": Growth(
        "ddp_rpc_hybrid/main.py --num_embeddings {n} --epochs 5",
        (100, 10_000, 100_000, 300_000, 1_000_000), "size",
        lambda metrics: metrics["steps_per_s"], lambda n: 1,
        (("training steps of a trainer", "rows of the table"),
         ("トレーナーあたりの訓練ステップ", "テーブルの行数")), "--epochs 2"),
    "p2p_train": Growth(
        "p2p_collectives/train_flat.py --world_size {n} --epochs 4", (1, 2, 4, 8, 16), "ranks",
        lambda metrics: metrics["samples_per_s"], lambda n: n,
        (("samples", "ranks"), ("サンプル", "ランク数")), "--epochs 1"),
    "ring": Growth(
        f"p2p_collectives/ring_allreduce.py --world_size {{n}} --sizes {RING_BYTES} --repeats 5",
        (2, 4, 8, 16), "ring", lambda metrics: 1 / seconds_of_ring(metrics), lambda n: 1,
        (("all-reduces of 16 MiB", "ranks"), ("16 MiBのall-reduce", "ランク数")), "--repeats 1"),
}
WORDS = {
    "en": {"title": "{name}", "x": "{grows}", "y": "{unit} per second", "law": "fitted law",
           "one": "runs of each size: {rounds}; median and range"},
    "ja": {"title": "{name}", "x": "{grows}", "y": "{unit}（1秒あたり）", "law": "当てはめた法則",
           "one": "各サイズにつき{rounds}回の測定（中央値と範囲）"},
}


def measure(growth, n, quick):
    """Units of work per second of one run with the size `n`."""
    words = f"{growth.command} {growth.short if quick else ''}".split()
    for extra in (0, 1, 2):
        words = [word.replace(f"{{n+{extra}}}" if extra else "{n}", str(n + extra))
                 for word in words]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([sys.executable, *words, "--output_dir", folder], cwd=ROOT,
                               capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"error: {' '.join(words)} ended with status {ended.returncode}: "
                             f"{ended.stderr[-1000:]}")
        metrics = json.loads(Path(folder, "metrics.json").read_text())
    return growth.done({"trainers": n, **metrics})


def fit(growth, points):
    """The coefficients of the law that fit best, in shares of each time; none is negative.

    Args:
        growth: of `GROWING`.
        points: of (size, units of work per second).
    """
    from scipy.optimize import nnls

    # terms . coefficients = units / done: each equation divided by its right side.
    rows = [[term * done / growth.units(n) for term in LAWS[growth.law](n)] for n, done in points]
    return [float(coefficient) for coefficient in nnls(rows, [1.0] * len(rows))[0]]


def by_the_law(growth, coefficients, n):
    """Units of work per second that the law predicts for the size `n`."""
    terms = zip(coefficients, LAWS[growth.law](n), strict=True)
    return growth.units(n) / sum(coefficient * term for coefficient, term in terms)


def best_ranks(coefficients):
    """With how many ranks the law of ranks has its largest rate; infinity if it never falls."""
    a, b, c = coefficients
    return math.inf if c == 0 else max(1.0, math.sqrt(max(0.0, a - b) / c))


def row_of(name, done):
    """What is known of a program: `{size: its rates}`, the law, what it predicts."""
    growth = GROWING[name]
    points = [(n, statistics.median(rates)) for n, rates in done.items()]
    coefficients = fit(growth, points)
    off = max(abs(by_the_law(growth, coefficients, n) / rate - 1) for n, rate in points)
    row = {"name": name, "law": growth.law, "coefficients": coefficients, "largest_error": off,
           "measured": [{"size": n, "per_s": rate, "low": min(done[n]), "high": max(done[n])}
                        for n, rate in points]}
    if growth.law != "size":
        row |= {f"per_s_with_{n}": by_the_law(growth, coefficients, n) for n in BY_THE_LAW}
    if growth.law == "ranks" and math.isfinite(best := best_ranks(coefficients)):
        row["best_ranks"] = best
    return row


def plot(row, metrics, args):
    """Draw `NAME.png`: what was measured, and the law's line."""
    name, law = row["name"], GROWING[row["name"]]
    english, japanese = law.words
    words = {language: {key: text.replace("{unit}", unit).replace("{grows}", grows)
                        for key, text in WORDS[language].items()}
             for language, (unit, grows) in {"en": english, "ja": japanese}.items()}
    sizes = [point["size"] for point in row["measured"]]
    curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 60) for i in range(61)]
    path = args.output_dir / f"{name}.png"
    for axes, texts in picture.in_each_language(path, words, [metrics], name=law.command.split()[0],
                                                rounds=args.rounds):
        rates, low, high = ([point[key] for point in row["measured"]]
                            for key in ("per_s", "low", "high"))
        axes.errorbar(sizes, rates, [[rate - least for rate, least in zip(rates, low, strict=True)],
                                     [most - rate for rate, most in zip(rates, high, strict=True)]],
                      fmt="o", color="C0", capsize=3)
        axes.plot(curve, [by_the_law(law, row["coefficients"], n) for n in curve], "--",
                  color="0.3", label=texts["law"])
        axes.set_xscale("log", base=10 if sizes[-1] > 1000 else 2)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)


def build_parser():
    """What is measured, and how often."""
    parser = PlainParser(__doc__)
    parser.set_defaults(example="benchmark_growth", device="cpu", seed=0, world_size=None)
    add = parser.add_argument
    add("--only", choices=GROWING, nargs="+", default=list(GROWING), metavar="NAME",
        help=f"of {', '.join(GROWING)}")
    add("--rounds", type=bounded(int, at_least=1), default=1, metavar="N", help="runs of each size")
    add("--quick", action="store_true", help="the two smallest sizes, and short flags")
    add("--output_dir", type=Path, default=Path("outputs", "benchmark_growth"), metavar="DIR",
        help="for metrics.json and the pictures")
    return parser


def main(argv=None):
    """Measure, fit, draw, print the table, write metrics.json."""
    args = build_parser().parse_args(argv)
    require_writable_folder("--output_dir", args.output_dir)
    sizes = {name: GROWING[name].sizes[: 2 if args.quick else None] for name in args.only}
    done = {name: {n: [] for n in sizes[name]} for name in args.only}
    with report.progress(args.rounds * sum(map(len, sizes.values())), "run") as bar:
        for _ in range(args.rounds):
            for name in args.only:
                bar.set_description(name)
                for n in sizes[name]:
                    done[name][n].append(measure(GROWING[name], n, args.quick))
                    bar.update()
    rows = [row_of(name, done[name]) for name in args.only]
    metrics = report.save_metrics(args, {"rounds": args.rounds, "rows": rows}, backend="several")
    for row in rows:
        plot(row, metrics, args)
        unit, grows = GROWING[row["name"]].words[0]
        points = ", ".join(f"{point['size']:,}: {point['per_s']:,.4g}" for point in row["measured"])
        print(f"{row['name']}: {unit} per second, by {grows}: {points}; the law is off by "
              f"{row['largest_error']:.0%} at most"
              + (f"; best with {row['best_ranks']:.1f}" if "best_ranks" in row else "")
              + "".join(f"; with {n} by the law {row[f'per_s_with_{n}']:,.4g}"
                        for n in BY_THE_LAW if f"per_s_with_{n}" in row))
    return metrics


if __name__ == "__main__":
    main()
