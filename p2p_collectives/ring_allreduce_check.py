"""The oracle of `ring_allreduce.py`: sums, messages and times of every algorithm.

The lesson measures all types and awkward sizes: no elements, fewer than ranks, sizes that do not
divide, several segments. Instead of its numbers each rank has random ones, so that no mix-up of
chunks or ranks can go unnoticed. Recorded are the sums on every rank, who sends how many bytes to
whom, and who waits for what. In the last size of one type the last rank loses known times after
each sum: the times that the lesson reports must be made of these.
"""

import statistics
import time
from argparse import Namespace
from functools import partial
from types import ModuleType

import torch
from common.launcher import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder, gathered

from p2p_collectives import ring_allreduce as lesson
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.messages import record_messages

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
REPEATS = 3
LOSES_S = (0.6, 0.0, 0.05, 0.4)  # in each round: the first one warms up, and must not count
CLOSE_S = 0.06  # which a reported time may be longer than the recorded one, on a busy machine
TIMED = "float32"
RINGS = ("ring_naive", "ring_chunked", "RingAllReduce", "RingAllReduce_short")


def single_process(args: Namespace) -> dict[str, dict[int, torch.Tensor]]:
    """Sum the numbers of all ranks: `{dtype: {bytes: tensor}}`."""
    return {name: {size: sum(numbers_of(rank, size // dtype.itemsize, dtype, args.seed)
                             for rank in range(args.world_size)) for size in args.sizes}
            for name, dtype in DTYPES.items()}


def numbers_of(rank: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw what a rank adds to the sum: n random numbers, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (1e6 * torch.randn(n, dtype=torch.float64, generator=generator)).to(dtype)


def messages_of(name: str, rank: int, world_size: int, n_bytes: int, itemsize: int) -> list:
    """Compute how many bytes a rank should send, and the list of ranks that should get them."""
    if world_size == 1:
        return [0, []]
    shorter, longer = divmod(n_bytes // itemsize, world_size)  # so many chunks are longer
    chunks = [(shorter + (chunk < longer)) * itemsize for chunk in range(world_size)]
    if name == "ring_naive":
        total = (world_size - 1) * sum(chunks)
    else:  # all chunks but one to add, all but one that are complete
        total = 2 * sum(chunks) - chunks[(rank + 1) % world_size] - chunks[(rank + 2) % world_size]
    return [total, [(rank + 1) % world_size]]


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded, once for each type; return the findings on rank 0."""
    calls, rows, everyone = [], {}, []
    with Recorder() as recorder:
        messages, barriers = record_messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_sum", lambda *_: None)  # of other numbers

        @recorder.around(lesson, "measure")
        def measure(original, rank, world_size, args):
            for dtype in DTYPES:
                flags = Namespace(**{**vars(args), "dtype": dtype})
                rows[dtype] = original(rank, world_size, flags)
            everyone.extend(gathered([calls, messages.not_waited_for()]))
            return rows

        @recorder.around(lesson, "algorithms")
        def algorithms(original, dtype):
            ways, counts = original(dtype), {}
            ways["RingAllReduce_short"] = RingAllReduce(dtype, segment_bytes=256)
            return {name: recording(name, ring, counts) for name, ring in ways.items()}

        def recording(name, all_reduce, counts):
            def summed(tensor):
                dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.nbytes
                repeat = counts[name, size] = counts.get((name, size), -1) + 1
                together = barriers.all_had_come()
                began, first = time.perf_counter(), len(messages.sent)
                all_reduce(tensor)
                if rank == world_size - 1 and (dtype, size) == (TIMED, args.sizes[-1]):
                    time.sleep(LOSES_S[repeat])
                seconds = time.perf_counter() - began
                calls.append({"name": name, "dtype": dtype, "bytes": size, "repeat": repeat,
                              "seconds": seconds, "sum": tensor.clone(), "together": together,
                              "sent": messages.sent[first:]})

            return summed

        lesson.run_worker(rank, world_size, args)
    return compare(rows, everyone, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    n = args.world_size
    args.sizes = [8 * count for count in (0, 1, n - 1, n, n + 1, 1000)]  # in bytes
    args.repeats = REPEATS
    return verdict(launch(record, args, program.role_name))


def compare(rows: dict[str, list[dict]], everyone: list[list], args: Namespace) -> dict:
    """Hold the rows of each type, and what all ranks have recorded, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, ranks = single_process(args), range(args.world_size)
    calls = [of_rank for of_rank, _ in everyone]
    for name in ("all_reduce", *RINGS):
        for dtype, torch_dtype in DTYPES.items():
            mine = [[call for call in of_rank if (call["name"], call["dtype"]) == (name, dtype)]
                    for of_rank in calls]
            sums = by_rank(mine, "sum")
            # Numbers are added in another order than in one process: each addition rounds.
            eps = torch.finfo(torch_dtype).eps if torch_dtype.is_floating_point else 0.0
            theirs = [{f"rank {rank}": oracle[dtype][size] for rank in ranks}
                      for size in args.sizes for _ in range(REPEATS + 1)]
            findings.close(f"{name} {dtype}", sums, theirs, args.world_size * eps,
                           "sums in another order" if eps else "whole numbers", unit="sum")
            if name != "ring_naive":  # it alone adds in another order on every rank
                first = [dict.fromkeys(of_all, of_all["rank 0"]) for of_all in sums]
                findings.equal(f"{name} {dtype}, rank by rank", sums, first,
                               "each chunk is summed once, and copied", unit="sum")
            if name in RINGS:
                sent = [[[sum(n_bytes for _, n_bytes in call["sent"]),
                          sorted({receiver for receiver, _ in call["sent"]})] for call in of_all]
                        for of_all in zip(*mine, strict=False)]
                expected = [[messages_of(name, rank, args.world_size, size, torch_dtype.itemsize)
                             for rank in ranks] for size in args.sizes for _ in range(REPEATS + 1)]
                findings.equal(f"{name} {dtype}, bytes sent and to whom", sent, expected,
                               "to the right neighbour only", unit="sum")
        compare_times(findings, name, rows[TIMED], calls, args)
    together = [call["together"] for of_rank in calls for call in of_rank]
    findings.holds("clocks", all(together), f"all ranks had come before {sum(together)} of "
                   f"{len(together)} calls were timed")
    not_waited_for = [count for _, count in everyone]
    findings.holds("requests", not any(not_waited_for),
                   f"the ranks did not wait for {not_waited_for} requests")
    return findings.as_dict()


def compare_times(findings: Comparison, name: str, rows: list[dict], calls: list[list[dict]],
                  args: Namespace) -> None:
    """Hold the row of the largest size against the slowest rank's times, without the first."""
    size = args.sizes[-1]
    rounds = [[call["seconds"] for call in of_rank
               if (call["name"], call["dtype"], call["bytes"]) == (name, TIMED, size)]
              for of_rank in calls]
    slowest = [max(of_all) for of_all in zip(*rounds, strict=False)]
    median = statistics.median(slowest[1:])
    of_size = {row["algorithm"]: row for row in rows if row["bytes"] == size}
    row, library = of_size.get(name), of_size.get("all_reduce")
    there = row is not None and library is not None
    findings.holds(f"{name}, reported time", there and 0 <= row["median_s"] - median < CLOSE_S,
                   f"{row and row['median_s']} s; the slowest rank took {slowest} s, the first of "
                   f"these to warm up: median {median} s")
    if there:
        n = args.world_size
        findings.close(f"{name}, reported bandwidth",
                       [row["bytes"], row["world_size"], row["bus_GBps"], row["vs_all_reduce"]],
                       [size, n, 2 * (n - 1) * size / n / row["median_s"] / 1e9,
                        library["median_s"] / row["median_s"]], 1e-12,
                       "2(N-1)/N of the bytes, by the reported time", unit="number")
