"""What a run of single_machine.py leaves: the tutorial's numbers, table, pictures, metrics.json."""

import statistics

import torch
from common import report

ROLE = "main"
# What the tutorial measured on two GPUs: seconds, and the shares that it works out from them.
TUTORIAL = {"single_s": 3.75, "model_parallel_s": 4.02, "split_size_20_s": 2.51,
            "split_size_12_s": 2.43, "model_parallel_slower": 0.07, "pipeline_faster": 0.49,
            "best_split_size": 12, "best_split_faster": 0.54}


def finish(rows, toy_losses, left_out, wall_s, args):
    """Print, draw and write what was measured; the metrics.

    Args:
        rows: of `measure`.
        toy_losses: of `train_toy`, before and after its step.
        left_out: split sizes that are larger than the batch.
        wall_s: seconds of all of it.
        args: the parsed flags.
    """
    if left_out:
        report.log(ROLE, f"left out: split sizes {left_out}, for the batch has only "
                         f"{args.batch_size} samples")
    report.log(ROLE, "ToyModel: loss {:.3f} -> {:.3f} in one step".format(*toy_losses))
    add_averages(rows)
    for line in table(rows):
        report.log(ROLE, line)
    numbers = compare_times(rows, args.split_size)
    plot(rows, numbers, args)
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
    print(last_line(numbers, losses, args.devices))
    return metrics


def add_averages(rows):
    """Add `mean_s`, `std_s` and `median_s` to each row."""
    for row in rows:
        times = row["times_s"]
        row |= {"mean_s": statistics.fmean(times), "std_s": statistics.pstdev(times),
                "median_s": statistics.median(times)}


def compare_times(rows, split_size):
    """The tutorial's four numbers, from our times: shares, 0.07 is 7%.

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


def table(rows):
    """Lines: a head, and one for each row."""
    lines = ["model            split size   micro-batches    median      mean   deviation   "
             "median / single's"]
    for row in rows:
        size, ratio = row["split_size"] or "", row["median_s"] / rows[0]["median_s"]
        lines.append(f"{row['model']:16} {size:>10} {row['micro_batches']:>15} "
                     f"{row['median_s']:>7.3f} s {row['mean_s']:>7.3f} s {row['std_s']:>9.3f} s "
                     f"{ratio:>18.2f}")
    return lines


def last_line(numbers, losses, devices):
    """The run in one sentence."""
    return (f"ResNet50 on {names_of(devices)}: model parallel takes "
            f"{numbers['model_parallel_slower']:+.0%} time (tutorial +7%), pipelined "
            f"{numbers['pipeline_faster']:+.0%} speed (+49%), best split size "
            f"{numbers['best_split_size']} with {numbers['best_split_faster']:+.0%} "
            f"(12 with +54%); loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")


def can_overlap(devices):
    """Whether the two halves can compute at the same time."""
    return devices[0] != devices[1]


def names_of(devices):
    """In words: `cuda:0 and cuda:1`, or `one device (cpu)`."""
    if can_overlap(devices):
        return f"{devices[0]} and {devices[1]}"
    return f"one device ({devices[0]})"


def what_it_shows(devices):
    """What a run on these devices can show, and what it cannot."""
    if can_overlap(devices):
        return (f"{names_of(devices)}: the halves can compute at the same time; this shows what a "
                "pipeline wins")
    return (f"{names_of(devices)}: nothing can overlap; this shows what splitting costs, but not "
            "what a pipeline wins on two GPUs")


def plot(rows, numbers, args):
    """Draw the tutorial's three pictures: mean and standard deviation over `--num_repeat`."""
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == args.split_size)
    overlap = can_overlap(args.devices)
    shown = "the halves can overlap" if overlap else "nothing can overlap, only costs show"
    title = (f"{{}} on {names_of(args.devices)}: {shown}\nResNet50, {args.batch_size} images of "
             f"{args.image_size}x{args.image_size}; mean and deviation of {args.num_repeat}")
    steps = f"{args.num_batches} training steps" if args.num_batches > 1 else "a training step"
    seconds = f"seconds for {steps}"

    slower, faster = numbers["model_parallel_slower"], numbers["pipeline_faster"]
    bars = [(single, "single device", ""),
            (model_parallel, "model parallel", f"{slower:+.0%} time (tutorial: +7%)"),
            (pipeline, f"pipelined, split size {args.split_size}",
             f"{faster:+.0%} speed (tutorial: +49%)")]
    for name, count, subject in (("mp_vs_rn", 2, "Model parallel"),
                                 ("mp_vs_rn_vs_pp", 3, "Pipeline")):
        path = args.output_dir / f"{name}.png"
        with report.picture(path, title.format(subject), "", seconds) as axes:
            means, deviations = ([row[key] for row, _, _ in bars[:count]]
                                 for key in ("mean_s", "std_s"))
            labels = [f"{label}\n{words}" for _, label, words in bars[:count]]
            axes.bar(labels, means, yerr=deviations, width=0.6, color=["0.6", "C0", "C1"][:count],
                     ecolor="C3", capsize=8)
            medians = [row["median_s"] for row, _, _ in bars[:count]]
            axes.plot(labels, medians, "kD", label="median (compared in percent)")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")

    path = args.output_dir / "split_size_tradeoff.png"
    with report.picture(path, title.format("Split size"),
                        "split size (samples in a micro-batch)", seconds) as axes:
        sizes, means, deviations = ([row[key] for row in pipelines]
                                    for key in ("split_size", "mean_s", "std_s"))
        axes.errorbar(sizes, means, deviations, fmt="o-", color="C1", ecolor="C3", capsize=4,
                      label="pipeline, mean")
        axes.plot(sizes, [row["median_s"] for row in pipelines], "kD", markersize=4, zorder=3,
                  label="pipeline, median")
        axes.axhline(single["median_s"], color="0.6", linestyle="--",
                     label="single device, median")
        axes.set_xticks(sizes)
        axes.set_ylim(bottom=0)
