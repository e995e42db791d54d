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


# Of these tests `make test` runs the rows whose ids match; `make test-all` runs all. What is left out repeats, for another
# program or another place, what a row that stays has shown; of these mechanisms there is one for all programs.
MAINS = r"(rpc_rl|batch_rl|ddp_basic|param_server|ddp_rpc_hybrid|rpc_rnn|model_parallel_resnet|p2p_collectives)\.main"
NEVER = r"(?!)"
SOME = {
    "test_check_passes": r"(?!p2p_collectives.shared_memory--74)(?!.*(--gamma [01]-|world_size 1 |size 143|size 1-|"
                         r"num_classes [12]-|max_staleness 0|sharding full|splits 2-|zero_bubble-|world_size 2-51))",
    "test_check_sees_it": r"(batch_rl|ddp_basic|ddp_rpc_hybrid|flags|model_parallel_resnet|p2p_collectives|param_server_batch_update|rpc_rnn)$",
    "test_across_machines": r"(rpc_rl/main|p2p_collectives/train|ddp_rpc_hybrid/main|param_server/main).py-torchrun|batch_rl/main.py-manual",
    "test_cut_cable": r".*p2p.*torchrun",
    "test_a_bad_cable_is_survived": r".*rpc_rl",
    "test_a_cable_that_carries_one_way": r".*rpc_rl",
    "test_fault_of_a_rank": MAINS,
    "test_end_of_a_rank": MAINS,
    "test_rarer_end_of_a_rank": r"(rpc_rl|p2p_collectives)",
    "test_frozen_for_a_while": r".*(rpc_rl|p2p_collectives)",
    "test_spawn": r"(rpc_rl|p2p_collectives)\.main",
    "test_spawn_interrupted": r"rpc_rl",
    "test_spawn_to_the_end": NEVER,
    "test_no_standstill": r"(rpc_rl|ddp_rpc_hybrid)",
    "test_fault_in_the_other_ways_in": r".*-(SIGKILL-1|SIGSTOP-0|exception-1)",
    "test_interrupted_while_starting": r"forkserver-[24]|spawn-3",
    "test_strangers": r"local",
    "test_no_inodes": r"2",
    "test_few_files": NEVER,
    "test_odd_temporary_folders": NEVER,
    "test_killed_at_a_random_moment": r"rpc_rl|ddp_basic",
    "test_cannot_be_saved": r"(rpc_rl|p2p_collectives)",
    "test_check_of_a_resumed_training": NEVER,
    "test_check_passes_through_a_checkpoint": r"rpc_rnn.main",
    "test_param_server.py::test_it_learns": NEVER,
    "test_rpc_rnn.py::test_it_learns": NEVER,
    "test_the_documented_command": NEVER,
    "test_traced": r"(rpc_rl|p2p_collectives|ddp_rpc_hybrid)/main",
    "test_screenshot": r".*(True-1280|False-390)|.*(1280-True|390-False)",
    "test_killed_while_it_writes_under_torchrun": NEVER,
    "test_fsdp.py::test_killed": NEVER,
    "test_killed_twice_at_random_moments": NEVER,
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items):
    """Group the tests, the longest groups first; mark what `make quick` runs (refusals, oracles, pages) and leaves out."""
    for item in items:
        name, _, row = item.name.rstrip("]").partition("[")
        kept = SOME.get(name) or SOME.get(f"{item.path.name}::{name}", "")
        if not re.match(kept, row):
            item.add_marker("nightly")
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
