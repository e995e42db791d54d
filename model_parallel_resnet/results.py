"""What a run of main.py or schedules.py leaves: the table, metrics.json, num_split.png, and the timeline."""

import statistics

from common import report, timeline

TUTORIAL_S = {1: 16.45, 2: 12.33, 4: 10.16, 8: 9.08}  # published in tutorial 6_7: three batches of 120 on two GPUs
STAGES = 2


def finish(metrics, args, name, workers, backend):
    """Turn what was recorded into rows, print and write them, and draw; the whole metrics.

    Args:
        metrics: of `launch`: `losses` (one for each batch), `windows` (for each of `args.num_splits`, the beginning and
            end of its timed batches) and `spans` (of all processes); times in seconds.
        args: the parsed flags.
        name: of the pipeline, for the last line and the pictures.
        workers: the roles that compute.
        backend: what carries the tensors.
    """
    spans, windows = metrics.pop("spans"), metrics.pop("windows")
    medians = [statistics.median(end - start for start, end in of_split) for of_split in windows]
    rows = [{"num_split": num_split, "median_s": median, "speedup": medians[0] / median,
             # One batch is m pieces of work for each of two stages. In a pipeline without any loss, the last piece
             # leaves the second stage after m + 1 of the 2m pieces' times.
             "ideal": STAGES * num_split / (num_split + STAGES - 1),
             "idle_share": statistics.median(idle_share(spans, workers, window) for window in of_split)}
            for num_split, median, of_split in zip(args.num_splits, medians, windows, strict=True)]
    metrics = report.save_metrics(args, {"arch": args.arch, "batch_size": args.batch_size,
                                         "image_size": args.image_size, "rows": rows, **metrics}, backend)
    print_table(rows)
    draw_num_split(rows, args, name)
    best = min(rows, key=lambda row: row["median_s"])
    if args.timeline:
        last = {row["num_split"]: of_split[-1] for row, of_split in zip(rows, windows, strict=True)}
        shown = {f"num_split {n}: {last[n][1] - last[n][0]:.2f} s": last[n] for n in (1, best["num_split"])}
        timeline.save(spans, args.output_dir, f"A batch of {args.arch}, {name}", shown)
    loss = "loss {:.4f} -> {:.4f}".format(metrics["losses"][0], metrics["losses"][-1])
    print("{}, {}: {} | best with num_split {num_split}: {median_s:.2f} s a batch, {speedup:.2f} times as fast as "
          "with 1 (ideal {ideal:.2f}), workers idle {idle_share:.0%}".format(args.arch, name, loss, **best))
    return metrics


def idle_share(spans, workers, window):
    """The mean of the workers' idle shares in a window of time."""
    return statistics.mean(timeline.idle_share(spans[worker], window) for worker in workers)


def print_table(rows):
    """A line for each number of splits."""
    print("splits   s/batch   speed-up   ideal   idle")
    for row in rows:
        print("{num_split:6}   {median_s:7.2f}   {speedup:8.2f}   {ideal:5.2f}   {idle_share:4.0%}".format(**row))


def draw_num_split(rows, args, name):
    """Draw `num_split.png`: times of a batch, and those of the tutorial, each as a share of its time with 1 split."""
    title = f"A pipeline of two stages: {args.arch}, batch {args.batch_size}, {args.image_size} pixels"
    ylabel = "time of a batch / time with 1 split"
    with report.picture(args.output_dir / "num_split.png", title, "micro-batches (num_split)", ylabel) as axes:
        splits = [row["num_split"] for row in rows]
        axes.plot(splits, [1 / row["ideal"] for row in rows], ":", color="0.5", label="ideal: (m + 1) / 2m")
        axes.plot(list(TUTORIAL_S), [seconds / TUTORIAL_S[1] for seconds in TUTORIAL_S.values()], "s--", color="C1",
                  label="the tutorial (two GPUs, start-up included)")
        axes.plot(splits, [1 / row["speedup"] for row in rows], "o-", color="C0", label=f"here ({name})")
        for row in rows:
            away = -14 if row["speedup"] > row["ideal"] else 7  # points, from the other lines
            axes.annotate(f"{row['median_s']:.2f} s", (row["num_split"], 1 / row["speedup"]), xytext=(0, away),
                          textcoords="offset points", ha="center", fontsize=8, color="C0")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({*splits, *TUTORIAL_S}), labels=map(str, sorted({*splits, *TUTORIAL_S})))
        axes.set_ylim(0, 1.3 * max(1 / row["speedup"] for row in rows) - 0.1)
