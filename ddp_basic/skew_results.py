"""Output of `skew.py`: a table, skew.png, metrics.json and the summary line."""

import argparse
import statistics
from collections.abc import Iterable

from common import picture, report

PLOTTED_STEPS = 5
WORDS = {
    "en": {"title": "Rank {rank} loses {delay:g} s in each step, and so do all other ranks",
           "x": "time (s)", "y": "rank", "computes": "forward and extra work",
           "waits": "backward(): mostly waiting for the other ranks"},
    "ja": {"title": "ランク{rank}が各ステップで{delay:g}秒遅れると、全ランクが遅れる",
           "x": "時間（秒）", "y": "ランク", "computes": "フォワードパスと追加の処理",
           "waits": "backward()：ほとんどはほかのランクの待ち"},
}


def metrics_of(rows: list[dict], backend: str) -> dict[str, object]:
    """Return medians over the steps, in seconds, of what `train_twice` returned on each rank."""
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
    """Write metrics.json, draw skew.png, print table and summary line; return the metrics."""
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
    """Draw the first steps of each rank as bars over time, from `spans` in the metrics."""
    path, spans = args.output_dir / "skew.png", metrics["spans"]
    zero = min(steps[0][0] for steps in spans)
    for axes, words in picture.in_each_language(path, WORDS, metrics,
                                                height=1.8 + 0.7 * len(spans),
                                                rank=args.slow_rank, delay=args.delay):
        for rank, steps in enumerate(spans):
            starts, backwards, ends = zip(*steps[:PLOTTED_STEPS], strict=True)
            for name, begin, end, look in (("computes", starts, backwards, {"color": "C0"}),
                                           ("waits", backwards, ends,
                                            {"color": "C1", "hatch": "////"})):
                axes.barh(rank, [b - a for a, b in zip(begin, end, strict=True)],
                          left=[a - zero for a in begin], height=0.7, edgecolor="white",
                          label=words[name] if rank == 0 else None, **look)
        axes.set_yticks(range(len(spans)))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
