"""Per-process timelines: spans of time, recorded in every process, shown at the end of a run.

    timeline.start("worker1")                          in each process, or nothing is recorded
    with timeline.span("forward", micro_batch=3): ...  in any thread
    spans = timeline.recorded()                        {"worker1": [...]}: travels over RPC
    timeline.save(spans, args.output_dir, title)       where the spans of all processes are

The clock is `time.time()`: processes of one machine read the same. Those of several machines differ
by what NTP leaves between them, often milliseconds: compare only spans of one machine.
"""

import ast
import contextlib
import functools
import json
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from common import picture, report

ROOT = Path(__file__).resolve().parent.parent
KEPT = 20_000  # spans of a process: the last ones, so that a long training does not fill the memory
DEPTH = 3  # functions of the lesson that are kept for each span: itself and those that called it
SUPPORT = ("results.py", "measuring.py")  # they record what happens in the lines that call them
_NOTHING = contextlib.nullcontext()
_role, _spans = None, None


class Kind(NamedTuple):
    """How a kind of span looks, in the picture and on the page, and what it means."""

    colour: str
    meaning: str
    meaning_ja: str
    striped: bool = False  # communication: also told from computation without colours
    waits: bool = False  # the process does nothing itself meanwhile: idle

    @property
    def ink(self):
        """Of text on it: black or white, whichever is easier to read."""
        red, green, blue = bytes.fromhex(self.colour[1:])
        return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


# The colours are those of Okabe and Ito, https://jfly.uni-koeln.de/color/, which colour-blind
# readers distinguish; two kinds share one only where no lesson has both.
KINDS = {
    "forward": Kind("#0072B2", "forward pass", "順伝搬"),
    "backward": Kind("#D55E00", "backward pass", "逆伝搬"),
    "backward with all_reduce": Kind(
        "#D55E00", "backward pass; DDP averages the gradients meanwhile",
        "逆伝搬。その間にDDPが勾配を平均する", striped=True),
    "loss": Kind("#F0E442", "the loss", "損失の計算"),
    "step": Kind("#009E73", "the optimizer changes the weights", "オプティマイザーによる更新"),
    "add": Kind("#F0E442", "adds up a trainer's gradients", "トレーナーの勾配を加算"),
    "env.step": Kind("#E69F00", "a step of the environment", "環境の1ステップ"),
    "select_action": Kind("#0072B2", "the policy chooses actions", "ポリシーが行動を選ぶ"),
    "finish_episode": Kind("#D55E00", "learns from an episode", "エピソードから学習"),
    "send": Kind("#56B4E9", "sends", "送信", striped=True),
    "recv": Kind("#F0E442", "receives, or waits for what it will receive", "受信とその待ち",
                 striped=True),
    "all_reduce": Kind("#CC79A7", "adds up the tensors of all ranks, or waits for one of them",
                       "全ランクのテンソルの合計とその待ち", striped=True),
    "collective": Kind("#E69F00", "a collective of several ranks, or waits for one of them",
                       "集合通信とその待ち", striped=True),
    "remote call": Kind("#999999", "waits for the answer of another process",
                        "ほかのプロセスの応答を待つ", striped=True, waits=True),
}
OTHER = Kind("#666666", "", "")
IDLE = "0.9"  # the grey of nothing
WORDS = {
    "en": {"x": "time ({unit})", "y": "", "idle": "idle: waits for another process",
           "idle_share": "idle %.0f%%", "kinds": "en"},
    "ja": {"x": "時間（{unit}）", "y": "", "idle": "待機（ほかのプロセスを待つ）",
           "idle_share": "待機 %.0f%%", "kinds": "ja"},
}


# --- recording


def start(role):
    """Record the spans of this process from now on, under the name `role`."""
    global _role, _spans
    _role, _spans = role, deque(maxlen=KEPT)


def is_on():
    """Whether spans are recorded in this process."""
    return _spans is not None


def span(kind, **labels):
    """A `with` block whose time is recorded; the first label is written into the bar."""
    return _NOTHING if _spans is None else _span(kind, here(), labels)


@contextlib.contextmanager
def _span(kind, where, labels):
    started = time.time()
    try:
        yield
    finally:
        add(kind, started, time.time(), where, **labels)


def add(kind, started, ended, where=None, **labels):
    """Record what is no `with` block; nothing when off.

    Args:
        kind: one of `KINDS`, which have a colour; any other is grey.
        started, ended: two readings of `time.time()`.
        where: what `here` gave where the work was asked for; by default that of this call.
        labels: numbers or short texts, shown with the span.
    """
    if _spans is not None:
        _spans.append({"kind": kind, "start": started, "end": ended, "labels": labels,
                       "where": here() if where is None else where,
                       "thread": threading.get_ident()})  # atomic: any thread may


def here():
    """The lines of the lesson that are being executed: [file, line, function], innermost first."""
    frame, where = sys._getframe(1), []
    while frame is not None and len(where) < DEPTH:
        path = lesson_file(frame.f_code.co_filename)
        if path is not None:
            where.append([path, frame.f_lineno, frame.f_code.co_qualname])
        frame = frame.f_back
    return where


@functools.cache
def lesson_file(filename):
    """`rpc_rl/main.py` of a file in the folder of a lesson; None of any other file."""
    with contextlib.suppress(ValueError):
        path = Path(filename).relative_to(ROOT)
        if len(path.parts) == 2 and path.parts[0] != "common" and not path.name.endswith(SUPPORT):
            return path.as_posix()
    return None


def recorded():
    """The spans of this process; empty when off.

    Returns:
        `{role: [{kind, start, end, labels, where, thread}]}`, times in seconds.
    """
    return {} if _spans is None else {_role: list(_spans)}


# --- what the spans say


def within(spans, window):
    """Those that touch a window of time (start, end), cut to it, in order of their start."""
    start, end = window
    inside = ({**span, "start": max(span["start"], start), "end": min(span["end"], end)}
              for span in spans if span["end"] > start and span["start"] < end)
    return sorted(inside, key=lambda span: span["start"])


def idle_share(spans, window):
    """The share of a window (start, end) in which nothing was done: 0 is always busy, 1 never.

    A remote call, in which this process only waits for another one, is idle.
    """
    start, end = window
    busy, until = 0.0, start
    for span in within(spans, window):
        if not KINDS.get(span["kind"], OTHER).waits:
            busy += max(0.0, span["end"] - max(span["start"], until))
            until = max(until, span["end"])
    return 1 - busy / (end - start)


def _rows(spans):
    """For each span, in order of their start, the first row in which nothing else is then open."""
    rows, ends = [], []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span["start"]), len(ends))
        ends[row : row + 1] = [span["end"]]
        rows.append(row)
    return rows


@functools.cache
def _cells():
    """`{"rpc_rl/main.py::Policy.forward": ["6_5", 6, heading]}`, of docs/walk."""
    cells = {}
    for walk in sorted((ROOT / "docs" / "walk").glob("*.json")):
        chapter, heading = "_".join(walk.stem.split("_")[:2]), ""
        for row in json.loads(walk.read_text(encoding="utf-8")):
            heading = row.get("heading", heading)
            for name in filter(None, row.get("names", {}).values()):  # "" is of what is left out
                cells.setdefault(name, [chapter, row["cell"], heading])
    return cells


@functools.cache
def _bases(path):
    """`{"FastAgent": ["Agent"]}`: the classes of a file, and what they are subclasses of."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
            for node in tree.body if isinstance(node, ast.ClassDef)}


def cell_of(where):
    """The tutorial's cell of a span: that of its function, or of the first caller that has one.

    A method of a subclass belongs to the cell of the method in its place there.

    Returns:
        [chapter, number, heading], or None.
    """
    for path, _, function in where:
        function = function.split(".<locals>")[0]
        if f"{path}::{function}" in _cells():
            return _cells()[f"{path}::{function}"]
        owner, _, method = function.rpartition(".")
        for base in _bases(path).get(owner, []):
            for name, cell in _cells().items():
                if (name.startswith(f"{Path(path).parent}/")
                        and name.endswith(f"::{base}.{method}")):
                    return cell
    return None


# --- what a run leaves


def save(spans_by_role, output_dir, title, windows=None, machine=None):
    """Write `timeline.html`, `timeline.json` (for https://ui.perfetto.dev) and `timeline.png`.

    Args:
        spans_by_role: `{role: spans}`, as `recorded` returns them, of all processes; their order is
            that of the lanes.
        output_dir: for the files.
        title: of page and picture; or `{"en": ..., "ja": ...}`, and the page has the English one.
        windows: `{caption: (start, end)}` in seconds: what the picture shows, below each other, and
            the page first; by default one with everything.
        machine: for the picture's caption, what `report.machine` returns.

    Returns:
        `{caption: {role: idle share}}`; the caption of the default is "".
    """
    spans = [span for spans in spans_by_role.values() for span in spans]
    everything = min(span["start"] for span in spans), max(span["end"] for span in spans)
    windows = windows or {"": everything}
    events = _trace_events(spans_by_role)
    with report.replacing(output_dir / "timeline.json") as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    titles = title if isinstance(title, dict) else {"en": title, "ja": title}
    _write_page(events, titles["en"], windows, output_dir / "timeline.html")
    _draw(spans_by_role, titles, windows, output_dir / "timeline.png", machine)
    return {caption: {role: idle_share(of_role, window) for role, of_role in spans_by_role.items()}
            for caption, window in windows.items()}


def _trace_events(spans_by_role):
    """The spans in Chrome's trace event format: times in microseconds, rows as threads."""
    events = []
    for pid, (role, spans) in enumerate(spans_by_role.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}})
        spans = sorted(spans, key=lambda span: span["start"])
        threads = {}  # numbered in the order of their first span
        for span, row in zip(spans, _rows(spans), strict=True):
            args = dict(span["labels"])
            if "thread" in span:
                args["thread"] = threads.setdefault(span["thread"], len(threads) + 1)
            if span.get("where"):
                path, line, function = span["where"][0]
                args["where"] = f"{path}:{line} {function.split('.<locals>')[0]}"
                if cell := cell_of(span["where"]):
                    args["cell"] = "{}, cell {}: {}".format(*cell)
            events.append({"ph": "X", "name": span["kind"], "pid": pid, "tid": row,
                           "ts": span["start"] * 1e6, "dur": (span["end"] - span["start"]) * 1e6,
                           "args": args})
    return events


def _write_page(events, title, windows, path):
    """Put the trace into `timeline.html`: one page, which asks for nothing else."""
    begin = min(event["ts"] for event in events if event["ph"] == "X")
    lanes = [event["args"]["name"] for event in events if event["ph"] == "M"]
    places = {}  # many spans have the same
    spans = []
    for event in events:
        if event["ph"] == "X":
            labels = dict(event["args"])
            place = labels.pop("where", ""), labels.pop("cell", "")
            spans.append([event["pid"], event["tid"], event["name"],
                          round((event["ts"] - begin) / 1000, 4), round(event["dur"] / 1000, 4),
                          places.setdefault(place, len(places)), labels])
    shown = {span[2] for span in spans}
    looks = KINDS | {kind: OTHER for kind in sorted(shown - KINDS.keys())}
    kinds = {kind: {**look._asdict(), "ink": look.ink} for kind, look in looks.items()
             if kind in shown}
    views = [[caption, start * 1e3 - begin / 1e3, end * 1e3 - begin / 1e3]
             for caption, (start, end) in windows.items()]
    data = json.dumps({"title": title, "lanes": lanes, "kinds": kinds, "places": [*places],
                       "views": views, "spans": spans}, ensure_ascii=False, separators=(",", ":"))
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    with report.replacing(path) as temporary:
        # Within a script, only "</" could end it.
        temporary.write_text(page.replace("{{DATA}}", data.replace("</", "<\\/")), encoding="utf-8")


def _draw(spans_by_role, titles, windows, path, machine):
    """Draw a lane for each process, and the windows below each other."""
    longest = max(end - start for start, end in windows.values())
    unit, scale = ("s", 1) if longest >= 1 else ("ms", 1000)
    words = {language: {**WORDS[language], "title": titles[language]} for language in WORDS}
    lanes = len(windows) * len(spans_by_role)
    for axes, texts in picture.in_each_language(path, words, [machine], unit=unit,
                                                height=max(3.5, 1.9 + 0.55 * lanes)):
        ticks, y = {}, 0
        for caption, window in windows.items():
            axes.text(0, y - 0.12, caption, va="bottom", fontsize=9,
                      fontweight=axes.title.get_fontweight())
            for role, of_role in spans_by_role.items():
                idle = idle_share(of_role, window)
                ticks[y + 0.5] = f"{role}\n{texts['idle_share'] % (100 * idle)}"
                axes.barh(y + 0.5, window[1] - window[0], height=0.9, color=IDLE)
                _draw_lane(axes, y, within(of_role, window), window[0], longest)
                y += 1
            y += 0.6
        drawn = {span["kind"] for window in windows.values() for spans in spans_by_role.values()
                 for span in within(spans, window)
                 if span["end"] - span["start"] > longest / 1000}  # or nobody could see it
        for kind in [kind for kind in KINDS if kind in drawn] + sorted(drawn - KINDS.keys()):
            label = KINDS.get(kind, OTHER).meaning_ja if texts["kinds"] == "ja" else kind
            axes.barh(0, 0, label=label or kind, **bar(kind))
        axes.barh(0, 0, color=IDLE, label=texts["idle"])
        axes.set_yticks(list(ticks), ticks.values(), fontsize=8)
        axes.set_ylim(y - 0.5, -0.6 if any(windows) else -0.1)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{scale * seconds:g}")
        axes.grid(visible=False, axis="y")


def bar(kind):
    """How matplotlib draws the bars of a kind."""
    look = KINDS.get(kind, OTHER)
    return {"color": look.colour, "edgecolor": "white", "linewidth": 0.5,
            "hatch": "////" if look.striped else None}


def _draw_lane(axes, y, spans, zero, longest):
    rows = _rows(spans)
    height = 0.9 / (1 + max(rows, default=0))
    for span, row in zip(spans, rows, strict=True):
        start, width = span["start"] - zero, span["end"] - span["start"]
        middle = y + 0.05 + (row + 0.5) * height
        drawn = bar(span["kind"])
        if width <= 0.005 * longest:
            drawn |= {"linewidth": 0, "hatch": None}
        axes.barh(middle, width, left=start, height=height, **drawn)
        text = str(next(iter(span["labels"].values()), ""))
        if width / longest > 0.012 * len(text) and height > 0.2:
            look = KINDS.get(span["kind"], OTHER)
            axes.text(start + width / 2, middle, text, ha="center", va="center", fontsize=7,
                      color=look.ink, bbox={"facecolor": look.colour, "linewidth": 0, "pad": 1})
