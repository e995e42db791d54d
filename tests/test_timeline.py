"""Per-process timelines: spans, idle shares, the picture and the trace."""

import contextlib
import json
import threading
import time

import pytest
from common import timeline

from p2p_collectives import train
from rpc_rl import main as rpc_rl


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


def test_picture_and_trace(tmp_path):
    of_roles = {"worker1": spans((0, 2), (1, 3), (4, 5)), "worker2": spans((2, 4), kind="backward")}
    idle = timeline.save(of_roles, tmp_path, "two workers")
    assert idle == {"": {"worker1": pytest.approx(0.2), "worker2": pytest.approx(0.6)}}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [(names[event["pid"]], event["name"], event["ts"], event["dur"], event["tid"])
             for event in events if event["ph"] == "X"]  # microseconds; what overlaps is in rows of its own
    assert found == [("worker1", "forward", 0, 2e6, 0), ("worker1", "forward", 1e6, 2e6, 1),
                     ("worker1", "forward", 4e6, 1e6, 0), ("worker2", "backward", 2e6, 2e6, 0)]
    idle = timeline.save(of_roles, tmp_path, "two workers", {"first": (0, 2), "second": (3, 5)})
    assert idle == {"first": {"worker1": 0, "worker2": 1}, "second": {"worker1": 0.5, "worker2": 0.5}}


def kinds(folder):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return {name: {event["name"] for event in events if event["ph"] == "X" and names[event["pid"]] == name}
            for name in names.values()}


def test_rpc_rl(tmp_path):
    rpc_rl.main(["--max_episodes", "2", "--timeline", "--output_dir", str(tmp_path)])
    assert kinds(tmp_path) == {"agent": {"select_action", "finish_episode"}, "observer1": {"env.step"},
                               "observer2": {"env.step"}}
    assert (tmp_path / "timeline.png").exists()
    assert "spans" not in json.loads((tmp_path / "metrics.json").read_text())


@pytest.mark.parametrize(("sync", "expected"), [("flat", {"forward", "backward", "all_reduce", "step"}),
                                                ("ddp", {"forward", "backward with all_reduce", "step"})])
def test_p2p_train(sync, expected, tmp_path):
    train.main(["--epochs", "1", "--sync", sync, "--timeline", "--output_dir", str(tmp_path)])
    assert kinds(tmp_path) == {"rank0": expected, "rank1": expected}
    assert (tmp_path / "timeline.png").exists()
    assert "spans" not in json.loads((tmp_path / "metrics.json").read_text())
