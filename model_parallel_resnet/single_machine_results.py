"""What a run of single_machine.py leaves: the tutorial's numbers, table, pictures, metrics.json."""

import argparse
import statistics

from common import picture, report

import torch

ROLE = "main"
WORDS = {
    "en": {"mp_vs_rn": "Model parallel", "mp_vs_rn_vs_pp": "Pipeline",
           "split_size_tradeoff": "Split size",
           "overlap": " on two devices: the halves can overlap",
           "costs": " on one device: nothing can overlap, only costs show",
           "batch": "ResNet50, {batch_size} images of {pixels}x{pixels}",
           "x": "split size (samples in a micro-batch)", "y": "seconds (training steps: {steps})",
           "single": "single device", "split": "model parallel\n{slower:+.0%} time (tutorial: +7%)",
           "pipeline": "pipelined, split size {size}\n{faster:+.0%} speed (tutorial: +49%)",
           "curve": "pipeline", "line": "single device",
           "one": "Median of {repeats} repeats with their range",
           "several": "Median of {repeats} repeats in {{n}} runs, with their range"},
    "ja": {"mp_vs_rn": "モデル並列", "mp_vs_rn_vs_pp": "パイプライン",
           "split_size_tradeoff": "分割サイズ",
           "overlap": "（デバイス2個：前半と後半が重なりうる）",
           "costs": "（デバイス1個：処理は重ならず、分割のコストだけが見える）",
           "batch": "ResNet50、{pixels}×{pixels}の画像{batch_size}枚",
           "x": "分割サイズ（マイクロバッチのサンプル数）", "y": "訓練{steps}ステップの秒数",
           "single": "単一デバイス",
           "split": "モデル並列\n時間{slower:+.0%}（チュートリアル：+7%）",
           "pipeline": "パイプライン、分割サイズ{size}\n速度{faster:+.0%}（チュートリアル：+49%）",
           "curve": "パイプライン", "line": "単一デバイス",
           "one": "{repeats}回の測定の中央値と範囲",
           "several": "{{n}}回の実行での{repeats}回の測定の中央値と範囲"},
}
# What the tutorial measured on two GPUs: seconds, and the shares that it works out from them.
TUTORIAL = {"single_s": 3.75, "model_parallel_s": 4.02, "split_size_20_s": 2.51,
            "split_size_12_s": 2.43, "model_parallel_slower": 0.07, "pipeline_faster": 0.49,
            "best_split_size": 12, "best_split_faster": 0.54}


def finish(rows: list[dict], toy_losses: tuple[float, float], left_out: list[int], wall_s: float,
           args: argparse.Namespace) -> dict:
    """Print, draw and write what was measured; return the metrics.

    Args:
        rows: of `measure`.
        toy_losses: of `train_toy`, before and after its step.
        left_out: split sizes that are larger than the batch.
        wall_s: seconds of all of it.
        args: the parsed flags.
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
    plot([metrics], args)
    print(last_line(numbers, losses, args.devices))
    return metrics


def add_averages(rows: list[dict]) -> None:
    """Add `mean_s`, `std_s` and `median_s` to each row."""
    for row in rows:
        times = row["times_s"]
        row |= {"mean_s": statistics.fmean(times), "std_s": statistics.pstdev(times),
                "median_s": statistics.median(times)}


def compare_times(rows: list[dict], split_size: int) -> dict[str, float]:
    """Compute the tutorial's four numbers from our times: shares, 0.07 is 7%.

    From medians, not from the tutorial's means: one repeat that something else has slowed down
    would decide a mean.
    """
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == split_size)
    best = min(pipelines, key=lambda row: row["median_s"])
    return {"model_parallel_slower": model_parallel["median_s"] / single["median_s"] - 1,
            "pipeline_faster": single["median_s"] / pipeline["median_s"] - 1,
            "best_split_size": best["split_size"],
            "best_split_faster": single["median_s"] / best["median_s"] - 1}


def table(rows: list[dict]) -> list[str]:
    """Return lines: a head, and one for each row."""
    lines = ["model            split size   micro-batches    median      mean   deviation   "
             "median / single's"]
    for row in rows:
        size, ratio = row["split_size"] or "", row["median_s"] / rows[0]["median_s"]
        lines.append(f"{row['model']:16} {size:>10} {row['micro_batches']:>15} "
                     f"{row['median_s']:>7.3f} s {row['mean_s']:>7.3f} s {row['std_s']:>9.3f} s "
                     f"{ratio:>18.2f}")
    return lines


def last_line(numbers: dict[str, float], losses: list[float], devices: list[torch.device]) -> str:
    """Put the run into one sentence."""
    return (f"ResNet50 on {names_of(devices)}: model parallel takes "
            f"{numbers['model_parallel_slower']:+.0%} time (tutorial +7%), pipelined "
            f"{numbers['pipeline_faster']:+.0%} speed (+49%), best split size "
            f"{numbers['best_split_size']} with {numbers['best_split_faster']:+.0%} "
            f"(12 with +54%); loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


def can_overlap(devices: list) -> bool:
    """Return whether the two halves can compute at the same time; devices, or their names."""
    return devices[0] != devices[1]


def names_of(devices: list[torch.device]) -> str:
    """Name both devices: `cuda:0 and cuda:1`, or `one device (cpu)`."""
    if can_overlap(devices):
        return f"{devices[0]} and {devices[1]}"
    return f"one device ({devices[0]})"


def what_it_shows(devices: list[torch.device]) -> str:
    """Describe what a run on these devices can show, and what it cannot."""
    if can_overlap(devices):
        return (f"{names_of(devices)}: the halves can compute at the same time; this shows what a "
                "pipeline wins")
    return (f"{names_of(devices)}: nothing can overlap; this shows what splitting costs, but not "
            "what a pipeline wins on two GPUs")


def plot(runs: list[dict], args: argparse.Namespace) -> None:
    """Draw the tutorial's three pictures: medians and ranges of all repeats of one or several runs.

    Tutorial: means and standard deviations, which a single slow repeat decides.
    """
    ran = runs[0]
    rows = [{**row, "times_s": sum((run["rows"][number]["times_s"] for run in runs), [])}
            for number, row in enumerate(ran["rows"])]
    add_averages(rows)
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == ran["split_size"])
    numbers = compare_times(rows, ran["split_size"])
    values = {"batch_size": ran["batch_size"], "pixels": ran["image_size"],
              "steps": ran["num_batches"], "size": ran["split_size"],
              "repeats": len(single["times_s"]), "slower": numbers["model_parallel_slower"],
              "faster": numbers["pipeline_faster"]}
    for name, drawn in (("mp_vs_rn", [single, model_parallel]),
                        ("mp_vs_rn_vs_pp", [single, model_parallel, pipeline])):
        path = args.output_dir / f"{name}.png"
        for axes, words in picture.in_each_language(path, words_of(name, ran), runs, **values):
            labels = [words[label] for label in ("single", "split", "pipeline")][: len(drawn)]
            medians, errors = picture.median_and_errors(of_repeats(drawn))
            axes.bar(labels, medians, yerr=errors, width=0.6, capsize=8, ecolor="0.2",
                     color=[picture.GREY, "C0", "C2"][: len(drawn)])
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")
    path = args.output_dir / "split_size_tradeoff.png"
    for axes, words in picture.in_each_language(path, words_of("split_size_tradeoff", ran), runs,
                                                **values):
        sizes = [row["split_size"] for row in pipelines]
        picture.line(axes, sizes, of_repeats(pipelines), color="C2", label=words["curve"])
        axes.axhline(single["median_s"], color="0.4", linestyle="--", label=words["line"])
        axes.set_xticks(sizes)
        # One slow measurement would press the curve flat.
        axes.set_ylim(0, 1.5 * max(row["median_s"] for row in pipelines))


def of_repeats(rows: list[dict]) -> list[tuple[float, ...]]:
    """Return, for each repeat, the seconds of each row."""
    return list(zip(*(row["times_s"] for row in rows), strict=True))


def words_of(name: str, ran: dict) -> dict[str, dict[str, str]]:
    """Make the texts of a picture, from the metrics of its run."""
    overlap = "overlap" if can_overlap(ran["devices"]) else "costs"
    return {language: {**texts, "title": f"{texts[name]}{texts[overlap]}\n{texts['batch']}",
                       "x": texts["x"] if name == "split_size_tradeoff" else ""}
            for language, texts in WORDS.items()}
