"""The oracle of `shared_memory.py`: sums, copies, messages, waiting and times of every way.

The lesson measures with all ranks as one machine, and as several (`--ranks_per_machine`), whose
ranks share memory with fewer others. Instead of its numbers each rank has random ones, in sizes
that do not divide. In the first round the last rank is late: it writes its tensor after the others
have called, comes late from each barrier, and as soon as its call has returned every rank writes
something else into its tensor, and begins another call. Who does not wait for the others reads or
keeps wrong numbers.
"""

import os
import time
from argparse import Namespace
from functools import partial
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder

import torch

from p2p_collectives import shared_memory as lesson
from p2p_collectives.messages import record_messages
from p2p_collectives.ring_allreduce_check import (
    hold_time,
    hold_waiting,
    lengths,
    messages_of,
    numbers_of,
)

REPEATS = 2
LATE_S = 0.01
OPENS_S = 0.2  # longer than the others take for it
GARBAGE = 7_777_777
LOSES_S = (0.6, 0.05, 0.2)  # in each round: the first one warms up, and must not count
TIMED = "reduce_scatter"


def single_process(args: Namespace, n: int) -> dict[str, list[torch.Tensor]]:
    """Compute what the ranks should hold afterwards: `{collective: [tensor of each rank]}`."""
    brought = [numbers_of(rank, n, args.seed) for rank in range(args.world_size)]
    total = sum(brought)
    pieces = [tensor.tensor_split(args.world_size) for tensor in brought]
    gathered = torch.cat([pieces[rank][rank] for rank in range(args.world_size)])
    return {"all_reduce": [total] * args.world_size,
            "reduce_scatter": list(total.tensor_split(args.world_size)),
            "all_gather": [gathered] * args.world_size}


def bytes_sent(collective: str, way: str, rank: int, world_size: int, per_machine: int,
               n: int) -> list:
    """Compute how many bytes of messages a rank should send, and the list of ranks to send to."""
    if way == "hierarchical":  # a ring of one rank of each machine, for its slice
        n_bytes, _ = messages_of("ring", rank // per_machine, world_size // per_machine,
                                 lengths(n, per_machine)[rank % per_machine])
        right = (rank + per_machine) % world_size
        return [n_bytes, [right] if right != rank else []]
    if way != "ring":
        return [0, []]
    if collective == "all_reduce":
        return messages_of("ring", rank, world_size, n)
    right = (rank + 1) % world_size
    left_out = lengths(n, world_size)[rank if collective == "reduce_scatter" else right]
    return [4 * (n - left_out), [right] if right != rank else []]


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded, for each division into machines; return the findings on rank 0."""
    calls, rows = [], {}
    where, is_last, late = {}, rank == world_size - 1, [False]  # where: which run of `measure`
    with Recorder() as recorder:
        messages, barriers = record_messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_right", lambda *_: None)  # of other numbers
        everyone = recorder.gather_at_end(lambda: [calls, messages.not_waited_for()])

        @recorder.around(lesson, "measure")
        def measure(original, rank, world_size, args):
            for per_machine, uneven in runs():
                sizes = [4 * n for n in counts_of(args, uneven)]
                flags = Namespace(**{**vars(args), "ranks_per_machine": per_machine,
                                     "sizes": sizes})
                where.update(per_machine=per_machine, uneven=uneven, largest=sizes[-1])
                rows[per_machine, uneven] = original(rank, world_size, flags)
            return []

        @recorder.around(lesson, "collectives")
        def collectives(original, *given):
            whole = where["per_machine"] == int(os.environ["LOCAL_WORLD_SIZE"])
            return {name: {way: recording(name, way, ways["ring"] if way == "gloo"
                                          and where["uneven"] else function)
                           for way, function in ways.items()}
                    for name, ways in original(*given).items()
                    if whole or name == "all_reduce"}  # the others are the same

        @recorder.around(torch, "from_file")
        def late_open(original, *given, **options):
            if rank == world_size - 1:  # nobody may close what it has not opened yet
                time.sleep(OPENS_S)
            return original(*given, **options)

        @recorder.around(lesson.SharedMemory, "barrier")
        def late_barrier(original, shared):
            original(shared)
            if late[0]:
                time.sleep(LATE_S)

        def recording(collective, way, function):
            counts = {}

            def called(tensor):
                size = tensor.nbytes
                repeat = counts[size] = counts.get(size, -1) + 1
                late[0], together = is_last and repeat == 0, barriers.all_had_come()
                if late[0]:
                    brought = tensor.clone()
                    tensor.fill_(GARBAGE)
                    time.sleep(LATE_S)
                    tensor.copy_(brought)
                began, first = time.perf_counter(), len(messages.sent)
                function(tensor)
                result = tensor.clone()
                if repeat == 0 and way in (lesson.SHARED, lesson.COPIED):  # the others go on
                    function(torch.full_like(tensor, GARBAGE))
                late[0] = False
                tensor.fill_(GARBAGE)
                if is_last and collective == TIMED and size == where["largest"]:
                    time.sleep(LOSES_S[repeat])
                calls.append({
                    **where, "collective": collective, "way": way, "bytes": size,
                    "seconds": time.perf_counter() - began, "together": together,
                    "has": (result.tensor_split(world_size)[rank]
                            if collective == "reduce_scatter" else result),
                    "sent": messages.total(first)})

            return called

        given = args.ranks_per_machine or int(os.environ["LOCAL_WORLD_SIZE"])
        metrics = lesson.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    findings = compare(rows, everyone, args)
    findings.holds("ranks of a machine", metrics["ranks_per_machine"] == given,
                   f"{metrics['ranks_per_machine']}, and {given} by --ranks_per_machine")
    return findings.as_dict()


def runs() -> list[tuple[int, bool]]:
    """Return the ranks that act as one machine, and `uneven`, of each run of `measure`.

    With even ones only, gloo takes part in all: its reduce_scatter wants slices of one length.
    """
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return [(n, uneven) for n in range(here, 0, -1) if here % n == 0 for uneven in (False, True)]


def counts_of(args: Namespace, uneven: bool) -> list[int]:
    """Return the numbers of elements: N divides them, or not; the last has several blocks."""
    n = args.world_size
    return sorted({n - 1, n + 1, 400_001} - {0}) if uneven else [100 * n]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.sizes, args.repeats = [4 * args.world_size], REPEATS
    return verdict(launch(record, args, program.role_name))


def compare(rows: dict[tuple, list[dict]], everyone: list[list],
            args: Namespace) -> Comparison:
    """Hold the rows of all runs, and what all ranks have recorded, against one process."""
    findings, n = Comparison(f"{args.world_size} processes"), args.world_size

    def kind_of(call):
        return call["per_machine"], call["collective"], call["way"]

    # By the flags, not by the recorded calls: there a round, or a size, could be missing.
    counts = [count for uneven in (False, True) for count in counts_of(args, uneven)
              for _ in range(REPEATS + 1)]
    oracle = {count: single_process(args, count) for count in {*counts}}
    for kind in dict.fromkeys(map(kind_of, everyone[0][0])):
        per_machine, collective, way = kind
        mine = [[call for call in calls if kind_of(call) == kind] for calls, _ in everyone]
        has = by_rank(mine, "has")
        expected = [{f"rank {rank}": oracle[count][collective][rank] for rank in range(n)}
                    for count in counts]
        machines = f", machines of {per_machine}" if per_machine < n else ""
        what = f"{collective} by {way}{machines}"
        if collective == "all_gather":
            findings.equal(what, has, expected, "copies", unit="call")
        else:
            findings.close(what, has, expected, n * torch.finfo(torch.float32).eps,
                           "sums in another order", unit="call")
        if collective == "all_reduce":
            findings.equal(f"{what}, rank by rank", has,
                           [dict.fromkeys(of_all, of_all["rank 0"]) for of_all in has],
                           "each slice is summed once, and copied", unit="call")
        if way != "gloo":
            findings.equal(
                f"{what}, bytes sent and to whom",
                [[call["sent"] for call in of_all] for of_all in zip(*mine, strict=False)],
                [[bytes_sent(collective, way, rank, n, per_machine, count) for rank in range(n)]
                 for count in counts],
                "to the right neighbour; through shared memory nothing", unit="call")
            if collective == TIMED:
                compare_times(findings, what, way, rows[per_machine, True], mine)
    hold_waiting(findings, everyone)
    return findings


def compare_times(findings: Comparison, what: str, way: str, rows: list[dict],
                  mine: list[list[dict]]) -> None:
    """Hold the row of the largest size, and how much faster than gloo it says that a way is."""
    largest = max(row["bytes"] for row in rows)
    of_size = {row["way"]: row for row in rows
               if (row["bytes"], row["collective"]) == (largest, TIMED)}
    seconds = [[call["seconds"] for call in of_rank if call["bytes"] == largest]
               for of_rank in mine]
    if hold_time(findings, what, of_size.get(way), seconds):
        findings.equal(f"{what}, against gloo", [of_size[way]["vs_gloo"]],
                       [of_size["gloo"]["median_s"] / of_size[way]["median_s"]],
                       "the ratio of the reported times", unit="row")
