"""Report of batch_update.py: metrics, the picture and the summary line."""

import resource
import sys
import time
from argparse import Namespace
from statistics import mean, median

from common import picture, report

import torch

SPENT = {"compute": {"color": "C0"}, "transfer": {"color": "C5", "hatch": "////"},
         "waiting": {"color": "0.9"}}
WORDS = {
    "en": {"title": "{arch}, {trainers} trainers: what an update is spent on", "x": "update",
           "y": "seconds, mean of the trainers", "compute": "compute", "transfer": "transfer",
           "waiting": "waiting for the others"},
    "ja": {"title": "{arch}、トレーナー{trainers}つ：1回の更新にかかる時間の内訳", "x": "更新",
           "y": "秒（トレーナーの平均）", "compute": "計算", "transfer": "転送",
           "waiting": "ほかのトレーナーを待つ"},
}


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seconds_since(moments: dict[int, float]) -> list[float]:
    """Return the seconds since each rank's moment of `time.perf_counter()`, by rank."""
    now = time.perf_counter()
    return [now - moments[rank] for rank in sorted(moments)]


def summary(measured: dict, args: Namespace) -> dict:
    """Return the metrics of a run for metrics.json.

    Args:
        measured: What the server returns: `trainers`, with the `updates` (loss, compute, seconds)
            and `peak_memory` of each trainer; `waits`, the seconds that each trainer waited in
            each update; `peak_memory` of the server; `model_bytes`.
        args: Parsed flags.

    Returns:
        `updates` (seconds of the slowest trainer in each), `median_update_s`; `compute`,
        `transfer`, `waiting` (seconds, mean of the trainers) and `loss` of each update;
        `bytes_per_update`, both ways for all trainers; `peak_memory_gb`, of all processes.
    """
    trainers = measured["trainers"]
    updates = list(zip(*(trainer["updates"] for trainer in trainers), strict=True))
    means = {what: [mean(of_trainer[what] for of_trainer in update) for update in updates]
             for what in ("loss", "compute", "seconds")}
    waiting = [mean(waits) for waits in measured["waits"]]
    slowest = [max(of_trainer["seconds"] for of_trainer in update) for update in updates]
    peak = measured["peak_memory"] + sum(trainer["peak_memory"] for trainer in trainers)
    return {"updates": slowest, "median_update_s": median(slowest), "compute": means["compute"],
            "transfer": [seconds - compute - waited for seconds, compute, waited in zip(
                means["seconds"], means["compute"], waiting, strict=True)],
            "waiting": waiting, "loss": means["loss"],
            "bytes_per_update": 2 * len(trainers) * measured["model_bytes"],
            "peak_memory_gb": peak / 1e9}


def finish(measured: dict, args: Namespace) -> dict:
    """Write metrics.json, draw the picture, print the summary line; return all metrics."""
    metrics = {**summary(measured, args), "wall_s": measured["wall_s"]}
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    typical = {what: median(metrics[what]) for what in SPENT}
    spent = ", ".join(f"{what} {seconds / sum(typical.values()):.0%}"
                      for what, seconds in typical.items())
    report.log("parameter_server", f"an update is {spent}; peak memory of all processes "
               f"{metrics['peak_memory_gb']:.1f} GB")
    n_trainers, losses = args.world_size - 1, metrics["loss"]
    trainers = "1 trainer" if n_trainers == 1 else f"{n_trainers} trainers"
    print(f"{args.arch}, {trainers}: {metrics['median_update_s']:.1f} s per update in the median, "
          f"{metrics['bytes_per_update'] / 1e6:.0f} MB each; "
          f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return metrics


def plot(metrics: dict, args: Namespace) -> None:
    """Draw `batch_update.png`: what each update was spent on."""
    for axes, words in picture.in_each_language(
            args.output_dir / "batch_update.png", WORDS, metrics, arch=args.arch,
            trainers=args.world_size - 1):
        updates = list(range(1, 1 + len(metrics["updates"])))
        bottom = torch.zeros(len(updates))
        for what, look in SPENT.items():
            axes.bar(updates, metrics[what], bottom=bottom, label=words[what], edgecolor="white",
                     **look)
            bottom += torch.tensor(metrics[what])
        axes.set_xticks(updates)
        axes.grid(visible=False, axis="x")
