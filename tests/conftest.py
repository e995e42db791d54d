"""Fixtures that the tests of several folders share."""

import os
import shutil
import signal

import pytest

from tests import helpers

# Several runs share the cores: one thread for each rank, and no rank that polls its shared memory. (Some tests of
# test_launch.py take both away.)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RPC_TRANSPORTS", "uv")
# If a script has started pytest in the background, Ctrl-C would be ignored here and by all that is started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker of pytest-xdist takes a whole file because of its fixtures; of these files it takes a test at a time.
ONE_BY_ONE = ("test_launch.py", "test_checks.py", "test_mutants.py", "test_programs.py")


def pytest_ignore_collect(collection_path, config):
    """Keep `make quick` from the seconds of importing files that have no quick test."""
    if config.option.markexpr == "quick" and collection_path.suffix:
        return True if "pytest.mark.quick" not in collection_path.read_text(encoding="utf-8") else None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items):
    """Group the tests."""
    for item in items:
        if item.path.name not in ONE_BY_ONE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


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
