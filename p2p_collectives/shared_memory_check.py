"""The oracle of `shared_memory.py`: sums, copies, messages, waiting and times of every way.

The lesson measures with all ranks as one machine, and as several (`--ranks_per_machine`), whose
ranks share memory with fewer others. Instead of its numbers each rank has random ones, in sizes
that do not divide. In the first round the last rank is late: it writes its tensor after the others
have called, comes late from each barrier, and as soon as its call has returned every rank writes
something else into its tensor. Who does not wait for the others reads or keeps wrong numbers.
"""

import os
import statistics
import time
from argparse import Namespace
from functools import partial
from types import ModuleType

import torch
from common.launcher import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder, gathered

from p2p_collectives import shared_memory as lesson
from p2p_collectives.messages import record_messages
from p2p_collectives.ring_allreduce_check import CLOSE_S, numbers_of

DTYPES = {"float32": torch.float32, "int64": torch.int64}
REPEATS = 2
LATE_S = 0.01
GARBAGE = 7_777_777
LOSES_S = (0.6, 0.05, 0.2)  # in each round: the first one warms up, and must not count
TIMED = ("float32", "reduce_scatter")


def single_process(args: Namespace, dtype: torch.dtype, n: int) -> dict[str, list[torch.Tensor]]:
    """Compute what the ranks should hold afterwards: `{collective: [tensor of each rank]}`."""
    brought = [numbers_of(rank, n, dtype, args.seed) for rank in range(args.world_size)]
    total = sum(brought)
    pieces = [tensor.tensor_split(args.world_size) for tensor in brought]
    gathered = torch.cat([pieces[rank][rank] for rank in range(args.world_size)])
    return {"all_reduce": [total] * args.world_size,
            "reduce_scatter": list(total.tensor_split(args.world_size)),
            "all_gather": [gathered] * args.world_size}


def bytes_sent(collective: str, way: str, rank: int, world_size: int, per_machine: int, n: int,
               itemsize: int) -> list:
    """Compute how many bytes of messages a rank should send, and the list of ranks to send to."""
    def lengths(total, parts):
        shorter, longer = divmod(total, parts)
        return [shorter + (part < longer) for part in range(parts)]

    slices, last = lengths(n, world_size), world_size - 1
    right = (rank + 1) % world_size
    if way == "hierarchical":
        n = lengths(n, per_machine)[rank % per_machine]
        machines, machine = world_size // per_machine, rank // per_machine
        slices, last, right = lengths(n, machines), machines - 1, (rank + per_machine) % world_size
        kept = slices[(machine + 1) % machines] + slices[(machine + 2) % machines]
        total = 2 * n - kept
    elif way != "ring":
        return [0, []]
    elif collective == "all_reduce":
        total = 2 * n - slices[(rank + 1) % world_size] - slices[(rank + 2) % world_size]
    elif collective == "reduce_scatter":
        total = n - slices[rank]
    else:
        total = n - slices[(rank + 1) % world_size]
    return [total * itemsize, [right] if last > 0 else []]


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded, for each type and division; return the findings on rank 0."""
    calls, rows, everyone = [], {}, []
    where, is_last, late = {}, rank == world_size - 1, [False]  # where: which run of `measure`
    with Recorder() as recorder:
        messages, barriers = record_messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_right", lambda *_: None)  # of other numbers

        @recorder.around(lesson, "measure")
        def measure(original, rank, world_size, args):
            for dtype, per_machine, uneven in runs():
                flags = Namespace(**{
                    **vars(args), "dtype": dtype, "ranks_per_machine": per_machine,
                    "sizes": [DTYPES[dtype].itemsize * n for n in counts_of(args, uneven)]})
                where.update(dtype=dtype, per_machine=per_machine, uneven=uneven,
                             largest=flags.sizes[-1])
                rows[dtype, per_machine, uneven] = original(rank, world_size, flags)
            everyone.extend(gathered([calls, messages.not_waited_for()]))
            return []

        @recorder.around(lesson, "collectives")
        def collectives(original, *given):
            whole = where["per_machine"] == int(os.environ["LOCAL_WORLD_SIZE"])
            return {name: {way: recording(name, way, ways["ring"] if way == "gloo"
                                          and where["uneven"] else function)
                           for way, function in ways.items()}
                    for name, ways in original(*given).items()
                    if whole or name == "all_reduce"}  # the others are the same

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
                late[0] = False
                result = tensor.clone()
                tensor.fill_(GARBAGE)
                if is_last and (where["dtype"], collective) == TIMED and size == where["largest"]:
                    time.sleep(LOSES_S[repeat])
                sent = messages.sent[first:]
                calls.append({
                    **where, "collective": collective, "way": way, "bytes": size, "repeat": repeat,
                    "seconds": time.perf_counter() - began, "together": together,
                    "has": (result.tensor_split(world_size)[rank]
                            if collective == "reduce_scatter" else result),
                    "sent": [sum(n_bytes for _, n_bytes in sent), sorted({to for to, _ in sent})]})

            return called

        lesson.run_worker(rank, world_size, args)
    return compare(rows, everyone, args) if rank == 0 else None


def runs() -> list[tuple[str, int, bool]]:
    """Return the type, the ranks that act as one machine, and `uneven` of each run of `measure`.

    With even ones only, gloo takes part in all: its reduce_scatter wants slices of one length.
    """
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    machines = [("float32", n) for n in range(here, 0, -1) if here % n == 0] + [("int64", here)]
    return [(dtype, n, uneven) for dtype, n in machines for uneven in (False, True)]


def counts_of(args: Namespace, uneven: bool) -> list[int]:
    """Return the numbers of elements: N divides them, or not; the last has several blocks."""
    n = args.world_size
    return sorted({n - 1, n + 1, 400_001} - {0}) if uneven else [100 * n]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.sizes, args.repeats = [4 * args.world_size], REPEATS
    return verdict(launch(record, args, program.role_name))


def compare(rows: dict[tuple, list[dict]], everyone: list[list], args: Namespace) -> dict:
    """Hold the rows of all runs, and what all ranks have recorded, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    calls, n = [of_rank for of_rank, _ in everyone], args.world_size
    kinds = list(dict.fromkeys((call["dtype"], call["per_machine"], call["collective"], call["way"])
                               for call in calls[0]))
    oracle = {}
    for dtype, per_machine, collective, way in kinds:
        mine = [[call for call in of_rank
                 if kinds_of(call) == (dtype, per_machine, collective, way)] for of_rank in calls]
        counts = [call["bytes"] // DTYPES[dtype].itemsize for call in mine[0]]
        for count in set(counts) - {count for name, count in oracle if name == dtype}:
            oracle[dtype, count] = single_process(args, DTYPES[dtype], count)
        has = by_rank(mine, "has")
        expected = [{f"rank {rank}": oracle[dtype, count][collective][rank] for rank in range(n)}
                    for count in counts]
        machines = f", machines of {per_machine}" if per_machine < n else ""
        what = f"{collective} by {way}{machines}, {dtype}"
        if dtype == "float32" and collective != "all_gather":
            findings.close(what, has, expected, n * torch.finfo(torch.float32).eps,
                           "sums in another order", unit="call")
        else:
            findings.equal(what, has, expected, "whole numbers, or copies", unit="call")
        if collective == "all_reduce":
            findings.equal(f"{what}, rank by rank", has,
                           [dict.fromkeys(of_all, of_all["rank 0"]) for of_all in has],
                           "each slice is summed once, and copied", unit="call")
        if way != "gloo":
            uneven = [call["uneven"] for call in mine[0]]
            findings.equal(
                f"{what}, bytes sent and to whom",
                [[call["sent"] for call in of_all] for of_all in zip(*mine, strict=False)],
                [[bytes_sent(collective, way, rank, n, per_machine, count, DTYPES[dtype].itemsize)
                  for rank in range(n)] for count in counts],
                "to the right neighbour; through shared memory nothing", unit="call")
            if any(uneven) and (dtype, collective) == TIMED:
                compare_times(findings, what, way, rows[dtype, per_machine, True], mine)
    together = [call["together"] for of_rank in calls for call in of_rank]
    findings.holds("clocks", all(together), f"all ranks had come before {sum(together)} of "
                   f"{len(together)} calls were timed")
    not_waited_for = [count for _, count in everyone]
    findings.holds("requests", not any(not_waited_for),
                   f"the ranks did not wait for {not_waited_for} requests")
    return findings.as_dict()


def kinds_of(call: dict) -> tuple[str, int, str, str]:
    """Return to which comparison a call belongs."""
    return call["dtype"], call["per_machine"], call["collective"], call["way"]


def compare_times(findings: Comparison, what: str, way: str, rows: list[dict],
                  mine: list[list[dict]]) -> None:
    """Hold the row of the largest size against the slowest rank's times, without the first."""
    largest = max(row["bytes"] for row in rows)
    of_size = {row["way"]: row for row in rows
               if (row["bytes"], row["collective"]) == (largest, TIMED[1])}
    seconds = [[call["seconds"] for call in of_rank if call["bytes"] == largest]
               for of_rank in mine]
    slowest = [max(of_all) for of_all in zip(*seconds, strict=False)]
    median, row = statistics.median(slowest[1:]), of_size.get(way)
    findings.holds(f"{what}, reported time", row and 0 <= row["median_s"] - median < CLOSE_S,
                   f"{row and row['median_s']} s; the slowest rank took {slowest} s, the first of "
                   f"these to warm up: median {median} s")
    if row:
        findings.equal(f"{what}, against gloo", [row["vs_gloo"]],
                       [of_size["gloo"]["median_s"] / row["median_s"]],
                       "the ratio of the reported times", unit="row")
