"""Tutorial 6_8, second half."""

import json
import re
import struct
import threading

import pytest
import torch
from torch.futures import Future

from batch_rl import main as batch_rl
from tests.helpers import bad, commands_in, end, run, running, script, torchrun

MAIN = "batch_rl/main.py"


class AgentAlone(batch_rl.Agent):
    """Without observers and RPC: what they would call is called here."""

    def __init__(self, observers):
        self.device, self.lock = torch.device("cpu"), threading.Lock()
        self.policy = batch_rl.Policy()
        self.ob_rrefs = [None] * observers
        self.saved_log_probs, self.states, self.future_actions = [], {}, Future()


@pytest.fixture
def agent(monkeypatch):
    agent = AgentAlone(3)
    monkeypatch.setattr(batch_rl, "_agent", agent)
    return agent


# --- pieces


def test_the_last_request_completes_all(agent, monkeypatch):
    def act(states):
        assert states == [[[0.0] * 4], [[1.0] * 4], [[2.0] * 4]]  # in the order of the observers
        return [["left"], ["right"], ["stay"]], torch.zeros(3, 1)

    monkeypatch.setattr(agent, "act", act)
    select = batch_rl.Agent.select_action_batch
    for _ in range(2):  # and all over again
        third, first = select(2, [[2.0] * 4]), select(0, [[0.0] * 4])
        assert not third.done()
        assert not first.done()
        second = select(1, [[1.0] * 4])
        assert [future.wait() for future in (first, second, third)] == [["left"], ["right"], ["stay"]]
    assert len(agent.saved_log_probs) == 2


def test_states_may_change_after_they_were_sent(agent):
    """The tutorial copies each step's states into the same tensor, which autograd still needs: backward fails."""
    for _ in range(2):
        for ob_id in range(3):
            batch_rl.Agent.select_action_batch(ob_id, torch.randn(1, 4).tolist())
    agent.batch = True
    agent.log_probs().sum().backward()


@pytest.mark.parametrize("n_envs", [1, 4])
def test_log_probs_have_one_shape_in_both_modes(agent, n_envs):
    """In the tutorial (observers, steps, 1) met rewards of (steps, observers), and broadcasting mixed the observers."""
    states = torch.randn(5, 3, n_envs, 4).tolist()
    agent.policy.eval()
    for batch in (True, False):
        agent.batch, agent.saved_log_probs = batch, [] if batch else [[], [], []]
        for of_step in states:
            for ob_id, of_observer in enumerate(of_step):
                (batch_rl.Agent.select_action_batch if batch else batch_rl.Agent.select_action)(ob_id, of_observer)
        assert agent.log_probs().shape == (3, n_envs, 5)


def test_loss_refuses_to_broadcast():
    batch_rl.policy_loss(torch.zeros(2, 1, 5), torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match=r"\(2, 5, 1\).*\(2, 5\)"):
        batch_rl.policy_loss(torch.zeros(2, 5, 1), torch.zeros(2, 5))


def test_returns():
    assert batch_rl.discounted_returns([1, 1, 1], 0.5, 0.0) == [1.75, 1.5, 1.0]
    assert batch_rl.discounted_returns([1, 1], 0.5, 2.0) == [2.0, 2.0]


def test_wait_all_raises_at_once():
    never, failed = Future(), Future()
    failed.set_exception(ValueError("observer2 is gone"))
    with pytest.raises(ValueError, match="observer2 is gone"):
        batch_rl.wait_all([never, failed])
    futures = [Future() for _ in range(3)]
    for number in (2, 0, 1):
        futures[number].set_result(number)
    assert batch_rl.wait_all(futures) == [0, 1, 2]


# --- what it computes


@pytest.mark.parametrize("flags", [
    ["--observers", "5", "--num_steps", "120"],
    ["--observers", "2", "--envs_per_observer", "3", "--gamma", "1", "--num_steps", "150"],
])
def test_check_passes(flags, capfd, tmp_path):
    differences = batch_rl.main(["--check", "--output_dir", str(tmp_path), *flags])
    whats = ("states", "log_probs", "gradient")
    assert list(differences) == [f"{mode}: {what}" for mode in ("batched", "single") for what in whats]
    assert differences["batched: states"] == differences["single: states"] == 0
    assert max(differences.values()) <= 1e-5
    out, err = capfd.readouterr()
    assert out.count(" ok\n") == 6
    assert err == ""


def record_neighbours_actions(rank, world_size, args):
    """`record`, but in batches every observer receives the actions of the next one."""
    honest = batch_rl.Agent.act

    def act(self, states):
        actions, log_probs = honest(self, states)
        return (actions[1:] + actions[:1] if self.batch else actions), log_probs

    batch_rl.Agent.act = act
    return batch_rl.record(rank, world_size, args)


def record_neighbours_returns(rank, world_size, args):
    """`record`, but the loss multiplies log-probabilities with the returns of another observer, as the tutorial's."""

    def policy_loss(log_probs, returns):
        returns = (returns - returns.mean()) / returns.std(correction=0)
        return -(log_probs * returns.flip(0)).sum() / len(returns)

    batch_rl.policy_loss = policy_loss
    return batch_rl.record(rank, world_size, args)


@pytest.mark.parametrize(("record", "fails"), [
    (record_neighbours_actions, ["batched: log_probs", "batched: gradient"]),
    (record_neighbours_returns, ["batched: gradient", "single: gradient"]),
], ids=["another observer's action", "another observer's returns"])
def test_check_can_fail(record, fails, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(batch_rl, "record", record)
    with pytest.raises(SystemExit) as stop:
        batch_rl.main(["--check", "--num_steps", "60", "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    assert re.findall(r"\[check\] (.*): differs .* FAIL", capfd.readouterr().out) == fails


def test_compare(tmp_path):
    """The README's command, with fewer and shorter episodes."""
    less = ["--num_episode", "1", "--num_steps", "40", "--observers", "1", "3"]
    result = run([*script(*commands_in("batch_rl/README.md")[0][1:]), *less], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/batch_rl/metrics.json").read_text())
    assert [(row["observers"], row["mode"]) for row in metrics["rows"]] == [
        (observers, mode) for observers in (1, 3) for mode in ("batched", "single")]
    speeds = [row["env_steps_per_s"] for row in metrics["rows"]]
    assert min(speeds) > 0
    assert metrics["speedup"] == {"1": speeds[0] / speeds[1], "3": speeds[2] / speeds[3]}
    assert (metrics["world_size"], metrics["envs_per_observer"]) == (4, 1)
    lines = result.stdout.splitlines()
    assert "warm-up episode excluded" in lines[0]
    assert lines[-1].startswith("3 observers: ")
    width, height = struct.unpack(">II", (tmp_path / "outputs/batch_rl/batch_vs_single.png").read_bytes()[16:24])
    assert min(width, height) > 300


def test_it_learns_and_one_seed_gives_one_training(tmp_path):
    """Also that observers play in different environments: with equal ones all rewards would be whole numbers."""
    flags = ["--mode", "train", "--observers", 2, "--envs_per_observer", 8, "--num_steps", 100]
    flags = [*map(str, flags), "--reward_threshold", "40", "--output_dir", str(tmp_path)]
    first, second = (batch_rl.main([*flags, "--max_episodes", episodes]) for episodes in ("60", "3"))
    assert first["solved"]
    assert first["running_rewards"][-1] > 40  # without learning, about 20
    assert not second["solved"]
    assert first["rewards"][:3] == second["rewards"]
    assert any(reward % 1 for reward in first["rewards"][:3])
    assert first["env_steps"] == first["episodes"] * 100 * 16
    width, height = struct.unpack(">II", (tmp_path / "learning_curve.png").read_bytes()[16:24])
    assert min(width, height) > 300


def test_benchmark(tmp_path):
    flags = ["--observers", "2", "--envs_per_observer", "3", "--num_steps", "30", "--num_episode", "2"]
    result = run(script("benchmarks/batch_rl.py", *flags), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/benchmark_batch_rl/metrics.json").read_text())
    assert len(metrics["medians"]) == 4
    assert min(metrics["medians"].values()) > 0


# --- how it is started


def test_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where torchrun leaves a folder behind
    result = run(torchrun(2, MAIN, "--num_steps", 40), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("1 observers: ") == 1
    metrics = json.loads((tmp_path / "outputs/batch_rl/metrics.json").read_text())
    assert (metrics["world_size"], [row["observers"] for row in metrics["rows"]]) == (2, [1, 1])


def terminal(rank, port, *flags, world_size=3):
    place = ["--world_size", world_size, "--rank", rank, "--master_addr", "localhost", "--master_port", port]
    return script(MAIN, *place, *flags)


def test_two_terminals(free_port, tmp_path):
    agent, observer = (terminal(rank, free_port, "--num_steps", 40, world_size=2) for rank in (0, 1))
    with running(observer, tmp_path) as observer:
        result = run([*agent, "--output_dir", tmp_path / "agent"], tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[-1].startswith("1 observers: ")
        assert end(observer) == ("", "")
        assert observer.returncode == 0
    assert json.loads((tmp_path / "agent/metrics.json").read_text())["world_size"] == 2


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    *(bad("--observers", value, says=("--observers", value, "at least 1")) for value in ("0", "two", "1.5")),
    *(bad(f"--{flag}", "0", says=(f"--{flag}", "'0'", "at least 1"))
      for flag in ("envs_per_observer", "num_episode", "num_steps", "max_episodes", "log_interval")),
    bad("--observers", "2", "--world_size", "6", says=("--observers", "2", "must be 5 with --world_size 6")),
    bad("--mode", "train", "--observers", "2", "5", says=("--observers 2 5", "a single number", "train")),
    bad("--check", "--observers", "2", "5", says=("--observers 2 5", "a single number", "--check")),
    bad("--mode", "train", "--num_steps", "400", says=("--num_steps", "400", "475")),
    bad("--mode", "learn", says=("--mode", "learn", "compare")),
    *(bad("--gamma", value, says=("--gamma", value, "at most 1")) for value in ("1.5", "nan")),
    bad("--lr", "0", says=("--lr", "0", "above 0")),
    bad("--world_size", "1", says=("--world_size", "1", "at least 2")),
    bad("--rank", "1", "--master_addr", "localhost", says=("--rank", "1", "--world_size")),
    bad("--rank", "3", "--world_size", "3", "--master_addr", "localhost", says=("--rank", "3", "below")),
])
def test_bad_input(flags, says, refused):
    refused(batch_rl.main, flags, says)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the agent's policy is on it")
def test_check_on_a_gpu(tmp_path):
    assert batch_rl.main(["--check", "--device", "cuda", "--output_dir", str(tmp_path)])
