"""Tutorial 6_5, first half."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import cli
from common.launcher import launch
from common.session import rpc_options
from torch.distributed import rpc

from benchmarks import rpc_rl as benchmark
from rpc_rl import fast
from rpc_rl import main as rpc_rl
from tests.helpers import (
    bad,
    commands_in,
    end,
    listening,
    nothing_left,
    running,
    script,
)

MAIN = "rpc_rl/main.py"


def train(folder, *flags, program=rpc_rl):
    return program.main(["--output_dir", str(folder / "out"), *map(str, flags)])


# --- what it computes


def agent_without_rpc(gamma=0.99, truncation="bootstrap"):
    """An agent of which only the arithmetic is used; its log-probabilities are parameters."""
    agent = object.__new__(rpc_rl.Agent)
    agent.args = SimpleNamespace(gamma=gamma, truncation=truncation)
    agent.eps, agent.running_reward = torch.finfo(torch.float32).eps, 0.0
    return agent


def learned(rewards, terminated, **options):
    """What `finish_episode` would change each action's log-probability by."""
    agent = agent_without_rpc(**options)
    log_probs = torch.zeros(sum(map(len, rewards.values())), requires_grad=True)
    agent.rewards, agent.terminated = rewards, terminated
    agent.saved_log_probs = {1: list(log_probs)}
    agent.optimizer = torch.optim.SGD([log_probs], lr=1.0)
    reward = agent.finish_episode()
    assert reward == min(map(sum, rewards.values()))
    assert agent.running_reward == pytest.approx(0.05 * reward)
    return log_probs.detach()


def test_returns():
    returns = agent_without_rpc(gamma=0.5).returns
    assert returns([1, 1, 1], True) == [1.75, 1.5, 1.0]
    assert agent_without_rpc(gamma=0.0).returns([1, 2, 4], True) == [1, 2, 4]
    assert agent_without_rpc(gamma=1.0).returns([1, 2, 4], True) == [7, 6, 4]
    assert returns([1, 1], False) == [2.0, 2.0]
    assert agent_without_rpc(gamma=0.5, truncation="terminal").returns([1, 1], False) == [1.5, 1.0]


def test_returns_do_not_leak_between_observers():
    """The tutorial runs one R over the joined rewards: the first observer's last step would be worth 3, not 1."""
    changes = learned({1: [1.0], 2: [1.0, 1.0]}, {1: True, 2: True}, gamma=1.0)
    returns = torch.tensor([1.0, 2.0, 1.0])
    torch.testing.assert_close(changes, (returns - returns.mean()) / returns.std(correction=0))


def test_a_truncated_episode_has_not_terminated():
    """Perfect balance up to the limit must not look like a failure near its end."""
    changes = {truncation: learned({1: [1.0] * 500, 2: [1.0] * 500}, {1: False, 2: False}, truncation=truncation)
               for truncation in ("bootstrap", "terminal")}
    assert changes["bootstrap"].abs().max() < 1e-3  # nothing to learn from
    assert changes["terminal"][499] < -2  # the tutorial: the last, perfect step is the worst of all


def test_one_step_gives_no_nan():
    assert torch.isfinite(learned({1: [1.0]}, {1: True})).all()


def test_diverged(tmp_path, capfd):
    """A loss that is not finite is said in words, and metrics.json has no NaN."""
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, "--lr", "1e30", "--max_episodes", "9")
    assert stop.value.code == 1
    err = capfd.readouterr().err.strip()
    assert re.fullmatch(r"error: rank 0 \(agent\) has a \w+ of \S+ (after|in) an .*: training has diverged; give a smaller "
                        r"--lr; stopped 2 other processes", err)
    assert not (tmp_path / "out/metrics.json").exists()


def test_the_tutorials_agent_trains(tmp_path):
    metrics = train(tmp_path, "--max_episodes", "3")
    assert metrics["episodes"] == 3
    assert metrics["env_steps"] > sum(metrics["rewards"])


def test_benchmark(tmp_path):
    metrics = benchmark.main(["--world_size", "2", "--rounds", "4", "--min_steps", "1", "--output_dir", str(tmp_path)])
    assert [row["agent"] for row in metrics["rows"]] == ["plain", "fast, 2 RPCs a step", "fast", "ceiling"]
    assert metrics["rows"][3]["share_of_ceiling"] == 1
    assert all(len(speeds) == 4 and min(speeds) > 0 for speeds in metrics["steps_per_s"].values())


def observers_start(rank, world_size, args):
    rpc.init_rpc(rpc_rl.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    started = None
    if rank == 0:
        agent = fast.FastAgent(world_size, args)
        agent.run_episode()
        names = [rref.owner_name() for rref in agent.ob_rrefs.values()]
        started = {"names": names, "first_states": [states[0] for states in agent.states.values()]}
    rpc.shutdown()
    return started


def test_observers_differ(tmp_path):
    """The tutorial seeds all environments alike, and its OBSERVER_NAME is the same for all."""
    args = rpc_rl.build_parser().parse_args(["--world_size", "3", "--output_dir", str(tmp_path)])
    result = launch(observers_start, args, rpc_rl.role_name)
    assert result["names"] == ["observer1", "observer2"]
    first, second = result["first_states"]
    assert first != second


def test_defaults_can_solve(tmp_path):
    """The tutorial's cannot: 100 steps shared by the observers against a threshold of 475, and gamma 0.1."""
    args = rpc_rl.build_parser().parse_args(["--output_dir", str(tmp_path)])
    assert args.total_steps_per_episode // (args.world_size - 1) >= args.reward_threshold == 475
    assert args.gamma == 0.99


def session_of(process):
    """The processes of a run: launcher, fork server and ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # no process, or one that has just ended
            if os.getsid(int(entry.name)) == process.pid:
                found.append(int(entry.name))
    return found


def read_all(screen, chunks):
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while chunk := os.read(screen, 4096):
            chunks.append(chunk)
    os.close(screen)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """The README's command twice, at the same time: one on a terminal, one trains until it balances for 30 steps."""
    folder = tmp_path_factory.mktemp("side_by_side")
    command = script(*commands_in("README.md")[0][1:])
    short = [*command, "--max_episodes", "20", "--log_interval", "1", "--output_dir", "terminal"]
    longer = [*command, "--reward_threshold", "30", "--max_episodes", "150", "--output_dir", "out"]
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    chunks, addresses = [], set()
    reader = threading.Thread(target=read_all, args=(screen, chunks))
    reader.start()
    with running(short, folder, stdout=terminal, stderr=terminal) as one, running(longer, folder) as two:
        os.close(terminal)
        while two.poll() is None:  # from its beginning to its end, whenever that is on a busy machine
            with contextlib.suppress(OSError):  # a process that has just ended
                addresses.update(listening(session_of(two)))
            time.sleep(0.1)
        out, err = end(two, within_s=60)
        end(one, within_s=60)
        for process in (one, two):
            nothing_left(process, folder)
    reader.join()
    return SimpleNamespace(folder=folder, returncodes=(one.returncode, two.returncode), out=out, err=err,
                           shown=b"".join(chunks), addresses=addresses)


@pytest.fixture(scope="module")
def trained(side_by_side):
    """The training until the running reward is above 30: its folder, its metrics, the lines of its output."""
    assert side_by_side.returncodes[1] == 0, side_by_side.err
    folder = side_by_side.folder / "out"
    return folder, json.loads((folder / "metrics.json").read_text()), side_by_side.out.splitlines()


def test_two_runs_at_once(side_by_side):
    """One shows a bar; one prints lines, and no warning; nobody else can reach them."""
    assert (side_by_side.returncodes, side_by_side.err) == ((0, 0), "")  # a normal run prints no warning
    ipv6 = {"00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert side_by_side.addresses  # gloo and RPC do listen,
    assert side_by_side.addresses <= {"0100007F", *ipv6}  # but only on loopback

    shown = side_by_side.shown
    assert b"20/20" in shown
    assert b"running reward" in shown
    assert b"[agent]" not in shown  # the bar instead of the lines
    assert b"not solved in 20 episodes" in shown.splitlines()[-2]


def test_it_learns(trained):
    _, metrics, _ = trained
    assert metrics["solved"]
    assert metrics["episodes"] == len(metrics["rewards"]) == len(metrics["running_rewards"])
    assert metrics["running_reward"] == metrics["running_rewards"][-1] > 30
    assert sum(metrics["rewards"][-5:]) > 2 * sum(metrics["rewards"][:5])
    assert metrics["env_steps"] > sum(metrics["rewards"])  # of the worst observer only
    expected = 0.0
    for reward in metrics["rewards"]:
        expected = 0.05 * reward + 0.95 * expected
    assert metrics["running_reward"] == pytest.approx(expected)


def test_what_a_run_leaves(trained):
    folder, metrics, lines = trained
    assert any(line.startswith("[agent] episode 10  last reward ") for line in lines)
    assert lines[-2].startswith(f"CartPole-v1 solved in {metrics['episodes']} episodes: running reward 3")
    ran_on = {"example", "world_size", "device", "backend", "seed", "wall_s", "torch", "python", "cpu_count"}
    assert ran_on < set(metrics)
    width, height = struct.unpack(">II", (folder / "learning_curve.png").read_bytes()[16:24])
    assert min(width, height) > 300
    assert sorted(path.name for path in folder.iterdir()) == ["learning_curve.png", "metrics.json"]


def test_resume_continues_as_if_never_stopped(tmp_path):
    whole = train(tmp_path, "--max_episodes", 12, program=fast)
    saved = tmp_path / "run.pt"
    train(tmp_path, "--max_episodes", 3, "--checkpoint", saved, program=fast)
    resumed = train(tmp_path, "--max_episodes", 12, "--checkpoint", saved, "--resume", program=fast)
    assert resumed["rewards"] == whole["rewards"]
    assert resumed["running_rewards"] == whole["running_rewards"]
    assert torch.load(saved, weights_only=True)["history"]["episodes"] == 12


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    *(bad("--world_size", value, says=("--world_size", value, "at least 2")) for value in ("0", "1", "-3", "two")),
    *(bad("--gamma", value, says=("--gamma", value, "at most 1")) for value in ("1.5", "nan", "-0.1")),
    *(bad("--lr", value, says=("--lr", value, "above 0")) for value in ("0", "inf")),
    bad("--lr", "1e38", says=("--lr 1e+38", "at most 1e+30")),
    bad("--world_size", "12", says=("--reward_threshold 475", "454 steps", "--world_size 12", "5000")),
    bad("--reward_threshold", "600", says=("--reward_threshold 600", "500 steps")),
    bad("--rank", "3", "--world_size", "3", "--master_addr", "localhost", says=("--rank", "3", "below")),
    bad("--rank", "1", says=("--rank", "1", "--master_addr")),
    bad("--master_addr", "localhost", says=("--master_addr", "localhost", "--rank")),
    *(bad("--rank", "1", "--master_addr", "localhost", "--master_port", port, says=("--master_port", port, "65535"))
      for port in ("0", "99999", "abc")),
    bad("--output_dir", "/dev/null", says=("--output_dir", "/dev/null", "written")),
    bad("--output_dir", "/proc/1/nowhere", says=("--output_dir", "/proc/1/nowhere", "written")),
    bad("--max_episodes", "0", says=("--max_episodes", "0", "at least 1")),
    bad("--timeout", "0", says=("--timeout", "'0'", "at least 0.01")),
    bad("--seed", "x", says=("--seed", "x", "whole number")),
    bad("--learning_rate", "1", says=("--learning_rate",)),
    bad("--max", "1", says=("--max",)),
])
def test_bad_input(flags, says, refused):
    refused(rpc_rl.main, flags, says)


@pytest.mark.parametrize(("flags", "says"), [
    bad("--checkpoint", "/dev/null/run.pt", says=("--checkpoint", "/dev/null/run.pt", "written")),
    bad("--resume", says=("--resume", "--checkpoint")),
    bad("--checkpoint", "/tmp/none/run.pt", "--resume", says=("--checkpoint", "/tmp/none/run.pt", "existing")),
])
def test_bad_checkpoint(flags, says, refused):
    refused(fast.main, flags, says)


def test_bad_input_leaves_no_traceback(capfd):
    with pytest.raises(SystemExit) as stop:
        rpc_rl.main(["--gamma", "1.5"])
    assert stop.value.code == 2
    line = "error: argument --gamma: '1.5' is not accepted; give a number at least 0 and at most 1\n"
    assert capfd.readouterr() == ("", line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so --device cuda is good input")
def test_cuda_without_gpu(capfd):
    with pytest.raises(SystemExit) as stop:
        rpc_rl.main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "--device cuda needs a GPU" in capfd.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_check_on_a_gpu():
    differences = rpc_rl.main(["--check", "--device", "cuda"])
    assert differences["weights"] < 1e-9


@pytest.mark.parametrize(("kind", "flags"), [
    *((kind, flags) for kind in ("truncated", "foreign", "another example", "text") for flags in ([], ["--resume"])),
    ("other world", ["--resume"]),
])
def test_not_a_checkpoint(kind, flags, tmp_path, capfd):
    path = tmp_path / "run.pt"
    state = {"generators": {1: 0, 2: 0, 3: 0}, "padding": torch.zeros(10_000)}
    example = {"foreign": {}, "another example": {"example": "param_server"}}.get(kind, {"example": "rpc_rl_fast"})
    torch.save({**example, **state}, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:20_000])
    elif kind == "text":
        path.write_text("lr = 0.01\n")
    before = path.read_bytes()
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, "--checkpoint", path, *flags, program=fast)
    assert stop.value.code == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert ("--world_size" if kind == "other world" else str(path)) in err
    assert path.read_bytes() == before


def test_help_tells_every_default(capsys):
    with pytest.raises(SystemExit) as stop:
        rpc_rl.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    actions = rpc_rl.build_parser()._actions[1:]  # not --help itself
    assert text.count("(default: ") == len(actions)
    assert isinstance(rpc_rl.build_parser(), cli.Parser)
