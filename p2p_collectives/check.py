"""The oracle of `main.py`: what every rank holds before and after each operation.

A single process (`expected.py`) has the tensors of all ranks as lists of numbers and moves them
itself. In the run, messages leave late, by more on higher ranks: who reads one without having
waited, reads the old value.
"""

from argparse import Namespace
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder

from p2p_collectives import main as lesson
from p2p_collectives.expected import single_process
from p2p_collectives.messages import record_messages

DELAY_S = 0.1  # of messages, for each rank


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    with Recorder() as recorder:
        messages = record_messages(recorder, delay=DELAY_S * (rank + 1))
        not_waited_for = recorder.gather_at_end(messages.not_waited_for)
        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, not_waited_for, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
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
