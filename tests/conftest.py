"""Fixtures that the tests of several folders share."""

import os
import re
import signal
import socket

import pytest
import torch
from common.launcher import start

start.PRELOAD.append("tests.preload")  # once for all tests, not once in each worker
# Several runs share the cores, and a process that polls its shared memory would take the time of all others.
# What is started cold (tests/helpers.py) sends as it does for a user.
os.environ.setdefault("RPC_TRANSPORTS", "uv")
# More threads would only wait for each other: several test processes share the cores.
torch.set_num_threads(1)
# Where a script has started pytest in the background, Ctrl-C would be ignored here and by all that is started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker takes a whole file, for the sake of its fixtures, the longest ones first; but each row of ROWS by itself, unless
# it has another group there.
LONG = ("test_faults.py", "test_faults_of_commands.py", "test_notebooks.py", "test_param_server.py",
        "test_checkpoints.py", "test_model_parallel_resnet.py", "test_timeline.py", "test_batch_rl.py")
ROWS = ("test_faults.py", "test_checks.py", "test_machines.py", "test_mutants.py")

QUICK = re.compile(r"test_bad_input|test_flags_exist|test_the_table|test_rpc_is|test_a_|"
                   r"test_the_(oracle|walk|lesson)")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items):
    """Group the tests, the longest groups first; mark what `make quick` runs: refusals, oracles, pages."""
    for item in items:
        if item.path.name not in ROWS:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        if QUICK.match(item.name) or item.path.name in ("test_docs.py", "test_oracle.py"):
            item.add_marker("quick")
    items.sort(key=lambda item: (
        item.get_closest_marker("xdist_group") is None,
        LONG.index(item.path.name) if item.path.name in LONG else len(LONG)))


@pytest.fixture
def free_port():
    """A port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def refused(capfd, monkeypatch, tmp_path):
    """`refused(main, flags, says)`: status 2 and one line, before any process starts."""

    def started(*_, **__):
        raise AssertionError("a process was started")

    def refused(main, flags, says):
        monkeypatch.chdir(tmp_path)
        for function in ("torch.multiprocessing.start_processes",
                         "multiprocessing.forkserver.ensure_running", "subprocess.Popen"):
            monkeypatch.setattr(function, started)
        with pytest.raises(SystemExit) as stop:
            main(flags)
        out, err = capfd.readouterr()
        assert stop.value.code == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith("error: ")
        for words in says:
            assert words in err

    return refused
