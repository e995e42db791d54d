"""Who computed, sent or waited when: spans of time, recorded in every process, drawn and written at the end of a run.

    timeline.start("worker1")                            in each process; without it, nothing is recorded
    with timeline.span("forward", micro_batch=3): ...    in any thread
    spans = timeline.recorded()                          {"worker1": [...]}: travels over RPC, or in a gather
    timeline.save(spans, args.output_dir, title)         where the spans of all processes have come together

The clock is `time.time()`: processes of one machine read the same. Those of several machines differ by what NTP leaves
between them, often milliseconds: there, compare spans of one machine with each other.
"""

import contextlib
import json
import time
from collections import deque

from common import report

KEPT = 20_000  # spans of a process: the last ones, so that a long training does not fill the memory
_NOTHING = contextlib.nullcontext()
_role, _spans = None, None


def start(role):
    """Record the spans of this process from now on, under the name `role`."""
    global _role, _spans
    _role, _spans = role, deque(maxlen=KEPT)


def is_on():
    """Whether spans are recorded in this process."""
    return _spans is not None


def span(kind, **labels):
    """A `with` block whose time is recorded; the first label's value is written into the bar. Almost free when off."""
    return _NOTHING if _spans is None else _span(kind, labels)


@contextlib.contextmanager
def _span(kind, labels):
    started = time.time()
    try:
        yield
    finally:
        add(kind, started, time.time(), **labels)


def add(kind, started, ended, **labels):
    """Record what is no `with` block, between two readings of `time.time()`; nothing when off."""
    if _spans is not None:
        _spans.append({"kind": kind, "start": started, "end": ended, "labels": labels})  # atomic: any thread may


def recorded():
    """The spans of this process: `{role: [{kind, start, end, labels}]}`, times in seconds; empty when off."""
    return {} if _spans is None else {_role: list(_spans)}


def within(spans, window):
    """Those of a list of spans that touch a window of time (start, end), cut to it, in order of their start."""
    start, end = window
    inside = (span for span in spans if span["end"] > start and span["start"] < end)
    return sorted(({**span, "start": max(span["start"], start), "end": min(span["end"], end)} for span in inside),
                  key=lambda span: span["start"])


def idle_share(spans, window):
    """The share of a window of time (start, end) in which no span was open: 0 is always busy, 1 never."""
    start, end = window
    busy, until = 0.0, start
    for span in within(spans, window):
        busy += max(0.0, span["end"] - max(span["start"], until))
        until = max(until, span["end"])
    return 1 - busy / (end - start)


def save(spans_by_role, output_dir, title, windows=None):
    """Draw `timeline.png`, a lane for each process, and write `timeline.json`, which https://ui.perfetto.dev opens.

    Args:
        spans_by_role: `{role: spans}`, as `recorded` returns them, of all processes; their order is that of the lanes.
        output_dir: for both files.
        title: of the picture.
        windows: `{caption: (start, end)}` in seconds, drawn below each other; by default one with everything.

    Returns:
        `{caption: {role: idle share}}`; the caption of the default is "".
    """
    spans = [span for spans in spans_by_role.values() for span in spans]
    if windows is None:
        windows = {"": (min(span["start"] for span in spans), max(span["end"] for span in spans))}
    _write_trace(spans_by_role, output_dir / "timeline.json")
    kinds = dict.fromkeys(span["kind"] for span in sorted(spans, key=lambda span: span["start"]))
    colours = {kind: f"C{i}" for i, kind in enumerate(kinds)}
    longest, idle, ticks, y = max(end - start for start, end in windows.values()), {}, {}, 0
    unit, scale = ("s", 1) if longest >= 1 else ("ms", 1000)
    with report.picture(output_dir / "timeline.png", title, f"time ({unit})", "") as axes:
        for caption, window in windows.items():
            idle[caption] = {}
            axes.text(0, y - 0.12, caption, va="bottom", fontweight="bold", fontsize=9)
            for role, of_role in spans_by_role.items():
                share = idle[caption][role] = idle_share(of_role, window)
                ticks[y + 0.5] = f"{role}\nidle {share:.0%}"
                axes.barh(y + 0.5, window[1] - window[0], height=0.9, color="0.93")  # what stays visible of it is idle
                _draw_lane(axes, y, within(of_role, window), window[0], longest, colours)
                y += 1
            y += 0.6
        drawn = {span["kind"] for window in windows.values() for span in within(spans, window)
                 if span["end"] - span["start"] > longest / 1000}  # or nobody could see it
        for kind in colours:
            if kind in drawn:
                axes.barh(0, 0, color=colours[kind], label=kind)
        axes.set_yticks(list(ticks), ticks.values(), fontsize=8)
        axes.set_ylim(y - 0.5, -0.6 if any(windows) else -0.1)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{scale * seconds:g}")
    return idle


def _draw_lane(axes, y, spans, zero, longest, colours):
    rows = _rows(spans)
    height = 0.9 / (1 + max(rows, default=0))
    for span, row in zip(spans, rows, strict=True):
        start, width = span["start"] - zero, span["end"] - span["start"]
        middle = y + 0.05 + (row + 0.5) * height
        axes.barh(middle, width, left=start, height=height, color=colours[span["kind"]], edgecolor="white",
                  linewidth=0.5 if width > 0.005 * longest else 0)
        text = str(next(iter(span["labels"].values()), ""))
        if width / longest > 0.012 * len(text) and height > 0.2:
            axes.text(start + width / 2, middle, text, ha="center", va="center", color="white", fontsize=7)


def _rows(spans):
    """For each of the spans, in order of their start, the first row in which nothing else is then open."""
    rows, ends = [], []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span["start"]), len(ends))
        ends[row : row + 1] = [span["end"]]
        rows.append(row)
    return rows


def _write_trace(spans_by_role, path):
    events = []
    for pid, (role, spans) in enumerate(spans_by_role.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}})
        spans = sorted(spans, key=lambda span: span["start"])
        for span, row in zip(spans, _rows(spans), strict=True):
            events.append({"ph": "X", "name": span["kind"], "pid": pid, "tid": row, "ts": span["start"] * 1e6,
                           "dur": (span["end"] - span["start"]) * 1e6, "args": span["labels"]})
    with report.replacing(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
