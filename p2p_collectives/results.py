"""Output of `main.py`: a table for each operation, metrics.json, the summary line."""

from argparse import Namespace

from common import report

from p2p_collectives.expected import single_process


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, print the tables and the summary line; return the complete metrics.

    Raises:
        SystemExit: 1 if a rank holds other numbers than expected, except for gloo's own mistake.
    """
    expected = single_process(args.world_size)
    for operation in metrics["operations"]:
        known = expected[operation["demo"]][operation["operation"]]
        for row, (_, after) in zip(operation["rows"], known, strict=True):
            row.append(None if row[1] is None else after)
    device = "cpu" if metrics["backend"] == "gloo" else None  # see run_worker
    metrics = report.save_metrics(args, metrics, metrics["backend"], device)
    for operation in metrics["operations"]:
        show(operation)
    seen = [operation for operation in metrics["operations"]
            if any(row[2] is not None for row in operation["rows"])]
    wrong = [operation["operation"] for operation in seen
             if any(row[1] != row[2] for row in operation["rows"])]
    found = f"WRONG: {', '.join(wrong)}" if wrong else "every rank holds what it should"
    print(f"\n{len(seen)} operation{'s' if len(seen) != 1 else ''} on {args.world_size} ranks over "
          f"{metrics['backend']}: {found}")
    if wrong and args.demo != "noncontiguous":
        raise SystemExit(1)
    return metrics


def show(operation: dict) -> None:
    """Print the table of an operation: one row for each rank."""
    print(f"\n{operation['operation']}: {operation['says']}")
    rows = [[*("" if cell is None else " ".join(f"{number:g}" for number in cell) for cell in row),
             "" if row[2] is None else "ok" if row[1] == row[2] else "FAIL"]
            for row in operation["rows"]]
    if any(cell for row in rows for cell in row):
        table = [["before", "after", "expected", ""], *rows]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        for rank, row in enumerate(table, start=-1):
            cells = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(f"  {'rank' if rank < 0 else rank:>4}   {cells}".rstrip())
