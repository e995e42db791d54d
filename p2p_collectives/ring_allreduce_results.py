"""What `ring_allreduce.py` makes of its times: bandwidths, the alpha-beta model, tables, a picture."""

import statistics

import torch
from common import report

OTHER_WORLDS = (8, 64, 1024)  # for which the model is printed


def require_sum(name, tensor, world_size):
    """What is summed wrongly is not timed.

    Args:
        name: of the algorithm.
        tensor: the sum of `contribution` over the ranks.
        world_size: their number.

    Raises:
        ArithmeticError: if it is not.
    """
    numbers = torch.arange(tensor.numel()) % 100
    expected = (world_size * numbers + world_size * (world_size - 1) // 2).to(tensor.dtype)
    if not torch.equal(tensor, expected):
        raise ArithmeticError(f"{name} has summed {size_text(tensor.nbytes)} wrongly")


def rows_of(seconds, world_size, n_bytes):
    """One row per algorithm, from the seconds of all its rounds."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [{"world_size": world_size, "bytes": n_bytes, "algorithm": name, "median_s": median,
             "bus_GBps": bus_bandwidth(world_size, n_bytes, median) / 1e9,
             "vs_all_reduce": medians["all_reduce"] / median} for name, median in medians.items()]


def bus_bandwidth(world_size, n_bytes, seconds):
    """Bytes per second that every rank must at least send for an all-reduce, by any algorithm."""
    return 2 * (world_size - 1) / world_size * n_bytes / seconds


def model_seconds(world_size, n_bytes, alpha, beta):
    """The alpha-beta model of a ring: 2(N-1) messages of S/N bytes.

    A message costs alpha seconds, and its bytes travel at beta bytes per second.
    """
    return 2 * (world_size - 1) * (alpha + n_bytes / (world_size * beta))


def fit_model(world_size, points):
    """Fit alpha (s) and beta (bytes/s), with the smallest relative squared errors.

    Args:
        world_size: of the ring.
        points: of (bytes, seconds).

    Returns:
        Both; or None if the points do not determine them: a single size, or only sizes whose bytes
        cost nothing yet.
    """
    from scipy.optimize import nnls

    # T = messages * alpha + bytes * 1/beta, each equation divided by its T; no negative results.
    messages = 2 * (world_size - 1)
    rows = [(messages / seconds, messages * n_bytes / world_size / seconds)
            for n_bytes, seconds in points]
    (alpha, inverse_beta), _ = nnls(rows, [1.0] * len(rows))
    several = len({n_bytes for n_bytes, _ in points}) > 1
    return (alpha, 1 / inverse_beta) if several and inverse_beta > 0 else None


def size_text(n_bytes):
    """64 MiB, 16 KiB, 100 B."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.4g} {unit}"
    return f"{n_bytes} B"


def finish(metrics, args):
    """Fit the model, draw, write metrics.json, print tables and the last line; the whole metrics."""
    if args.world_size > 1:
        points = [(row["bytes"], row["median_s"]) for row in metrics["rows"]
                  if row["algorithm"] == "RingAllReduce"]
        if model := fit_model(args.world_size, points):
            metrics |= {"alpha_s": model[0], "beta_GBps": model[1] / 1e9}
        plot(metrics, args)
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    show(metrics, args)
    largest = {row["algorithm"]: row for row in metrics["rows"] if row["bytes"] == max(args.sizes)}
    ours, naive = largest["RingAllReduce"], largest["ring_naive"]
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    print(f"{size_text(max(args.sizes))} on {ranks}: RingAllReduce takes "
          f"{1e3 * ours['median_s']:.3g} ms, {ours['vs_all_reduce']:.2f} times as fast as "
          f"all_reduce, {naive['median_s'] / ours['median_s']:.1f} times as fast as ring_naive")
    return metrics


def plot(metrics, args):
    """Draw `bandwidth.png`: what was measured as points, the model as lines without any."""
    sizes = sorted(args.sizes)
    title = f"All-reduce of {args.dtype} on {args.world_size} ranks, measured; the ring on others, modelled"
    path = args.output_dir / "bandwidth.png"
    with report.picture(path, title, "message size", "bus bandwidth (GB/s)") as axes:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for index, name in enumerate(dict.fromkeys(row["algorithm"] for row in metrics["rows"])):
            points = sorted((row["bytes"], row["bus_GBps"]) for row in metrics["rows"] if row["algorithm"] == name)
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{index}", markersize=5, label=name)
        curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 50) for i in range(51)]
        for world in (args.world_size, *OTHER_WORLDS) if "alpha_s" in metrics else ():
            alpha, beta = metrics["alpha_s"], 1e9 * metrics["beta_GBps"]
            seconds = [model_seconds(world, n_bytes, alpha, beta) for n_bytes in curve]
            speeds = [bus_bandwidth(world, n_bytes, s) / 1e9 for n_bytes, s in zip(curve, seconds, strict=True)]
            style, color, label = ("--", "0.3", "model") if world == args.world_size else (":", "0.6", None)
            axes.plot(curve, speeds, style, color=color, label=label)
            if world != args.world_size:
                axes.annotate(f"model, {world} ranks", (curve[4], speeds[4]), (4, -9), textcoords="offset points",
                              color="0.4", fontsize=8)
        axes.set_xticks(sizes, [size_text(n_bytes) for n_bytes in sizes])


def show(metrics, args):
    """Print the tables: measured, and modelled."""
    print(f"\n{'size':10}{'algorithm':16}{'median':>12}{'bus GB/s':>12}{'all_reduce = 1':>18}")
    for row in metrics["rows"]:
        print(f"{size_text(row['bytes']):10}{row['algorithm']:16}{1e3 * row['median_s']:9.2f} ms"
              f"{row['bus_GBps']:12.3f}{row['vs_all_reduce']:18.2f}")
    if "alpha_s" in metrics:
        alpha, beta = metrics["alpha_s"], metrics["beta_GBps"] * 1e9
        print(f"\nT = 2(N-1)(alpha + S/(N*beta)) fitted to RingAllReduce: alpha {1e6 * alpha:.0f} us a message, "
              f"beta {beta / 1e9:.2f} GB/s\n{'model, not measured':20}"
              + "".join(f"{f'{world} ranks':>16}" for world in OTHER_WORLDS))
        for n_bytes in args.sizes:
            seconds = [model_seconds(world, n_bytes, alpha, beta) for world in OTHER_WORLDS]
            print(f"{size_text(n_bytes):20}" + "".join(f"{1e3 * s:13.1f} ms" for s in seconds))
    elif args.world_size > 1:
        print("\nno model: it needs two --sizes, one of them large enough for its bytes to cost time")
    print()
