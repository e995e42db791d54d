"""Write `replay.html`: one page with a record in it, which loads nothing else."""

import json
import linecache
import re
import textwrap
from pathlib import Path

from common import ROOT, report

from tracing.places import Place, cell_of
from tracing.timeline import KINDS, OTHER, ends_of

MOST = 8000  # operations on a page, the last ones: a browser can draw this many
AROUND = 3  # lines of code above and below the line that sends a message
INDICES = ("call", "on", "made", "run", "pair", "with")  # fields that refer to other operations


def save(record: dict, path: Path) -> None:
    """Write the page of a record.

    Args:
        record: Result of `merge.merged`; its entry `failed` says that the run has failed.
        path: Path of the page.
    """
    begin, end = ends_of(record)
    places, ops = {}, _last(record["ops"])
    new = {op["index"]: number for number, op in enumerate(ops)}

    def ms(time):
        return None if time is None else round((time - begin) * 1e3, 4)

    def number_of(place):
        key = tuple(map(tuple, place))
        return places.setdefault(key, len(places)) if place else None

    def of_page(name, value):
        if name in ("start", "end", "gave_up"):
            return ms(value)
        if name in INDICES and value is not None:
            return [new[i] for i in value if i in new] if name == "with" else new.get(value)
        return number_of(value) if name in ("where", "done") else value

    shown = [{name: there for name, value in op.items() if name != "index"
              and (there := of_page(name, value)) is not None} for op in ops]
    arrows = [{**arrow, "op": new[arrow["op"]], "left": ms(arrow["left"]),
               "came": ms(arrow["came"])} for arrow in record["arrows"] if arrow["op"] in new]
    cut = len(ops) < len(record["ops"])
    since = ops[0]["start"] if cut else begin
    spans = [[lane, span["kind"], ms(span["start"]), ms(span["end"])]
             for lane, of_lane in enumerate(record["spans"].values())
             for span in sorted(of_lane, key=lambda span: span["start"])  # inner bars on top
             if span["end"] >= since]
    kinds = {span[1]: KINDS.get(span[1], OTHER)._asdict() for span in spans}
    data = {"title": record["title"], "lanes": record["lanes"], "ops": shown, "arrows": arrows,
            "places": [_code(place) for place in places], "spans": spans, "kinds": kinds,
            "end": ms(end), "failed": record.get("failed", False), "cut": cut and len(ops)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    with report.replacing(path) as temporary:
        # Within a script, only "</" could end it.
        temporary.write_text(page_of(text.replace("</", "<\\/")), encoding="utf-8")


def page_of(data: str) -> str:
    """Return the page that shows the data of a replay, in JSON."""
    template = Path(__file__).with_name("replay.html").read_text(encoding="utf-8")
    return template.replace("{{DATA}}", data)


def data_of(page: str) -> str:
    """Return the data in a page, in JSON."""
    return re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]


def _last(ops: list[dict]) -> list[dict]:
    """Return the last operations, and older ones that were still open when these began."""
    since = ops[-MOST]["start"] if len(ops) > MOST else 0
    return [op for op in ops if op["end"] is None or op["end"] >= since]


def _code(place: Place) -> dict:
    """Return a line of the lesson with the lines around it, and its cell."""
    path, line, function = place[0]
    lines = range(max(1, line - AROUND), line + AROUND + 1)
    code = "".join(linecache.getline(str(ROOT / path), n) or "\n" for n in lines)
    return {"path": path, "line": line, "function": function.split(".<locals>")[0],
            "cell": cell_of(place),
            "code": [*zip(lines, textwrap.dedent(code).splitlines(), strict=True)]}
