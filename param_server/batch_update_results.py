"""What the batched updates report: the metrics, the pictures, the line of numbers."""

import resource
import statistics
import sys
import time
from argparse import Namespace

from common import picture, report

import torch

from tracing import page

SPENT = {"compute": {"color": "C0"}, "transfer": {"color": "C5", "hatch": "////"},
         "waiting": {"color": page.IDLE}}
WORDS = {
    "en": {"title": "{arch}, {trainers} trainers: what an update is spent on", "x": "update",
           "y": "seconds, mean of the trainers", "compute": "compute", "transfer": "transfer",
           "waiting": "waiting for the others"},
    "ja": {"title": "{arch}、トレーナー{trainers}個：1回の更新にかかる時間の内訳", "x": "更新",
           "y": "秒（トレーナーの平均）", "compute": "計算", "transfer": "転送",
           "waiting": "ほかのトレーナーを待つ"},
}


def peak_memory() -> int:
    """Return the peak of this process until now, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seconds_since(moments: dict[int, float]) -> list[float]:
    """Return how long ago these moments of the ranks were, rank by rank."""
    now = time.perf_counter()
    return [now - moments[rank] for rank in sorted(moments)]


def seconds_of(step_stats: dict[str, float], waiting: float) -> dict[str, float]:
    """Return what an update of a trainer took: in all, and what it was spent on."""
    seconds = step_stats["ended"] - step_stats["started"]
    compute = step_stats["computed"] - step_stats["started"]
    return {"seconds": seconds, "compute": compute, "waiting": waiting,
            "transfer": seconds - compute - waiting}


def summary(measured: dict, args: Namespace) -> dict:
    """Return the metrics of a run, as metrics.json has them.

    Args:
        measured: what the server returns: of each trainer the `step_stats` of its updates and its
            `peak_memory`; the server's own, `model_bytes`, and of each update the `waits` of the
            trainers.
        args: the parsed flags.

    Returns:
        `updates` (seconds of the slowest trainer in each), `median_update_s`; `compute`,
        `transfer`, `waiting` (seconds, mean of the trainers) and `loss` of each update;
        `bytes_per_update`, of all trainers, both ways; `peak_memory_gb`, of all processes.
    """
    trainers = measured["trainers"]
    updates = list(zip(*(trainer["updates"] for trainer in trainers), strict=True))
    spent = [[seconds_of(*of_trainer) for of_trainer in zip(update, waits, strict=True)]
             for update, waits in zip(updates, measured["waits"], strict=True)]
    seconds = [max(of_trainer["seconds"] for of_trainer in update) for update in spent]
    shares = {what: [statistics.mean(of_trainer[what] for of_trainer in update) for update in spent]
              for what in SPENT}
    peak = measured["peak_memory"] + sum(trainer["peak_memory"] for trainer in trainers)
    return {"updates": seconds, "median_update_s": statistics.median(seconds), **shares,
            "loss": [statistics.mean(step_stats["loss"] for step_stats in update)
                     for update in updates],
            "bytes_per_update": 2 * len(trainers) * measured["model_bytes"],
            "peak_memory_gb": peak / 1e9}


def finish(measured: dict, args: Namespace) -> dict:
    """Write metrics.json, draw, print the line of numbers; return the whole metrics."""
    metrics = {**summary(measured, args), "wall_s": measured["wall_s"]}
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot([metrics], args)
    typical = {what: statistics.median(metrics[what]) for what in SPENT}
    spent = ", ".join(f"{what} {seconds / sum(typical.values()):.0%}"
                      for what, seconds in typical.items())
    report.log("parameter_server", f"an update is {spent}; peak memory of all processes "
               f"{metrics['peak_memory_gb']:.1f} GB")
    first, last = metrics["loss"][0], metrics["loss"][-1]
    print(f"{args.arch}, {args.world_size - 1} trainers: {metrics['median_update_s']:.1f} s per "
          f"update in the median, {metrics['bytes_per_update'] / 1e6:.0f} MB each; "
          f"loss {first:.3f} -> {last:.3f}")
    return metrics


def plot(runs: list[dict], args: Namespace) -> None:
    """Draw `batch_update.png`: what every update was spent on, in one or several runs."""
    path, values = args.output_dir / "batch_update.png", {
        "arch": args.arch, "trainers": args.world_size - 1}
    for axes, words in picture.in_each_language(path, WORDS, runs, **values):
        updates = list(range(1, 1 + len(runs[0]["updates"])))
        bottom = torch.zeros(len(updates))
        for what, look in SPENT.items():
            medians, _ = picture.median_and_errors([run[what] for run in runs])
            axes.bar(updates, medians, bottom=bottom, label=words[what], edgecolor="white", **look)
            bottom += torch.tensor(medians)
        totals = [[sum(seconds) for seconds in zip(*(run[what] for what in SPENT), strict=True)]
                  for run in runs]
        medians, errors = picture.median_and_errors(totals)
        if errors:
            axes.errorbar(updates, medians, errors, fmt="none", ecolor="0.2", capsize=4)
        axes.set_xticks(updates)
        axes.grid(visible=False, axis="x")
