"""The check of `main.py`: what every rank holds before and after each operation.

The single process (`expected.py`) moves lists of numbers itself. In the run, every message leaves
late, and later on higher ranks: a rank that does not wait for a message reads the old value.
"""

from argparse import Namespace
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder

from p2p_collectives import main as lesson
from p2p_collectives.expected import single_process
from p2p_collectives.messages import Messages

DELAY_S = 0.1  # delay of each message, times the number of ranks up to its sender


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    with Recorder() as recorder:
        messages = Messages(recorder, delay_s=DELAY_S * (rank + 1))
        not_waited_for = recorder.gather_at_end(messages.not_waited_for)
        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, not_waited_for, args) if rank == 0 else None


def compare(metrics: dict, not_waited_for: list[int], args: Namespace) -> dict:
    """Compare the metrics of a run, and the requests of each rank, with the single process."""
    findings = Comparison(f"{args.world_size} processes")
    chosen = lesson.RIGHT if args.demo == "all" else [args.demo]
    oracle = {name: rows for demo in chosen
              for name, rows in single_process(args.world_size)[demo].items()}
    ran = {operation["operation"]: operation["rows"] for operation in metrics["operations"]}
    for name, theirs in oracle.items():
        rows = ran.get(name, [])
        if name == "barrier":  # how many ranks arrived first is up to the machine
            rows = [[None, after] for _, after in rows]
        if name == "all_reduce of a column":  # gloo's mistake; a later torch may have fixed it
            gloos = [[before, [*after[:2], before[2]]] for before, after in theirs]
            findings.holds(name, rows in (theirs, gloos),
                           f"the ranks hold {[after for _, after in rows]}")
        elif rows != [[None, None]] * args.world_size:  # a barrier of several machines
            findings.equal(name, cells(rows), cells(theirs), "small whole numbers are exact",
                           "rank")
    findings.holds("requests", not any(not_waited_for),
                   f"requests of isend and irecv without a wait, by rank: {not_waited_for}")
    return findings.as_dict()


def cells(rows: list[list]) -> list[dict[str, list[float]]]:
    """Name the two cells of each row; undefined cells become empty."""
    return [{"before": before or [], "after": after or []} for before, after in rows]
