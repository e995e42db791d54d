"""What `fsdp.py` shows: a table, sharding.png, metrics.json, the line of numbers."""

import argparse
import statistics
from typing import TYPE_CHECKING

import torch
from common import picture, report

from ddp_basic import fsdp_memory as memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # the workers need not pay for the import

MB = 1e6
WORDS = {
    "en": {"title": "What each of {ranks} ranks holds and sends, {millions:.2g} M parameters",
           "x": "--sharding", "y": "held (MB)", "y2": "sent in a step (MB)",
           "parameters": "parameters", "gradients": "gradients", "optimizer": "Adam's state",
           "sent": "sent, as the kernel counts it", "formula": "formula",
           "gloo": "formula, with gloo's reduce-scatter",
           "one": "One run, a bar for each rank"},
    "ja": {"title": "{ranks}ランクの保持量と送信量（パラメーター{millions:.2g}M個）",
           "x": "--sharding", "y": "保持（MB）", "y2": "1ステップの送信（MB）",
           "parameters": "パラメーター", "gradients": "勾配", "optimizer": "Adamの状態",
           "sent": "送信（カーネルによる計数）", "formula": "計算式",
           "gloo": "計算式（glooのreduce-scatter）",
           "one": "1回の測定（棒は各ランク）"},
}


def metrics_of(measured: dict[str, list[dict]], parameters: int, backend: str) -> dict:
    """Make the metrics from what `train` has returned on each rank.

    Args:
        measured: `{sharding: a dict of each rank}`.
        parameters: how many the network has.
        backend: gloo or nccl.
    """
    n_bytes, rows = parameters * torch.get_default_dtype().itemsize, []
    for sharding, ranks in measured.items():
        formula = memory.formula(sharding, n_bytes, len(ranks))
        of_ranks = {key: [rank[key] for rank in ranks] for key in (*memory.KINDS, "sent")}
        held = [sum(rank[kind] for kind in memory.KINDS) for rank in ranks]
        sent = None if None in of_ranks["sent"] else statistics.fmean(of_ranks["sent"])
        rows.append({
            "sharding": sharding, "held_mb": max(held) / MB,
            "formula_mb": sum(formula[kind] for kind in memory.KINDS) / MB,
            "sent_mb": None if sent is None else sent / MB,
            "sent_formula_mb": formula["sent"] / MB, "sent_gloo_mb": formula["sent_by_gloo"] / MB,
            "step_ms": 1e3 * statistics.median(ranks[0]["seconds"]),
            "loss": ranks[0]["history"][-1]["loss"],
            "losses": [epoch["loss"] for epoch in ranks[0]["history"]], "per_rank": of_ranks})
    return {"backend": backend, "parameters": parameters, "rows": rows}


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json, draw, print the table and the numbers; return the whole metrics."""
    device = "cpu" if metrics["backend"] == "gloo" else None
    metrics = report.save_metrics(args, metrics, metrics["backend"], device)
    plot([metrics], args)
    rows = metrics["rows"]
    print(f"\n{'':12}{'held by the fullest rank':>26}{'sent in a step':>24}")
    print(f"{'--sharding':12}{'measured':>14}{'formula':>12}{'measured':>12}{'formula':>12}"
          f"{'a step':>11}{'loss':>10}")
    for row in rows:
        print(f"{row['sharding']:12}{mb(row['held_mb']):>14}{mb(row['formula_mb']):>12}"
              f"{mb(row['sent_mb']):>12}{mb(row['sent_formula_mb']):>12}"
              f"{row['step_ms']:8.1f} ms{row['loss']:10.4f}")
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    held, sent = (", ".join(f"{mb(row[key])} ({row['sharding']})" for row in rows)
                  for key in ("held_mb", "sent_mb"))
    print(f"\n{metrics['parameters']:,} parameters on {ranks}: a rank holds at most {held}; "
          f"it sends in a step {sent}")
    return metrics


def mb(number: float | None) -> str:
    """Write megabytes as "12.3 MB" or "4.5 kB"; a dash for what could not be measured."""
    if number is None:
        return "-"
    return f"{number:.3g} MB" if number >= 0.1 or number == 0 else f"{1e3 * number:.3g} kB"


def plot(runs: list[dict], args: argparse.Namespace) -> None:
    """Draw `sharding.png`: what every rank holds and sends in each way, and the formulas.

    Args:
        runs: their metrics; the bytes are the same in each.
        args: the parsed flags.
    """
    run, path = runs[-1], args.output_dir / "sharding.png"
    ranks, n_bytes = run["world_size"], run["parameters"] * 4
    for panels, words in picture.in_each_language(
            path, WORDS, runs, panels=2, height=6.5, ranks=ranks,
            millions=run["parameters"] / 1e6):
        for place, row in enumerate(run["rows"]):
            formula = memory.formula(row["sharding"], n_bytes, ranks)
            at = [place + 0.8 * (rank + 0.5) / ranks - 0.4 for rank in range(ranks)]
            bars, below, mark = {"width": 0.7 / ranks}, [0.0] * ranks, 0.0
            for colour, kind in enumerate(memory.KINDS):
                heights = [n / MB for n in row["per_rank"][kind]]
                panels[0].bar(at, heights, bottom=below, color=f"C{colour}", label=words[kind],
                              **bars)
                below = [low + height for low, height in zip(below, heights, strict=True)]
                mark += formula[kind] / MB
                ruled(panels[0], place, mark, words["formula"])
            if row["sent_mb"] is not None:
                heights = [n / MB for n in row["per_rank"]["sent"]]
                panels[1].bar(at, heights, color="C3", label=words["sent"], **bars)
            ruled(panels[1], place, formula["sent"] / MB, words["formula"])
            if formula["sent_by_gloo"] != formula["sent"] and run["backend"] == "gloo":
                ruled(panels[1], place, formula["sent_by_gloo"] / MB, words["gloo"], "--")
        panels[1].set_xticks(range(len(run["rows"])), [row["sharding"] for row in run["rows"]])
        for axes in panels:
            axes.grid(visible=False, axis="x")


def ruled(axes: "Axes", place: int, height: float, label: str, style: str = "-") -> None:
    """Draw a mark across the bars of a way."""
    axes.plot([place - 0.42, place + 0.42], [height, height], style, color="0.2", linewidth=1.2,
              label=label)
