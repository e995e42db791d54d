"""Per-process timelines: spans of time, recorded in every process, shown at the end of a run.

    timeline.start("worker1")                                in each process, or nothing is recorded
    timeline.add("forward", started, ended, micro_batch=3)   in any thread
    spans = timeline.recorded()                              {"worker1": [...]}: travels over RPC
    page.save(record, output_dir)                            what merge.merged makes of them all

The clock is `time.time()`: processes of one machine read the same. Those of several machines differ
by what NTP leaves between them, often milliseconds: compare only spans of one machine.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]  # of this repository
NO_LESSONS = ("common", "tracing")
KEPT = 20_000  # spans of a process: the last ones, so that a long training does not fill the memory
DEPTH = 3  # functions of the lesson that are kept for each span: itself and those that called it
SUPPORT = ("results.py", "measuring.py")  # they record what happens in the lines that call them
_role, _spans, _also = None, None, None


class Kind(NamedTuple):
    """Describes how a kind of span looks, in the picture and on the page, and what it means."""

    colour: str
    meaning_ja: str  # in English, the name of the kind says it
    striped: bool = False  # communication: distinct from computation without colours, too
    waits: bool = False  # the process does nothing itself meanwhile: idle

    @property
    def ink(self) -> str:
        """Return the colour of text on it: black or white, whichever is easier to read."""
        red, green, blue = bytes.fromhex(self.colour[1:])
        return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


# The colours are those of Okabe and Ito, https://jfly.uni-koeln.de/color/, which colour-blind
# readers distinguish; two kinds share one only where no picture of a lesson has both.
KINDS = {
    "forward": Kind("#0072B2", "フォワードパス"),
    "backward": Kind("#D55E00", "バックワードパス"),
    "backward with all_reduce": Kind("#D55E00", "バックワードパス。その間にDDPが勾配を平均する",
                                     striped=True),
    "weight gradients": Kind("#E69F00", "後回しにした、重みの勾配の計算"),
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


# --- recording


def start(role: str, also: Callable[[dict], None] | None = None) -> None:
    """Record the spans of this process from now on, under the name `role`.

    Args:
        role: of this process.
        also: is called with each span, too.
    """
    global _role, _spans, _also
    _role, _spans, _also = role, deque(maxlen=KEPT), also


def is_on() -> bool:
    """Return whether spans are recorded in this process."""
    return _spans is not None


def add(kind: str, started: float, ended: float, where: list | None = None,
        **labels: object) -> None:
    """Record a span of this process; nothing when off.

    Args:
        kind: one of `KINDS`, which have a colour; any other is grey.
        started, ended: two readings of `time.time()`.
        where: what `here` gave where the work was asked for; by default that of this call.
        labels: numbers or short texts, shown with the span.
    """
    if _spans is not None:
        span = {"kind": kind, "start": started, "end": ended, "labels": labels,
                "where": here() if where is None else where, "thread": threading.get_ident()}
        _spans.append(span)  # atomic: any thread may
        if _also is not None:
            _also(span)


def here() -> list[list]:
    """Return where the lesson is: [file, line, function], the innermost first."""
    frame, where = sys._getframe(1), []
    while frame is not None and len(where) < DEPTH:
        path = lesson_file(frame.f_code.co_filename)
        if path is not None:
            where.append([path, frame.f_lineno, frame.f_code.co_qualname])
        frame = frame.f_back
    return where


@functools.cache
def lesson_file(filename: str) -> str | None:
    """Return `rpc_rl/main.py` for a file in the folder of a lesson; None for any other file."""
    with contextlib.suppress(ValueError):
        path = Path(filename).relative_to(ROOT)
        if (len(path.parts) == 2 and path.parts[0] not in NO_LESSONS
                and not path.name.endswith(SUPPORT)):
            return path.as_posix()
    return None


@functools.cache
def place_of(definition: object) -> list[list]:
    """Return where a function or class of the lesson begins, like `here`; [] of others."""
    try:
        definition = inspect.unwrap(definition)
        path = lesson_file(inspect.getsourcefile(definition) or "")
    except TypeError:  # built into torch
        path = None
    if path is None:
        return []
    return [[path, inspect.getsourcelines(definition)[1], definition.__qualname__]]


def recorded() -> dict[str, list[dict]]:
    """Return the spans of this process; empty when off.

    Returns:
        `{role: [{kind, start, end, labels, where, thread}]}`, times in seconds.
    """
    return {} if _spans is None else {_role: list(_spans)}


# --- what the spans say


def within(spans: list[dict], window: tuple[float, float]) -> list[dict]:
    """Return the spans that touch a window (start, end), cut to it, in order of their start."""
    start, end = window
    inside = ({**span, "start": max(span["start"], start), "end": min(span["end"], end)}
              for span in spans if span["end"] > start and span["start"] < end)
    return sorted(inside, key=lambda span: span["start"])


def idle_share(spans: list[dict], window: tuple[float, float]) -> float:
    """Compute the share of a window (start, end) in which nothing was done: 0 is always busy.

    A remote call, in which this process only waits for another one, is idle.
    """
    start, end = window
    busy, until = 0.0, start
    for span in within(spans, window):
        if not KINDS.get(span["kind"], OTHER).waits:
            busy += max(0.0, span["end"] - max(span["start"], until))
            until = max(until, span["end"])
    return 1 - busy / (end - start)
