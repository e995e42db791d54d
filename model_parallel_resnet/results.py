"""Results of both pipelines: a line for each batch, a table, metrics.json, num_split.png."""

import argparse
import statistics
import sys

from common import picture, report

import torch

TUTORIAL_S = {1: 16.45, 2: 12.33, 4: 10.16, 8: 9.08}  # 6_7, cell 18: three batches of 120, two GPUs
STAGES = 2
WORDS = {
    "en": {"title": "A pipeline of two stages: {arch}, batch {batch_size}, {pixels} pixels",
           "x": "micro-batches m (num_split)", "y": "time of a batch / time with 1 split",
           "ideal": "ideal: (m + 1) / 2m", "here": "here ({name})", "seconds": "%.2f s",
           "tutorial": "the tutorial (two GPUs, start-up included)"},
    "ja": {"title": "2段のパイプライン：{arch}、バッチサイズ{batch_size}、{pixels}ピクセル",
           "x": "マイクロバッチの数m（num_split）", "y": "1バッチの時間 / 分割なしの時間",
           "ideal": "理想：(m + 1) / 2m", "here": "測定値（{name}）", "seconds": "%.2f秒",
           "tutorial": "チュートリアル（GPU 2個、起動時間を含む）"},
}


class Batches:
    """Losses and times of a run's batches.

    Args:
        role: Name of this process, for the printed lines.
        args: Parsed flags.
        show: Whether this process prints; if not, it only keeps its own times.
    """

    def __init__(self, role: str, args: argparse.Namespace, show: bool = True) -> None:
        self.role, self.show = role, show
        self.losses = []
        self.seconds = {num_split: [] for num_split in args.num_splits}
        self.idle = {num_split: [] for num_split in args.num_splits}
        self.bar = report.progress((args.num_batches + 1) * len(args.num_splits), "batch",
                                   show=show)

    def add(self, batch: int, num_split: int, seconds: float, loss: float | torch.Tensor | None,
            busy: float | None = None) -> None:
        """Add a batch, and print a line.

        Args:
            batch: Number of the batch; batch 0 is the warm-up, whose time is dropped.
            num_split: Number of its micro-batches.
            seconds: Duration of the batch.
            loss: Loss of the batch; None on a rank that does not compute it.
            busy: Seconds in which this process computed, if they were measured.

        Raises:
            NotFiniteError: If the loss is not finite.
        """
        if batch > 0:
            self.seconds[num_split].append(seconds)
            if busy is not None:
                self.idle[num_split].append(1 - busy / seconds)
        if self.show:
            loss = report.require_finite(loss, f"at step {len(self.losses) + 1}")
            self.losses.append(loss)
            number = f"batch {batch}" if batch else "warm-up"
            report.log(self.role, f"{number}  splits {num_split}  loss {loss:.4f}  {seconds:.2f} s")
            self.bar.update()

    def metrics(self) -> dict:
        """Return the losses of all batches in order, and the times: see `finish`."""
        self.bar.close()
        return {"losses": self.losses, "seconds": list(self.seconds.values())}


def finish(metrics: dict, args: argparse.Namespace, name: str = "RPC pipeline",
           backend: str = "tensorpipe", device: str | None = None) -> dict:
    """Print the table, write metrics.json, plot num_split.png; return all metrics.

    Args:
        metrics: What `run_worker` returned. `losses` has one loss per batch. `seconds` has, for
            each of `args.num_splits`, the duration of each timed batch. `idle`, if present, has
            for each rank and each of `args.num_splits` the idle fraction of each timed batch.
        args: Parsed flags.
        name: Name of the pipeline, for the summary line and the picture.
        backend: Backend that sends the tensors.
        device: "cpu" if the workers used the CPU in spite of `--device`.

    Raises:
        SystemExit: 1 after one line, if the loss has not fallen.
    """
    require_falling(metrics["losses"], len(args.num_splits))
    rows = rows_of(metrics.pop("seconds"), metrics.pop("idle", []), args.num_splits)
    metrics = report.save_metrics(args, {
        "arch": args.arch, "batch_size": args.batch_size, "image_size": args.image_size, **metrics,
        "rows": rows}, backend, device)
    print("\n".join(table(rows)))
    plot(metrics, args, name)
    print(last_line(rows, metrics["losses"], args.arch, name))
    return metrics


def require_falling(losses: list[float], round_size: int) -> None:
    """Refuse a training run whose mean loss in the last round is not below that of the first.

    All steps use the same batch, so a loss that does not fall shows that nothing was learned.

    Args:
        losses: Losses of all steps, in order.
        round_size: Number of steps in a round.

    Raises:
        SystemExit: 1 after one line.
    """
    first, last = (statistics.fmean(part) for part in (losses[:round_size], losses[-round_size:]))
    if not last < first:
        print(f"error: the loss of the same batch has not fallen: {first:.4f} to {last:.4f}; "
              "a smaller --lr?", file=sys.stderr)
        raise SystemExit(1)


def rows_of(seconds: list[list[float]], idle: list[list[list[float]]],
            num_splits: list[int]) -> list[dict]:
    """Compute one row of numbers for each of `num_splits`; see `finish` for the arguments.

    Returns:
        For each number: its median time, its speedup over a single piece, the ideal speedup, and
        the mean idle fraction of the ranks if that was measured.
    """
    rows = []
    for row, (num_split, times) in enumerate(zip(num_splits, seconds, strict=True)):
        median = statistics.median(times)
        # In an ideal pipeline, a batch is m pieces of work for each of two stages. The last piece
        # leaves the second stage after m + 1 of the 2m pieces' times.
        rows.append({"num_split": num_split, "median_s": median,
                     "speedup": statistics.median(seconds[0]) / median,
                     "ideal": STAGES * num_split / (num_split + STAGES - 1)})
        if idle:
            of_batches = zip(*(of_rank[row] for of_rank in idle), strict=True)
            rows[-1]["idle_share"] = statistics.median(map(statistics.fmean, of_batches))
    return rows


def table(rows: list[dict]) -> list[str]:
    """Return a heading, and one line for each number of micro-batches."""
    head, line = "splits   s/batch    speedup   ideal", (
        "{num_split:6}   {median_s:7.2f}   {speedup:8.2f}   {ideal:5.2f}")
    if "idle_share" in rows[0]:
        head, line = f"{head}   idle", f"{line}   {{idle_share:4.0%}}"
    return [head, *(line.format(**row) for row in rows)]


def last_line(rows: list[dict], losses: list[float], arch: str, name: str) -> str:
    """Return the summary line."""
    best = min(rows, key=lambda row: row["median_s"])
    idle = ", workers idle {idle_share:.0%}" if "idle_share" in best else ""
    return ("{}, {}: loss {:.4f} -> {:.4f} | best with num_split {num_split}: {median_s:.2f} s "
            "a batch, {speedup:.2f} times as fast as with 1 (ideal {ideal:.2f})" + idle).format(
                arch, name, losses[0], losses[-1], **best)


def shown_first(spans_by_role: dict[str, list[dict]],
                args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Choose two windows for the timeline: the last batch in one piece, and the fastest batch.

    Args:
        spans_by_role: Spans of each process. The steps of the optimizer end a batch.
        args: Parsed flags.

    Returns:
        The windows (start, end) in seconds, by their captions.
    """
    steps = [sorted(span["end"] for span in spans if span["kind"] == "step")
             for spans in spans_by_role.values()]
    ends = [max(of_batch) for of_batch in zip(*filter(None, steps), strict=True)]
    of_batches = list(zip(ends, ends[1:], strict=False))[-len(args.num_splits) :]
    windows = dict(zip(args.num_splits, of_batches, strict=True))
    fastest = min(windows, key=lambda number: windows[number][1] - windows[number][0])
    return {f"num_split {number}: {windows[number][1] - windows[number][0]:.2f} s": windows[number]
            for number in (1, fastest)}


def plot(metrics: dict, args: argparse.Namespace, name: str) -> None:
    """Plot num_split.png: times of a batch, here and in the tutorial, over those with 1 split."""
    rows = metrics["rows"]
    splits = [row["num_split"] for row in rows]
    times = [1 / row["speedup"] for row in rows]
    for axes, words in picture.in_each_language(
            args.output_dir / "num_split.png", WORDS, metrics, arch=args.arch,
            batch_size=args.batch_size, pixels=args.image_size, name=name):
        axes.plot(splits, [1 / row["ideal"] for row in rows], ":", color="0.4",
                  label=words["ideal"])
        axes.plot(list(TUTORIAL_S), [seconds / TUTORIAL_S[1] for seconds in TUTORIAL_S.values()],
                  "s--", color=picture.GREY, label=words["tutorial"])
        axes.plot(splits, times, "o-", color="C0", label=words["here"])
        ticks = sorted({*splits, *TUTORIAL_S})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.set_ylim(0, 1.15 * max(times))
        for row, split, relative in zip(rows, splits, times, strict=True):
            below = row["speedup"] > row["ideal"]  # away from the other lines
            axes.annotate(words["seconds"] % row["median_s"], (split, relative),
                          (0, -15 if below else 7), textcoords="offset points", ha="center",
                          fontsize=9, color="C0")
