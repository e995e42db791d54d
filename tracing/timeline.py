"""Draw `timeline.png`: what each process computes, what it waits for, and the messages."""

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Window = tuple[float, float]  # start and end, in seconds
AROUND = ("init_process_group", "init_rpc", "rpc.shutdown")  # the picture leaves them out
BACKWARD = "dist_autograd.backward"
MOST_ARROWS = 80  # of a picture: more of them cannot be told apart
IDLE, INK = "0.9", "0.25"  # grays of unrecorded time, and of a message
WORDS = {
    "en": {"x": "time ({unit})", "y": "", "idle": "not recorded: waiting or other work",
           "share": "computes %.0f%%", "message": "message", "ranks": r", \1", "kinds": "en"},
    "ja": {"x": "時間（{unit}）", "y": "", "idle": "記録していない時間（待機またはほかの処理）",
           "share": "計算 %.0f%%", "message": "メッセージ", "ranks": r"、\2ランク", "kinds": "ja"},
}


class Kind(NamedTuple):
    """The look of a kind of bar, in the picture and on the page, and its meaning."""

    color: str
    meaning_ja: str  # in English, the name of the kind says it
    striped: bool = False  # communication, which differs from computation without colors, too
    waits: bool = False  # the process itself is idle meanwhile

    @property
    def ink(self) -> str:
        """Return the color of text on it: black or white, whichever is easier to read."""
        red, green, blue = bytes.fromhex(self.color[1:])
        return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


# The colors of Okabe and Ito, https://jfly.uni-koeln.de/color/, which color-blind readers can
# distinguish. Two kinds share a color only if one is striped, or if no picture has both.
KINDS = {
    "forward": Kind("#0072B2", "フォワードパス"),
    "backward": Kind("#D55E00", "バックワードパス"),
    "backward with all_reduce": Kind("#D55E00", "バックワードパス。その間にDDPが勾配を平均する",
                                     striped=True),
    "loss": Kind("#F0E442", "損失の計算"),
    "step": Kind("#009E73", "オプティマイザーによる更新"),
    "env.step": Kind("#E69F00", "環境の1ステップ"),
    "send": Kind("#56B4E9", "送信", striped=True, waits=True),
    "recv": Kind("#F0E442", "受信とその待ち", striped=True, waits=True),
    "all_reduce": Kind("#CC79A7", "全ランクのテンソルの合計とその待ち", striped=True, waits=True),
    "all_gather": Kind("#F0E442", "全ランクの部分の収集とその待ち", striped=True, waits=True),
    "reduce_scatter": Kind("#56B4E9", "合計の分配とその待ち", striped=True, waits=True),
    "all_to_all_single": Kind("#E69F00", "全ランク間の交換とその待ち", striped=True, waits=True),
    "collective": Kind("#E69F00", "集合通信とその待ち", striped=True, waits=True),
    "remote call": Kind("#999999", "ほかのプロセスの応答を待つ", striped=True, waits=True),
}
OTHER = Kind("#666666", "")


def save(record: dict, path: Path, windows: dict[str, Window] | None = None) -> None:
    """Draw a record.

    Args:
        record: What `merge.merged` returns.
        path: Path of the picture.
        windows: `{caption: (start, end)}` in seconds, the parts of the run to draw below each
            other. By default, the picture shows the whole run.
    """
    begin, end = ends_of(record)
    lanes = _lanes(record, end)
    if not windows:
        spans = record["spans"] if any(record["spans"].values()) else lanes
        shown = list(itertools.chain(*spans.values()))
        windows = {"": (min((span["start"] for span in shown), default=begin),
                        max((span["end"] for span in shown), default=end))}
    _draw(lanes, _arrows_in(record, windows.values()), record["title"], windows, path,
          record["machine"])


def ends_of(record: dict) -> Window:
    """Return the first and the last time of a record."""
    times = [thing[key] for things in (record["ops"], *record["spans"].values())
             for thing in things for key in ("start", "end") if thing[key] is not None]
    return min(times), max(times)


def _lanes(record: dict, end: float) -> dict[str, list[dict]]:
    """Return the bars of each process: what it computes, and what it waits for.

    A bar around a wait for a call stands for that call: a forward that runs elsewhere.
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
                "name": "" if name == kind else name, "thread": op["thread"],
                "hidden": computes and kind == "remote call" and op.get("name") != BACKWARD})
    return {role: _innermost(spans) for role, spans in lanes.items()}


def _arrows_in(record: dict, windows: Iterable[Window]) -> list[dict]:
    """Return the messages between lanes in the windows; none if there are too many of them.

    The bars of collectives show already that all ranks wait for all.
    """
    arrows = [arrow for arrow in record["arrows"] if arrow["came"] is not None
              and arrow["source"] != arrow["target"]
              and record["ops"][arrow["op"]]["kind"] != "collective"
              and any(_is_in(arrow, window) for window in windows)]
    return arrows if len(arrows) <= MOST_ARROWS else []


def _is_in(arrow: dict, window: Window) -> bool:
    return window[0] <= arrow["left"] and arrow["came"] <= window[1]


def _innermost(spans: list[dict]) -> list[dict]:
    """Cut out of each bar the bars inside it in the same thread."""
    pieces, threads = [], {}  # for each thread: the open bars, the innermost last
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        around = threads.setdefault(span["thread"], [])
        while around and around[-1]["end"] <= span["start"]:
            pieces.append(around.pop())
        if around and span["end"] <= around[-1]["end"]:
            outer = around[-1]
            pieces.append({**outer, "end": span["start"]})
            around[-1] = {**outer, "start": span["end"]}
            if span["kind"] == "remote call":
                span = {**span, "name": outer["kind"], "hidden": False}
        around.append(span)
    pieces += itertools.chain(*threads.values())
    return [piece for piece in pieces if piece["start"] < piece["end"] and not piece.get("hidden")]


def within(spans: list[dict], window: Window) -> list[dict]:
    """Return the bars that touch a window, clipped to it, in the order of their start."""
    start, end = window
    inside = ({**span, "start": max(span["start"], start), "end": min(span["end"], end)}
              for span in spans if span["end"] > start and span["start"] < end)
    return sorted(inside, key=lambda span: span["start"])


def busy_share(spans: list[dict], window: Window) -> float:
    """Compute the fraction of a window in which the process computes, between 0 and 1."""
    busy, until = 0.0, window[0]
    for span in within(spans, window):
        if not KINDS.get(span["kind"], OTHER).waits:
            busy += max(0.0, span["end"] - max(span["start"], until))
            until = max(until, span["end"])
    return busy / (window[1] - window[0])


def _draw(lanes: dict[str, list[dict]], arrows: list[dict], title: str,
          windows: dict[str, Window], path: Path, machine: dict | None) -> None:
    """Draw a lane for each process, arrows between them, and the windows below each other."""
    longest = max(end - start for start, end in windows.values())
    unit, scale = ("s", 1) if longest >= 1 else ("ms", 1000)
    words = {language: {**texts, "title": re.sub(r", ((\d+) ranks?)$", texts["ranks"], title)}
             for language, texts in WORDS.items()}
    wide = 0.64 if arrows else 0.9
    height = max(3.5, 1.9 + 0.5 * len(windows) * len(lanes) / wide)
    for axes, texts in picture.in_each_language(path, words, machine, unit=unit, height=height):
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
            for role, spans in lanes.items():
                ticks[y + 0.5] = f"{role}\n{texts['share'] % (100 * busy_share(spans, window))}"
                axes.barh(y + 0.5, window[1] - window[0], height=wide, color=IDLE)
                _draw_lane(axes, y, wide, within(spans, window), window[0], longest)
                y += 1
            y += 0.6
        drawn = {span["kind"] for window in windows.values() for spans in lanes.values()
                 for span in within(spans, window)
                 if span["end"] - span["start"] > longest / 1000}  # shorter ones cannot be seen
        for kind in [kind for kind in KINDS if kind in drawn] + sorted(drawn - KINDS.keys()):
            label = KINDS.get(kind, OTHER).meaning_ja if texts["kinds"] == "ja" else kind
            axes.barh(0, 0, label=label or kind, **_bar(kind))
        axes.barh(0, 0, color=IDLE, label=texts["idle"])
        if arrows:
            axes.plot([], [], color=INK, linewidth=0.8, marker=">", markersize=4,
                      label=texts["message"])
        axes.set_yticks(list(ticks), ticks.values(), fontsize=8)
        axes.set_ylim(y - 0.5, -0.6 if any(windows) else -0.1)
        axes.set_xlim(0, longest)
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{scale * seconds:g}")
        axes.grid(visible=False, axis="y")


def _draw_lane(axes: "Axes", y: float, wide: float, spans: list[dict], zero: float,
               longest: float) -> None:
    rows = _rows(spans)
    height = wide / (1 + max(rows, default=0))
    for span, row in zip(spans, rows, strict=True):
        start, width = span["start"] - zero, span["end"] - span["start"]
        middle = y + (1 - wide) / 2 + (row + 0.5) * height
        look = _bar(span["kind"])
        if width <= 0.005 * longest:
            look |= {"linewidth": 0, "hatch": None}
        axes.barh(middle, width, left=start, height=height, **look)
        text = span["name"]
        if width / longest > 0.012 * len(text) and height > 0.2:
            kind = KINDS.get(span["kind"], OTHER)
            axes.text(start + width / 2, middle, text, ha="center", va="center", fontsize=7,
                      color=kind.ink, bbox={"facecolor": kind.color, "linewidth": 0, "pad": 1})


def _rows(spans: list[dict]) -> list[int]:
    """Give each bar, in the order of their start, the first row that is free then."""
    rows, ends = [], []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span["start"]), len(ends))
        ends[row : row + 1] = [span["end"]]
        rows.append(row)
    return rows


def _bar(kind: str) -> dict:
    """Return how matplotlib draws the bars of a kind."""
    look = KINDS.get(kind, OTHER)
    return {"color": look.color, "edgecolor": "white", "linewidth": 0.5,
            "hatch": "////" if look.striped else None}
