"""The check of `ring_allreduce.py`: the sums and the messages of every algorithm.

The lesson measures awkward sizes: no elements, fewer elements than ranks, sizes that N does not
divide, several segments. Random numbers replace its own, so that a wrong chunk or a wrong rank
changes the sum. Each rank records its sums, the bytes that it sends to whom, and its waits.
"""

from argparse import Namespace
from functools import partial
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder

import torch

from p2p_collectives import ring_allreduce as lesson
from p2p_collectives.fast_ring import RingAllReduce
from p2p_collectives.messages import Messages

CALLS = 2  # of each algorithm and size: one to warm up, one that is timed
RINGS = ("ring_naive", "ring_chunked", "RingAllReduce", "RingAllReduce_short")


def numbers_of(rank: int, n: int, seed: int) -> torch.Tensor:
    """Return the numbers (n,) that a rank adds to the sum, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return 1e6 * torch.randn(n, generator=generator)


def single_process(args: Namespace) -> list[torch.Tensor]:
    """Sum the numbers of all ranks, for each call of an algorithm."""
    return [sum(numbers_of(rank, size // 4, args.seed) for rank in range(args.world_size))
            for size in args.sizes for _ in range(CALLS)]


def messages_of(name: str, rank: int, world_size: int, n: int) -> list:
    """Compute the bytes that a rank should send for n numbers, and the list of receivers."""
    if world_size == 1:
        return [0, []]
    right, chunks = (rank + 1) % world_size, lengths(n, world_size)
    if name == "ring_naive":
        total = (world_size - 1) * n
    else:  # all chunks but one to add, all chunks but one that are complete
        total = 2 * n - chunks[right] - chunks[(rank + 2) % world_size]
    return [4 * total, [right]]


def lengths(n: int, parts: int) -> list[int]:
    """Compute the lengths of the parts of n numbers."""
    shorter, longer = divmod(n, parts)  # `longer` parts have one number more
    return [shorter + (part < longer) for part in range(parts)]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    n = args.world_size
    args.sizes = [4 * count for count in (0, 1, n - 1, n, n + 1, 1000)]  # in bytes
    args.repeats = CALLS - 1
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0."""
    calls = []
    with Recorder() as recorder:
        messages, barriers = Messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_sum", lambda *_: None)  # it expects other numbers
        everyone = recorder.gather_at_end(lambda: [calls, messages.not_waited_for()])

        @recorder.around(lesson, "algorithms")
        def algorithms(original):
            short = {"RingAllReduce_short": RingAllReduce(segment_size=64)}
            return {name: partial(recorded, name, ring)
                    for name, ring in {**original(), **short}.items()}

        def recorded(name, all_reduce, tensor):
            together, first = barriers.all_had_come(), len(messages.sent)
            all_reduce(tensor)
            calls.append({"name": name, "sum": tensor.clone(), "together": together,
                          "sent": messages.since(first)})

        lesson.run_worker(rank, world_size, args)
    return compare(everyone, args) if rank == 0 else None


def compare(everyone: list[list], args: Namespace) -> dict:
    """Compare the calls of all ranks with a single process."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, ranks = single_process(args), range(args.world_size)
    for name in ("all_reduce", *RINGS):
        recorded = [[call for call in calls if call["name"] == name] for calls, _ in everyone]
        sums = by_rank(recorded, "sum")
        findings.close(name, sums, [{f"rank {rank}": of_call for rank in ranks}
                                    for of_call in oracle],
                       args.world_size * torch.finfo(torch.float32).eps, "sums in another order",
                       unit="sum")
        if name != "ring_naive":  # in which each rank adds in an order of its own
            hold_equal_ranks(findings, name, sums)
        if name in RINGS:
            expected = [{f"rank {rank}": messages_of(name, rank, args.world_size, len(of_call))
                         for rank in ranks} for of_call in oracle]
            findings.equal(f"{name}, bytes sent and to whom", by_rank(recorded, "sent"), expected,
                           "to the right neighbor only", unit="sum")
    hold_waiting(findings, everyone)
    return findings.as_dict()


def hold_equal_ranks(findings: Comparison, name: str, sums: list[dict]) -> None:
    """Hold that all ranks have the same sums, bit by bit."""
    findings.equal(f"{name}, rank by rank", sums,
                   [dict.fromkeys(of_all, of_all["rank 0"]) for of_all in sums],
                   "each chunk is summed once, and copied", unit="sum")


def hold_waiting(findings: Comparison, everyone: list[list]) -> None:
    """Hold that all ranks began each call together, and waited for all requests."""
    together = [call["together"] for calls, _ in everyone for call in calls]
    findings.holds("clocks", all(together), f"all ranks had reached the barrier before "
                   f"{sum(together)} of {len(together)} calls were timed")
    not_waited_for = [count for _, count in everyone]
    findings.holds("requests", not any(not_waited_for),
                   f"requests without a wait, by rank: {not_waited_for}")
