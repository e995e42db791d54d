"""Fixtures that the tests of several folders share."""

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from tests import helpers, warm

# Nothing that the tests import is garbage, and looking for some takes a fifth of the start: until all is there, nobody does.
gc.disable()
# What connects asks for a name; a name server that is slow would hold up a start for longer than any test waits.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
# Where a script has started pytest in the background, Ctrl-C would be ignored here and by all that is started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker takes a whole file, for the sake of its fixtures, the longest ones first; but each row of ROWS by itself, unless
# it has another group there.
LONG = ("test_faults.py", "test_faults_of_commands.py", "test_notebooks.py", "test_param_server.py",
        "test_checkpoints.py", "test_model_parallel_resnet.py", "test_timeline.py", "test_batch_rl.py")
ROWS = ("test_faults.py", "test_checks.py", "test_machines.py", "test_mutants.py")

# What `make quick` runs, file by file (of test_checks.py, four marked rows): it imports no other.
QUICK = {"test_checks.py": None, "test_docs.py": "", "test_flags.py": "test_(known_)?bad_input", "test_layout.py": "",
         "test_mutants.py": "test_the_table", "test_oracle.py": ""}


# Of these tests `make test` runs the rows whose ids match; `make test-all` runs all. What is left out repeats, for another
# program or another place, what a row that stays has shown; of these mechanisms there is one for all programs.
# Observers that are called and call back, trainers that call a server, both RPC and DDP, collectives.
KINDS = r"(rpc_rl|param_server|ddp_rpc_hybrid|p2p_collectives)\.main"
NEVER = r"(?!)"
SOME = {
    "test_check_passes": r"(?!.*\.(train_|async_|shared_))",  # their oracle is another program's; the last has one that takes long
    "test_check_passes_at_the_limits": r"(rpc_rl\.main|batch_rl\.main|ddp_basic\.elastic|p2p_collectives\.main)",
    "test_check_sees_it": r"(ddp_basic|ddp_rpc_hybrid|flags)$",
    "test_across_machines": r"(rpc_rl/main|p2p_collectives/train|ddp_rpc_hybrid/main).py-torchrun|batch_rl/main.py-manual",
    "test_cut_cable": r".*p2p.*torchrun",
    "test_a_bad_cable_is_survived": r".*rpc_rl",
    "test_a_cable_that_carries_one_way": r".*rpc_rl",
    "test_a_training_that_diverges": r"(ddp_basic.main---demo basic|rpc_rnn.main|model_parallel_resnet.single_machine)",
    "test_benchmark": NEVER,
    "test_one_process": NEVER,
    "test_it_learns_and_one_seed_gives_one_training": NEVER,
    "test_one_seed_gives_one_training_to_the_last_digit": NEVER,
    "test_fault_of_a_rank": rf"rpc_rl.main-SIGTERM|{KINDS}-(?!SIGTERM)",
    "test_readme_command": NEVER,
    "test_end_of_a_rank": r"(rpc_rl|ddp_rpc_hybrid)\.main",
    "test_rarer_end_of_a_rank": r"rpc_rl",
    "test_frozen_for_a_while": r"shorter-p2p|longer-rpc_rl",
    "test_only_waiting_tells": r"ddp_rpc_hybrid\.main|p2p_collectives\.train",
    "test_second_failure": r"(rpc_rl|p2p_collectives)",
    "test_slow_role": r"batch_rl",
    "test_arrows": r"400",
    "test_spawn": NEVER,
    "test_standstill": r".*rpc_rl",
    "test_no_standstill": r"ddp_rpc_hybrid",
    "test_fault_beside_the_ranks": r"(local|manual|torchrun)-run",
    "test_interrupted_with_spawn": NEVER,
    "test_fault_in_the_other_ways_in": r"torchrun-rpc_rl.*-(SIGKILL-1|SIGSTOP-0|exception-1)|manual-rpc_rl.*-(SIGKILL-1|SIGSTOP-0)|"
                                       r"manual-p2p.*-exception-1",
    "test_interrupted_while_starting": NEVER,
    "test_strangers": r"local",
    "test_no_inodes": r"2",
    "test_many_ranks": r"20",
    "test_short_timeout": r"0\.5",
    "test_warnings_as_errors": NEVER,
    "test_odd_temporary_folders": NEVER,
    "test_killed_at_a_random_moment": r"p2p_collectives",
    "test_stopped_at_each_save": r"p2p_collectives.train_flat",
    "test_killed_while_it_writes_under_torchrun": NEVER,
    "test_the_table_has_what_is_saved": r"rpc_rnn|p2p",  # trained for other tests, too
    "test_ddp_basic.py::test_two_runs_at_once": NEVER,
    "test_compare": NEVER,
    "test_cannot_be_saved": r"p2p_collectives",
    "test_threads_under_torchrun": NEVER,
    "test_out_of_files": NEVER,
    "test_resume_on_two_machines": NEVER,
    "test_check_of_a_resumed_training": NEVER,
    "test_batch_update.py::test_it_learns": NEVER,
    "test_ddp_rpc_hybrid.py::test_training": NEVER,
    "test_sharded_table.py::test_training": NEVER,
    "test_p2p_collectives.py::test_training": NEVER,
    "test_param_server.py::test_it_learns": NEVER,
    "test_rpc_rnn.py::test_it_learns": NEVER,
    "test_the_documented_command": NEVER,
    "test_torch_names_other_collectives": NEVER,
    "test_the_circle_of_a_deadlock": r"other_shape|rpc",
    "test_it_runs": r"two lessons",
    "test_forwarded_rref": NEVER,
    "test_several_machines": r"p2p",
    "test_one_rank_of_torchrun_says_it": r"(rpc_rl|p2p_collectives)\.main",
    "test_traced": r"(rpc_rl|p2p_collectives|ddp_rpc_hybrid)/main",
    "test_screenshot": r"400-True",
    "test_killed_twice_at_random_moments": NEVER,
    "test_perfetto": NEVER,
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Have the workers forked, too: they need not import torch."""
    if sys.platform == "linux":
        python = Path(tempfile.mkdtemp(prefix="warm-")) / "python"
        atexit.register(shutil.rmtree, python.parent)
        python.write_text(warm.as_python())
        python.chmod(0o755)
        for spec in specs:
            spec.python = str(python)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["owner"] = os.getpid()


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # all workers share one server
        warm.owner = config.workerinput["owner"]


def pytest_ignore_collect(collection_path, config):
    """Keep `make quick` from the seconds of importing what it does not run."""
    return True if config.option.markexpr == "quick" and collection_path.suffix and collection_path.name not in QUICK else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items):
    """Group the tests, the longest groups first; mark what `make quick` runs (refusals, oracles, pages) and leaves out."""
    rows = {name: [] for name in SOME}  # does a row stay?
    for item in items:
        name, _, row = item.name.rstrip("]").partition("[")
        entry = name if name in SOME else f"{item.path.name}::{name}"
        if entry in SOME:
            rows[entry].append(bool(re.match(SOME[entry], row)))
            if not rows[entry][-1]:
                item.add_marker("nightly")
        if item.path.name not in ROWS:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        quick = QUICK.get(item.path.name)
        if quick is not None and re.match(quick, item.name):
            item.add_marker("quick")
    if {item.path for item in items} >= {*Path(__file__).parent.glob("test_*.py")}:
        for name, stay in rows.items():  # a test that was renamed would never run, or always whole
            if not stay or all(stay) or not (any(stay) or SOME[name] == NEVER):
                raise pytest.UsageError(f"tests/conftest.py: SOME[{name!r}] keeps {sum(stay)} of {len(stay)} rows")
    items.sort(key=lambda item: (
        item.get_closest_marker("xdist_group") is None,
        LONG.index(item.path.name) if item.path.name in LONG else len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork what will fork the ranks of the programs that tests run in their own process: it need not import anything.

    Up to here nobody may have asked whether there is a GPU (a mark that does is given as text): CUDA survives no fork.
    """
    gc.freeze()  # nor does anybody look at it later, here or in what is forked
    gc.enable()
    # As in common/launcher/fork_server.py: the other thread, pytest-xdist's, waits for what to run next.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork", category=DeprecationWarning)
    if sys.platform == "linux" and not session.config.option.numprocesses:  # which says that workers run the tests
        warm.fork_the_fork_server()


def pytest_unconfigure():
    """Take apart all at the end: what is frozen then, triton prints as leaked."""
    gc.unfreeze()


@pytest.fixture
def free_port():
    """A port of loopback on which nothing listens now."""
    return helpers.unused_port()


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
