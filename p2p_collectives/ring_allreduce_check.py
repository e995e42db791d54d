"""The oracle of `ring_allreduce.py`: sums, messages and times of every algorithm.

The lesson measures awkward sizes: no elements, fewer than ranks, sizes that do not divide, several
segments. Instead of its numbers each rank has random ones, so that no mix-up of chunks or ranks can
go unnoticed. Recorded are the sums on every rank, who sends how many bytes to whom, and who waits
for what. In the last size the last rank loses known times after each sum: the times that the lesson
reports must be made of these.
"""

import statistics
import time
from argparse import Namespace
from functools import partial
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder

import torch

from p2p_collectives import ring_allreduce as lesson
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.messages import record_messages

REPEATS = 3
LOSES_S = (0.6, 0.0, 0.05, 0.4)  # in each round: the first one warms up, and must not count
CLOSE_S = 0.06  # which a reported time may be longer than the recorded one, on a busy machine
RINGS = ("ring_naive", "ring_chunked", "RingAllReduce", "RingAllReduce_short")


def single_process(args: Namespace) -> dict[int, torch.Tensor]:
    """Sum the numbers of all ranks: `{bytes: tensor}`."""
    return {size: sum(numbers_of(rank, size // 4, args.seed) for rank in range(args.world_size))
            for size in args.sizes}


def numbers_of(rank: int, n: int, seed: int) -> torch.Tensor:
    """Draw what a rank adds to the sum: n random numbers, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return 1e6 * torch.randn(n, generator=generator)


def messages_of(name: str, rank: int, world_size: int, n: int) -> list:
    """Compute how many bytes a rank should send, and the list of ranks that should get them."""
    if world_size == 1:
        return [0, []]
    chunks = lengths(n, world_size)
    if name == "ring_naive":
        total = (world_size - 1) * n
    else:  # all chunks but one to add, all but one that are complete
        total = 2 * n - chunks[(rank + 1) % world_size] - chunks[(rank + 2) % world_size]
    return [4 * total, [(rank + 1) % world_size]]


def lengths(n: int, parts: int) -> list[int]:
    """Compute how long the parts of n numbers are."""
    shorter, longer = divmod(n, parts)  # so many are longer
    return [shorter + (part < longer) for part in range(parts)]


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0."""
    calls = []
    with Recorder() as recorder:
        messages, barriers = record_messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_sum", lambda *_: None)  # of other numbers
        everyone = recorder.gather_at_end(lambda: [calls, messages.not_waited_for()])

        @recorder.around(lesson, "algorithms")
        def algorithms(original):
            ways = {**original(), "RingAllReduce_short": RingAllReduce(segment_size=64)}
            return {name: recording(name, ring) for name, ring in ways.items()}

        def recording(name, all_reduce):
            def summed(tensor):
                repeat = sum((call["name"], call["bytes"]) == (name, tensor.nbytes)
                             for call in calls)
                together = barriers.all_had_come()
                began, first = time.perf_counter(), len(messages.sent)
                all_reduce(tensor)
                if rank == world_size - 1 and tensor.nbytes == args.sizes[-1]:
                    time.sleep(LOSES_S[repeat])
                calls.append({"name": name, "bytes": tensor.nbytes, "sum": tensor.clone(),
                              "seconds": time.perf_counter() - began, "together": together,
                              "sent": messages.total(first)})

            return summed

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics["rows"], everyone, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    n = args.world_size
    args.sizes = [4 * count for count in (0, 1, n - 1, n, n + 1, 1000)]  # in bytes
    args.repeats = REPEATS
    return verdict(launch(record, args, program.role_name))


def compare(rows: list[dict], everyone: list[list], args: Namespace) -> dict:
    """Hold the rows, and what all ranks have recorded, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, ranks = single_process(args), range(args.world_size)
    for name in ("all_reduce", *RINGS):
        mine = [[call for call in calls if call["name"] == name] for calls, _ in everyone]
        sums = by_rank(mine, "sum")
        # Numbers are added in another order than in one process: each addition rounds.
        theirs = [{f"rank {rank}": oracle[size] for rank in ranks}
                  for size in args.sizes for _ in range(REPEATS + 1)]
        findings.close(name, sums, theirs, args.world_size * torch.finfo(torch.float32).eps,
                       "sums in another order", unit="sum")
        if name != "ring_naive":  # it alone adds in another order on every rank
            first = [dict.fromkeys(of_all, of_all["rank 0"]) for of_all in sums]
            findings.equal(f"{name}, rank by rank", sums, first,
                           "each chunk is summed once, and copied", unit="sum")
        if name in RINGS:
            sent = [[call["sent"] for call in of_all] for of_all in zip(*mine, strict=False)]
            expected = [[messages_of(name, rank, args.world_size, size // 4) for rank in ranks]
                        for size in args.sizes for _ in range(REPEATS + 1)]
            findings.equal(f"{name}, bytes sent and to whom", sent, expected,
                           "to the right neighbour only", unit="sum")
        largest = args.sizes[-1]
        of_size = {row["algorithm"]: row for row in rows if row["bytes"] == largest}
        seconds = [[call["seconds"] for call in calls if call["bytes"] == largest]
                   for calls in mine]
        hold_time(findings, name, of_size.get(name), seconds)
    hold_waiting(findings, everyone)
    return findings.as_dict()


def hold_time(findings: Comparison, name: str, row: dict | None,
              seconds: list[list[float]]) -> bool:
    """Hold the time in a row against the slowest rank's `seconds`, without the first round."""
    slowest = [max(of_all) for of_all in zip(*seconds, strict=False)]
    median = statistics.median(slowest[1:])
    return findings.holds(
        f"{name}, reported time", row and 0 <= row["median_s"] - median < CLOSE_S,
        f"{row and row['median_s']} s; the slowest rank took {slowest} s, the first of these to "
        f"warm up: median {median} s")


def hold_waiting(findings: Comparison, everyone: list[list]) -> None:
    """Hold that all ranks waited for each other before each call, and for each request."""
    together = [call["together"] for calls, _ in everyone for call in calls]
    findings.holds("clocks", all(together), f"all ranks had come before {sum(together)} of "
                   f"{len(together)} calls were timed")
    not_waited_for = [count for _, count in everyone]
    findings.holds("requests", not any(not_waited_for),
                   f"the ranks did not wait for {not_waited_for} requests")
