"""Writes `replay.html`: one page, which asks for nothing else, with a record in it."""

import json
import linecache
import re
import textwrap
from pathlib import Path

from common import report

from tracing.cells import cell_of
from tracing.timeline import KINDS, OTHER, ROOT

KEPT = 8000  # operations on the page, the last ones: a browser draws so many at once
AROUND = 3  # lines of code above and below the one that sent a message
INDICES = ("call", "on", "made", "run", "pair", "with")  # of an operation, to others


def write(record: dict, begin: float, end: float, windows: dict[str, tuple[float, float]] | None,
          path: Path) -> None:
    """Put a record into the page.

    Args:
        record: what `merge.merged` returns; `failed` in it says that the run has failed.
        begin, end: of the record, in seconds.
        windows: `{caption: (start, end)}`; the page begins with the first one.
        path: of the page.
    """
    def ms(time):
        return None if time is None else round((time - begin) * 1e3, 4)

    places, ops = {}, _last(record["ops"])
    new = {op["index"]: number for number, op in enumerate(ops)}

    def place(where):
        return places.setdefault(tuple(map(tuple, where)), len(places)) if where else None

    def of_page(name, value):
        if name in ("start", "end", "gave_up"):
            return ms(value)
        if name in INDICES and value is not None:
            return [new[i] for i in value if i in new] if name == "with" else new.get(value)
        return place(value) if name in ("where", "done") else value

    shown = [{name: there for name, value in op.items() if name not in ("index", "slice")
              and (there := of_page(name, value)) is not None} for op in ops]
    arrows = [{**arrow, "op": new[arrow["op"]], "left": ms(arrow["left"]),
               "came": ms(arrow["came"])} for arrow in record["arrows"] if arrow["op"] in new]
    since = ops[0]["start"] if len(ops) < len(record["ops"]) else begin
    spans = [[lane, span["kind"], ms(span["start"]), ms(span["end"])]
             for lane, of_role in enumerate(record["spans"].values())
             for span in sorted(of_role, key=lambda span: span["start"])  # those within, on top
             if span["end"] >= since]
    kinds = {span[1]: KINDS.get(span[1], OTHER)._asdict() for span in spans}
    window = next(iter((windows or {}).values()), None)
    data = {"title": record["title"], "lanes": record["lanes"], "ops": shown, "arrows": arrows,
            "places": [_code(where) for where in places], "spans": spans, "kinds": kinds,
            "window": window and [ms(time) for time in window], "end": ms(end),
            "failed": record.get("failed", False)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    with report.replacing(path) as temporary:
        # Within a script, only "</" could end it.
        temporary.write_text(page_of(text.replace("</", "<\\/")), encoding="utf-8")


def page_of(data: str) -> str:
    """Return the page of a replay with its data, in JSON."""
    template = Path(__file__).with_name("replay.html").read_text(encoding="utf-8")
    return template.replace("{{DATA}}", data)


def data_of(page: str) -> str:
    """Return the data in a page, in JSON."""
    return re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]


def _last(ops: list[dict]) -> list[dict]:
    """Return the last operations, and those that were still open when these began."""
    since = ops[-KEPT]["start"] if len(ops) > KEPT else 0
    return [op for op in ops if op["end"] is None or op["end"] >= since]


def _code(where: tuple) -> dict:
    """Return a line of the lesson with those around it, and its cell."""
    path, line, function = where[0]
    lines = range(max(1, line - AROUND), line + AROUND + 1)
    code = "".join(linecache.getline(str(ROOT / path), n) or "\n" for n in lines)
    cell = cell_of(where)
    return {"path": path, "line": line, "function": function.split(".<locals>")[0],
            "cell": cell and list(cell),
            "code": [*zip(lines, textwrap.dedent(code).splitlines(), strict=True)]}
