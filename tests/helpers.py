"""Start scripts as a user does, find their processes, and see that nothing of them is left."""

import contextlib
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 200  # for one command; a test's own limit is in pyproject.toml
# What happens in a moment: so long, because the machine may stand still, or be busy with other tests.
SOON_S = 45


def slow_but(rows, *often):
    """The rows of a table, marked slow except those whose first value is one of `often`."""
    def values(row):
        return row if isinstance(row, tuple) else (row,)

    return [row if str(values(row)[0]) in often else pytest.param(*values(row), marks=pytest.mark.slow) for row in rows]


def script(*arguments):
    """The command line of a script of this repository, from any working directory."""
    path, *rest = map(str, arguments)
    return [sys.executable, str(ROOT / path), *rest]


def torchrun(processes, *arguments, options=("--standalone",)):
    """The same under torchrun, by default on this machine alone."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *map(str, options), "--nproc_per_node", str(processes)]
    return launcher + script(*arguments)[1:]


def commands(way, ranks, path, *flags):
    """The command lines that start a script: "local", under "torchrun", or "manual", with one for each rank."""
    if way == "torchrun":
        return [torchrun(ranks, path, *flags)]
    if way == "local":
        return [script(path, *flags)]
    where = ["--master_addr", "localhost", "--master_port", unused_port()]
    return [script(path, *flags, "--world_size", ranks, "--rank", rank, *where) for rank in range(ranks)]


def args_of(program, folder, *flags):
    """The flags of a program, parsed; `folder` is for its output."""
    return program.build_parser().parse_args(["--output_dir", str(folder), *map(str, flags)])


def commands_in(readme):
    """The commands of a README's code blocks, continued lines joined, each as a list."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]


def run(command, folder, env=None):
    """Run a command to its end in `folder`; `env` in place of this environment."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=LIMIT_S)


def results_of(command, folder):
    """Run a program that must succeed, and print no warning; where its results are, and its lines but the one that says so."""
    result = run(command, folder)
    assert (result.returncode, result.stderr) == (0, "")
    *lines, last = result.stdout.splitlines()
    return folder / last.removeprefix("results: "), lines


@contextlib.contextmanager
def running(command, folder, until=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=()):
    """Start a command in a session of its own, wait until a line of its output matches `until`, and yield it.

    Its temporary files go to `folder/tmp`, so that a test can see whether any is left. `env` is added to the
    environment.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    process = subprocess.Popen(
        command, cwd=folder, stdout=stdout, stderr=stderr, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **dict(env)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )
    try:
        while until is not None:
            line = process.stdout.readline()
            assert line, f"ended before {until!r}: {process.stderr.read()}"
            if re.search(until, line):
                break
        yield process
    finally:
        for pid in descendants(process.pid):  # torchrun's ranks have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(pid):
    """Process ids of the children of a process, oldest first, whichever of its threads has started them."""
    found = []
    for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, of_thread.read_text().split())
    return sorted(found)


def descendants(pid):
    """Process ids of the children of a process, and of theirs."""
    return [pid for child in children(pid) for pid in (child, *descendants(child))]


def command_of(pid):
    """The command line of a process; "" if it has just ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def processes(condition):
    """Those that live and for which `condition(psutil.Process)` holds; what ends meanwhile is not among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if condition(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def all_end(condition):
    """Wait until none lives for which the condition holds; see `processes`."""
    deadline = time.monotonic() + SOON_S
    while left := processes(condition):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def nothing_left(process, folder, *beside):
    """Assert that no process of the runs' sessions lives and that their temporary folder is empty.

    `beside`: further runs in that folder, which may end a moment later.
    """
    sessions = {run.pid for run in (process, *beside)}
    all_end(lambda process: os.getsid(process.pid) in sessions)  # a fork server without its launcher imports to the end first
    theirs = ("torchinductor_", "torchelastic_")  # a cache of torch, and the logs of torchrun
    ours = [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith(theirs)]
    assert ours == [], ours
    assert [path for path in folder.rglob(".*.tmp")] == []
    all_end(lambda process: process.cwd() == str(folder))  # beside a rank of torchrun, in its session


def unused_port():
    """A port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_mnist(folder, counts):
    """Write so many images and labels as MNIST's files, unpacked; return their folder."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in counts.items():
        pixels = np.arange(count * 28 * 28, dtype=np.uint8).tobytes()
        labels = (np.arange(count, dtype=np.uint8) % 10).tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    return raw


def errors_of(stderr):
    """The lines of a run that say what has ended it."""
    return [line for line in stderr.splitlines() if line.startswith("error:")]
