"""Puts together what the processes of a run have recorded: their files, and who answers whom."""

import json
from collections import defaultdict
from pathlib import Path

from common.launch import Failure

from tracing.messages import older

STATES = "hold", "context"  # kinds of operations that send nothing and wait for nobody
SOON = 1e-6  # seconds: a message arrives after it has left, whatever two clocks say


def read(path: Path) -> list[list]:
    """Return the events of a process, the oldest first."""
    files = [file.read_bytes().rstrip(b"\0") for file in (older(path), path) if file.exists()]
    lines = b"".join(files).splitlines(keepends=True)
    # A killed process may have left a part of a line.
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def merged(folder: Path) -> dict | None:
    """Read the files of all processes.

    Returns:
        None if there is none; else a dict with `title`, `machine`, `lanes` (the roles), `spans` of
        each role, `ops` in the order of their beginning, and `arrows`. An operation has `rank`,
        `kind`, `start`, `end` (None: it never ended), `thread` (0 is the main one), `where`, and
        what `messages.py` says about it; other operations are named by their `index`. An arrow
        belongs to the operation `op`; it leaves the rank `source` in the operation `out` (None: in
        C++) at the time `left`, and comes to `target` in `into` at `came` (None: never).
    """
    record, found, asked = None, {}, []
    for path in sorted(folder.glob("rank-*")):
        events = read(path)
        header = next((event[1:] for event in events if event[0] == "header"), None)
        if header is None:
            continue
        rank, roles, title, machine, main = header
        if record is None:
            record = {"title": title, "machine": machine, "lanes": roles, "ops": [], "arrows": [],
                      "spans": {role: [] for role in roles}}
        if rank >= len(record["lanes"]):  # of an earlier run, on more ranks
            continue
        threads, own, bars = {main: 0}, set(), []
        for what, *event in events:
            if what in ("span", "bar"):
                span = event[1]
                span["thread"] = threads.setdefault(span["thread"], len(threads))
                if what == "span":
                    own.add(span["kind"])
                bars.append((what, *event))
            elif what == "begin":
                number, start, kind, thread, where, about = event
                threads.setdefault(thread, len(threads))
                found[rank, number] = {"rank": rank, "kind": kind, "start": start, "end": None,
                                       "thread": threads[thread], "where": where, **about}
            elif what == "end" and (rank, event[0]) in found:
                found[rank, event[0]] |= {"end": event[1], **event[2]}
        of_runs, spans = defaultdict(list), record["spans"][roles[rank]]
        for what, number, span in bars:
            if not span["where"]:
                asked.append((span, found.get((rank, number), {}).get("call")))
            if what == "span":
                spans.append(span)
            elif span["kind"] not in own:  # what the lesson records itself has its place
                of_runs[number].append(span)
        for number, of_run in of_runs.items():
            spans += _as_one(of_run, found.get((rank, number), {}))
        spans.sort(key=lambda span: span["end"])
    if not found:
        return None
    for bar, call in asked:  # no line of the lesson is there: that of the call
        bar["where"] = found.get(tuple(call or ()), {}).get("where", [])
    record["ops"] = sorted(found.values(), key=lambda op: op["start"])
    for index, op in enumerate(record["ops"]):
        op["index"] = index
    for op in record["ops"]:  # from numbers of a process to those of all
        for name, there in (("call", op.get("call")), ("on", (op["rank"], op.get("on"))),
                            ("made", (op["rank"], op.get("made")))):
            if name in op:
                op[name] = found.get(tuple(there or ()), {}).get("index")
    for op in record["ops"]:  # a wait is over when that is over for which it waits
        on = record["ops"][op["on"]] if op.get("on") is not None else op
        if op["end"] and on["end"]:
            op["end"] = max(on["end"], op["start"] + SOON)
    _gave_up(record["ops"])
    record["arrows"] = [*_calls(record["ops"]), *_sends(record["ops"]),
                        *_collectives(record["ops"])]
    return record


def _as_one(bars: list[dict], run: dict) -> list[dict]:
    """Join the bars in what RPC has run, if all are forwards and nothing in there has waited."""
    inside = [bar for bar in bars if bar["end"] <= (run.get("end") or 0)]
    if run.get("waited") or {bar["kind"] for bar in inside} != {"forward"}:
        return bars
    first, *others = inside
    first |= {"start": run["start"], "end": run["end"]}
    if first["where"] and not first["where"][0][2].endswith("forward"):
        first["labels"] = {"name": run["name"].split(".")[-1]}  # it says more than the module
    return [bar for bar in bars if bar not in others]


def add_failure(record: dict, failure: Failure | None) -> None:
    """Add what a rank could not write itself: how it was killed, behind its last message."""
    ranks = [op["rank"] for op in record["ops"] if op["kind"] == "failed"]
    if failure is not None and failure.rank not in ranks:
        last = max((op[key] for op in record["ops"] if op["rank"] == failure.rank
                    for key in ("start", "end") if op[key]), default=record["ops"][-1]["start"])
        record["ops"].append({
            "index": len(record["ops"]), "rank": failure.rank, "kind": "failed", "thread": 0,
            "start": last + SOON, "end": None, "where": [], "error": failure.what})


def _gave_up(ops: list[dict]) -> None:
    """Let what failed be open, if nothing came after it in its thread: it still waits."""
    last = {}
    for op in ops:
        if op["kind"] not in ("failed", *STATES):
            last[op["rank"], op["thread"]] = op
    for op in last.values():
        waited = [op, ops[op["on"]]] if op.get("on") is not None else [op]
        for which in waited if op.get("error") and op["kind"] != "run" else ():
            which["gave_up"], which["end"] = which["end"] or op["end"], None


def _arrow(op: dict, out: dict | None, left: float, into: dict, came: float | None) -> dict:
    return {"op": op["index"], "out": out and out["index"], "into": into["index"],
            "source": out["rank"] if out else op["to"], "target": into["rank"],
            "left": left, "came": came if came is None else max(came, left + SOON)}


def _calls(ops: list[dict]) -> list[dict]:
    """Return the arrows of calls, their answers, and what was fetched."""
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
    """Return the arrows from a send to the recv that took it: the first one of the same tag."""
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
    """Return the arrows from the root or to it; of the others, from the last to come."""
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
            if op is not hub and root and op["name"] in ("reduce", "gather", "gather_object"):
                arrows.append(_arrow(op, op, op["start"], hub, hub["end"]))
            elif op is not hub:
                arrows.append(_arrow(hub, hub, hub["start"], op, op["end"]))
    return arrows
