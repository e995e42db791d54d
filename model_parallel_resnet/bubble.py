"""Where the time of a batch goes on each of two workers: its work, and what it waits for.

Every moment of a batch belongs to one part, so the parts add up to its time. A worker that has
nothing open waits for its next piece of work. As long as the other worker still computes what that
piece needs, it waits for the other one; from then on, for messages: RPC, serialization, the master.
"""

import itertools
import statistics

from common import timeline

PARTS = {"forward": "forward", "backward": "backward", "both": "forward and backward at a time",
         "first": "waits for the first features", "turn": "waits for the first gradient",
         "between": "waits between micro-batches", "last": "waits for the last gradient",
         "step": "adds up gradients, steps", "messages": "messages, the master"}
WORK = {"forward": "forward", "backward": "backward", "weight gradients": "backward",
        "add": "step", "step": "step"}


def parts_of(spans, workers, window):
    """The parts of one batch.

    Args:
        spans: of all processes, as `timeline.recorded` gives them.
        workers: the roles that compute: the first and the second half of the model.
        window: (start, end) of the batch, in seconds.

    Returns:
        `{worker: {part: seconds}}`, with all of `PARTS`.
    """
    pieces = {worker: [span for span in timeline.within(spans[worker], window)
                       if span["kind"] in WORK] for worker in workers}
    ends = {(worker, span["kind"], span["labels"].get("micro_batch")): span["end"]
            for worker in workers for span in pieces[worker]}
    last = {worker: max((span["end"] for span in pieces[worker] if span["kind"] != "step"
                         and span["kind"] != "add"), default=window[0]) for worker in workers}
    return {worker: _of_worker(worker, workers, pieces[worker], ends, last, window)
            for worker in workers}


def _of_worker(worker, workers, pieces, ends, last, window):
    parts = dict.fromkeys(PARTS, 0.0)
    start, end = window
    edges = sorted({start, end, *(span[edge] for span in pieces for edge in ("start", "end"))})
    for a, b in itertools.pairwise(edges):
        kinds = {WORK[span["kind"]] for span in pieces if span["start"] <= a and b <= span["end"]}
        if {"forward", "backward"} <= kinds:
            parts["both"] += b - a
        elif kinds:
            parts[min(kinds & {"forward", "backward"} or kinds)] += b - a
        else:
            part, until = _waits_for(worker, workers, pieces, ends, last, b)
            waited = min(max(until - a, 0.0), b - a)
            parts[part] += waited
            parts["messages"] += b - a - waited
    return parts


def _waits_for(worker, workers, pieces, ends, last, until):
    """What a gap that lasts `until` then is, and when the other worker had done its share."""
    first, second = workers
    piece = next((span for span in pieces if span["start"] == until), None)
    before = {span["kind"] for span in pieces if span["start"] < until}
    if piece is None or WORK[piece["kind"]] == "step" and until >= last[worker]:
        return "last", last[first if worker == second else second]
    kind, number = piece["kind"], piece["labels"].get("micro_batch")
    if kind == "forward":
        part = "between" if "forward" in before else "first"
        return part, ends.get((first, kind, number), until) if worker == second else 0.0
    part = "between" if "backward" in before else "turn"
    return part, ends.get((second, kind, number), until) if worker == first else 0.0


def rows_of(spans, workers, num_splits, windows):
    """The medians of each part over the timed batches, for each number of micro-batches.

    Returns:
        `[{"num_split": 4, worker: {part: seconds}}]`.
    """
    rows = []
    for num_split, of_split in zip(num_splits, windows, strict=True):
        batches = [parts_of(spans, workers, window) for window in of_split]
        rows.append({"num_split": num_split, **{
            worker: {part: statistics.median(batch[worker][part] for batch in batches)
                     for part in PARTS} for worker in workers}})
    return rows


def table(row, workers):
    """Lines: a head, and one for each part, in seconds."""
    head = f"{'num_split ' + str(row['num_split']):36}" + "".join(f"{w:>9}" for w in workers)
    return [head, *(f"  {says:34}" + "".join(f"{row[worker][part]:9.3f}" for worker in workers)
                    for part, says in PARTS.items())]
