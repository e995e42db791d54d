"""What `python -m tracing` records of a program from outside, and what its picture and its replay show."""

import contextlib
import json
import os
import re
import shlex
import signal
import struct
import sys
import threading

from common import ROOT, lessons
from common.launch import CAUSE, Failure

import pytest

from tests.helpers import SOON_S, run, running, slow_but
from tracing import events, merge, places, record, replay, timeline


def data_of(folder):
    """The data of the page in a folder."""
    return json.loads(replay.data_of((folder / "replay.html").read_text()))


def spans(*times, kind="forward"):
    return [{"kind": kind, "start": start, "end": end, "name": "", "where": [], "thread": 0} for start, end in times]


# --- places, and the picture


def test_the_line_and_the_cell(tmp_path, monkeypatch):
    """The line of the innermost function of a lesson; the cell of the first function that has one, or that it overrides."""
    recorder = events.Recorder(tmp_path / "rank-0")
    number = recorder.place()
    assert recorder.place() == number + 1
    here = test_the_line_and_the_cell.__code__
    [_, (_, _, [(path, line, function), *callers]), _] = events.read(tmp_path / "rank-0")
    assert (path, line, function) == ("tests/test_tracing.py", here.co_firstlineno + 3, here.co_name)
    assert not any(path.startswith("common") for path, _, _ in callers)

    assert places._cells()["rpc_rl/main.py::Observer.run_episode"][:2] == ["6_5", 11]
    monkeypatch.setattr(places, "_cells", lambda: {"rpc_rl/main.py::Observer.run_episode": 11, "rpc_rl/main.py::run_worker": 22})

    def cell(*where):
        return places.cell_of([[path, 1, function] for path, function in where])

    assert cell(("rpc_rl/main.py", "Observer.run_episode")) == cell(("rpc_rl/fast.py", "FastObserver.run_episode")) == 11
    assert cell(("rpc_rl/main.py", "train"), ("rpc_rl/main.py", "run_worker.<locals>.anything")) == 22
    assert cell(("rpc_rl/main.py", "train")) is None


def test_the_share_of_computation():
    """Bars that overlap count once, and only inside the window; waits do not count."""
    assert timeline.busy_share([], (0, 1)) == 0
    assert timeline.busy_share(spans((0, 4), (2, 6), (3, 4), (8, 9)), (0, 10)) == pytest.approx(0.7)
    assert timeline.busy_share(spans((-5, 1), (9, 20), (30, 40)), (0, 10)) == pytest.approx(0.2)
    assert timeline.busy_share(spans((0, 4), kind="remote call"), (0, 10)) == 0


def test_a_wait_in_a_bar():
    """A wait for a call inside a forward stands for that call. Outside of any bar, only waits for messages are shown."""
    def wait(start, end, kind="call", name="select_action"):
        return {"rank": 0, "kind": kind, "name": name, "start": start, "end": end, "waits": True, "thread": 0, "where": []}

    bars = spans((0, 9)) + [{**span, "thread": 1} for span in spans((1, 2))]
    ops = [wait(2, 5), wait(6, 7, "collective", "all_reduce"), wait(10, 11), wait(12, 13, "collective", "barrier"),
           wait(14, 15, "collective", "rpc.shutdown"), wait(16, 17, "wait", "dist_autograd.backward")]
    shown = timeline._lanes({"lanes": ["trainer"], "spans": {"trainer": bars}, "ops": ops}, 20)["trainer"]
    assert sorted((span["start"], span["end"], span["kind"], span["name"]) for span in shown) == [
        (0, 2, "forward", ""), (1, 2, "forward", ""), (2, 5, "remote call", "forward"), (5, 6, "forward", ""),
        (6, 7, "all_reduce", ""), (7, 9, "forward", ""), (12, 13, "collective", "barrier"), (16, 17, "remote call", "backward")]
    failed = timeline._lanes({"lanes": ["trainer"], "spans": {"trainer": []}, "ops": ops[2:3]}, 20)["trainer"]
    assert [span["name"] for span in failed] == ["select_action"]  # all there is


# --- programs

WORK = {"forward", "backward", "step"}
DDP = {"forward", "loss", "backward with all_reduce", "step"}
EXPECTED = {  # what some programs compute in each process
    "rpc_rl/main.py": {"agent": WORK, "observer1": {"env.step"}, "observer2": {"env.step"}},
    "p2p_collectives/train.py": {"rank0": WORK, "rank1": WORK},
    "ddp_rpc_hybrid/main.py": {"trainer0": DDP, "trainer1": DDP, "master": set(), "ps": WORK},
}
SHORT = {program.path: program.short for program in lessons.programs() if "run_worker" in program.file.read_text()}


def kinds(folder):
    """What each process has computed, from the page in a folder."""
    data = data_of(folder)
    return {name: {kind for lane, kind, *_ in data["spans"] if lane == number} for number, name in enumerate(data["lanes"])}


@pytest.mark.parametrize("program", slow_but(SHORT, *EXPECTED))
def test_traced(program, tmp_path, capfd):
    """A program without a line for it: its processes, what they did, their messages; the results of the run as ever."""
    folder = tmp_path / record.RECORD
    folder.mkdir()
    (folder / "rank-7").write_text("of an earlier run, which failed")
    with contextlib.suppress(SystemExit):  # of a program that shows a failure
        record.main([str(ROOT / program), *shlex.split(SHORT[program]), "--output_dir", str(tmp_path)])
    assert capfd.readouterr().out.splitlines()[-1] == f"replay: {tmp_path / 'replay.html'}"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not folder.exists()
    assert kinds(tmp_path) == EXPECTED.get(program, kinds(tmp_path))
    data = data_of(tmp_path)
    assert not data["failed"]
    assert any(place["path"] == program for place in data["places"])
    assert set(data["kinds"]) <= set(timeline.KINDS)
    assert all(arrow["left"] < arrow["came"] for arrow in data["arrows"])
    assert data["arrows"] or len(data["lanes"]) == 1


@pytest.mark.parametrize("way", ["manual", pytest.param("torchrun", marks=pytest.mark.slow)])  # there, all ranks share a folder
def test_other_ways_to_launch(way, tmp_path, free_port):
    """Each terminal has a folder of its own, as on several machines: rank 0 gets the records of all ranks."""
    command = ["-m", "tracing", str(ROOT / "p2p_collectives/train.py"), "--epochs", "1", "--output_dir"]
    if way == "torchrun":
        result = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *command,
                      str(tmp_path / "0")], tmp_path)
        assert result.returncode == 0, result.stderr
    else:
        commands = [[sys.executable, *command, str(tmp_path / str(rank)), "--world_size", "2", "--rank", str(rank),
                     "--master_addr", "localhost", "--master_port", str(free_port)] for rank in range(2)]
        with running(commands[1], tmp_path) as there:
            result = run(commands[0], tmp_path)
            assert (result.returncode, there.wait(SOON_S)) == (0, 0), result.stderr
    assert result.stdout.splitlines()[-1] == f"replay: {tmp_path / '0' / 'replay.html'}"
    assert kinds(tmp_path / "0") == EXPECTED["p2p_collectives/train.py"]
    assert {(arrow["source"], arrow["target"]) for arrow in data_of(tmp_path / "0")["arrows"]} >= {(0, 1), (1, 0)}
    assert not list(tmp_path.glob(f"?/{record.RECORD}"))


@pytest.mark.slow
def test_after_a_failure_under_torchrun(tmp_path, capfd):
    """Its ranks end at once; what they have recorded stays, and a command of its own makes the page."""
    result = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tracing",
                  str(ROOT / "p2p_collectives/deadlock.py"), "--timeout", "2", "--output_dir", str(tmp_path)], tmp_path)
    assert result.returncode == 1
    assert f"after a failure: python -m tracing {tmp_path}" in result.stdout.splitlines()
    record.main([str(tmp_path)])
    assert capfd.readouterr().out == f"replay: {tmp_path / 'replay.html'}\n"
    assert data_of(tmp_path)["failed"]


def test_refused(refused):
    for path in (ROOT / "rpc_rl/check.py", ROOT / "nowhere/main.py", ROOT / "benchmarks/rpc_rl.py", "main.py"):
        refused(record.main, [str(path), "--max_episodes", "1"], ["program of a lesson"])
    refused(record.main, [], ["program of a lesson"])


PRIVATE = """
import importlib, sys, tempfile
from pathlib import Path
module, _, name = sys.argv[1].rpartition(":")
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
delattr(owner, name)
from tracing import messages, work
work.start()
messages.start(Path(tempfile.mkdtemp()), 0, ["a"], "a run", {})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *(f"torch.distributed.rpc.api:{name}" for name in (
        "_rref_typeof_on_owner", "_invoke_rpc_python_udf", "_invoke_remote_python_udf", "_is_current_rpc_agent_set")),
    *(f"torch.distributed.rpc.internal:{name}" for name in (
        "PythonUDF", "_run_function", "RemoteException", "RPCExecMode", "serialize", "_InternalRPCPickler",
        "_InternalRPCPickler._py_rref_receiver", "_InternalRPCPickler._py_rref_reducer")),
    *(f"torch.distributed.rpc.rref_proxy:{name}" for name in ("_local_invoke", "_local_invoke_async_execution", "_invoke_rpc")),
    "torch.distributed.autograd:_get_debug_info", "torch._C:Future.wait"])
def test_without_a_private_name(name, tmp_path):
    """A torch that lacks a private name: messages of its kind are not recorded, and one line says so."""
    result = run([sys.executable, "-c", PRIVATE, name], tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stderr) == (0, "")
    told = not name.endswith(("_is_current_rpc_agent_set", "_get_debug_info"))  # these cost only the bars of a backward
    assert (len(result.stdout.splitlines()) == 1 and "not recorded" in result.stdout) == told


# --- what stays if a process is killed


def test_the_last_messages_are_kept(tmp_path, monkeypatch):
    """Two files of bounded size; an operation that is still open stays in them, however long ago it began."""
    monkeypatch.setattr(events, "FULL", 2**18)
    recorder = events.Recorder(tmp_path / "rank-0", 0, ["agent"], "a run", None, threading.get_ident())
    first = recorder.begin("hold", rref="0.0", owner=0)
    count = 3 * events.FULL // 100
    for number in range(count):
        recorder.finish(recorder.begin("call", 0, name=f"call {number}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older-rank-0", "rank-0"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * events.FULL
    ops = merge.merged(tmp_path)["ops"]
    assert (ops[0]["kind"], ops[0]["end"], ops[0]["where"][0][0]) == ("hold", None, "tests/test_tracing.py")
    assert ops[-1]["name"] == f"call {count - 1}"
    assert 100 < len(ops) < count
    recorder.finish(first)
    assert merge.merged(tmp_path)["ops"][0]["end"]
    for number in range(count):  # more open ones than there is room for
        recorder.begin("hold", 0, rref=f"0.{number}", owner=0)
    recorder.finish(recorder.begin("call", 0, name="the last"))
    assert merge.merged(tmp_path)["ops"][-1]["name"] == "the last"


def test_a_killed_process_leaves_its_messages(tmp_path):
    """Up to the last one; the operation that was under way is open."""
    pid = os.fork()
    if pid == 0:
        recorder = events.Recorder(tmp_path / "rank-0", 0, ["agent"], "a run", None, threading.get_ident())
        recorder.finish(recorder.begin("call", name="first", dtype=ValueError))  # any other value becomes a text
        recorder.begin("call", name="second")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    ops = merge.merged(tmp_path)["ops"]
    assert [(op["name"], op["end"] is None) for op in ops] == [("first", False), ("second", True)]


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


def press(page, key):
    page.keyboard.press(key)
    drawn(page)


def complaints(page):
    """Errors and warnings of the console, and what was thrown."""
    return [message.text for message in page.console_messages()] + page.page_errors()


TITLE = "A <b>title, as long as that of a lesson: it takes two lines on a phone </script>"
ROLES = ["agent", "observer1", "observer2"]
LINE = 1 + (ROOT / "rpc_rl/main.py").read_text().splitlines().index("    def run_episode(self, agent_rref: RRef, n_steps: int, seed: int) -> bool:")
PLACE = [["rpc_rl/main.py", LINE, "Observer.run_episode"]]


def recorded(folder, rank, roles, title, *operations, bars=()):
    """Write the file of a rank: each operation is its number, kind, start, end and fields; each bar a kind and two times."""
    folder.mkdir(exist_ok=True)
    recorder = events.Recorder(folder / f"rank-{rank}", rank, roles, title, None, 7)
    recorder.write("place", 1, PLACE)
    recorder.write("place", 2, [["rpc_rl/main.py", LINE + 3, "Observer.run_episode"]])
    for number, kind, start, end, about in operations:
        done = {name: about.pop(name) for name in ("done", "error") if name in about and kind != "failed"}
        recorder.write("begin", number, 1e9 + start, kind, 7, 1, about)
        if end:
            recorder.write("end", number, 1e9 + end, done)
    for kind, start, end in bars:
        recorder.write("bar", None, kind, 1e9 + start, 1e9 + end, 7, 1, None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A page of three processes: a call and its answer, a send, a barrier, an RRef, futures, a context."""
    folder = tmp_path_factory.mktemp("replay")
    group = {"group": "world", "ranks": [0, 1, 2]}

    def barrier(number, start):
        return number, "collective", start, 2.5, {"name": "barrier", "waits": True, "number": 0, **group}

    recorded(folder, 0, ROLES, TITLE, (1, "hold", 0.5, None, {"rref": "0.0", "owner": 0}),
             (2, "run", 1.1, 1.3, {"call": [1, 1], "name": "select_action"}), barrier(3, 2.0),
             (4, "call", 3.0, None, {"to": 2, "name": "run_episode", "how": "rpc_async", "waits": False, "bytes": 1,
                                     "rrefs": ["0.0", "1.0", "1.1", "1.2"]}),
             (5, "future", 3.1, 3.4, {"done": 2}))
    recorded(folder, 1, ROLES, TITLE,
             (1, "call", 1.0, 1.4, {"to": 0, "name": "select_action", "how": "rpc_sync", "waits": True, "bytes": 305}),
             (2, "hold", 1.05, 1.45, {"rref": "0.0", "owner": 0}), barrier(4, 2.1),
             (5, "context", 1.05, 1.45, {"context": "1.0"}),
             (3, "send", 1.6, 1.65, {"name": "send", "peer": 2, "tag": 0, "bytes": 4, "waits": True, **group}),
             bars=[("env.step", 1.41, 1.5)])
    recorded(folder, 2, ROLES, TITLE,
             (1, "recv", 1.5, 1.7, {"name": "recv", "peer": 1, "tag": 0, "bytes": 4, "waits": True, **group}), barrier(2, 2.2))
    replay.save(merge.merged(folder), folder / "replay.html")
    return folder


def ends(page, selector):
    """The lanes that each drawn line of a kind joins."""
    return page.evaluate("""selector => [...document.querySelectorAll(selector)].map(line => line.dataset.ends
        ? [line.dataset.ends] : [line.x1.baseVal.value, line.x2.baseVal.value].map(px => Math.round((px - gutter) / laneWidth - 0.5)))
    """, selector)


def at_step(page, number):
    page.evaluate("number => go(number)", number)
    drawn(page)
    return page.inner_text("#say")


def all_steps(page):
    """The sentence of each step, and what each process does there."""
    return [(at_step(page, number), page.inner_text("#doing")) for number in range(page.evaluate("steps.length"))]


def test_the_page_is_self_contained(opened, saved):
    page = opened(saved / "replay.html")
    assert [request.url for request in page.requests()] == [(saved / "replay.html").resolve().as_uri()]
    assert complaints(page) == []
    assert page.inner_text("h1") == TITLE
    assert page.inner_text("#count") == "1 / 18"
    text = (saved / "replay.html").read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|@import|url\(|\b(src|href)=(?!\"data:,\")", text)


def test_arrows(opened, saved):
    """They join the lanes of sender and receiver, in the order of the record."""
    page = opened(saved / "replay.html", 400)
    page.evaluate("zoom = 1; go(0)")
    drawn(page)
    # The call, its answer, the send; the barrier, of which observer2 is the last one to join.
    assert sorted(ends(page, "line.arrow")) == sorted([[1, 0], [0, 1], [1, 2], [2, 0], [2, 1]])
    assert page.evaluate("""[...document.querySelectorAll("line.arrow")].every(
        line => line.y2.baseVal.value >= line.y1.baseVal.value)""")


def test_steps(opened, saved):
    """What each process waits for changes with the steps, and backwards in the same way."""
    page = opened(saved / "replay.html")
    forwards = all_steps(page)
    said = [text for text, _ in forwards]
    assert said == [
        "observer1 calls select_action on agent and waits for the answer.",
        "agent runs select_action for observer1.", "agent answers observer1: select_action is done.",
        "observer1 receives the answer from agent: select_action.", "observer2 waits for data from observer1.",
        "observer1 sends to observer2 and waits until the data has left.",
        "observer1 has finished sending to observer2.", "observer2 has received the data from observer1.",
        "agent joins barrier. Missing: observer1, observer2.",
        "observer1 joins barrier. Missing: observer2.", "observer2 joins barrier. The group is complete.",
        *[f"{role} has finished barrier." for role in ROLES],
        "agent calls run_episode on observer2 and continues. A future stands for the answer. "
        "The message carries RRef 0.0, 1.0, 1.1… (4).",
        "agent creates a future, to complete it later.", "agent completes its future.", "The run has ended."]
    doing = [text.splitlines() for _, text in forwards]
    assert "observer1: waits for agent: select_action" in doing[0]
    assert "agent: runs select_action for observer1" in doing[1]
    assert doing[3] == [f"{role}: computes, or does unrecorded work" for role in ROLES]
    assert "agent: waits for observer1, observer2: barrier" in doing[8]
    assert "agent: waits for observer2: barrier" in doing[9]
    assert "agent: completes barrier with observer1, observer2" in doing[10]  # none is missing any more
    assert not any("waits" in line for line in doing[10])
    press(page, "End")
    for number in reversed(range(len(said) - 1)):
        press(page, "ArrowLeft")
        assert (page.inner_text("#say"), page.inner_text("#doing")) == forwards[number]


def test_lines_rrefs_futures_and_contexts(opened, saved):
    """Beside each message: its line and cell, in English without the Japanese heading; RRefs, futures, contexts."""
    page = opened(saved / "replay.html")
    assert page.inner_text("#facts") == f"500.00 ms · 305 B · rpc_rl/main.py:{LINE} Observer.run_episode · cell 11 of 6_5"
    assert not re.search("[ぁ-ん一-龠]", page.inner_text("#words"))
    assert re.fullmatch(rf"{LINE} *def run_episode\(.*", page.inner_text("#code .here"))
    for step, holders in ((0, "agent"), (1, "agent, observer1"), (4, "agent")):
        at_step(page, step)
        rows = [row.split("\t") for row in page.inner_text("#rrefs").splitlines()]
        assert rows == [["RRef", "owner", "holders", "created by"], ["0.0", "agent", holders, f"rpc_rl/main.py:{LINE}"]]
        assert page.inner_text("#contexts") == (f"1.0: observer1 (rpc_rl/main.py:{LINE})" if "," in holders else "none")
    assert page.inner_text("#futures") == "none"
    at_step(page, 15)
    assert page.inner_text("#futures").splitlines() == ["agent → observer2: run_episode", f"agent (rpc_rl/main.py:{LINE})"]
    assert f"rpc_rl/main.py:{LINE} " in page.inner_text("#facts")  # where it is created
    at_step(page, 16)
    assert f"rpc_rl/main.py:{LINE + 3} " in page.inner_text("#facts")  # where it is completed
    at_step(page, 8)
    assert "call 1 of its group" in page.inner_text("#facts")


def test_time(opened, tmp_path):
    """The axis has a unit, and a long time without a message is marked."""
    recorded(tmp_path / "record", 0, ["rank0"], "a run", *[
        (n, "call", start, start + 0.001, {"to": 0, "name": "f", "how": "rpc_sync", "waits": True})
        for n, start in enumerate([0.002, 0.004, 0.006, 12.5, 12.502], start=1)])
    page = opened(record.save(tmp_path / "record"))
    assert page.get_attribute("#heads", "data-unit") == "s"
    assert page.locator("svg .gap").count() == 1
    assert page.locator("svg text", has_text="⋯").all_text_contents() == ["⋯ 12.493 s"]


def test_keys_and_mouse(opened, saved):
    """Step, play at a speed, zoom and language from the keyboard; a click goes to its step."""
    page = opened(saved / "replay.html")
    for key, expected in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        press(page, key)
        assert page.evaluate("k") == expected
    height = page.evaluate("ZOOMS[zoom]")
    press(page, "+")
    assert page.evaluate("ZOOMS[zoom]") > height
    for _ in range(9):
        press(page, "-")
    assert page.evaluate("ZOOMS[zoom]") < height
    page.select_option("#speed", "20")
    page.locator("#chart").focus()
    page.keyboard.press(" ")
    page.wait_for_function("k === steps.length - 1 && playing === null")
    press(page, "l")
    assert page.evaluate("document.documentElement.lang") == "ja"
    for _ in range(6):
        press(page, "+")
    press(page, "Home")
    x, y = page.evaluate("(() => { const at = svg.getBoundingClientRect(); return [at.left + 9, at.top + y(2)]; })()")
    page.mouse.click(x, y)
    assert page.evaluate("k") == 2
    assert page.evaluate("[...document.querySelectorAll('button, input, select, [tabindex]')].every("
                         "node => node.ariaLabel || node.textContent.trim())")
    assert page.get_attribute("#say", "aria-live") == "polite"


def test_languages(opened, saved):
    """That of the browser, and a switch; no sentence stays in the other language."""
    page = opened(saved / "replay.html", language="ja")
    assert page.evaluate("document.documentElement.lang") == "ja"
    assert all(re.search("[ぁ-ん]", text) for text, _ in all_steps(page))
    assert not re.search(r"\b(waits|runs|steps|none)\b", page.inner_text("#words"))
    page.click("#language")
    drawn(page)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert "What each process does" in page.inner_text("#words")
    assert page.evaluate("Object.keys(TEXTS.en).sort().join() === Object.keys(TEXTS.ja).sort().join()")


@pytest.mark.parametrize(("width", "dark"), [(400, True), pytest.param(1400, False, marks=pytest.mark.slow)])
def test_it_fits_into_the_window(opened, saved, width, dark, tmp_path):
    """In both languages and at each zoom."""
    for language in ("en", "ja"):
        page = opened(saved / "replay.html", width, 844, language, dark)
        for action in ("scale(0)", "scale(9)", "scale(-9)"):
            page.evaluate(action)
            drawn(page)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate("[...document.querySelectorAll('button')].every(button => button.scrollWidth <= button.clientWidth)")
            picture = page.screenshot(path=tmp_path / f"{language}.png", full_page=True)
            assert struct.unpack(">I", picture[16:20])[0] == width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark
        assert complaints(page) == []


@pytest.mark.slow
def test_a_forwarded_rref(opened, tmp_path):
    """Created by the master, owned by ps, forwarded to two trainers; parameters' RRefs come in answers."""
    record.main([str(ROOT / "ddp_rpc_hybrid/main.py"), "--epochs", "1", "--output_dir", str(tmp_path)])
    page = opened(tmp_path / "replay.html")
    ops, lanes = page.evaluate("ops"), page.evaluate("lanes")
    [made] = [op for op in ops if op.get("name") == "EmbeddingBag" and op["kind"] == "call"]
    sent = [(lanes[op["rank"]], op["kind"], op["name"], op["rrefs"]) for op in ops if op.get("rrefs")]
    assert sent.count(("master", "call", "_run_trainer", [made["rref"]])) == 2
    weights = [[op["rref"]] for op in ops if op["kind"] == "hold" and op["rank"] == op["owner"] == lanes.index("ps")
               and "where" in op]  # where the lesson makes them
    assert [rrefs for *who, rrefs in sent if who == ["ps", "run", "_retrieve_embedding_parameters"]] == weights
    assert len(weights) == 2
    at_step(page, page.evaluate("steps.findLastIndex(step => step.begins && step.op.kind === 'run' && step.op.name === '_run_trainer')"))
    [[owner, holders]] = [row.split("\t")[1:3] for row in page.inner_text("#rrefs").splitlines() if row.startswith(made["rref"])]
    assert (owner, {*holders.split(", ")}) == ("ps", {"master", "trainer0", "trainer1"})


# --- runs that fail

CIRCLE = ["When the run ended: rank0 waited for rank1; rank1 waited for rank0.",
          "They wait in a circle: rank0 → rank1 → rank0. None of them can continue."]
DIFFERS = "Call 2 of the group differs between its ranks: "


def test_a_deadlock(opened, tmp_path, capfd, monkeypatch):
    """It leaves its record in a folder of its own, and the page opens where it ends."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="^1$"):
        record.main([str(ROOT / "p2p_collectives/deadlock.py"), "--timeout", "2"])
    out, err = capfd.readouterr()
    assert re.search(r"p2p_collectives/deadlock\.py:\d+, `dist\.send", err.splitlines()[-1])  # not the recorder's line
    assert err.count("p2p_collectives/deadlock.py\", line") >= 2  # of both ranks, without frames of launcher and tracer
    assert not re.search(r'File "[^"]*/(tracing/|common/launch)', err), err
    folder = "outputs/trace/p2p_collectives/deadlock"
    assert out.splitlines()[-1] == f"replay: {folder}/replay.html"
    page = opened(tmp_path / folder / "replay.html")
    assert page.locator("#end p").all_inner_texts() == CIRCLE
    assert ends(page, ".waiting") == [["0 1"], ["1 0"]]
    assert "rank0: waits for rank1: send" in page.inner_text("#doing")
    assert "dist.send(mine" in page.inner_text("#code .here")
    assert (tmp_path / folder / "timeline.png").exists()


@pytest.mark.parametrize(("kind", "calls"), slow_but([
    ("other_collective", [DIFFERS + "rank0 all_reduce 4 B, rank1 broadcast 4 B."]),
    ("other_shape", [DIFFERS + "rank0 all_reduce 8 B, rank1 all_reduce 4 B."]), ("one_fewer", []), ("rpc", []),
], "other_shape", "rpc"), ids=lambda kind: kind if isinstance(kind, str) else "")
def test_the_circle_of_a_deadlock(kind, calls, opened, tmp_path, capfd):
    """The page names the circle of the other kinds, too."""
    with pytest.raises(SystemExit, match="^1$"):
        record.main([str(ROOT / "p2p_collectives/deadlock.py"), "--kind", kind, "--timeout", "3", "--output_dir", str(tmp_path)])
    assert "p2p_collectives/deadlock.py:" in capfd.readouterr().err.splitlines()[-1]
    assert opened(tmp_path / "replay.html").locator("#end p").all_inner_texts() == [*CIRCLE, *calls]


def test_a_killed_rank(opened, tmp_path):
    """What the launcher says of it stands on the page, after its last message."""
    recorded(tmp_path / "record", 1, ["rank0", "rank1"], "a run", (1, "recv", 1.0, None, {
        "name": "recv", "peer": 0, "tag": 0, "group": "world", "ranks": [0, 1], "waits": True}))
    page = opened(record.save(tmp_path / "record", failed=True, failure=Failure(CAUSE, 1, "was killed by SIGKILL")))
    assert page.locator("#end p").all_inner_texts() == [
        "rank1 has failed: was killed by SIGKILL", "When the run ended: rank1 waited for rank0."]
    assert "rank1: has failed" in page.inner_text("#doing")


def test_a_failed_call(opened, tmp_path):
    """One rank has answered, and the other one has waited for the answer until the end."""
    roles, called = ["rank0", "rank1"], {"to": 0, "name": "own_number", "how": "rpc_sync", "waits": True, "bytes": 9}
    recorded(tmp_path / "record", 0, roles, "a run", (1, "run", 2.0, 3.0, {"call": [1, 1], "name": "own_number"}))
    recorded(tmp_path / "record", 1, roles, "a run", (1, "call", 1.0, 9.0, {**called, "error": "RuntimeError: too late"}),
             (2, "failed", 9.5, None, {"error": "RuntimeError: too late"}))
    page = opened(record.save(tmp_path / "record", failed=True))
    assert "When the run ended: rank1 waited for rank0." in page.inner_text("#end")
    assert "answered, but the caller has not read the answer" in page.inner_text("#doing")
