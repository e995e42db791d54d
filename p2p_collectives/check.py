"""The oracle of `main.py`: what every rank holds before and after each operation.

A single process has the tensors of all ranks as lists of numbers and moves them itself. In the run,
messages leave late, by more on higher ranks: who reads one without having waited, reads the old
value.
"""

import importlib
from argparse import Namespace
from math import prod
from types import ModuleType

import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, gathered

from p2p_collectives.messages import record_messages

DELAY_S = 0.1  # of messages, for each rank


def single_process(size: int) -> dict[str, dict[str, list[list]]]:
    """Compute what `size` ranks should hold.

    Returns:
        `{demo: {operation: [[before, after] of each rank]}}`, lists of numbers; None where it is
        undefined.
    """
    ranks = range(size)
    counts = [[rank + 1] for rank in ranks]  # 1, 2, 3, ...
    tens = [[10 * rank] for rank in ranks]
    zeros = [[0] for _ in ranks]
    ones_and_twos = [[1 + rank % 2] for rank in ranks]
    everything = [10 * rank for rank in ranks]
    lists = [[10 * column + row for column in ranks] for row in ranks]
    matrix = [[10 * row + column for column in ranks] for row in ranks]
    own_kind = [[other for other in ranks if other % 2 == rank % 2] for rank in ranks]

    def pairs(before, after):
        return [list(pair) for pair in zip(before, after, strict=True)]

    def reduced(start, operator):
        return pairs(start, [[operator([number for [number] in start])]] * size)

    return {
        "blocking": {"send, recv": pairs(zeros, counts)},  # each adds one to what it has received
        "nonblocking": {
            "isend, irecv": pairs(zeros, [[1], [1], *zeros[2:]]),
            "batch_isend_irecv": pairs(zeros, [[size - 1], *([rank - 1] for rank in ranks[1:])])},
        "all_reduce": {
            "all_reduce in [0, 1]": pairs([[1]] * size, [[2], [2], *[[1]] * (size - 2)])},
        "collectives": {
            "broadcast": pairs([[10, 20], *[[0, 0]] * (size - 1)], [[10, 20]] * size),
            "scatter": pairs([everything, *zeros[1:]], tens),
            "gather": pairs(tens, [everything, *[None] * (size - 1)]),
            "reduce SUM": pairs(counts, [[sum(range(1, size + 1))], *[None] * (size - 1)]),
            "all_reduce SUM": reduced(counts, sum),
            "all_reduce PRODUCT": reduced(ones_and_twos, prod),
            "all_reduce MIN": reduced(counts, min),
            "all_reduce MAX": reduced(counts, max),
            "all_reduce AVG": reduced(counts, lambda numbers: sum(numbers) / size),
            "all_gather": pairs(tens, [everything] * size),
            "reduce_scatter SUM": pairs(lists,
                                        [[sum(column)] for column in zip(*lists, strict=True)]),
            "all_to_all": pairs(matrix, [[row[rank] for row in matrix] for rank in ranks])},
        "barrier": {"barrier": pairs([None] * size, [[size]] * size)},
        "groups": {
            "all_reduce in evens, odds": pairs([[rank] for rank in ranks],
                                               [[sum(kind)] for kind in own_kind]),
            "broadcast in evens, odds": pairs(tens, [[10 * kind[0]] for kind in own_kind])},
    }


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program `args.program`, recorded; return the findings on rank 0."""
    program = importlib.import_module(args.program)  # it imports this file: the table of a run
    not_waited_for = []
    with Recorder() as recorder:
        messages = record_messages(recorder, delay=DELAY_S * (rank + 1))

        @recorder.around(dist, "destroy_process_group")
        def gather_and_leave(leave):
            not_waited_for.extend(gathered(messages.not_waited_for()))
            leave()

        metrics = program.run_worker(rank, world_size, args)
    return compare(metrics, not_waited_for, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.program = program.__name__
    return verdict(launch(record, args, program.role_name))


def compare(metrics: dict, not_waited_for: list[int], args: Namespace) -> dict:
    """Hold the metrics of a run, and its requests by rank, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    oracle = {name: rows for demo, of_demo in single_process(args.world_size).items()
              for name, rows in of_demo.items() if args.demo in ("all", demo)}
    ran = {operation["operation"]: operation for operation in metrics["operations"]}
    missing = [name for name in oracle if name not in ran]
    findings.holds("operations", not missing, f"{len(oracle)} were expected; not there: "
                   f"{', '.join(missing) or 'none'}")
    for name in [name for name in oracle if name in ran]:
        rows, theirs = ran[name]["rows"], oracle[name]
        if name == "barrier":  # how many were there before it is up to the machine
            if rows[0][1] is None:
                continue  # several machines
            rows = [[None, after] for _, after in rows]
        findings.equal(name, [side_by_side(row) for row in rows],
                       [side_by_side(row) for row in theirs], "small whole numbers are exact",
                       "rank")
    findings.holds("requests", not any(not_waited_for),
                   f"of isend and irecv, the ranks did not wait for {not_waited_for} requests")
    return findings.as_dict()


def side_by_side(row: list) -> dict[str, list[float]]:
    """Name the cells of a row, `before` and `after`, without what is undefined."""
    cells = zip(("before", "after"), row, strict=True)
    return {name: cell for name, cell in cells if cell is not None}
