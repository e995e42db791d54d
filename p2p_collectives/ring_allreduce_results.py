"""Bandwidths, alpha-beta model, table and picture of `ring_allreduce.py`, from its times."""

import statistics
from argparse import Namespace
from typing import TYPE_CHECKING

from common import picture, report
from common.cli import ranks_here, require_memory

import numpy as np
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "en": {"title": "All-reduce of float32 on {ranks} ranks", "x": "message size",
           "y": "bus bandwidth (GB/s)", "model": "model of RingAllReduce",
           "one": "One run, medians of {repeats} rounds"},
    "ja": {"title": "{ranks}ランクのall-reduce（float32）", "x": "メッセージのサイズ",
           "y": "バス帯域（GB/s）", "model": "RingAllReduceのモデル",
           "one": "1回の測定（{repeats}回の中央値）"},
}


def require_room(args: Namespace, tensors: int) -> None:
    """Refuse `--sizes` if a rank cannot hold that many `tensors`; a check has sizes of its own."""
    if not args.check:
        n_bytes = len(ranks_here(args)) * tensors * max(args.sizes)
        require_memory(args, ["sizes"], n_bytes)


def require_sum(name: str, tensor: torch.Tensor, world_size: int) -> None:
    """Require a sum to be right, because the time of a wrong sum says nothing.

    Args:
        name: Name of the algorithm.
        tensor: Sum of `contribution` over all ranks (n,).
        world_size: Number of ranks.

    Raises:
        ArithmeticError: if the sum is wrong.
    """
    numbers = torch.arange(tensor.numel()) % 100
    expected = (world_size * numbers + world_size * (world_size - 1) // 2).to(tensor.dtype)
    if not torch.equal(tensor, expected):
        raise ArithmeticError(f"{name} has summed {size_text(tensor.nbytes)} wrongly")


def rows_of(seconds: dict[str, list[float]], world_size: int, n_bytes: int) -> list[dict]:
    """Return one row for each algorithm, from the seconds of its rounds."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [{"world_size": world_size, "bytes": n_bytes, "algorithm": name, "median_s": median,
             "bus_GBps": bus_bandwidth(world_size, n_bytes, median) / 1e9,
             "vs_all_reduce": medians["all_reduce"] / median} for name, median in medians.items()]


def bus_bandwidth(world_size: int, n_bytes: float, seconds: float) -> float:
    """Compute the bytes/s that every rank must send at least, whatever the algorithm."""
    return 2 * (world_size - 1) / world_size * n_bytes / seconds


def model_seconds(world_size: int, n_bytes: float, alpha: float, beta: float) -> float:
    """Compute the alpha-beta model of a ring: 2(N-1) messages of S/N bytes.

    A message costs alpha seconds, and its bytes travel at beta bytes per second.
    """
    return 2 * (world_size - 1) * (alpha + n_bytes / (world_size * beta))


def fit(points: list[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Fit alpha (s) and beta (bytes/s) with the smallest relative squared errors.

    Args:
        points: (messages, bytes, seconds) of each size.

    Returns:
        Both, or None if the points do not determine them: fewer than two sizes, or only sizes so
        small that more bytes do not take longer.
    """
    if len({n_bytes for _, n_bytes, _ in points}) < 2:
        return None
    # T = messages * alpha + bytes / beta, each equation divided by its T; no negative results.
    rows = np.array([(messages, n_bytes) for messages, n_bytes, _ in points])
    rows = rows / [[seconds] for *_, seconds in points]
    ones = np.ones(len(rows))
    alpha, inverse_beta = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if alpha < 0:
        alpha, inverse_beta = 0.0, np.linalg.lstsq(rows[:, 1:], ones, rcond=None)[0].item()
    return (alpha, 1 / inverse_beta) if inverse_beta > 0 else None


def size_text(n_bytes: int) -> str:
    """Format a number of bytes as "64 MiB", "16 KiB" or "100 B"."""
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= bytes_of:
            return f"{n_bytes / bytes_of:.4g} {unit}"
    return f"{n_bytes} B"


def finish(metrics: dict, args: Namespace) -> dict:
    """Fit the model, write metrics.json, plot, and print the table and the summary line.

    Returns:
        The complete metrics.
    """
    messages = 2 * (args.world_size - 1)
    if args.world_size > 1 and (model := fit([
            (messages, messages * row["bytes"] / args.world_size, row["median_s"])
            for row in metrics["rows"] if row["algorithm"] == "RingAllReduce"])):
        metrics |= {"alpha_s": model[0], "beta_GBps": model[1] / 1e9}
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    if args.world_size > 1:
        plot(metrics, args)
    show(metrics)
    largest = {row["algorithm"]: row for row in metrics["rows"] if row["bytes"] == max(args.sizes)}
    ours, naive = largest["RingAllReduce"], largest["ring_naive"]
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    print(f"{size_text(max(args.sizes))} on {ranks}: RingAllReduce takes "
          f"{1e3 * ours['median_s']:.3g} ms, {ours['vs_all_reduce']:.2f} times as fast as "
          f"all_reduce, {naive['median_s'] / ours['median_s']:.1f} times as fast as ring_naive")
    return metrics


def plot(metrics: dict, args: Namespace) -> None:
    """Plot the measured bandwidths and the model: `bandwidth.png`."""
    path, rows = args.output_dir / "bandwidth.png", metrics["rows"]
    sizes, ranks = sorted(set(args.sizes)), metrics["world_size"]
    for axes, texts in picture.in_each_language(path, WORDS, metrics, ranks=ranks,
                                                repeats=args.repeats):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            speeds = {row["bytes"]: row["bus_GBps"] for row in rows if row["algorithm"] == name}
            axes.plot(sizes, [speeds[n_bytes] for n_bytes in sizes], "o-", markersize=5, label=name)
        if "alpha_s" in metrics:
            curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 50) for i in range(51)]
            speeds = [bus_bandwidth(ranks, n_bytes, model_seconds(
                ranks, n_bytes, metrics["alpha_s"], 1e9 * metrics["beta_GBps"])) / 1e9
                for n_bytes in curve]
            axes.plot(curve, speeds, color="0.3", linestyle="--", label=texts["model"])
        scale(axes, sizes)


def scale(axes: "Axes", sizes: list[int]) -> None:
    """Set logarithmic axes, with the sizes in words."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, [size_text(n_bytes) for n_bytes in sizes], fontsize=9)
    axes.minorticks_off()


def show(metrics: dict) -> None:
    """Print the table and the model."""
    print(f"\n{'size':10}{'algorithm':16}{'median':>12}{'bus GB/s':>12}{'all_reduce = 1':>18}")
    for row in metrics["rows"]:
        print(f"{size_text(row['bytes']):10}{row['algorithm']:16}{1e3 * row['median_s']:9.2f} ms"
              f"{row['bus_GBps']:12.3f}{row['vs_all_reduce']:18.2f}")
    if "alpha_s" in metrics:
        print("\nT = 2(N-1)(alpha + S/(N*beta)) fitted to RingAllReduce: "
              f"alpha {1e6 * metrics['alpha_s']:.0f} us per message, "
              f"beta {metrics['beta_GBps']:.2f} GB/s")
    print()
