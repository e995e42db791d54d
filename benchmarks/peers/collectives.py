"""Collectives on one machine: MPI against gloo, the lesson's ring and the lesson's shared memory.

An mpiexec starts the ranks, and all ways run in turns in the same processes (with_mpi.py). MPI is
Open MPI with mpi4py (pinned versions in openmpi.txt), in an environment that is made here at the
first time (120 MB). Where there are more ranks than cores, those that wait yield their core. With
MPICH they spin on: where other programs ran, a barrier of 4 ranks on 2 cores took 20 ms, not 0.04.

    python -m benchmarks.peers.collectives                 five rounds, of 4 ranks and of 2
    python -m benchmarks.peers.collectives --rounds 1 --sizes 65536
    python -m benchmarks peers_collectives                 for docs/results/peers_collectives.json

A wrong sum ends the benchmark.
"""

import json
import signal
import statistics
import subprocess
import tempfile
from argparse import Namespace
from pathlib import Path

from common import report
from common.cli import PlainParser, bounded, refuse, require_writable_folder

from benchmarks.peers import environments
from benchmarks.peers.environments import HERE, python_of
from p2p_collectives.ring_allreduce_results import size_text

LIMIT_S = 1200  # of one run
WHICH = ("world_size", "collective", "bytes", "way")  # what names a row


def rows_of_a_run(python: Path, world_size: int, args: Namespace) -> list[dict]:
    """Run with_mpi.py once on so many ranks; return its rows.

    Raises:
        SystemExit: if a rank has failed, with the end of what it has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # mpi4py ends all ranks when one raises; gloo's threads do not call MPI.
        command = [python.with_name("mpiexec"), "-n", world_size, "--map-by", ":oversubscribe",
                   "--bind-to", "none", python, "-m", "mpi4py", "--rc", "thread_level=funneled",
                   HERE / "with_mpi.py", "--store", Path(folder, "store"),
                   "--repeats", args.repeats, "--sizes", *args.sizes]
        with subprocess.Popen(
                [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, start_new_session=True,
                env={**environments.ours(), "TMPDIR": folder, "GLOO_SOCKET_IFNAME": "lo",
                     # In a container one is often root, which Open MPI refuses.
                     "OMPI_ALLOW_RUN_AS_ROOT": "1",
                     "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}) as process:
            try:
                out, err = process.communicate(timeout=LIMIT_S)
            finally:
                process.terminate()  # of an interruption mpiexec hears here, and ends its ranks
    if process.returncode:
        raise SystemExit(f"error: {world_size} ranks ended with status {process.returncode}: "
                         f"{err[-2000:]}")
    return json.loads(out.splitlines()[-1])


def summary(rounds: list[list[dict]]) -> list[dict]:
    """Make of the rows of all rounds one row each: medians, and the range of the ratio to gloo."""
    rows = []
    for same in zip(*rounds, strict=True):
        assert len({tuple(row[key] for key in WHICH) for row in same}) == 1
        ratios = [row["vs_gloo"] for row in same]
        rows.append({**{key: same[0][key] for key in WHICH},
                     "median_s": statistics.median(row["median_s"] for row in same),
                     "vs_gloo": statistics.median(ratios),
                     "low": min(ratios), "high": max(ratios)})
    return rows


def build_parser() -> PlainParser:
    """Make the parser: how many ranks, which sizes, how often."""
    parser = PlainParser(__doc__)
    parser.set_defaults(example="benchmark_peers_collectives", device="cpu", seed=0,
                        world_size=None)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--world_sizes", type=bounded(int, at_least=2), nargs="+", default=[4, 2], metavar="N",
        help="ranks; several to compare")
    add("--sizes", type=count, nargs="+", default=[2**16, 2**20, 2**26], metavar="BYTES",
        help="of the tensor on each rank")
    add("--repeats", type=count, default=9, metavar="N", help="in a round, in turns; medians")
    add("--rounds", type=count, default=5, metavar="N", help="of new processes")
    add("--environments", type=Path, default=environments.DEFAULT, metavar="DIR",
        help="where Open MPI is installed")
    add("--output_dir", type=Path, default=Path("outputs", "benchmark_peers_collectives"),
        metavar="DIR", help="for metrics.json")
    return parser


def main(argv: list[str] | None = None) -> dict:
    """Print the table and write metrics.json; return the metrics."""
    args = build_parser().parse_args(argv)
    for n_bytes in args.sizes:
        for world_size in args.world_sizes:
            if n_bytes % (4 * world_size):
                refuse(f"--sizes {n_bytes} must be a multiple of {4 * world_size}: as many float32 "
                       f"for each of {world_size} ranks", None)
    require_writable_folder("--output_dir", args.output_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the ranks would run on
    python = python_of("openmpi.txt", args.environments.resolve())
    rounds = [[] for _ in range(args.rounds)]
    with report.progress(args.rounds * len(args.world_sizes), "run") as bar:
        for rows in rounds:
            for world_size in args.world_sizes:
                bar.set_description(f"{world_size} ranks")
                rows += rows_of_a_run(python, world_size, args)
                bar.update()
    rows = summary(rounds)
    metrics = report.save_metrics(args, {"rounds": args.rounds, "rows": rows}, backend="several")
    print(f"{'ranks':7}{'size':10}{'collective':16}{'way':22}{'median':>13}{'gloo = 1':>10}")
    for row in rows:
        print(f"{row['world_size']:<7}{size_text(row['bytes']):10}{row['collective']:16}"
              f"{row['way']:22}{1e3 * row['median_s']:10.3f} ms{row['vs_gloo']:10.2f} "
              f"({row['low']:.2f} to {row['high']:.2f})")
    return metrics


if __name__ == "__main__":
    main()
