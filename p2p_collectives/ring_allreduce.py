r"""The tutorial's ring all-reduce, and what it takes to be as fast as the library's (tutorial 6_4).

Every rank has a tensor, and all of them want the sum. In a ring each rank only sends to its right neighbour and only
receives from its left one. Three rungs lead from the tutorial's ring to one that keeps up with `dist.all_reduce`:

    ring_naive       the whole tensor of S bytes goes round: (N-1) S sent by every rank
    ring_chunked     chunk by chunk, in two rounds: 2 (N-1)/N S, less than 2 S however many ranks there are
    RingAllReduce    the same bytes, faster: in place, receives posted before the data come, no allocations, one
                     segment is added while the next one travels, and what is on its way fits into the cache

    reduce-scatter, N-1 steps: add and pass on        all-gather, N-1 steps: keep and pass on
    rank 0 ---chunk 0--> rank 1                       rank 0 ---sum 1--> rank 1
       ^                    |                            ^                  |
    chunk 3              chunk 1                       sum 0              sum 2
       |                    v                            |                  v
    rank 3 <--chunk 2--- rank 2                       rank 3 <--sum 3--- rank 2

    python p2p_collectives/ring_allreduce.py --world_size 4      all processes here
    python p2p_collectives/ring_allreduce.py --check             the same sums as a single process?
    torchrun --nproc_per_node 4 p2p_collectives/ring_allreduce.py

Last line, about:
    64 MiB on 4 ranks: RingAllReduce takes 142 ms, 1.05 times as fast as all_reduce, 4.6 times as fast as ring_naive
"""

import statistics
import time

import torch
import torch.distributed as dist
from common import report
from common.cli import Parser, bounded, ranks_here, refuse, require_memory
from common.launch import launch
from common.session import group_options

from p2p_collectives.rings import RingAllReduce, group_with_small_buffers, ring_chunked, ring_naive

EXAMPLE = "p2p_collectives/ring_allreduce"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
OTHER_WORLDS = (8, 64, 1024)  # for which the model is printed


def role_name(rank, world_size):
    """All ranks are alike."""
    return f"rank{rank}"


def algorithms(dtype):
    """The sums in place, `{name: function}`: the library's own and the three rungs. All ranks must call it."""
    return {"all_reduce": dist.all_reduce, "ring_naive": lambda tensor: ring_naive(tensor, tensor),
            "ring_chunked": ring_chunked, "RingAllReduce": RingAllReduce(dtype, group_with_small_buffers())}


def bus_bandwidth(world_size, n_bytes, seconds):
    """Bytes per second that every rank must at least send for an all-reduce, and receive, whatever the algorithm."""
    return 2 * (world_size - 1) / world_size * n_bytes / seconds


def model_seconds(world_size, n_bytes, alpha, beta):
    """The alpha-beta model of a ring: 2(N-1) messages of S/N bytes, alpha seconds each and beta bytes per second."""
    return 2 * (world_size - 1) * (alpha + n_bytes / (world_size * beta))


def fit_model(world_size, points):
    """Fit alpha (s) and beta (bytes/s), with the smallest relative squared errors, to `points` of (bytes, seconds).

    Returns:
        Both; or None if the points do not tell them: a single size, or only sizes whose bytes cost nothing yet.
    """
    from scipy.optimize import nnls

    # T = messages * alpha + bytes * 1/beta, each equation divided by its T; neither may be negative.
    messages = 2 * (world_size - 1)
    rows = [(messages / seconds, messages * n_bytes / world_size / seconds) for n_bytes, seconds in points]
    (alpha, inverse_beta), _ = nnls(rows, [1.0] * len(rows))
    several = len({n_bytes for n_bytes, _ in points}) > 1
    return (alpha, 1 / inverse_beta) if several and inverse_beta > 0 else None


def run_worker(rank, world_size, args):
    """Time all algorithms in turns, A B C D A B C D, so that a noisy machine cannot favour one; rank 0 has the rows."""
    rows, dtype = [], DTYPES[args.dtype]
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    rungs = algorithms(dtype)
    for n_bytes in args.sizes:
        numbers = torch.arange(n_bytes // dtype.itemsize) % 100
        mine = (numbers + rank).to(dtype)
        expected = (world_size * numbers + world_size * (world_size - 1) // 2).to(dtype)
        tensor, seconds = torch.empty_like(mine), {name: [] for name in rungs}
        for repeat in range(args.repeats + 1):
            for name, all_reduce in rungs.items():
                tensor.copy_(mine)
                dist.barrier()  # or the first to come would count its wait for the last
                started = time.perf_counter()
                all_reduce(tensor)
                slowest = torch.tensor(time.perf_counter() - started)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if not torch.equal(tensor, expected):
                    raise ArithmeticError(f"{name} has summed {size_text(n_bytes)} wrongly")
                if repeat > 0:  # the first round connects the ranks and touches the memory
                    seconds[name].append(slowest.item())
        rows += rows_of(seconds, world_size, n_bytes)
        if rank == 0:
            report.log("rank0", f"{size_text(n_bytes)}: timed {args.repeats} rounds")
    dist.destroy_process_group()
    return {"rows": rows} if rank == 0 else None


def rows_of(seconds, world_size, n_bytes):
    """One row per algorithm, from the seconds of all its rounds."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [{"world_size": world_size, "bytes": n_bytes, "algorithm": name, "median_s": median,
             "bus_GBps": bus_bandwidth(world_size, n_bytes, median) / 1e9,
             "vs_all_reduce": medians["all_reduce"] / median} for name, median in medians.items()]


def numbers_of(rank, world_size, dtype, seed):
    """What `rank` contributes to the check: fewer elements than ranks, as many, not divisible, several segments."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)  # a seed per rank: all have different numbers
    sizes = (0, 1, world_size - 1, world_size, world_size + 1, 1000)
    return [(1e6 * torch.randn(size, dtype=torch.float64, generator=generator)).to(dtype) for size in sizes]


def sums_for_check(rank, world_size, args):
    """The sums `{algorithm and dtype: [numbers of each rank]}`; rank 0 has them."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    sums = {}
    for dtype_name, dtype in DTYPES.items():
        short_segments = RingAllReduce(dtype, segment_bytes=256)
        for name, all_reduce in {**algorithms(dtype), "RingAllReduce_short": short_segments}.items():
            tensors = numbers_of(rank, world_size, dtype, args.seed)
            for tensor in tensors:
                all_reduce(tensor)
            sums[f"{name} {dtype_name}"] = torch.cat(tensors).tolist()
    everyones = [None] * world_size if rank == 0 else None
    dist.gather_object(sums, everyones)
    dist.destroy_process_group()
    return {what: [sums[what] for sums in everyones] for what in sums} if rank == 0 else None

def check(args):
    """Hold the sums of every rank against those of a single process; the differences, or None."""
    ours = launch(sums_for_check, args, role_name)
    if ours is None:
        return None
    del ours["wall_s"]
    oracle, tolerances = {}, {}
    for what, sums in list(ours.items()):
        name, dtype = what.split()[0], DTYPES[what.split()[1]]
        everyones = [torch.cat(numbers_of(rank, args.world_size, dtype, args.seed)) for rank in range(args.world_size)]
        oracle[what] = torch.stack(everyones).sum(0).expand(args.world_size, -1).tolist()
        # N numbers are added in another order than in one process: each addition rounds, by half an eps at most.
        tolerances[what] = args.world_size * torch.finfo(dtype).eps if dtype.is_floating_point else 0
        if name != "ring_naive":  # it alone adds in another order on every rank, so that they differ in the last bits
            alike = f"{what}, rank by rank"
            ours[alike], oracle[alike], tolerances[alike] = sums, [sums[0]] * args.world_size, 0
    return report.compare(ours, oracle, tolerances)


def size_text(n_bytes):
    """64 MiB, 16 KiB, 100 B."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.4g} {unit}"
    return f"{n_bytes} B"


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


def build_parser():
    """The flags of this example."""
    parser = Parser(EXAMPLE, __doc__, world_size=4)
    add = parser.add_argument
    add("--sizes", type=bounded(int, at_least=1), nargs="+", default=[2**14, 2**20, 2**26], metavar="BYTES",
        help="of the tensor on each rank")
    add("--repeats", type=bounded(int, at_least=1), default=9, metavar="N", help="rounds after the first; take medians")
    add("--dtype", choices=DTYPES, default="float32", help="of the elements")
    return parser


def main(argv=None):
    """Measure, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    for n_bytes in args.sizes:
        if n_bytes % DTYPES[args.dtype].itemsize:
            refuse(f"--sizes {n_bytes} must be a multiple of {DTYPES[args.dtype].itemsize}, the "
                   f"bytes of a {args.dtype}")
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: gloo sends and receives main memory only, and "
               "on GPUs NCCL has rings of its own")
    if args.check:
        return check(args)
    # On each rank: whole numbers of 8 bytes, three tensors, and the three copies of ring_naive.
    of_rank = max(args.sizes) * (8 // DTYPES[args.dtype].itemsize + 6)
    require_memory(args, ["sizes"], len(ranks_here(args)) * of_rank)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    if args.world_size > 1:
        points = [(row["bytes"], row["median_s"]) for row in metrics["rows"] if row["algorithm"] == "RingAllReduce"]
        if model := fit_model(args.world_size, points):
            metrics |= {"alpha_s": model[0], "beta_GBps": model[1] / 1e9}
        plot(metrics, args)
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    show(metrics, args)
    largest = {row["algorithm"]: row for row in metrics["rows"] if row["bytes"] == max(args.sizes)}
    ours, naive = largest["RingAllReduce"], largest["ring_naive"]
    ranks = "1 rank" if args.world_size == 1 else f"{args.world_size} ranks"
    print(f"{size_text(max(args.sizes))} on {ranks}: RingAllReduce takes "
          f"{1e3 * ours['median_s']:.3g} ms, {ours['vs_all_reduce']:.2f} times as fast as all_reduce, "
          f"{naive['median_s'] / ours['median_s']:.1f} times as fast as ring_naive")
    return metrics


if __name__ == "__main__":
    main()
