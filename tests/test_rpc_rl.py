"""Tutorial 6_5, first half."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks import rpc_rl as benchmark
from rpc_rl import main as rpc_rl
from tests.helpers import args_of, commands_in, listening, nothing_left, processes, running, script

# --- what it computes


@pytest.mark.slow
def test_benchmark(tmp_path):
    metrics = benchmark.main(["--world_size", "2", "--rounds", "4", "--min_steps", "1", "--output_dir", str(tmp_path)])
    assert [row["agent"] for row in metrics["rows"]] == ["plain", "fast, 2 RPCs a step", "fast", "ceiling"]
    assert metrics["rows"][3]["share_of_ceiling"] == 1
    assert all(len(speeds) == 4 and min(speeds) > 0 for speeds in metrics["steps_per_s"].values())


def test_defaults_can_solve(tmp_path):
    """The tutorial's cannot: 100 steps shared by the observers against a threshold of 475, and gamma 0.1."""
    args = args_of(rpc_rl, tmp_path)
    assert args.total_steps_per_episode // (args.world_size - 1) >= args.reward_threshold == 475
    assert args.gamma == 0.99


def read_all(screen, chunks):
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while chunk := os.read(screen, 4096):
            chunks.append(chunk)
    os.close(screen)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """The README's command twice, at the same time: one on a terminal, one trains, in large steps, until it balances for 30."""
    folder = tmp_path_factory.mktemp("side_by_side")
    command = script(*commands_in("README.md")[0][1:])
    short = [*command, "--max_episodes", "5", "--log_interval", "1", "--output_dir", "terminal"]
    longer = [*command, "--lr", "0.03", "--reward_threshold", "30", "--max_episodes", "150", "--output_dir", "out"]
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    chunks, addresses = [], set()
    reader = threading.Thread(target=read_all, args=(screen, chunks))
    reader.start()
    with running(short, folder, stdout=terminal, stderr=terminal) as one, running(longer, folder) as two:
        os.close(terminal)
        while two.poll() is None:  # from its beginning to its end, whenever that is on a busy machine
            session = processes(lambda process: os.getsid(process.pid) == two.pid)  # launcher, fork server, ranks
            addresses |= {address for address, _ in listening(process.pid for process in session)}
            time.sleep(1.0)
        out, err = two.communicate(timeout=60)
        one.communicate(timeout=60)
        for process in (one, two):
            nothing_left(process, folder)
    reader.join()
    return SimpleNamespace(folder=folder, returncodes=(one.returncode, two.returncode), out=out, err=err,
                           shown=b"".join(chunks), addresses=addresses)


def test_two_runs_at_once(side_by_side):
    """One shows a bar; one prints lines, and no warning; nobody else can reach them."""
    assert (side_by_side.returncodes, side_by_side.err) == ((0, 0), "")  # a normal run prints no warning
    assert side_by_side.addresses  # gloo and RPC do listen,
    assert side_by_side.addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}  # but only on loopback

    shown = side_by_side.shown
    assert b"5/5" in shown
    assert b"running reward" in shown
    assert b"[agent]" not in shown  # the bar instead of the lines
    assert b"not solved in 5 episodes" in shown.splitlines()[-2]


def test_it_learns_and_what_it_leaves(side_by_side):
    folder, lines = side_by_side.folder / "out", side_by_side.out.splitlines()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["solved"]
    assert metrics["running_reward"] > 30  # of an agent that draws without learning, it is about 15
    assert any(line.startswith("[agent] episode 10  last reward ") for line in lines)
    assert lines[-2].startswith(f"CartPole-v1 solved in {metrics['episodes']} episodes: running reward {metrics['running_reward']:.1f} ")
    ran_on = {"example", "world_size", "device", "backend", "seed", "wall_s", "torch", "python", "cpu_count"}
    assert ran_on < set(metrics)
    assert sorted(path.name for path in folder.iterdir()) == ["learning_curve.png", "metrics.json"]
