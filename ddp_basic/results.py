"""What `main.py` shows: a table for each demo, skew.png, metrics.json, the line of numbers."""

import argparse
import statistics
from collections.abc import Callable, Iterable

import torch
from common import picture, report
from common.tracing import page
from torch import nn

DRAWN_STEPS = 5
WORDS = {
    "en": {"title": "Rank {rank} loses {delay:g} s in each step, and so do all the others",
           "x": "time (s)", "y": "rank", "forward": "forward and extra work",
           "backward with all_reduce": "backward(): mostly waiting for the others"},
    "ja": {"title": "ランク{rank}が各ステップで{delay:g}秒遅れると、全ランクが遅れる",
           "x": "時間（秒）", "y": "ランク", "forward": "フォワードパスと追加の処理",
           "backward with all_reduce": "backward()：ほとんどはほかのランクの待ち"},
}
# What a timeline shows (common/tracing).
SPANS = {
    "torch.nn.parallel:DistributedDataParallel.forward": ["forward"],
    "torch:Tensor.backward": ["backward with all_reduce"],
    "torch.optim:SGD.step": ["step"],
}


def loss_on(inputs: torch.Tensor, labels: torch.Tensor, model: nn.Module,
            loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Compute the loss of a model as it is.

    Raises:
        NotFiniteError: if it is not a number any more.
    """
    with torch.no_grad():
        return report.require_finite(loss_fn(model(inputs), labels), "after the last step")


def table(demo: str, rows: list, args: argparse.Namespace, show: bool) -> dict[str, object]:
    """Make the metrics of a demo, from a row of each rank; print them on the rank that shows it.

    Args:
        demo: its name.
        rows: of `demo_skew` what it returns, of the others the losses before each step and at the
            end.
        args: the parsed flags.
        show: whether this rank prints. Rows that the ranks printed themselves would interleave.
    """
    if demo == "skew":
        return _skew_table(rows, args, show)
    # All ranks have as many samples: the mean of their means is the mean.
    losses = [statistics.fmean(step) for step in zip(*rows, strict=True)]
    if show:
        _log(f"{demo}: loss {losses[0]:.3f} -> {losses[-1]:.3f} on the samples of all ranks, "
             f"in {args.steps} steps")
        _log("  rank   loss on its own")
        for rank, own in enumerate(rows):
            _log(f"  {rank:4}    {own[0]:.3f} -> {own[-1]:.3f}")
    return {"loss_before": losses[0], "loss_after": losses[-1], "losses": losses,
            "losses_per_rank": rows}


def _skew_table(rows: list[dict], args: argparse.Namespace, show: bool) -> dict[str, list]:
    rows = [{"compute_s": _median((start, backward) for start, backward, _ in row["spans"]),
             "wait_s": _median((backward, end) for _, backward, end in row["spans"]),
             "step_s": _median((start, end) for start, _, end in row["spans"]),
             "even_step_s": _median((start, end) for start, _, end in row["even_spans"]),
             "spans": row["spans"]} for row in rows]
    if show:
        _log(f"skew: rank {args.slow_rank} takes {args.delay:g} s longer over each of "
             f"{args.steps} steps")
        _log("  rank   computes   in backward()    a step   a step without the delay")
        for rank, row in enumerate(rows):
            _log("  {:4} {compute_s:8.3f} s {wait_s:13.3f} s {step_s:7.3f} s {even_step_s:24.3f} s"
                 .format(rank, **row))
    return {key: [row[key] for row in rows] for key in rows[0]}


def _median(spans: Iterable[tuple[float, float]]) -> float:
    """Return that of the lengths of (start, end)."""
    return statistics.median(end - start for start, end in spans)


def _log(text: str) -> None:
    report.log("rank0", text)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json, draw skew.png, print the line of numbers; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    if "skew" in metrics:
        plot_skew(metrics, args)
        step_s, even_step_s = (max(metrics["skew"][key]) for key in ("step_s", "even_step_s"))
        print(f"skew on {args.world_size} ranks: a step takes {step_s:.3f} s where "
              f"rank {args.slow_rank} takes {args.delay:g} s longer, "
              f"{even_step_s:.3f} s where none does")
        return metrics
    losses = metrics[args.demos[0]]  # the same in every demo: they train the same weights
    print(f"{', '.join(args.demos)} on {args.world_size} ranks: "
          f"loss {losses['loss_before']:.3f} -> {losses['loss_after']:.3f}")
    return metrics


def plot_skew(metrics: dict, args: argparse.Namespace) -> None:
    """Draw the first steps of every rank as bars over time.

    Args:
        metrics: their `spans` are, of each rank and step: start, start of backward(), end, in
            seconds.
        args: the parsed flags.
    """
    path, spans = args.output_dir / "skew.png", metrics["skew"]["spans"]
    height = 1.8 + 0.7 * len(spans)
    for axes, words in picture.in_each_language(path, WORDS, [metrics], height=height,
                                                rank=args.slow_rank, delay=args.delay):
        zero = min(steps[0][0] for steps in spans)
        for rank, steps in enumerate(spans):
            computing = [(start - zero, backward - start) for start, backward, _ in steps]
            waiting = [(backward - zero, end - backward) for _, backward, end in steps]
            for bars, kind in (
                (computing, "forward"),
                (waiting, "backward with all_reduce"),
            ):
                starts, lengths = zip(*bars[:DRAWN_STEPS], strict=True)
                axes.barh(rank, lengths, left=starts, height=0.7, **page.bar(kind),
                          label=words[kind] if rank == 0 else None)
        axes.set_yticks(range(len(spans)))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
