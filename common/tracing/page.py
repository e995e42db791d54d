"""What a recorded timeline leaves: a page, a trace and a picture, each with the same colours.

The page, `timeline.html`, names of each span the file, the line and the tutorial's cell.
"""

import ast
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from common import picture, report
from common.tracing.timeline import KINDS, OTHER, ROOT, idle_share, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Window = tuple[float, float]  # start and end, in seconds

IDLE = "0.9"  # the grey of nothing
WORDS = {
    "en": {"x": "time ({unit})", "y": "", "idle": "idle: waits for another process",
           "idle_share": "idle %.0f%%", "kinds": "en"},
    "ja": {"x": "時間（{unit}）", "y": "", "idle": "待機（ほかのプロセスを待つ）",
           "idle_share": "待機 %.0f%%", "kinds": "ja"},
}


def save(spans_by_role: dict[str, list[dict]], output_dir: Path, title: str | dict[str, str],
         windows: dict[str, Window] | None = None,
         machine: dict | None = None) -> dict[str, dict[str, float]]:
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


def _trace_events(spans_by_role: dict[str, list[dict]]) -> list[dict]:
    """Return the spans in Chrome's trace event format: times in microseconds, rows as threads."""
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


def _rows(spans: list[dict]) -> list[int]:
    """Give each span, in order of their start, the first row in which nothing else is then open."""
    rows, ends = [], []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span["start"]), len(ends))
        ends[row : row + 1] = [span["end"]]
        rows.append(row)
    return rows


@functools.cache
def _cells() -> dict[str, list]:
    """Read `{"rpc_rl/main.py::Policy.forward": ["6_5", 6, heading]}` out of docs/walk."""
    cells = {}
    for walk in sorted((ROOT / "docs" / "walk").glob("*.json")):
        chapter, heading = "_".join(walk.stem.split("_")[:2]), ""
        for row in json.loads(walk.read_text(encoding="utf-8")):
            heading = row.get("heading", heading)
            for name in filter(None, row.get("names", {}).values()):  # "" is of what is left out
                cells.setdefault(name, [chapter, row["cell"], heading])
    return cells


@functools.cache
def _bases(path: str) -> dict[str, list[str]]:
    """Return the classes of a file, and what they are subclasses of: `{"FastAgent": ["Agent"]}`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
            for node in tree.body if isinstance(node, ast.ClassDef)}


def cell_of(where: list[list]) -> list | None:
    """Find the tutorial's cell of a span: that of its function, or of the first caller with one.

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


def _write_page(events: list[dict], title: str, windows: dict[str, Window], path: Path) -> None:
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
    page = Path(__file__).with_name("timeline.html").read_text(encoding="utf-8")
    with report.replacing(path) as temporary:
        # Within a script, only "</" could end it.
        temporary.write_text(page.replace("{{DATA}}", data.replace("</", "<\\/")), encoding="utf-8")


def _draw(spans_by_role: dict[str, list[dict]], titles: dict[str, str], windows: dict[str, Window],
          path: Path, machine: dict | None) -> None:
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


def bar(kind: str) -> dict:
    """Return how matplotlib draws the bars of a kind."""
    look = KINDS.get(kind, OTHER)
    return {"color": look.colour, "edgecolor": "white", "linewidth": 0.5,
            "hatch": "////" if look.striped else None}


def _draw_lane(axes: "Axes", y: float, spans: list[dict], zero: float, longest: float) -> None:
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
