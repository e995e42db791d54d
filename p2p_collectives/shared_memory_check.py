"""The check of `shared_memory.py`: the results, messages and waits of every variant.

Random numbers replace those of the lesson. In the first call of each variant the last rank is late:
it writes its tensor after the other ranks have called, and leaves each barrier late. As soon as a
call has returned, every rank overwrites its tensor and begins another call. A rank that does not
wait for the other ranks reads or keeps wrong numbers.
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
from p2p_collectives.messages import Messages
from p2p_collectives.ring_allreduce_check import (
    CALLS,
    hold_equal_ranks,
    hold_waiting,
    lengths,
    messages_of,
    numbers_of,
)

LATE_S = 0.01
OPENS_S = 0.2  # longer than the other ranks need to open the memory
GARBAGE = 7_777_777


def single_process(args: Namespace, n: int) -> dict[str, list[torch.Tensor]]:
    """Compute what the ranks should hold afterwards: `{collective: [tensor of each rank]}`."""
    brought = [numbers_of(rank, n, args.seed) for rank in range(args.world_size)]
    total = sum(brought)
    pieces = [tensor.tensor_split(args.world_size)[rank] for rank, tensor in enumerate(brought)]
    return {"all_reduce": [total] * args.world_size,
            "reduce_scatter": list(total.tensor_split(args.world_size)),
            "all_gather": [torch.cat(pieces)] * args.world_size}


def bytes_sent(collective: str, way: str, rank: int, args: Namespace, n: int) -> list:
    """Compute the bytes of messages that a rank should send, and the list of receivers."""
    size, per_machine = args.world_size, args.ranks_per_machine
    if way == lesson.HIERARCHICAL:  # one rank of each machine forms a ring for its slice
        n_bytes, _ = messages_of("ring", rank // per_machine, size // per_machine,
                                 lengths(n, per_machine)[rank % per_machine])
        right = (rank + per_machine) % size
        return [n_bytes, [right] if right != rank else []]
    if way != "ring":
        return [0, []]
    if collective == "all_reduce":
        return messages_of("ring", rank, size, n)
    right = (rank + 1) % size
    left_out = lengths(n, size)[rank if collective == "reduce_scatter" else right]
    return [4 * (n - left_out), [right] if right != rank else []]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    n = args.world_size
    counts = sorted({n - 1, n + 1, 100 * n, 400_001} - {0})  # the last one has several blocks
    args.sizes, args.repeats = [4 * count for count in counts], CALLS - 1
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0."""
    calls, is_last, late = [], rank == world_size - 1, [False]
    given = args.ranks_per_machine or int(os.environ["LOCAL_WORLD_SIZE"])
    with Recorder() as recorder:
        messages, barriers = Messages(recorder), Barriers(recorder)
        recorder.put(lesson, "contribution", partial(numbers_of, seed=args.seed))
        recorder.put(lesson.results, "require_right", lambda *_: None)  # it expects other numbers
        everyone = recorder.gather_at_end(lambda: [calls, messages.not_waited_for()])

        @recorder.around(torch, "from_file")
        def late_open(original, *given, **options):
            if is_last:  # no rank may close what the last one has not opened yet
                time.sleep(OPENS_S)
            return original(*given, **options)

        @recorder.around(lesson.SharedMemory, "barrier")
        def late_barrier(original, shared):
            original(shared)
            if late[0]:
                time.sleep(LATE_S)

        @recorder.around(lesson, "collectives")
        def collectives(original, *given):
            return {name: {way: partial(recorded, (name, way), function)
                           for way, function in ways.items()}
                    for name, ways in original(*given).items()}

        def recorded(kind, function, tensor):
            together, first = barriers.all_had_come(), len(messages.sent)
            collective, way = kind
            if way == "gloo":
                return  # it is torch's own, and some sizes here are none of its sizes
            is_first = sum(call["kind"] == kind for call in calls) % CALLS == 0
            late[0] = is_last and is_first
            if late[0]:
                brought = tensor.clone()
                tensor.fill_(GARBAGE)
                time.sleep(LATE_S)
                tensor.copy_(brought)
            function(tensor)
            has = tensor.clone()
            if is_first and way in (lesson.SHARED, lesson.COPIED):  # the other ranks go on
                function(torch.full_like(tensor, GARBAGE))
            late[0] = False
            tensor.fill_(GARBAGE)
            if collective == "reduce_scatter":  # the other slices are undefined
                has = has.tensor_split(world_size)[rank]
            calls.append({"kind": kind, "has": has, "together": together,
                          "sent": messages.since(first)})

        metrics = lesson.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    findings = compare(everyone, args)
    findings.holds("ranks of a machine", metrics["ranks_per_machine"] == given,
                   f"{metrics['ranks_per_machine']}, and {given} by --ranks_per_machine")
    return findings.as_dict()


def compare(everyone: list[list], args: Namespace) -> Comparison:
    """Compare the calls of all ranks with a single process."""
    findings, n = Comparison(f"{args.world_size} processes"), args.world_size
    # By the flags, because a call or a size could be missing in the record.
    counts = [size // 4 for size in args.sizes for _ in range(CALLS)]
    oracle = {count: single_process(args, count) for count in {*counts}}
    for kind in dict.fromkeys(call["kind"] for call in everyone[0][0]):
        collective, way = kind
        recorded = [[call for call in calls if call["kind"] == kind] for calls, _ in everyone]
        has, what = by_rank(recorded, "has"), f"{collective} by {way}"
        tolerance = 0.0 if collective == "all_gather" else n * torch.finfo(torch.float32).eps
        findings.close(what, has, [{f"rank {rank}": oracle[count][collective][rank]
                                    for rank in range(n)} for count in counts],
                       tolerance, "sums in another order" if tolerance else "copies", unit="call")
        if collective == "all_reduce":
            hold_equal_ranks(findings, what, has)
        expected = [{f"rank {rank}": bytes_sent(collective, way, rank, args, count)
                     for rank in range(n)} for count in counts]
        findings.equal(f"{what}, bytes sent and to whom", by_rank(recorded, "sent"), expected,
                       "to the right neighbor only; through shared memory nothing", unit="call")
    hold_waiting(findings, everyone)
    return findings
