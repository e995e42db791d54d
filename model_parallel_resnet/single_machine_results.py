"""Results of single_machine.py: table, the tutorial's numbers, metrics.json, a picture."""

import argparse
import statistics

from common import picture, report

import torch

ROLE = "main"
WORDS = {
    "en": {"title": "Split size{devices}\nResNet50, {batch_size} images of {pixels}x{pixels}",
           "overlap": " on two devices: the halves can overlap",
           "costs": " on one device: nothing can overlap, only costs show",
           "x": "split size (images in a micro-batch)", "y": "seconds (training steps: {steps})",
           "pipeline": "pipeline", "single device": "single device",
           "model parallel": "model parallel: {slower:+.0%} time (tutorial: +7%)",
           "one": "Median and range (repeats: {repeats})"},
    "ja": {"title": "分割サイズ{devices}\nResNet50、{pixels}×{pixels}の画像{batch_size}枚",
           "overlap": "（デバイス2個：前半と後半が重なりうる）",
           "costs": "（デバイス1個：処理は重ならず、分割のコストだけが見える）",
           "x": "分割サイズ（マイクロバッチの画像の枚数）", "y": "訓練{steps}ステップの秒数",
           "pipeline": "パイプライン", "single device": "単一デバイス",
           "model parallel": "モデル並列：時間{slower:+.0%}（チュートリアル：+7%）",
           "one": "{repeats}回の測定の中央値と範囲"},
}
# The tutorial's measurements on two GPUs: seconds, and the ratios that it computes from them.
TUTORIAL = {"single_s": 3.75, "model_parallel_s": 4.02, "split_size_20_s": 2.51,
            "split_size_12_s": 2.43, "model_parallel_slower": 0.07, "pipeline_faster": 0.49,
            "best_split_size": 12, "best_split_faster": 0.54}


def finish(rows: list[dict], toy_losses: tuple[float, float], left_out: list[int], wall_s: float,
           args: argparse.Namespace) -> dict:
    """Print, plot and write what was measured; return the metrics.

    Args:
        rows: Rows that `measure` returned.
        toy_losses: Losses of `train_toy` before and after its step.
        left_out: Split sizes that are larger than the batch.
        wall_s: Duration of the whole run in seconds.
        args: Parsed flags.
    """
    report.log(ROLE, "ToyModel: loss {:.3f} -> {:.3f} in one step".format(*toy_losses))
    add_averages(rows)
    for line in table(rows):
        report.log(ROLE, line)
    numbers = compare_times(rows, args.split_size)
    losses = rows[0]["losses"]
    names = [torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
             for device in args.devices]
    flags = ("batch_size", "image_size", "num_batches", "num_repeat", "split_size", "lr")
    metrics = {"device": names[0], "devices": list(map(str, args.devices)), "device_names": names,
               "can_overlap": can_overlap(args.devices),
               "what_it_shows": what_it_shows(args.devices),
               **{flag: getattr(args, flag) for flag in flags}, "left_out": left_out, "rows": rows,
               **numbers, "tutorial": TUTORIAL, "toy_loss_before": toy_losses[0],
               "toy_loss_after": toy_losses[1], "loss_before": losses[0], "loss_after": losses[-1],
               "wall_s": wall_s}
    metrics = report.save_metrics(args, metrics, backend=None)  # no process group
    plot(metrics, args)
    print(last_line(numbers, losses, args.devices))
    return metrics


def add_averages(rows: list[dict]) -> None:
    """Add `mean_s`, `std_s` and `median_s` to each row."""
    for row in rows:
        times = row["times_s"]
        row |= {"mean_s": statistics.fmean(times), "std_s": statistics.pstdev(times),
                "median_s": statistics.median(times)}


def compare_times(rows: list[dict], split_size: int) -> dict[str, float]:
    """Compute the tutorial's four numbers from our times; 0.07 means 7%.

    Tutorial: uses means, which a single slow repeat changes. Here they are medians.
    """
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == split_size)
    best = min(pipelines, key=lambda row: row["median_s"])
    return {"model_parallel_slower": model_parallel["median_s"] / single["median_s"] - 1,
            "pipeline_faster": single["median_s"] / pipeline["median_s"] - 1,
            "best_split_size": best["split_size"],
            "best_split_faster": single["median_s"] / best["median_s"] - 1}


def table(rows: list[dict]) -> list[str]:
    """Return a heading, and one line for each row."""
    lines = ["model            split size   micro-batches    median      mean   deviation   "
             "median / single's"]
    for row in rows:
        size, ratio = row["split_size"] or "", row["median_s"] / rows[0]["median_s"]
        lines.append(f"{row['model']:16} {size:>10} {row['micro_batches']:>15} "
                     f"{row['median_s']:>7.3f} s {row['mean_s']:>7.3f} s {row['std_s']:>9.3f} s "
                     f"{ratio:>18.2f}")
    return lines


def last_line(numbers: dict[str, float], losses: list[float], devices: list[torch.device]) -> str:
    """Return the summary line."""
    return (f"ResNet50 on {names_of(devices)}: model parallel takes "
            f"{numbers['model_parallel_slower']:+.0%} time (tutorial +7%), pipelined "
            f"{numbers['pipeline_faster']:+.0%} speed (+49%), best split size "
            f"{numbers['best_split_size']} with {numbers['best_split_faster']:+.0%} "
            f"(12 with +54%); loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


def can_overlap(devices: list) -> bool:
    """Return whether the two halves, given by devices or names, can compute at the same time."""
    return devices[0] != devices[1]


def names_of(devices: list[torch.device]) -> str:
    """Return a name for both devices: `cuda:0 and cuda:1`, or `one device (cpu)`."""
    if can_overlap(devices):
        return f"{devices[0]} and {devices[1]}"
    return f"one device ({devices[0]})"


def what_it_shows(devices: list[torch.device]) -> str:
    """Return a sentence on what a run on these devices can show."""
    if can_overlap(devices):
        return (f"{names_of(devices)}: the halves can compute at the same time; this shows what a "
                "pipeline gains")
    return (f"{names_of(devices)}: nothing can overlap; this shows what splitting costs, but not "
            "what a pipeline gains on two GPUs")


def plot(metrics: dict, args: argparse.Namespace) -> None:
    """Plot split_size_tradeoff.png: medians and ranges of all repeats, for each split size.

    Tutorial: draws means and standard deviations, which a single slow repeat changes.
    """
    single, model_parallel, *pipelines = metrics["rows"]
    sizes = [row["split_size"] for row in pipelines]
    overlap = "overlap" if can_overlap(metrics["devices"]) else "costs"
    words = {language: {**texts, "title": texts["title"].replace("{devices}", texts[overlap])}
             for language, texts in WORDS.items()}
    for axes, texts in picture.in_each_language(
            args.output_dir / "split_size_tradeoff.png", words, metrics,
            batch_size=metrics["batch_size"], pixels=metrics["image_size"],
            steps=metrics["num_batches"], repeats=len(single["times_s"]),
            slower=metrics["model_parallel_slower"]):
        axes.plot(sizes, [row["median_s"] for row in pipelines], "o-", color="C2",
                  label=texts["pipeline"])
        axes.fill_between(sizes, [min(row["times_s"]) for row in pipelines],
                          [max(row["times_s"]) for row in pipelines], color="C2", alpha=0.2)
        for row, style in ((single, "--"), (model_parallel, ":")):
            axes.axhline(row["median_s"], color="0.4", linestyle=style, label=texts[row["model"]])
        axes.set_xticks(sizes)
        # A single slow measurement must not flatten the curve.
        axes.set_ylim(0, 1.5 * max(row["median_s"] for row in metrics["rows"]))
