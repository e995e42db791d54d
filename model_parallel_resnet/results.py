"""What the folder's pipelines leave: a line for each batch, table, metrics.json, num_split.png."""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from common import picture, report

import torch

from model_parallel_resnet import measuring
from model_parallel_resnet.measuring import Spans, Window
from tracing import timeline

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
    """Keeps the losses and the times of a run's batches.

    Args:
        role: of this process, for the printed lines.
        args: the parsed flags.
        show: whether this process shows a progress bar.
    """

    def __init__(self, role: str, args: argparse.Namespace, show: bool = True) -> None:
        self.role, self.losses = role, []
        self.windows = {num_split: [] for num_split in args.num_splits}
        self.bar = report.progress((args.num_batches + 1) * len(args.num_splits), "batch",
                                   show=show)

    def add(self, batch: int, num_split: int, started: float, loss: float | torch.Tensor) -> None:
        """Add a batch that has ended, and print a line.

        Args:
            batch: its number; 0 is the warm-up.
            num_split: its micro-batches.
            started: when it did, of `time.time()`.
            loss: a number, or a tensor of one.

        Raises:
            NotFiniteError: if the loss is not.
        """
        ended = time.time()
        self.windows[num_split].append((started, ended))
        loss = report.require_finite(loss, f"at step {len(self.losses) + 1}")
        self.losses.append(loss)
        report.log(self.role, f"{f'batch {batch}' if batch else 'warm-up'}  splits {num_split}  "
                              f"loss {loss:.4f}  {ended - started:.2f} s")
        self.bar.update()

    def metrics(self, spans: Spans) -> dict:
        """Return what `finish` takes; `spans` are those of all processes."""
        self.bar.close()
        return {"losses": self.losses, "windows": [times[1:] for times in self.windows.values()],
                "spans": spans}


def finish(metrics: dict, args: argparse.Namespace, name: str = "RPC pipeline",
           workers: Sequence[str] = ("worker1", "worker2"), backend: str = "tensorpipe",
           device: str | None = None) -> dict:
    """Turn what was recorded into rows, print and write them, and draw; return all metrics.

    Args:
        metrics: of `run_worker`: `losses` (one for each batch), `windows` (for each of
            `args.num_splits`, the beginning and end of its timed batches) and `spans` (of all
            processes); times in seconds.
        args: the parsed flags.
        name: of the pipeline, for the line of numbers and the pictures.
        workers: the roles that compute.
        backend: what carries the tensors.
        device: "cpu" where the workers were on it whatever `--device` is.

    Raises:
        SystemExit: 1 after one line, if the run cannot be what its table would say.
    """
    require_sound(metrics, args, workers)
    rows = rows_of(metrics, args, workers)
    spans, windows = metrics.pop("spans"), metrics.pop("windows")
    if metrics.get("stages_per_rank", 1) == 1:
        metrics["where"] = measuring.rows_of(spans, workers, args.num_splits, windows)
    metrics = report.save_metrics(args, {
        "arch": args.arch, "batch_size": args.batch_size, "image_size": args.image_size, **metrics,
        "rows": rows}, backend, device)
    print("\n".join(table(rows)))
    plot([metrics], args, name)
    print(last_line(rows, metrics["losses"], args, name))
    return metrics


def require_sound(metrics: dict, args: argparse.Namespace, workers: Sequence[str]) -> None:
    """End in words if the loss has not fallen, or a worker had other numbers of micro-batches."""
    losses, n_rows = metrics["losses"], len(args.num_splits)
    first, last = (statistics.fmean(part) for part in (losses[:n_rows], losses[-n_rows:]))
    if not last < first:  # the batch is always the same
        fail(f"the loss of the same batch has not fallen: {first:.4f} to {last:.4f}; "
             "a smaller --lr?")
    for num_split, of_split in zip(args.num_splits, metrics["windows"], strict=True):
        for worker in workers:
            inside = timeline.within(metrics["spans"][worker], of_split[-1])
            forwards = sum(span["kind"] == "forward" for span in inside)
            number = forwards / metrics.get("stages_per_rank", 1)
            if number != num_split:
                fail(f"{worker} had {number:g} micro-batches with --num_splits {num_split}")


def shown_first(spans_by_role: Spans, args: argparse.Namespace) -> dict[str, Window]:
    """Choose the windows of a timeline: the last batch with 1 micro-batch, the fastest number's.

    Args:
        spans_by_role: with a step of each worker at the end of each batch.
        args: the parsed flags.

    Returns:
        The windows by their captions.
    """
    steps = [sorted(span["end"] for span in spans if span["kind"] == "step")
             for spans in spans_by_role.values()]
    ends = [max(of_batch) for of_batch in zip(*filter(None, steps), strict=True)]
    of_batches = list(zip(ends, ends[1:], strict=False))[-len(args.num_splits) :]
    windows = dict(zip(args.num_splits, of_batches, strict=True))
    fastest = min(windows, key=lambda number: windows[number][1] - windows[number][0])
    return {f"num_split {number}: {windows[number][1] - windows[number][0]:.2f} s": windows[number]
            for number in (1, fastest)}


def fail(sentence: str) -> NoReturn:
    """End with status 1 after one line."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(1)


def rows_of(metrics: dict, args: argparse.Namespace, workers: Sequence[str]) -> list[dict]:
    """Compute a row of numbers for each of `args.num_splits`; see `finish`."""
    medians = [statistics.median(end - start for start, end in of_split)
               for of_split in metrics["windows"]]
    return [{"num_split": num_split, "median_s": median, "speedup": medians[0] / median,
             # One batch is m pieces of work for each of two stages. In an ideal pipeline, the
             # last piece leaves the second stage after m + 1 of the 2m pieces' times.
             "ideal": STAGES * num_split / (num_split + STAGES - 1),
             "idle_share": statistics.median(idle_share(metrics["spans"], workers, window)
                                             for window in of_split)}
            for num_split, median, of_split
            in zip(args.num_splits, medians, metrics["windows"], strict=True)]


def idle_share(spans: Spans, workers: Sequence[str], window: Window) -> float:
    """Return the mean of the workers' idle shares in a window of time."""
    return statistics.fmean(timeline.idle_share(spans[worker], window) for worker in workers)


def table(rows: list[dict]) -> list[str]:
    """Return lines: a head, and one for each number of micro-batches."""
    line = "{num_split:6}   {median_s:7.2f}   {speedup:8.2f}   {ideal:5.2f}   {idle_share:4.0%}"
    return ["splits   s/batch   speed-up   ideal   idle", *(line.format(**row) for row in rows)]


def last_line(rows: list[dict], losses: list[float], args: argparse.Namespace, name: str) -> str:
    """Put the run into one sentence."""
    best = min(rows, key=lambda row: row["median_s"])
    return ("{}, {}: loss {:.4f} -> {:.4f} | best with num_split {num_split}: {median_s:.2f} s "
            "a batch, {speedup:.2f} times as fast as with 1 (ideal {ideal:.2f}), workers idle "
            "{idle_share:.0%}").format(args.arch, name, losses[0], losses[-1], **best)


def plot(runs: list[dict], args: argparse.Namespace, name: str = "RPC pipeline") -> None:
    """Draw `num_split.png`: times of a batch, here and in the tutorial, over those with 1 split.

    Args:
        runs: the metrics of one or several.
        args: the parsed flags.
        name: of the pipeline.
    """
    path, rows = args.output_dir / "num_split.png", runs[0]["rows"]
    for axes, words in picture.in_each_language(
            path, WORDS, runs, arch=args.arch, batch_size=args.batch_size, pixels=args.image_size,
            name=name):
        splits = [row["num_split"] for row in rows]
        axes.plot(splits, [1 / row["ideal"] for row in rows], ":", color="0.4",
                  label=words["ideal"])
        axes.plot(list(TUTORIAL_S), [seconds / TUTORIAL_S[1] for seconds in TUTORIAL_S.values()],
                  "s--", color=picture.GREY, label=words["tutorial"])
        times = [[1 / row["speedup"] for row in run["rows"]] for run in runs]
        picture.line(axes, splits, times, color="C0", label=words["here"])
        axes.set_xscale("log", base=2)
        ticks = sorted({*splits, *TUTORIAL_S})
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.set_ylim(0, 1.15 * max(max(of_run) for of_run in times))
        seconds, _ = picture.median_and_errors([[row["median_s"] for row in run["rows"]]
                                                for run in runs])
        for row, median, of_split in zip(rows, seconds, zip(*times, strict=True), strict=True):
            # Away from the other lines.
            end, points = (min, -15) if row["speedup"] > row["ideal"] else (max, 7)
            axes.annotate(words["seconds"] % median, (row["num_split"], end(of_split)), (0, points),
                          textcoords="offset points", ha="center", fontsize=9, color="C0")
