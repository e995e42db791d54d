"""What a `--check` says about times: that they are of the right steps, and that the table is right.

No time is expected to have a certain length. But between the two readings of the clock there must
be one step, that of the row; and from the windows of time, the rows, the printed table and the last
line are computed once more.
"""

import itertools
import re
import statistics

from model_parallel_resnet import bubble, results

TOLERANCE = 1e-10  # of the same few additions and divisions


def hold_windows(found, steps, metrics, args, workers, parts=1):
    """Each timed window has one step, that of its row, and all of its micro-batches.

    Args:
        found: the `Comparison`.
        steps: (start, end) of each step, as the recorder saw it.
        metrics: of the lesson.
        args: the parsed flags.
        workers: the roles that compute.
        parts: of the model that each of them has.
    """
    rows = len(args.num_splits)
    inside, forwards = [], []
    for of_row in metrics["windows"]:
        # -1: a step that only touches a window.
        inside.append([[n if start <= began and ended <= end else -1
                        for n, (began, ended) in enumerate(steps) if began < end and ended > start]
                       for start, end in of_row])
        forwards.append([[sum(span["kind"] == "forward" and start < span["end"] <= end
                              for span in metrics["spans"][worker]) for worker in workers]
                         for start, end in of_row])
    expected = [[[row + rows * (1 + batch)] for batch in range(args.num_batches)]
                for row in range(rows)]
    found.equal("timed steps", inside, expected, "the steps between the two readings of the clock; "
                "none of a warm-up, none of another number of splits", unit="row")
    found.equal("timed micro-batches", forwards,
                [[[number * parts] * len(workers)] * args.num_batches
                 for number in args.num_splits],
                "of each worker between the two readings", unit="row")


def made_up(metrics, args, workers):
    """Metrics with other times: of each row three, whose median is no mean, nor the first or last.

    The later a row, the earlier it is on the clock.
    """
    windows = [[(100 * row + 10 * i, 100 * row + 10 * i + (1 + 0.1 * row) * seconds)
                for i, seconds in enumerate((2.0, 7.0, 2.5))]
               for row in reversed(range(len(args.num_splits)))]
    spans = {worker: [{"kind": "forward", "start": start, "labels": {},
                       "end": start + (0.3 + 0.1 * i + 0.2 * j) * (end - start)}
                      for of_row in windows for i, (start, end) in enumerate(of_row)]
             for j, worker in enumerate(workers)}
    return {**metrics, "windows": windows, "spans": spans}


def hold_table(found, times, metrics, args, name, workers):
    """The rows, the printed table and the last line.

    Args:
        found: the `Comparison`.
        times: "measured" or "made-up".
        metrics: of the lesson, or of `made_up`.
        args: the parsed flags.
        name: of the pipeline, for the last line.
        workers: the roles that compute.
    """
    expected = expected_rows(metrics, args, workers)
    rows = results.rows_of(metrics, args, workers)
    found.close(f"rows of {times} times", rows, expected, TOLERANCE, "medians, idle times", "row")

    head, *lines = [line.split() for line in results.table(rows)]
    printed = [dict(zip(head, (float(word.rstrip("%")) for word in line), strict=True))
               for line in lines]
    rounded = [{"splits": row["num_split"], "s/batch": round(row["median_s"], 2),
                "speed-up": round(row["speedup"], 2), "ideal": round(row["ideal"], 2),
                "idle": round(100 * row["idle_share"])} for row in expected]
    found.close(f"table of {times} times", printed, rounded, TOLERANCE, "rounded alike", "row")

    fastest = min(range(len(expected)), key=lambda row: expected[row]["median_s"])
    best, losses = rounded[fastest], metrics["losses"]
    _, words = results.last_line(rows, losses, args, name).split(":", 1)
    said = [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", words)]
    shown = [round(losses[0], 4), round(losses[-1], 4), best["splits"], best["s/batch"],
             best["speed-up"], 1, best["ideal"], best["idle"]]
    found.close(f"last line of {times} times", said, shown, TOLERANCE, "rounded alike", "word")


def hold_parts(found, times, metrics, workers):
    """Where each batch's time has gone: work as often as any is open, and the parts are the whole.

    Args:
        found: the `Comparison`.
        times: "measured" or "made-up".
        metrics: of the lesson, or of `made_up`.
        workers: the roles that compute.
    """
    ours, theirs = [], []
    for of_row in metrics["windows"]:
        for start, end in of_row:
            parts = bubble.parts_of(metrics["spans"], workers, (start, end))
            for worker in workers:
                of_worker = parts[worker]
                work = sum(of_worker[part] for part in ("forward", "backward", "both", "step"))
                ours.append([sum(of_worker.values()), work, min(of_worker.values()) >= 0])
                idle = idle_share(metrics["spans"][worker], start, end)
                theirs.append([end - start, (1 - idle) * (end - start), True])
    found.close(f"parts of {times} times", ours, theirs, TOLERANCE,
                "of each batch on each worker: all parts, those of work, none below 0", "batch")


def expected_rows(metrics, args, workers):
    """What `results.rows_of` should make of the windows and the spans."""
    medians = [statistics.median(end - start for start, end in of_row)
               for of_row in metrics["windows"]]
    rows = []
    for number, median, of_row in zip(args.num_splits, medians, metrics["windows"], strict=True):
        idle = [sum(idle_share(metrics["spans"][worker], *window) for worker in workers)
                / len(workers) for window in of_row]
        rows.append({"num_split": number, "median_s": median, "speedup": medians[0] / median,
                     "ideal": 2 * number / (number + 1), "idle_share": statistics.median(idle)})
    return rows


def idle_share(spans, start, end):
    """The share of the time from `start` to `end` in which none of the spans was open."""
    spans = [span for span in spans if span["start"] < end and span["end"] > start]
    edges = sorted({start, end, *(min(max(span[edge], start), end) for span in spans
                                  for edge in ("start", "end"))})
    idle = sum(b - a for a, b in itertools.pairwise(edges)
               if not any(span["start"] <= a and b <= span["end"] for span in spans))
    return idle / (end - start)
