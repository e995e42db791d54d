"""What a record leaves: a page (replay.py), a trace and a picture, each with the same colours."""

import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from common import picture, report

from tracing import replay
from tracing.cells import cell_of
from tracing.merge import STATES
from tracing.timeline import KINDS, OTHER, idle_share, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Window = tuple[float, float]  # start and end, in seconds
SHORTEST_S = 1e-6  # of a message in the trace, which an arrow can then begin and end in
AROUND = ("init_process_group", "init_rpc", "rpc.shutdown")  # of a run: the picture leaves it out
BACKWARD = "dist_autograd.backward"
MESSAGES = 1000  # the row of the first one in the trace; the spans are above

MOST_ARROWS = 80  # in a picture: more could not be told apart
IDLE, INK = "0.9", "0.25"  # the greys of nothing, and of a message
WORDS = {
    "en": {"x": "time ({unit})", "y": "", "idle": "not recorded: waiting, or other work",
           "share": "computes %.0f%%", "message": "message", "ranks": r", \1 ranks",
           "kinds": "en"},
    "ja": {"x": "時間（{unit}）", "y": "", "idle": "記録していない時間（待機か、ほかの処理）",
           "share": "計算 %.0f%%", "message": "メッセージ", "ranks": r"、\1ランク", "kinds": "ja"},
}


def save(record: dict, output_dir: Path, windows: dict[str, Window] | None = None) -> None:
    """Write `replay.html`, `timeline.json` (for https://ui.perfetto.dev) and `timeline.png`.

    Args:
        record: what `merge.merged` returns.
        output_dir: for the files.
        windows: `{caption: (start, end)}` in seconds: what the picture shows, below each other, and
            the page first; by default one with everything.
    """
    times = [thing[key] for things in (record["ops"], *record["spans"].values())
             for thing in things for key in ("start", "end") if thing[key] is not None]
    begin, end = min(times), max(times)
    events = _trace_events(record, begin, end)
    with report.replacing(output_dir / "timeline.json") as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    replay.write(record, begin, end, windows, output_dir / "replay.html")
    lanes = _lanes(record, end)
    if not windows:
        shown = list(itertools.chain(*(record["spans"] if any(record["spans"].values())
                                       else lanes).values()))
        windows = {"": (min((span["start"] for span in shown), default=begin),
                        max((span["end"] for span in shown), default=end))}
    _draw(lanes, _arrows_in(record, windows.values()), record["title"], windows,
          output_dir / "timeline.png", record["machine"])


def _lanes(record: dict, end: float) -> dict[str, list[dict]]:
    """Return what the picture shows of each process: what it computes, and what it waits for.

    A wait for a call is shown within a bar, the time of which it is: a forward that is elsewhere.
    """
    lanes, ops = {role: list(spans) for role, spans in record["spans"].items()}, record["ops"]
    computes = any(lanes.values())
    for op in ops:
        if (op.get("waits") or op["kind"] == "wait") and op.get("name") not in AROUND:
            on = ops[op["on"]] if op.get("on") is not None else op
            kind = on["kind"] if on["kind"] in KINDS else "remote call"
            kind = on["name"] if kind == "collective" and on["name"] in KINDS else kind
            name = "backward" if on.get("name") == BACKWARD else on.get("name", on["kind"])
            lanes[record["lanes"][op["rank"]]].append({
                "kind": kind, "start": op["start"], "end": op["end"] or end,
                "labels": {} if name == kind else {"name": name}, "thread": op["thread"],
                "hidden": computes and kind == "remote call" and op.get("name") != BACKWARD})
    return {role: _innermost(spans) for role, spans in lanes.items()}


def _arrows_in(record: dict, windows: Iterable[Window]) -> list[dict]:
    """Return the messages from one lane to another within a window; none of too many.

    Not those of collectives: in which all wait for all, as the bars of that show.
    """
    arrows = [arrow for arrow in record["arrows"] if arrow["came"] is not None
              and arrow["source"] != arrow["target"]
              and record["ops"][arrow["op"]]["kind"] != "collective"
              and any(_is_in(arrow, window) for window in windows)]
    return arrows if len(arrows) <= MOST_ARROWS else []


def _is_in(arrow: dict, window: Window) -> bool:
    return window[0] <= arrow["left"] and arrow["came"] <= window[1]


def _innermost(spans: list[dict]) -> list[dict]:
    """Cut out of each span what is within it in the same thread."""
    pieces, threads = [], {}  # of a thread: spans that go on, the innermost last
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        around = threads.setdefault(span["thread"], [])
        while around and around[-1]["end"] <= span["start"]:
            pieces.append(around.pop())
        if around and span["end"] <= around[-1]["end"]:
            outer = around[-1]
            pieces.append({**outer, "end": span["start"]})
            around[-1] = {**outer, "start": span["end"]}
            if span["kind"] == "remote call":
                span = {**span, "labels": {"name": outer["kind"]}, "hidden": False}
        around.append(span)
    pieces += itertools.chain(*threads.values())
    return [piece for piece in pieces if piece["start"] < piece["end"] and not piece.get("hidden")]


def _trace_events(record: dict, begin: float, end: float) -> list[dict]:
    """Return all in Chrome's trace event format: times in microseconds, rows as threads.

    The spans are in the first rows of a process, its messages below; an arrow joins two of those.
    """
    events, named = [], set()

    def add(pid, tid, name, start, stop, cat, args):
        if (pid, tid) not in named:
            named.add((pid, tid))
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid,
                           "args": {"name": f"{cat}s"}})
        ts = round((start - begin) * 1e6, 3)
        events.append({"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts,
                       "dur": max(round((stop - begin) * 1e6, 3) - ts, 0), "args": args})

    for pid, (role, spans) in enumerate(record["spans"].items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}})
        spans = sorted(spans, key=lambda span: span["start"])
        for span, row in zip(spans, _rows(spans), strict=True):
            add(pid, row, span["kind"], span["start"], span["end"], "span",
                {**span["labels"], "thread": span["thread"], **_place(span["where"])})
        ops = [{**op, "end": max(op["end"] or end, op["start"] + SHORTEST_S)}
               for op in record["ops"] if op["rank"] == pid and op["kind"] not in STATES]
        for op, row in zip(ops, _rows(ops), strict=True):
            args = {key: op[key] for key in ("thread", "bytes", "group", "number", "tag", "rref",
                                           "error")
                    if op.get(key) is not None}
            name = op.get("name") or op["kind"]
            name = name if name == op["kind"] else f"{op['kind']} {name}"
            add(pid, MESSAGES + row, name, op["start"], op["end"], "message",
                args | _place(op["where"]))
            record["ops"][op["index"]]["slice"] = events[-1]
    for number, arrow in enumerate(record["arrows"]):
        if arrow["came"] is None or arrow["out"] is None:
            continue
        out, into = (record["ops"][arrow[name]]["slice"] for name in ("out", "into"))
        for phase, piece, at in (("s", out, arrow["left"]), ("f", into, arrow["came"])):
            ts = min(max((at - begin) * 1e6, piece["ts"]), piece["ts"] + piece["dur"] * 0.999)
            events.append({"ph": phase, "bp": "e", "id": number, "name": "message",
                           "cat": "message", "pid": piece["pid"], "tid": piece["tid"],
                           "ts": round(ts, 3)})
    return events


def _place(where: list[list]) -> dict[str, str]:
    """Return the line of the lesson and the cell of the tutorial, in words."""
    if not where:
        return {}
    path, line, function = where[0]
    place = {"where": f"{path}:{line} {function.split('.<locals>')[0]}"}
    if cell := cell_of(where):
        place["cell"] = "{}, cell {}: {}".format(*cell)
    return place


def _rows(spans: list[dict]) -> list[int]:
    """Give each span, in order of their start, the first row in which nothing else is then open."""
    rows, ends = [], []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span["start"]), len(ends))
        ends[row : row + 1] = [span["end"]]
        rows.append(row)
    return rows


def _draw(spans_by_role: dict[str, list[dict]], arrows: list[dict], title: str,
          windows: dict[str, Window], path: Path, machine: dict | None) -> None:
    """Draw a lane for each process, arrows between them, and the windows below each other."""
    longest = max(end - start for start, end in windows.values())
    unit, scale = ("s", 1) if longest >= 1 else ("ms", 1000)
    words = {language: {**texts, "title": re.sub(r", (\d+) ranks$", texts["ranks"], title)}
             for language, texts in WORDS.items()}
    lanes, wide = len(windows) * len(spans_by_role), 0.64 if arrows else 0.9
    for axes, texts in picture.in_each_language(path, words, [machine], unit=unit,
                                                height=max(3.5, 1.9 + 0.5 * lanes / wide)):
        ticks, y = {}, 0
        for caption, window in windows.items():
            axes.text(0, y - 0.12, caption, va="bottom", fontsize=9,
                      fontweight=axes.title.get_fontweight())
            for arrow in arrows:
                if _is_in(arrow, window):
                    source, target = y + 0.5 + arrow["source"], y + 0.5 + arrow["target"]
                    edge = math.copysign(wide / 2, target - source)
                    axes.annotate("", (arrow["came"] - window[0], target - edge),
                                  (arrow["left"] - window[0], source + edge),
                                  arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8,
                                              "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0})
            for role, of_role in spans_by_role.items():
                computes = 100 * (1 - idle_share(of_role, window))
                ticks[y + 0.5] = f"{role}\n{texts['share'] % computes}"
                axes.barh(y + 0.5, window[1] - window[0], height=wide, color=IDLE)
                _draw_lane(axes, y, wide, within(of_role, window), window[0], longest)
                y += 1
            y += 0.6
        drawn = {span["kind"] for window in windows.values() for spans in spans_by_role.values()
                 for span in within(spans, window)
                 if span["end"] - span["start"] > longest / 1000}  # or nobody could see it
        for kind in [kind for kind in KINDS if kind in drawn] + sorted(drawn - KINDS.keys()):
            label = KINDS.get(kind, OTHER).meaning_ja if texts["kinds"] == "ja" else kind
            axes.barh(0, 0, label=label or kind, **bar(kind))
        axes.barh(0, 0, color=IDLE, label=texts["idle"])
        if arrows:
            axes.plot([], [], color=INK, linewidth=0.8, marker=">", markersize=4,
                      label=texts["message"])
        axes.set_yticks(list(ticks), ticks.values(), fontsize=8)
        axes.set_ylim(y - 0.5, -0.6 if any(windows) else -0.1)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{scale * seconds:g}")
        axes.grid(visible=False, axis="y")


def bar(kind: str) -> dict:
    """Return how matplotlib draws the bars of a kind."""
    look = KINDS.get(kind, OTHER)
    return {"color": look.colour, "edgecolor": "white", "linewidth": 0.5,
            "hatch": "////" if look.striped else None}


def _draw_lane(axes: "Axes", y: float, wide: float, spans: list[dict], zero: float,
               longest: float) -> None:
    rows = _rows(spans)
    height = wide / (1 + max(rows, default=0))
    for span, row in zip(spans, rows, strict=True):
        start, width = span["start"] - zero, span["end"] - span["start"]
        middle = y + (1 - wide) / 2 + (row + 0.5) * height
        drawn = bar(span["kind"])
        if width <= 0.005 * longest:
            drawn |= {"linewidth": 0, "hatch": None}
        axes.barh(middle, width, left=start, height=height, **drawn)
        text = str(next(iter(span["labels"].values()), ""))
        if width / longest > 0.012 * len(text) and height > 0.2:
            look = KINDS.get(span["kind"], OTHER)
            axes.text(start + width / 2, middle, text, ha="center", va="center", fontsize=7,
                      color=look.ink, bbox={"facecolor": look.colour, "linewidth": 0, "pad": 1})
