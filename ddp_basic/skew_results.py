"""What `skew.py` shows: a table, skew.png, metrics.json, the line of numbers."""

import argparse
import statistics
from collections.abc import Iterable

from common import picture, report

from tracing import page

DRAWN_STEPS = 5
WORDS = {
    "en": {"title": "Rank {rank} loses {delay:g} s in each step, and so do all the others",
           "x": "time (s)", "y": "rank", "forward": "forward and extra work",
           "backward with all_reduce": "backward(): mostly waiting for the others"},
    "ja": {"title": "ランク{rank}が各ステップで{delay:g}秒遅れると、全ランクが遅れる",
           "x": "時間（秒）", "y": "ランク", "forward": "フォワードパスと追加の処理",
           "backward with all_reduce": "backward()：ほとんどはほかのランクの待ち"},
}


def metrics_of(rows: list[dict], backend: str) -> dict[str, object]:
    """Make the metrics from what `train_twice` has returned on each rank: medians of the steps."""
    rows = [{"compute_s": _median((start, backward) for start, backward, _ in row["spans"]),
             "wait_s": _median((backward, end) for _, backward, end in row["spans"]),
             "step_s": _median((start, end) for start, _, end in row["spans"]),
             "even_step_s": _median((start, end) for start, _, end in row["even_spans"]),
             "spans": row["spans"]} for row in rows]
    return {"backend": backend, **{key: [row[key] for row in rows] for key in rows[0]}}


def _median(spans: Iterable[tuple[float, float]]) -> float:
    """Return the median length, in seconds, of spans (start, end)."""
    return statistics.median(end - start for start, end in spans)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json, draw skew.png, print the table and the line of numbers.

    Returns:
        The whole metrics.
    """
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    plot(metrics, args)
    report.log("rank0", f"skew: rank {args.slow_rank} takes {args.delay:g} s longer over each of "
                        f"{args.steps} steps")
    report.log("rank0", "  rank   computes   in backward()    a step   a step without the delay")
    columns = (metrics[key] for key in ("compute_s", "wait_s", "step_s", "even_step_s"))
    for rank, (compute_s, wait_s, step_s, even_step_s) in enumerate(zip(*columns, strict=True)):
        report.log("rank0", f"  {rank:4} {compute_s:8.3f} s {wait_s:13.3f} s {step_s:7.3f} s "
                            f"{even_step_s:24.3f} s")
    step_s, even_step_s = max(metrics["step_s"]), max(metrics["even_step_s"])
    print(f"skew on {args.world_size} ranks: a step takes {step_s:.3f} s where "
          f"rank {args.slow_rank} takes {args.delay:g} s longer, "
          f"{even_step_s:.3f} s where none does")
    return metrics


def plot(metrics: dict, args: argparse.Namespace) -> None:
    """Draw the first steps of every rank as bars over time.

    Args:
        metrics: their `spans` are, of each rank and step: start, start of backward(), end, in
            seconds.
        args: the parsed flags.
    """
    path, spans = args.output_dir / "skew.png", metrics["spans"]
    height = 1.8 + 0.7 * len(spans)
    for axes, words in picture.in_each_language(path, WORDS, [metrics], height=height,
                                                rank=args.slow_rank, delay=args.delay):
        zero = min(steps[0][0] for steps in spans)
        for rank, steps in enumerate(spans):
            computing = [(start - zero, backward - start) for start, backward, _ in steps]
            waiting = [(backward - zero, end - backward) for _, backward, end in steps]
            for bars, kind in ((computing, "forward"), (waiting, "backward with all_reduce")):
                starts, lengths = zip(*bars[:DRAWN_STEPS], strict=True)
                axes.barh(rank, lengths, left=starts, height=0.7, **page.bar(kind),
                          label=words[kind] if rank == 0 else None)
        axes.set_yticks(range(len(spans)))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
