"""Per-process timelines: spans, idle shares, the picture, the trace and the page."""

import contextlib
import json
import re
import shutil
import struct
import threading
import time

import pytest
from common.tracing import page, record, timeline


@pytest.fixture(autouse=True)
def _off():
    """Other tests, in this process, find it as they would without these."""
    yield
    timeline._spans = timeline._role = None


def spans(*times, kind="forward"):
    return [{"kind": kind, "start": start, "end": end, "labels": {}} for start, end in times]


def test_off_is_nothing():
    assert not timeline.is_on()
    assert isinstance(timeline.span("forward", micro_batch=3), contextlib.nullcontext)
    timeline.add("forward", 0, 1)
    assert timeline.recorded() == {}


def test_spans_of_any_thread():
    timeline.start("worker1")

    def work(number):
        with timeline.span("forward", micro_batch=number):
            time.sleep(0.01)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    before = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [(role, recorded)] = timeline.recorded().items()
    assert role == "worker1"
    assert sorted(span["labels"]["micro_batch"] for span in recorded) == list(range(8))
    assert all(before <= span["start"] <= span["end"] - 0.009 for span in recorded)


def test_a_span_with_an_error_ends_too():
    timeline.start("worker1")
    with contextlib.suppress(KeyError), timeline.span("forward"):
        raise KeyError
    assert len(timeline.recorded()["worker1"]) == 1


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
    """It is that of the `with`, and of the functions that called it; nothing of `common`."""
    timeline.start("worker1")
    with timeline.span("forward"):
        pass
    [span] = timeline.recorded()["worker1"]
    path, line, function = span["where"][0]
    here = test_the_line_of_a_span.__code__
    assert (path, function) == ("tests/test_timeline.py", "test_the_line_of_a_span")
    assert line == here.co_firstlineno + 3
    assert all(not path.startswith("common") for path, _, _ in span["where"])


def test_the_cell_of_a_span():
    """That of its function, of the one a subclass has replaced, or of the first caller with one."""
    def cell(*where):
        found = page.cell_of([[path, 1, function] for path, function in where])
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
    for kinds in (["env.step", "select_action", "finish_episode"],
                  ["forward", "backward", "step", "add"],
                  ["forward", "backward", "loss", "step", "send"],
                  ["forward", "backward", "all_reduce", "step"],
                  ["forward", "backward with all_reduce", "step", "remote call"],
                  ["send", "recv", "all_reduce", "collective"]):
        assert len({timeline.KINDS[kind].colour for kind in kinds}) == len(kinds)


def test_picture_and_trace(tmp_path):
    of_roles = {"worker1": spans((0, 2), (1, 3), (4, 5)), "worker2": spans((2, 4), kind="backward")}
    idle = page.save(of_roles, tmp_path, "two workers")
    assert idle == {"": {"worker1": pytest.approx(0.2), "worker2": pytest.approx(0.6)}}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [(names[event["pid"]], event["name"], event["ts"], event["dur"], event["tid"])
             for event in events if event["ph"] == "X"]  # microseconds; what overlaps has a row
    assert found == [("worker1", "forward", 0, 2e6, 0), ("worker1", "forward", 1e6, 2e6, 1),
                     ("worker1", "forward", 4e6, 1e6, 0), ("worker2", "backward", 2e6, 2e6, 0)]
    idle = page.save(of_roles, tmp_path, "two workers", {"first": (0, 2), "second": (3, 5)})
    assert idle == {"first": {"worker1": 0, "worker2": 1},
                    "second": {"worker1": 0.5, "worker2": 0.5}}


def kinds(folder):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return {name: {event["name"] for event in events
                   if event["ph"] == "X" and names[event["pid"]] == name}
            for name in names.values()}


def places(folder):
    """What the trace says of each kind: its lines, without numbers, and its cells."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    found = {}
    for event in events:
        if event["ph"] == "X":
            line, cell = event["args"].get("where", ""), event["args"].get("cell", "")
            found.setdefault(event["name"], set()).add(
                (re.sub(r":\d+", "", line), cell.partition(":")[0]))
    return found


BOTH = {"forward", "backward"}
OBSERVED = {"agent": {"select_action", "finish_episode"}, "observer1": {"env.step"},
            "observer2": {"env.step"}}
TRACED = {  # flags, and what is recorded in each process
    "rpc_rl/main.py": (["--max_episodes", "2"], OBSERVED),
    "rpc_rl/fast.py": (["--max_episodes", "2"], OBSERVED),
    "param_server/main.py": (["--epochs", "1"], {
        "parameter_server": {*BOTH, "step"}, "trainer1": {"remote call"},
        "trainer2": {"remote call"}}),
    "param_server/async_server.py": (["--epochs", "1"], {
        "parameter_server": {*BOTH, "step"}, "trainer1": {"remote call"},
        "trainer2": {"remote call"}}),
    "param_server/flat_update.py": (["--arch", "resnet18", "--image_size", "32", "--world_size", "3",
                                     "--num_updates", "2"], {
        "parameter_server": {"step"}, "trainer1": BOTH, "trainer2": BOTH}),
    "rpc_rnn/main.py": (["--epochs", "1"], {"ps": BOTH, "trainer": {*BOTH, "remote call"}}),
    "batch_rl/main.py": (["--observers", "2", "--num_steps", "20"], {
        "agent": {"select_action", "finish_episode"}, "observer1": {"env.step"},
        "observer2": {"env.step"}}),
    "batch_rl/vector.py": (["--observers", "1", "--num_steps", "20"], {
        "agent": {"select_action", "finish_episode"}, "observer1": {"env.step"}}),
    "ddp_rpc_hybrid/main.py": (["--epochs", "1"], {
        **{f"trainer{rank}": {"forward", "backward with all_reduce", "remote call", "step"}
           for rank in range(2)},
        "master": set(), "ps": {*BOTH, "step"}}),
    "ddp_basic/main.py": (["--steps", "2"], {
        f"rank{rank}": {"forward", "backward with all_reduce", "step"} for rank in range(2)}),
    **{f"p2p_collectives/{name}.py": (["--epochs", "1"], {
        f"rank{rank}": {*BOTH, "all_reduce", "step"} for rank in range(2)})
       for name in ("train", "train_flat", "train_ddp")},
    "rpc_rnn/prefetch.py": (["--epochs", "1"], {"ps": BOTH, "trainer": {*BOTH, "remote call"}}),
    "p2p_collectives/main.py": ([], {
        f"rank{rank}": {"collective", "all_reduce", *["send"] * (rank < 3), *["recv"] * (rank > 0)}
        for rank in range(4)}),
}


@pytest.mark.parametrize("program", TRACED)
def test_traced(program, tmp_path):
    """A lesson without a line for it: the processes, what they did, and where that stands."""
    flags, expected = TRACED[program]
    record.main([str(timeline.ROOT / program), *flags, "--output_dir", str(tmp_path)])
    assert kinds(tmp_path) == expected
    for kind, found in places(tmp_path).items():
        assert kind in timeline.KINDS
        assert all(line.startswith(program.split("/")[0]) for line, _ in found), found
    assert (tmp_path / "timeline.png").exists()
    assert (tmp_path / "timeline.html").exists()


def test_traced_bad_input(refused):
    for path in (timeline.ROOT / "rpc_rl/check.py", timeline.ROOT / "nowhere/main.py", "main.py"):
        refused(record.main, [str(path), "--max_episodes", "1"], ["SPANS"])
    refused(record.main, [], ["SPANS"])


# --- the page, in a browser


@pytest.fixture(scope="module")
def chromium():
    """The Chromium of this system, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")
    command = shutil.which("chromium") or shutil.which("chromium-browser")
    if command is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver, driver.chromium.launch(executable_path=command) as browser:
        yield browser


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


TITLE = "A <b>title, as long as that of a lesson: it takes two lines on a phone"
PLACE = [["rpc_rl/main.py", 88, "Observer.run_episode"]]
BEYOND = [["rpc_rl/main.py", 192, "train"]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A timeline of three processes: two rows, a striped kind, one without a span, </script>."""
    def made(kind, start, end, where, **labels):
        return {"kind": kind, "start": 1e9 + start, "end": 1e9 + end, "labels": labels,
                "where": where, "thread": 7}

    folder = tmp_path_factory.mktemp("timeline")
    first = [made("env.step", 0.1 * i, 0.1 * i + 0.05, PLACE, observer=i) for i in range(8)]
    second = [made("forward", 0.2, 0.4, BEYOND), made("backward", 0.3, 0.6, PLACE),
              made("remote call", 0.6, 0.8, PLACE), made("</script>", 0.8, 0.9, [])]
    page.save({"observer1": first, "agent": second, "observer2": []}, folder, TITLE,
                  {"the middle": (1e9 + 0.2, 1e9 + 0.5)})
    return folder


def events_of(folder):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def everything(page):
    """Show all of the timeline."""
    page.locator("#views button").last.click()
    drawn(page)


def middles(page):
    """Where the middle of each span is in the window, in the order of the JSON."""
    return page.evaluate("""(() => {
        const at = canvas.getBoundingClientRect();
        return spans.map(span => {
            const [left, top, wide, high] = box(span);
            return [at.left + left + wide / 2, at.top + top + high / 2];
        });
    })()""")


def test_page_is_self_contained(opened, saved):
    page = opened(saved / "timeline.html")
    assert [request.url for request in page.requests()] == [(saved / "timeline.html").resolve().as_uri()]
    assert complaints(page) == []
    assert page.inner_text("h1") == TITLE
    text = (saved / "timeline.html").read_text()
    assert not re.search(r"https?:|@import|url\(|\b(src|href)=(?!\"data:,\")", text)


def test_complaints_are_seen(opened, tmp_path):
    """The two lists that must be empty above are not empty where there is something."""
    bad = tmp_path / "bad.html"
    bad.write_text("<link rel=stylesheet href=missing.css><script>console.error(1); no()</script>")
    page = opened(bad)
    assert len(page.requests()) == 2
    assert len(complaints(page)) >= 2


def test_page_has_the_spans(opened, saved):
    """As many are drawn as the JSON has, each in its colour; first only those of the window."""
    page = opened(saved / "timeline.html")
    events = events_of(saved)
    begin = min(event["ts"] for event in events)
    inside = [event for event in events
              if event["ts"] - begin <= 0.5e6 and event["ts"] - begin + event["dur"] >= 0.2e6]
    assert int(page.evaluate("canvas.dataset.drawn")) == len(inside)
    everything(page)
    assert int(page.evaluate("canvas.dataset.drawn")) == len(events) == page.evaluate("spans.length")
    seen = page.evaluate("""spans.map(span => {
        const [left, top, wide, high] = box(span);
        const [r, g, b] = pen.getImageData(left + 1, top + high / 2, 1, 1).data;
        return "#" + [r, g, b].map(c => c.toString(16).padStart(2, "0")).join("").toUpperCase();
    })""")
    for event, colour in zip(events, seen, strict=True):
        look = timeline.KINDS.get(event["name"], timeline.OTHER)
        assert look.striped or colour == look.colour, event


@pytest.mark.parametrize("width", [1280, 390])
def test_hover_and_tap(opened, saved, width):
    """Each span says what it is, its line and its cell, to a mouse and to a finger."""
    page = opened(saved / "timeline.html", width)
    everything(page)
    for event, (x, y) in zip(events_of(saved), middles(page), strict=True):
        (page.touchscreen.tap if width < 600 else page.mouse.move)(x, y)
        drawn(page)
        said = page.inner_text("#details")
        assert event["name"] in said
        assert f"{event['dur'] / 1000:.3f}".rstrip("0").rstrip(".") + " ms" in said
        if "where" in event["args"]:
            assert event["args"]["where"] in said
            beyond = "train" in event["args"]["where"]
            assert ("none: beyond the tutorial" if beyond else "6_5, cell 11") in said
        else:
            assert "tutorial cell" not in said
    if width > 600:
        page.mouse.move(5, 5)
        drawn(page)
        assert page.inner_text("#details").startswith("Point at a span")


def test_keyboard(opened, saved):
    """The arrow keys reach all spans."""
    page = opened(saved / "timeline.html")
    page.evaluate("canvas.focus()")
    for count in (8, 4):
        press(page, "Home")
        seen = set()
        for _ in range(10):
            seen.add(page.evaluate("selected.index"))
            assert page.evaluate("selected.start >= view[0] && selected.end <= view[1]")
            press(page, "ArrowRight")
        assert len(seen) == count
        press(page, "ArrowDown")
    assert page.evaluate("lanes[selected.lane].name") == "agent"  # observer2 has no span
    press(page, "Escape")
    assert page.inner_text("#details").startswith("Point at a span")


def press(page, key):
    page.keyboard.press(key)
    drawn(page)


def shown(page):
    return page.evaluate("view[1] - view[0]")


def test_zoom_and_pan(opened, saved):
    page = opened(saved / "timeline.html")
    everything(page)
    whole = shown(page)
    (x, y), fixed = middles(page)[3], page.evaluate("spans[3].start")
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    drawn(page)
    assert shown(page) < whole / 1.5
    assert middles(page)[3][0] == pytest.approx(x, abs=3)  # what is under the mouse stays there
    page.click("[data-do=zoomIn]")
    drawn(page)
    before, start = shown(page), page.evaluate("view[0]")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y)
    page.mouse.up()
    drawn(page)
    assert shown(page) == pytest.approx(before)
    assert page.evaluate("view[0]") - start == pytest.approx(100 * before / page.evaluate("width"), rel=0.01)
    assert page.evaluate("selected") is None  # that was no click
    page.click("[data-do=zoomOut]")
    drawn(page)
    assert shown(page) == pytest.approx(2 * before)
    fingers = page.context.new_cdp_session(page)  # two of them; Playwright itself has one
    for kind, places in (("touchStart", (300, 500)), ("touchMove", (200, 600)), ("touchEnd", ())):
        points = [{"x": place, "y": y, "id": finger} for finger, place in enumerate(places)]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    drawn(page)
    assert shown(page) == pytest.approx(before, rel=0.02)
    assert fixed == page.evaluate("spans[3].start")


def test_idle_in_words(opened, saved):
    """As `idle_share` says; a remote call is idle."""
    page = opened(saved / "timeline.html")
    everything(page)
    lines = page.inner_text("#idle").splitlines()
    assert lines[0].startswith("observer1: idle for 56%")  # 8 times 50 ms of 900 ms
    assert lines[1].startswith("agent: idle for 44%")  # 200 to 600 ms and 800 to 900 ms
    assert lines[2] == "observer2: idle all the time; nothing is recorded of it here"


def test_languages(opened, saved):
    """That of the browser, and a switch."""
    page = opened(saved / "timeline.html", language="ja")
    assert page.evaluate("document.documentElement.lang") == "ja"
    assert "色の意味" in page.inner_text("body")
    assert "Colours" not in page.inner_text("body")
    page.click("#language")
    drawn(page)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert "Colours" in page.inner_text("body")
    assert page.evaluate("Object.keys(TEXTS.en).join() === Object.keys(TEXTS.ja).join()")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_screenshot(opened, saved, width, dark, tmp_path):
    """The page fits into the window, in both languages, with and without a chosen span."""
    for language in ("en", "ja"):
        page = opened(saved / "timeline.html", width, 844, language, dark)
        for action in ("0", "select(spans[3])"):
            page.evaluate(action)
            drawn(page)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate("[...document.querySelectorAll('button')].every("
                                 "button => button.scrollWidth <= button.clientWidth)")
            picture = page.screenshot(path=tmp_path / f"{language}.png", full_page=True)
            assert struct.unpack(">I", picture[16:20])[0] == width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark
        assert complaints(page) == []
