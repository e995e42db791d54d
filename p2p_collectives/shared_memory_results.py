"""Table, model and picture of `shared_memory.py`, from its times."""

import statistics
from argparse import Namespace

from common import picture, report

import torch

from p2p_collectives.ring_allreduce_results import fit, scale, size_text

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
# Variants of the collectives, as `shared_memory.py` names them.
SHARED, COPIED = "shared_memory", "shared_memory_copied"
HIERARCHICAL = "hierarchical"
SMALL_BYTES = 2**17  # up to this size of a tensor, the ranks wait once; above, twice
MACHINE_WORDS = {"en": ("one machine", "{machines} machines"),
                 "ja": ("1台のマシン", "{machines}台のマシン")}
WORDS = {
    "en": {"title": "Speed of collectives of {ranks} ranks on {machines} (gloo = 1)",
           "x": "message size", "y": "all_reduce", "y2": "reduce_scatter", "y3": "all_gather",
           "one": "One run, medians of {repeats} rounds",
           "gloo": "gloo", "ring": "ring", SHARED: "shared memory",
           COPIED: "shared memory, copied there and back", HIERARCHICAL: "hierarchical"},
    "ja": {"title": "{ranks}ランク（{machines}）の集合通信の速さ（glooを1とする）",
           "x": "メッセージのサイズ", "y": "all_reduce", "y2": "reduce_scatter", "y3": "all_gather",
           "one": "1回の測定（{repeats}回の中央値）",
           "gloo": "gloo", "ring": "リング", SHARED: "共有メモリー",
           COPIED: "共有メモリー（コピーあり）", HIERARCHICAL: "階層型"},
}


def require_right(collective: str, way: str, tensor: torch.Tensor, rank: int,
                  world_size: int) -> None:
    """Require a result to be right, because the time of a wrong result says nothing.

    Args:
        collective, way: Names of the collective and its variant.
        tensor: Result (n,), from the `contribution` of each rank.
        rank, world_size: Rank of this process, and number of ranks.

    Raises:
        ArithmeticError: if the result is wrong.
    """
    numbers, slices = torch.arange(tensor.numel()) % 100, slice(None)
    expected = world_size * numbers + world_size * (world_size - 1) // 2
    if collective == "reduce_scatter":
        slices = slice(rank, rank + 1)
    if collective == "all_gather":
        expected = torch.cat([of_rank + owner for owner, of_rank
                              in enumerate(numbers.tensor_split(world_size))])
    pairs = zip(tensor.tensor_split(world_size)[slices],
                expected.to(tensor.dtype).tensor_split(world_size)[slices], strict=True)
    if not all(torch.equal(found, right) for found, right in pairs):
        raise ArithmeticError(f"{collective} by {way} is wrong for {size_text(tensor.nbytes)}")


def rows_of(collective: str, seconds: dict[str, list[float]], world_size: int,
            n_bytes: int) -> list[dict]:
    """Return one row for each variant, from the seconds of its rounds."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return [{"collective": collective, "world_size": world_size, "bytes": n_bytes, "way": way,
             "median_s": median, "vs_gloo": medians["gloo"] / median}
            for way, median in medians.items()]


def finish(metrics: dict, args: Namespace) -> dict:
    """Fit the model, write metrics.json, plot, and print the table and the summary line.

    Returns:
        The complete metrics.
    """
    if model := fit([(2, 2 * args.world_size * row["bytes"], row["median_s"])
                     for row in metrics["rows"]
                     if (row["collective"], row["way"]) == ("all_reduce", SHARED)
                     and row["bytes"] > SMALL_BYTES]):
        metrics |= {"barrier_s": model[0], "memory_GBps": model[1] / 1e9}
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    if args.world_size > 1:
        plot(metrics, args)
    show(metrics)
    ours = next(row for row in reversed(metrics["rows"]) if row["bytes"] == max(args.sizes)
                and row["collective"] == "all_reduce" and row["way"] != COPIED)
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    print(f"{size_text(ours['bytes'])} on {ranks}: all_reduce by {ours['way']} takes "
          f"{1e3 * ours['median_s']:.3g} ms, {ours['vs_gloo']:.2f} times as fast as gloo")
    return metrics


def plot(metrics: dict, args: Namespace) -> None:
    """Plot how many times as fast as gloo each variant is: `collectives.png`."""
    sizes = sorted(set(args.sizes))
    machines = metrics["world_size"] // metrics["ranks_per_machine"]
    values = {"ranks": metrics["world_size"], "machines": machines, "repeats": args.repeats}
    words = {language: texts | {"title": texts["title"].replace("{machines}", MACHINE_WORDS[
        language][machines > 1])} for language, texts in WORDS.items()}
    path = args.output_dir / "collectives.png"
    for panels, texts in picture.in_each_language(path, words, metrics, panels=3, height=8,
                                                  **values):
        for axes, collective in zip(panels, COLLECTIVES, strict=True):
            rows = [row for row in metrics["rows"] if row["collective"] == collective]
            for way in dict.fromkeys(row["way"] for row in rows):
                ratios = {row["bytes"]: row["vs_gloo"] for row in rows if row["way"] == way}
                axes.plot(sizes, [ratios[n_bytes] for n_bytes in sizes], "o-", markersize=5,
                          label=texts[way])
            scale(axes, sizes)
            axes.set_yscale("linear")
            axes.set_ylim(bottom=0)


def show(metrics: dict) -> None:
    """Print the table and the model: two barriers, and the bytes that all ranks read and write."""
    print(f"\n{'size':10}{'collective':16}{'way':22}{'median':>12}{'gloo = 1':>10}")
    for row in metrics["rows"]:
        print(f"{size_text(row['bytes']):10}{row['collective']:16}{row['way']:22}"
              f"{1e3 * row['median_s']:9.2f} ms{row['vs_gloo']:10.2f}")
    if "barrier_s" in metrics:
        print("\nshared memory: T = 2 barrier + traffic / memory, fitted to all_reduce above "
              f"{size_text(SMALL_BYTES)}: barrier {1e6 * metrics['barrier_s']:.0f} us, memory "
              f"{metrics['memory_GBps']:.1f} GB/s")
    print()
