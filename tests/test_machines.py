"""Two network namespaces as two machines: what runs on one machine runs across them, and a cut cable ends it."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pytest

from tests.fault_table import OF_A_MACHINE
from tests.helpers import ENDS_S, SOON_S, errors_of, nothing_left, running, script, torchrun
from tests.two_machines import Weather, ip, two_machines, why_not

TIMEOUT_S = 8
in_turns = pytest.mark.xdist_group("machines in turns")  # beside many others, a healthy rank would be silent, too


@pytest.fixture(scope="module")
def machines():
    """`names` and `addresses` of two machines with a cable between them, and `cut` and `mend` for it."""
    if reason := why_not():
        pytest.skip(reason)
    with two_machines() as both:
        names, addresses = zip(*both, strict=True)

        def cable(state):
            for name in names:
                ip("-n", name, "link", "set", "eth0", state)

        yield SimpleNamespace(names=names, addresses=addresses, cut=lambda: cable("down"), mend=lambda: cable("up"))


PROGRAMS = {  # script: (ranks on each machine, flags)
    "rpc_rl/main.py": ((1, 1), "--max_episodes 2"),
    "batch_rl/main.py": ((1, 1), "--num_episode 1 --num_steps 20"),
    "ddp_rpc_hybrid/main.py": ((2, 2), "--epochs 2"),
    "ddp_rpc_hybrid/sharded_table.py": ((1, 1), "--epochs 2"),
    **{f"param_server/{name}.py": ((1, 1), "--epochs 1") for name in ("main", "async_server")},
    "param_server/batch_update.py": ((1, 1), "--arch resnet18 --image_size 32 --num_updates 2"),
    "rpc_rnn/main.py": ((1, 1), "--epochs 1"),
    "model_parallel_resnet/main.py": ((2, 1), "--arch resnet18 --image_size 64 --num_splits 2 --num_batches 1"),
    "model_parallel_resnet/schedules.py": ((1, 1), "--arch resnet18 --image_size 64 --num_splits 2 --num_batches 1"),
    "ddp_basic/main.py": ((1, 1), ""),
    "ddp_basic/skew.py": ((1, 1), "--delay 0"),
    "ddp_basic/elastic.py": ((1, 1), "--epochs 1"),
    "ddp_basic/pitfalls.py": ((1, 1), "--kind batchnorm --mended"),
    "p2p_collectives/main.py": ((1, 1), ""),
    **{f"p2p_collectives/{name}.py": ((1, 1), "--epochs 1") for name in ("train", "train_flat", "train_ddp")},
    "p2p_collectives/ring_allreduce.py": ((1, 1), "--sizes 65536 --repeats 1"),
    "p2p_collectives/shared_memory.py": ((2, 2), "--sizes 65536 --repeats 1"),
    "p2p_collectives/init_methods.py": ((1, 1), "--method env"),
    **{f"transformer_parallel/{name}.py": ((1, 1), "--steps 1") for name in (
        "main", "zero", "tensor_parallel", "ring_attention", "experts", "recompute", "pipeline")},
    "transformer_parallel/mesh.py": ((2, 2), "--steps 1 --ways data tensor data_tensor data_pipeline torch"),
}
FOR_EVER = {"rpc_rl.main": "--max_episodes 100000 --reward_threshold 499 --log_interval 1",
            "p2p_collectives.train": "--epochs 100000 --global_batch_size 512"}
ROLES = {"rpc_rl.main": ["agent", "observer1"], "p2p_collectives.train": ["rank0", "rank1"]}
BY_RANK = ["batch_rl/main.py", "ddp_rpc_hybrid/main.py", "model_parallel_resnet/main.py"]


def on_machines(machines, path, way, port, *flags, ranks=None):
    """The commands of one run: with torchrun one on each machine, else one for each rank."""
    of_path, more = PROGRAMS.get(path, ((1, 1), ""))
    ranks = ranks or of_path
    flags = [*(more.split() if not flags else []), *flags]
    if way == "torchrun":
        return [["ip", "netns", "exec", name, *torchrun(count, path, *flags, "--output_dir", f"out{node}", options=[
                 "--nnodes", len(ranks), "--node_rank", node, "--master_addr", machines.addresses[0],
                 "--master_port", port])]
                for node, (name, count) in enumerate(zip(machines.names, ranks, strict=True))]
    homes = [name for name, count in zip(machines.names, ranks, strict=True) for _ in range(count)]
    if path == "batch_rl/main.py":
        flags += ["--observers", len(homes) - 1]
    return [["ip", "netns", "exec", name, *script(path, *flags, "--world_size", len(homes), "--rank", rank,
                                                  "--master_addr", machines.addresses[0], "--master_port", port,
                                                  "--output_dir", f"out{rank}")] for rank, name in enumerate(homes)]


@pytest.fixture
def port(request):
    """Another one for each test: on the machines nobody else listens."""
    return 20000 + zlib.crc32(request.node.name.encode()) % 10000


@pytest.mark.parametrize(("path", "way"), [
    *((path, "torchrun") for path in PROGRAMS), *((path, "manual") for path in BY_RANK)])
def test_across_machines(path, way, machines, port, tmp_path):
    """One machine has the metrics, of all ranks, and says where; none complains of anything."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path))
                for command in on_machines(machines, path, way, port)]
        ended = [run.communicate(timeout=90) for run in runs]
        said = "\n".join(out + err for out, err in ended)
        assert [run.returncode for run in runs] == [0] * len(runs), said
        assert said.count("results: ") == 1, said
        metrics = [json.loads(written.read_text()) for written in tmp_path.glob("out*/**/metrics.json")]
        assert [of_run["world_size"] for of_run in metrics] == [sum(PROGRAMS[path][0])]
        if way == "manual":
            # torch's C++ says that it finds no name for these addresses: there is no name server here.
            lines = [line for _, err in ended for line in err.splitlines() if "hostname of the client" not in line]
            assert lines == []
        nothing_left(runs[0], tmp_path, *runs[1:])


def test_a_checkpoint_that_one_machine_does_not_see(machines, port, tmp_path):
    """Each rank has a folder of its own here."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(running(command, tmp_path)) for command in on_machines(
            machines, "transformer_parallel/mesh.py", "manual", port, "--ways", "moved", "--steps", "2", ranks=(1, 1))]
        for run in runs:
            _, err = run.communicate(timeout=90)
            assert run.returncode == 1, err
            assert "error: rank 1 (rank1) finds no checkpoint of rank 0 in out1/mesh.moved: --ways moved needs an" in err, err
        nothing_left(runs[0], tmp_path, *runs[1:])


def by_a_machine(fault, way, rank, roles):
    """The line that is expected on the other machine, as a pattern."""
    stopped = "" if way == "torchrun" else "; stopped 1 other process"
    return rf"error: rank {rank} \({roles[rank]}\) {OF_A_MACHINE[fault].expected(way)}{stopped}"


@pytest.mark.parametrize("way", ["torchrun", "manual"])
def test_interrupted_on_one_machine(way, machines, port, tmp_path):
    """The other one ends, too, and says who was."""
    commands = on_machines(machines, "p2p_collectives/train.py", way, port, "--epochs", 100_000)
    with running(commands[1], tmp_path) as there, running(commands[0], tmp_path, until="epo") as here:
        os.killpg(there.pid, signal.SIGINT)
        _, err = here.communicate(timeout=ENDS_S)
        assert (here.returncode, len(errors_of(err))) == (1, 1), err
        assert re.fullmatch(by_a_machine("interrupted", way, 1, ["rank0", "rank1"]), *errors_of(err)), err
        there.communicate(timeout=SOON_S)
        nothing_left(here, tmp_path, there)


@in_turns
@pytest.mark.parametrize("way", ["torchrun", "manual"])
@pytest.mark.parametrize("lesson", FOR_EVER)
def test_cut_cable(lesson, way, machines, port, tmp_path):
    """Both machines end, in time, and name the role that they cannot reach; so do the passive roles."""
    commands = on_machines(machines, f"{lesson.replace('.', '/')}.py", way, port, *FOR_EVER[lesson].split(), "--timeout", TIMEOUT_S)
    try:
        with running(commands[1], tmp_path) as there, running(commands[0], tmp_path, until="epi|epo") as here:
            machines.cut()
            cut = time.monotonic()
            ended = [run.communicate(timeout=TIMEOUT_S + 60) for run in (here, there)]
            # torchrun's agent looks for its store on the other machine for 5 s more before it ends.
            assert time.monotonic() - cut < TIMEOUT_S + ENDS_S + (10 if way == "torchrun" else 0)
            for run, (_, err), unreachable in zip((here, there), ended, (1, 0), strict=True):
                assert run.returncode == 1
                assert len(errors_of(err)) == 1, err
                assert re.fullmatch(by_a_machine("cable cut", way, unreachable, ROLES[lesson]), *errors_of(err)), err
            nothing_left(here, tmp_path, there)
    finally:
        machines.mend()


QUESTION = """
import socket, time
started = time.monotonic()
print(socket.socket().connect_ex(("{address}", 29500)), time.monotonic() - started)
"""


@in_turns
def test_a_long_cable():
    """It adds what it says to each question and its answer, and nothing of the machines is left."""
    if reason := why_not(round_trip_s=0.2):
        pytest.skip(reason)
    with two_machines(round_trip_s=0.2) as (here, there):
        asked = subprocess.run(there.command(sys.executable, "-c", QUESTION.format(address=here.address)),
                               stdout=subprocess.PIPE, text=True, check=True, timeout=30)
    error, seconds = asked.stdout.split()  # nobody listens there, and that answer has come over the cable
    assert int(error) == errno.ECONNREFUSED
    assert float(seconds) >= 0.2  # of what it takes besides, nothing is asserted
    left = ip("netns", "list").stdout
    assert here.name not in left
    assert there.name not in left


# --- bad cables

SLOWED = {"rpc_rl.main": "rpc_rl.main:Agent.finish_episode", "p2p_collectives.train": "p2p_collectives.train:average_gradients"}


@pytest.fixture(scope="module")
def far():
    """Two machines with a long cable, and its weather."""
    if reason := why_not(round_trip_s=0.001):
        pytest.skip(reason)
    weather = Weather()
    with two_machines(0.001, weather) as both:
        names, addresses = zip(*both, strict=True)
        yield SimpleNamespace(names=names, addresses=addresses, weather=weather)


@pytest.fixture
def weather(far):
    """Fair at the beginning and at the end."""
    yield far.weather
    far.weather.lost, far.weather.held_until = [0.0, 0.0], 0.0


def slowed(machines, lesson, way, port, timeout_s):
    """The commands of a run that never ends, one on each machine."""
    return on_machines(machines, "tests/sabotage.py", way, port, lesson, 1, "-", SLOWED[lesson],
                       *FOR_EVER[lesson].split(), "--timeout", timeout_s)


@in_turns
@pytest.mark.parametrize(("lesson", "way"), [("p2p_collectives.train", "manual"), ("rpc_rl.main", "torchrun")])
def test_a_bad_cable_is_survived(lesson, way, far, weather, port, tmp_path):
    """5% of the packets lost, nothing for 4 s, a cut for 3 s: all shorter than --timeout."""
    commands = slowed(far, lesson, way, port, timeout_s=60)
    with running(commands[1], tmp_path) as there, running(commands[0], tmp_path, until="epi|epo") as here:
        def goes_on(lines):
            for _ in range(lines):
                assert here.stdout.readline(), here.stderr.read()

        weather.lost = [0.05, 0.05]
        goes_on(2)
        weather.held_until = time.monotonic() + 4
        time.sleep(4)
        goes_on(2)
        weather.lost = [1.0, 1.0]
        time.sleep(3)
        weather.lost = [0.0, 0.0]
        goes_on(2)
        weather.lost = [0.3, 0.3]  # TCP needs seconds for a packet; nobody is taken for dead
        time.sleep(4)
        assert here.poll() is None, here.stderr.read()
        assert there.poll() is None, there.stderr.read()
        weather.lost = [0.0, 0.0]
        goes_on(2)
        here.send_signal(signal.SIGTERM)
        _, err = here.communicate(timeout=SOON_S)
        _, err_there = there.communicate(timeout=SOON_S)
        # Which line it is depends on what the bad cable still holds back.
        assert "interrupted" in err or way == "torchrun"
        assert len(errors_of(err_there)) == 1, err_there
        nothing_left(here, tmp_path, there)


@in_turns
@pytest.mark.parametrize(("lesson", "way", "lost"), [
    ("p2p_collectives.train", "manual", (1.0, 0.0)), ("rpc_rl.main", "manual", (0.0, 1.0)),
    ("rpc_rl.main", "torchrun", (1.0, 0.0))])
def test_a_cable_that_carries_one_way(lesson, way, lost, far, weather, port, tmp_path):
    """Both machines end in time, each with one line that names the other one's rank."""
    commands = slowed(far, lesson, way, port, TIMEOUT_S)
    with running(commands[1], tmp_path) as there, running(commands[0], tmp_path, until="epi|epo") as here:
        time.sleep(1.5)
        weather.lost = list(lost)
        ended = [run.communicate(timeout=TIMEOUT_S + SOON_S) for run in (here, there)]
        for run, (_, err), other in zip((here, there), ended, (1, 0), strict=True):
            assert run.returncode == 1
            errors = errors_of(err)
            assert len(errors) == 1, err
            assert re.match(rf"error: rank {other} \({ROLES[lesson][other]}\) cannot be reached: ", errors[0]), err
        nothing_left(here, tmp_path, there)
