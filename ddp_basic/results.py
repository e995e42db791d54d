"""Output of `main.py`: a table for each demo, metrics.json and the summary line."""

import argparse
import statistics

from common import report


def table(demo: str, rows: list[list[float]], args: argparse.Namespace,
          show: bool) -> dict[str, object]:
    """Return the metrics of one demo, and print them on one rank.

    Args:
        demo: Name of the demo.
        rows: For each rank, its losses before each step and after the last one.
        args: Parsed flags.
        show: Whether this rank prints. Lines that the ranks print themselves would interleave.
    """
    # All ranks have the same number of samples, so the mean of their means is the mean.
    losses = [statistics.fmean(step) for step in zip(*rows, strict=True)]
    if show:
        _log(f"{demo}: loss {losses[0]:.3f} -> {losses[-1]:.3f} on the samples of all ranks, "
             f"in {args.steps} steps")
        _log("  rank   loss on its own samples")
        for rank, own in enumerate(rows):
            _log(f"  {rank:4}    {own[0]:.3f} -> {own[-1]:.3f}")
    return {"loss_before": losses[0], "loss_after": losses[-1], "losses": losses,
            "losses_per_rank": rows}


def _log(text: str) -> None:
    report.log("rank0", text)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json and print the summary line; return the complete metrics."""
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    losses = metrics[args.demos[0]]  # the same in every demo, because all train the same weights
    print(f"{', '.join(args.demos)} on {args.world_size} ranks: "
          f"loss {losses['loss_before']:.3f} -> {losses['loss_after']:.3f}")
    return metrics
