"""Put together what the processes of a run have recorded, and find which messages belong together.

`merged` returns a record, a dict:

    title, machine, lanes    of the run; the lanes are the names of all ranks
    spans    {lane: list of bars}, each a dict with kind, start, end, thread, where, name
    ops      operations in the order of their start; what `messages.py` says about them, and
             index, rank, kind, start, end (None: it never ended), thread (0 is the main one),
             where. An operation refers to another one by its index.
    arrows   messages of the operation `op`: one leaves the rank `source` at the time `left`, from
             the operation `out` (None: from C++), and arrives at `target` in `into` at `came`
             (None: never)
"""

from collections import defaultdict
from pathlib import Path

from common.launch import Failure

from tracing.events import read

STATES = "hold", "context"  # kinds of operations that neither send nor wait
SOON = 1e-6  # seconds: a message arrives after it has left, whatever two clocks say
TO_ROOT = "reduce", "gather", "gather_object"


def merged(folder: Path) -> dict | None:
    """Read the files of all processes; return their record, or None if there is no file."""
    record, found, without_place = None, {}, []
    for path in sorted(folder.glob("rank-*")):
        events = list(read(path))
        header = next((event[1:] for event in events if event[0] == "header"), None)
        if header is None:
            continue
        rank, roles, title, machine, main_thread = header
        if record is None:
            record = {"title": title, "machine": machine, "lanes": roles, "ops": [], "arrows": [],
                      "spans": {role: [] for role in roles}}
        if rank >= len(record["lanes"]):  # of an earlier run, on more ranks
            continue
        threads, places, of_runs = {main_thread: 0}, {0: []}, defaultdict(list)
        for what, *event in events:
            if what == "place":
                places[event[0]] = event[1]
            elif what == "begin":
                number, start, kind, thread, place, about = event
                found[rank, number] = {
                    "rank": rank, "kind": kind, "start": start, "end": None, **about,
                    "thread": threads.setdefault(thread, len(threads)), "where": places[place]}
            elif what == "end" and (rank, event[0]) in found:
                number, end, about = event
                if "done" in about:
                    about["done"] = places[about["done"]]
                found[rank, number] |= {"end": end, **about}
            elif what == "bar":
                run, kind, start, end, thread, place, name = event
                span = {"kind": kind, "start": start, "end": end, "where": places[place],
                        "thread": threads.setdefault(thread, len(threads)), "name": name or ""}
                of_runs[run].append(span)
                if not place:
                    without_place.append((span, (rank, run)))
        spans = record["spans"][roles[rank]]
        for run, bars in of_runs.items():
            spans += _as_one(bars, found.get((rank, run), {}))
        spans.sort(key=lambda span: span["end"])
    if not found:
        return None
    for span, run in without_place:  # RPC runs it: the place of the call
        call = found.get(run, {}).get("call")
        span["where"] = found.get(tuple(call or ()), {}).get("where", [])
    record["ops"] = _in_order(found)
    _let_open(record["ops"])
    record["arrows"] = [*_calls(record["ops"]), *_sends(record["ops"]),
                        *_collectives(record["ops"])]
    return record


def _as_one(bars: list[dict], run: dict) -> list[dict]:
    """Join the bars in what RPC has run, if all are forwards and nothing in the run has waited."""
    inside = [bar for bar in bars if bar["end"] <= (run.get("end") or 0)]
    if run.get("waited") or {bar["kind"] for bar in inside} != {"forward"}:
        return bars
    first, *others = inside
    first |= {"start": run["start"], "end": run["end"]}
    if first["where"] and not first["where"][0][2].endswith("forward"):
        first["name"] = run["name"].split(".")[-1]  # it says more than the module
    return [bar for bar in bars if bar not in others]


def _in_order(found: dict[tuple[int, int], dict]) -> list[dict]:
    """Return the operations of all processes; replace their own numbers by indices."""
    ops = sorted(found.values(), key=lambda op: op["start"])
    for index, op in enumerate(ops):
        op["index"] = index
    for op in ops:
        for name, there in (("call", op.get("call")), ("on", (op["rank"], op.get("on"))),
                            ("made", (op["rank"], op.get("made")))):
            if name in op:
                op[name] = found.get(tuple(there or ()), {}).get("index")
    for op in ops:  # a wait is over when what it waits for is over
        on = ops[op["on"]] if op.get("on") is not None else op
        if op["end"] and on["end"]:
            op["end"] = max(on["end"], op["start"] + SOON)
    return ops


def _let_open(ops: list[dict]) -> None:
    """Let a failed operation stay open if its thread did nothing after it: it still waits."""
    last = {(op["rank"], op["thread"]): op for op in ops if op["kind"] not in ("failed", *STATES)}
    for op in last.values():
        waited = [op, ops[op["on"]]] if op.get("on") is not None else [op]
        for which in waited if op.get("error") and op["kind"] != "run" else ():
            which["gave_up"], which["end"] = which["end"] or op["end"], None


def add_failure(record: dict, failure: Failure | None) -> None:
    """Add how a rank was killed, which it could not write itself, after its last message."""
    ranks = [op["rank"] for op in record["ops"] if op["kind"] == "failed"]
    if failure is not None and failure.rank not in ranks:
        last = max((op[key] for op in record["ops"] if op["rank"] == failure.rank
                    for key in ("start", "end") if op[key]), default=record["ops"][-1]["start"])
        record["ops"].append({
            "index": len(record["ops"]), "rank": failure.rank, "kind": "failed", "thread": 0,
            "start": last + SOON, "end": None, "where": [], "error": failure.what})


# --- arrows


def _arrow(op: dict, out: dict | None, left: float, into: dict, came: float | None) -> dict:
    return {"op": op["index"], "out": out and out["index"], "into": into["index"],
            "source": out["rank"] if out else op["to"], "target": into["rank"],
            "left": left, "came": came if came is None else max(came, left + SOON)}


def _calls(ops: list[dict]) -> list[dict]:
    """Return the arrows of calls, of their answers, and of fetched values."""
    arrows, made = [], {}
    for op in ops:
        call = ops[op["call"]] if op.get("call") is not None else None
        if op["kind"] == "run" and call:
            op["start"] = max(op["start"], call["start"] + SOON)
            call["run"] = op["index"]
            arrows.append(_arrow(call, call, call["start"], op, op["start"]))
            if call.get("rref"):
                made[call["rref"]] = op
            elif op["end"] is not None:
                came = None if call["end"] is None else max(call["end"], op["end"] + SOON)
                call["end"] = came
                arrows.append(_arrow(op, op, op["end"], call, came))
    for op in ops:
        if op["kind"] == "fetch" and op["end"] is not None:
            ready = made.get(op["rref"])
            left = max(op["start"], ready and ready["end"] or 0)
            arrows.append(_arrow(op, ready, min(left, op["end"] - SOON), op, op["end"]))
    return arrows


def _sends(ops: list[dict]) -> list[dict]:
    """Return the arrows from each send to the recv that took it: the first one of its tag."""
    sent, taken = defaultdict(list), defaultdict(list)
    for op in ops:
        if op["kind"] == "send":
            sent[op["rank"], op["peer"], op["group"], op["tag"]].append(op)
        elif op["kind"] == "recv":
            taken[op["peer"], op["rank"], op["group"], op["tag"]].append(op)
    arrows = []
    for key, sends in sent.items():
        for send, recv in zip(sends, taken[key], strict=False):
            send["pair"], recv["pair"] = recv["index"], send["index"]
            arrows.append(_arrow(send, send, send["start"], recv, recv["end"]))
    return arrows


def _collectives(ops: list[dict]) -> list[dict]:
    """Return the arrows from the root or to it; without a root, from the last rank to join."""
    calls = defaultdict(list)
    for op in ops:
        if op["kind"] == "collective":
            calls[op["group"], op["number"]].append(op)
    arrows = []
    for members in calls.values():
        for op in members:
            op["with"] = [member["index"] for member in members]
        complete = len(members) == len(members[0]["ranks"])
        if len({op["name"] for op in members}) > 1 or not complete:
            continue
        root = next((op for op in members if op["rank"] == op.get("peer")), None)
        hub = root or max(members, key=lambda op: op["start"])
        for op in members:
            if op is not hub and root and op["name"] in TO_ROOT:
                arrows.append(_arrow(op, op, op["start"], hub, hub["end"]))
            elif op is not hub:
                arrows.append(_arrow(hub, hub, hub["start"], op, op["end"]))
    return arrows
