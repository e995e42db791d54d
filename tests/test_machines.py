"""Two network namespaces as two machines: a run across them, a cut cable, and a rank 0 that is lost."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import zlib
from types import SimpleNamespace

import pytest

from tests.helpers import errors_of, nothing_left, running, script, torchrun

slow = pytest.mark.slow
TIMEOUT_S = 8
LIMIT_S = 100
RL, TRAIN = "rpc_rl/main.py", "p2p_collectives/train.py"
FOREVER = {RL: "--max_episodes 100000 --reward_threshold 499 --log_interval 1", TRAIN: "--epochs 100000"}
ROLES = {RL: ["agent", "observer1"], TRAIN: ["rank0", "rank1"]}
PROGRAMS = {  # script: (ranks on each machine, flags of a short run)
    RL: ((1, 1), "--max_episodes 2"),
    "batch_rl/main.py": ((1, 1), "--observers 1 --num_episode 1 --num_steps 20"),
    "ddp_rpc_hybrid/main.py": ((2, 2), "--epochs 2"),
    "param_server/main.py": ((1, 1), "--epochs 1"),
    "rpc_rnn/main.py": ((1, 1), "--epochs 1"),
    "model_parallel_resnet/main.py": ((2, 1), "--arch resnet18 --image_size 64 --num_splits 2 --num_batches 1"),
    "ddp_basic/elastic.py": ((1, 1), "--epochs 1"),
    TRAIN: ((1, 1), "--epochs 1"),
    "p2p_collectives/shared_memory.py": ((2, 2), "--sizes 65536 --repeats 1"),
    "transformer_parallel/mesh.py": ((2, 2), "--steps 1 --ways data tensor data_pipeline torch"),
}
OFTEN = [(RL, "torchrun"), (TRAIN, "torchrun"), ("batch_rl/main.py", "manual")]


def ip(*words):
    return subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def machines():
    """`names` and `addresses` of two machines, and `cable("up" or "down")` for the cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need root and `ip` (Debian's iproute2)")
    names = [f"machine{number}-{os.getpid()}" for number in (1, 2)]
    addresses = ["10.123.45.1", "10.123.45.2"]

    def cable(state):
        for name in names:
            ip("-n", name, "link", "set", "eth0", state)
        while state == "up" and not all("state UP" in ip("-n", name, "link", "show", "eth0") for name in names):
            time.sleep(0.01)  # until then libuv, and so RPC, sees no network card

    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
            cable("up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here ({error.stderr.strip()})")
        yield SimpleNamespace(names=names, addresses=addresses, cable=cable)


@pytest.fixture
def port(request):
    """A port for each test: no other program listens on the machines."""
    return 20000 + zlib.crc32(request.node.name.encode()) % 10000


def commands(machines, mode, port, path, ranks, flags):
    """The commands of one run: with torchrun one on each machine, else one for each rank."""
    flags = [*map(str, flags), "--output_dir"]
    where = ["--master_addr", machines.addresses[0], "--master_port", port]
    if mode == "torchrun":
        return [["ip", "netns", "exec", name, *torchrun(
                    count, path, *flags, f"out{node}", options=["--nnodes", 2, "--node_rank", node, *where])]
                for node, (name, count) in enumerate(zip(machines.names, ranks, strict=True))]
    homes = [name for name, count in zip(machines.names, ranks, strict=True) for _ in range(count)]
    return [["ip", "netns", "exec", name, *script(
                path, *flags, f"out{rank}", "--world_size", len(homes), "--rank", rank, *where)]
            for rank, name in enumerate(homes)]


@pytest.mark.parametrize(("path", "mode"), [
    *OFTEN, *(pytest.param(path, mode, marks=slow) for path in PROGRAMS for mode in ("torchrun", "manual")
              if (path, mode) not in OFTEN)])
def test_a_run(path, mode, machines, port, tmp_path):
    """One machine has the metrics, of all ranks, and says where; no rank complains."""
    ranks, flags = PROGRAMS[path]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path))
                for command in commands(machines, mode, port, path, ranks, flags.split())]
        ended = [run.communicate(timeout=LIMIT_S) for run in runs]
        said = "\n".join(out + err for out, err in ended)
        assert [run.returncode for run in runs] == [0] * len(runs), said
        assert said.count("results: ") == 1, said
        metrics = [json.loads(written.read_text()) for written in tmp_path.glob("out*/**/metrics.json")]
        assert [of_run["world_size"] for of_run in metrics] == [sum(ranks)]
        if mode == "manual":
            # C++ of torch says that it finds no name for these addresses: there is no name server here.
            lines = [line for _, err in ended for line in err.splitlines() if "hostname of the client" not in line]
            assert lines == []
        nothing_left(runs[0], tmp_path, *runs[1:])


@contextlib.contextmanager
def forever(machines, mode, port, path, folder):
    """A run that has begun, one rank on each machine: (that of rank 0, that of rank 1)."""
    here, there = commands(machines, mode, port, path, (1, 1), [*FOREVER[path].split(), "--timeout", TIMEOUT_S])
    with running(there, folder) as second, running(here, folder, until="epi|epo") as first:
        yield first, second


def ends(run, path, rank, says):
    """Assert that a command ends with status 1 and one line about a rank."""
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1, err
    said, = errors_of(err)
    assert re.fullmatch(rf"error: rank {rank} \({ROLES[path][rank]}\) {says}", said), err


SILENCE = r"has not answered for \d+ s"
FAULTS = "a cut cable", "rank 0 is lost", "Ctrl-C on one machine"
EACH_DAY = [("a cut cable", RL, "manual"), ("a cut cable", TRAIN, "torchrun"), ("rank 0 is lost", RL, "manual"),
            ("rank 0 is lost", TRAIN, "torchrun"), ("Ctrl-C on one machine", TRAIN, "manual")]
EACH_NIGHT = [row for row in itertools.product(FAULTS, FOREVER, ("manual", "torchrun")) if row not in EACH_DAY]


@pytest.mark.parametrize(("fault", "path", "mode"), [*EACH_DAY, *(pytest.param(*row, marks=slow) for row in EACH_NIGHT)])
def test_a_fault(fault, path, mode, machines, port, tmp_path):
    """Both machines end, and each that lives names the rank that it cannot reach; torchrun may be the one that says it."""
    with forever(machines, mode, port, path, tmp_path) as (here, there):
        if fault == "a cut cable":
            try:
                machines.cable("down")
                ends(here, path, 1, SILENCE)
                ends(there, path, 0, SILENCE)
            finally:
                machines.cable("up")
        elif fault == "rank 0 is lost":
            for pid in ip("netns", "pids", machines.names[0]).split():
                os.kill(int(pid), signal.SIGKILL)
            here.wait()
            if mode == "manual":
                ends(there, path, 0, f"(is gone|{SILENCE})")
        else:
            os.killpg(there.pid, signal.SIGINT)
            ends(here, path, 1, "was interrupted" if mode == "manual" else f"(was interrupted|{SILENCE})")
        there.communicate(timeout=LIMIT_S)
        assert there.returncode != 0
        nothing_left(here, tmp_path, there)
