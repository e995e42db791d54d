"""What `shared_memory.py` makes of its times: the table, the models, the picture, the numbers."""

import statistics
from argparse import Namespace

import torch
from common import picture, report

from p2p_collectives.ring_allreduce_results import fit, fit_model, model_seconds, scale, size_text

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
# Ways to make them, as `shared_memory.py` names them.
SHARED, COPIED = "shared_memory", "shared_memory_copied"
HIERARCHICAL = "hierarchical"
MACHINES = (2, 8, 64)  # for which the model is printed
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
    """Require a result to be right: what is wrong is not timed.

    Args:
        collective, way: their names.
        tensor: what it has made of the `contribution` of each rank.
        rank, world_size: of this process.

    Raises:
        ArithmeticError: if it is not right.
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
    """Make a row for each way, from the seconds of all its rounds."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return [{"collective": collective, "world_size": world_size, "bytes": n_bytes, "way": way,
             "median_s": median, "vs_gloo": medians["gloo"] / median}
            for way, median in medians.items()]


def traffic(collective: str, world_size: int, n_bytes: float) -> float:
    """Count the bytes that all ranks of a machine read and write there for tensors of n_bytes."""
    return {"all_reduce": 2 * world_size, "reduce_scatter": world_size + 1,
            "all_gather": 2 * (world_size - 1)}[collective] * n_bytes


def shared_seconds(collective: str, world_size: int, n_bytes: float, barrier: float,
                   memory: float) -> float:
    """Compute the model of shared memory: two barriers (s), and its traffic at `memory` bytes/s."""
    return 2 * barrier + traffic(collective, world_size, n_bytes) / memory


def hierarchical_seconds(machines: int, per_machine: int, n_bytes: float,
                         models: tuple[float, float, float, float]) -> float:
    """Compute the model of several machines: inside, rings of a slice each between them, inside.

    Args:
        machines, per_machine: how many machines, of how many ranks.
        n_bytes: of the tensor.
        models: alpha (s), beta (bytes/s) of a ring; barrier (s), memory (bytes/s) of a machine.
    """
    alpha, beta, barrier, memory = models
    inside = sum(shared_seconds(collective, per_machine, n_bytes, barrier, memory)
                 for collective in ("reduce_scatter", "all_gather"))
    return inside + model_seconds(machines, n_bytes / per_machine, alpha, beta)


def with_models(metrics: dict, args: Namespace) -> dict:
    """Add the fitted models to the metrics; what the times do not determine is missing."""
    def points(way):
        return [(row["bytes"], row["median_s"]) for row in metrics["rows"]
                if (row["collective"], row["way"]) == ("all_reduce", way)]

    if args.world_size > 1 and (model := fit_model(args.world_size, points("ring"))):
        metrics |= {"alpha_s": model[0], "beta_GBps": model[1] / 1e9}
    if model := fit([(2, traffic("all_reduce", args.world_size, n_bytes), seconds)
                     for n_bytes, seconds in points(SHARED)]):
        metrics |= {"barrier_s": model[0], "memory_GBps": model[1] / 1e9}
    return metrics


def finish(metrics: dict, args: Namespace) -> dict:
    """Fit the models, draw, write metrics.json, print the tables and the line of numbers.

    Returns:
        The whole metrics.
    """
    metrics = report.save_metrics(args, with_models(metrics, args), backend="gloo", device="cpu")
    if args.world_size > 1:
        plot([metrics], args)
    show(metrics, args)
    ours = next(row for row in reversed(metrics["rows"]) if row["bytes"] == max(args.sizes)
                and row["collective"] == "all_reduce" and row["way"] != COPIED)
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    print(f"{size_text(ours['bytes'])} on {ranks}: all_reduce by {ours['way']} takes "
          f"{1e3 * ours['median_s']:.3g} ms, {ours['vs_gloo']:.2f} times as fast as gloo")
    return metrics


def plot(runs: list[dict], args: Namespace) -> None:
    """Draw how many times as fast as gloo each way is, in one run or several: `collectives.png`."""
    first, sizes = runs[0], sorted(set(args.sizes))
    machines = first["world_size"] // first["ranks_per_machine"]
    values = {"ranks": first["world_size"], "machines": machines, "repeats": args.repeats}
    words = {language: texts | {"title": texts["title"].replace("{machines}", MACHINE_WORDS[
        language][machines > 1])} for language, texts in WORDS.items()}
    path = args.output_dir / "collectives.png"
    for panels, texts in picture.in_each_language(path, words, runs, panels=3, height=8, **values):
        for axes, collective in zip(panels, COLLECTIVES, strict=True):
            rows = [[row for row in run["rows"] if row["collective"] == collective] for run in runs]
            for index, way in enumerate(dict.fromkeys(row["way"] for row in rows[0])):
                ratios = [[next(row["vs_gloo"] for row in of_run
                                if (row["bytes"], row["way"]) == (n_bytes, way))
                           for n_bytes in sizes] for of_run in rows]
                picture.line(axes, sizes, ratios, color=f"C{index}", markersize=5,
                             label=texts[way])
            scale(axes, sizes)
            axes.set_yscale("linear")
            axes.set_ylim(bottom=0)


def show(metrics: dict, args: Namespace) -> None:
    """Print the tables: measured, with the model of shared memory beside it; and modelled."""
    models = [metrics.get(key) for key in ("alpha_s", "beta_GBps", "barrier_s", "memory_GBps")]
    alpha, beta, barrier, memory = (number and number * (1e9 if i % 2 else 1)
                                    for i, number in enumerate(models))
    print(f"\n{'size':10}{'collective':16}{'way':22}{'median':>12}{'gloo = 1':>10}{'model':>12}")
    for row in metrics["rows"]:
        model = ""
        if row["way"] == SHARED and memory:
            seconds = shared_seconds(row["collective"], args.world_size, row["bytes"], barrier,
                                     memory)
            model = f"{1e3 * seconds:9.2f} ms"
        print(f"{size_text(row['bytes']):10}{row['collective']:16}{row['way']:22}"
              f"{1e3 * row['median_s']:9.2f} ms{row['vs_gloo']:10.2f}{model:>12}")
    if memory:
        print(f"\nshared memory: T = 2 barrier + traffic / memory, fitted to all_reduce: barrier "
              f"{1e6 * barrier:.0f} us, memory {memory / 1e9:.1f} GB/s")
    if memory and beta:
        n = args.world_size
        print(f"ring: T = 2(N-1)(alpha + S/(N*beta)): alpha {1e6 * alpha:.0f} us a message, beta "
              f"{beta / 1e9:.2f} GB/s\n{'model, not measured':24}"
              + "".join(f"{f'{machines} machines of {n}':>20}" for machines in MACHINES))
        fitted = alpha, beta, barrier, memory
        predictions = {
            "ring": lambda machines, size: model_seconds(machines * n, size, alpha, beta),
            HIERARCHICAL: lambda machines, size: hierarchical_seconds(machines, n, size, fitted)}
        for n_bytes in args.sizes:
            for way, predict in predictions.items():
                print(f"{size_text(n_bytes):10}{way:14}" + "".join(
                    f"{1e3 * predict(machines, n_bytes):17.1f} ms" for machines in MACHINES))
    print()
