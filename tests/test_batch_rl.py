"""Tutorial 6_8, second half."""

import functools
import json
import threading
from argparse import Namespace

import pytest
import torch
from common.program import run_program
from torch.futures import Future

from batch_rl import double_buffering, until_solved
from batch_rl import main as batch_rl
from batch_rl.results import finish_training, shown_first
from benchmarks import batch_rl as benchmark
from benchmarks import one_process
from tests.helpers import args_of, commands_in, results_of, script


class Here:
    """What the requests bring for an RRef, where there is no RPC."""

    def __init__(self, agent):
        self.agent = agent

    def local_value(self):
        return self.agent


@pytest.fixture
def agent():
    """Without observers and RPC: what they would call is called here."""
    agent = object.__new__(batch_rl.Agent)
    agent.device, agent.lock = torch.device("cpu"), threading.Lock()
    agent.policy, agent.running_reward = batch_rl.Policy(), 0.0
    agent.ob_rrefs, agent.agent_rref = [None] * 3, Here(agent)
    agent.saved_log_probs, agent.states, agent.future_actions = [], {}, Future()
    return agent


# --- pieces


def test_states_may_change_after_they_were_sent(agent):
    """The tutorial copies each step's states into the same tensor, which autograd still needs: backward fails."""
    for _ in range(2):
        for ob_id in range(3):
            batch_rl.Agent.select_action_batch(agent.agent_rref, ob_id, torch.randn(1, 4).tolist())
    agent.log_probs(batch=True).sum().backward()


@pytest.mark.parametrize("n_envs", [1, 4])
def test_log_probs_have_one_shape_in_both_modes(agent, n_envs):
    """In the tutorial (observers, steps, 1) met rewards of (steps, observers), and broadcasting mixed the observers."""
    states = torch.randn(5, 3, n_envs, 4).tolist()
    agent.policy.eval()
    for batch in (True, False):
        agent.saved_log_probs = [] if batch else [[], [], []]
        select = batch_rl.Agent.select_action_batch if batch else batch_rl.Agent.select_action
        for of_step in states:
            for ob_id, of_observer in enumerate(of_step):
                select(agent.agent_rref, ob_id, of_observer)
        assert agent.log_probs(batch).shape == (3, n_envs, 5)


def test_loss_refuses_to_broadcast(agent):
    agent.optimizer = torch.optim.SGD(agent.policy.parameters())
    agent.log_probs = lambda batch: torch.zeros(2, 5, 1, requires_grad=True)
    agent.returns = torch.rand(2, 5, 1)
    agent.finish_episode(True, 1.0)
    agent.returns = torch.zeros(2, 5)
    with pytest.raises(AssertionError):
        agent.finish_episode(True, 1.0)


def test_returns():
    def returns(rewards, terminated, gamma=0.5, n_steps=100):
        observer = object.__new__(batch_rl.Observer)
        observer.gamma = gamma
        return observer.returns(rewards, terminated, n_steps)

    assert returns([1, 1, 1], True) == [1.75, 1.5, 1.0]
    assert returns([1, 1], False) == [2.0, 2.0]
    assert returns([1, 1], False, gamma=1.0) == [102.0, 101.0]  # at most as long as an episode


# --- what it computes


def test_compare(tmp_path):
    """The README's command, with fewer and shorter episodes."""
    less = ["--num_episode", "1", "--num_steps", "40", "--observers", "1", "3"]
    folder, lines = results_of(script(*commands_in("batch_rl/README.md")[0][1:], *less), tmp_path, cold=True)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [(row["observers"], row["mode"]) for row in metrics["rows"]] == [
        (observers, mode) for observers in (1, 3) for mode in ("batched", "single")]
    speeds = [row["env_steps_per_s"] for row in metrics["rows"]]
    assert min(speeds) > 0
    assert metrics["speedup"] == {"1": speeds[0] / speeds[1], "3": speeds[2] / speeds[3]}
    assert (metrics["world_size"], metrics["envs_per_observer"]) == (4, 1)
    assert lines[0] == "[agent] observers 1  batched  warm-up"
    assert sum("warm-up episode excluded" in line for line in lines) == 1
    assert lines[-1].startswith("3 observers: ")
    assert (folder / "batch_vs_single.png").exists()


# The training of until_solved.py, with other agents than its own.
train_plain = functools.partial(until_solved.run_worker, agent_class=batch_rl.Agent)
train_double_buffered = functools.partial(until_solved.run_worker, agent_class=double_buffering.DoubleBufferedAgent)


def test_it_learns_and_one_seed_gives_one_training(tmp_path):
    """Also that observers play in different environments: with equal ones all rewards would be whole numbers."""
    flags = ["--envs_per_observer", 8, "--num_steps", 100, "--lr", 0.01, "--reward_threshold", 40, "--max_episodes"]
    first, second = (run_program(train_plain, args_of(until_solved, tmp_path, *flags, episodes),
                                 batch_rl.role_name, finish_training) for episodes in (60, 3))
    assert first["solved"]
    assert first["running_rewards"][-1] > 40  # without learning, about 20
    assert not second["solved"]
    assert first["rewards"][:3] == second["rewards"]
    assert any(reward % 1 for reward in first["rewards"][:3])
    assert first["env_steps"] == first["episodes"] * 100 * 16
    assert (tmp_path / "learning_curve.png").exists()


@pytest.mark.parametrize(("run_worker", "envs"), [(until_solved.run_worker, "vector"), (train_double_buffered, "sync")])
def test_one_seed_gives_one_training_to_the_last_digit(run_worker, envs, tmp_path):
    """Rewards of many episodes, which depend on all digits of the weights; also that it learns."""
    flags = ["--envs", envs, "--envs_per_observer", "8", "--num_steps", "60", "--lr", "0.01", "--reward_threshold", "45"]
    args = args_of(until_solved, tmp_path, *flags)
    first, second = (run_program(run_worker, args, batch_rl.role_name, finish_training) for _ in range(2))
    assert first["solved"]
    assert first["episodes"] > 5
    assert first["rewards"] == second["rewards"]
    # The step in which an environment resets is not counted.
    every = first["episodes"] * 60 * 16
    assert 0.9 * every < first["env_steps"] < every


def test_a_timeline_shows_both_ways():
    """The last four steps of the last two episodes, with the update; a training has one way."""
    def spans(kind, *starts):
        return [{"kind": kind, "start": start, "end": start + 1} for start in starts]

    agent = [*spans("step", 9, 49, 99), *spans("forward", *range(11, 20), *range(51, 90))]
    of_roles = {"agent": agent, "observer1": [], "observer2": []}
    of_two = Namespace(num_episode=1)
    assert shown_first(of_roles, of_two) == {"batched": (16, 50), "single": (82, 100)}
    assert shown_first(of_roles, Namespace()) == {"batched": (86, 100)}


def test_benchmark(tmp_path):
    flags = ["--observers", "2", "--envs_per_observer", "4", "--num_steps", "30", "--num_episode", "2"]
    metrics = benchmark.main([*flags, "--output_dir", str(tmp_path)])
    assert metrics["medians"].keys() == {"vector", "double_buffering"}
    assert metrics["double_buffering_gain"] > 0


def test_one_process(tmp_path):
    flags = ["--num_envs", "8", "32", "--num_steps", "60", "--output_dir", str(tmp_path)]
    metrics = one_process.main([*flags, "--num_episode", "1"])
    assert [row["num_envs"] for row in metrics["rows"]] == [8, 32]
    assert min(row["env_steps_per_s"] for row in metrics["rows"]) > 0
    metrics = one_process.main([*flags, "--mode", "train", "--lr", "0.02", "--reward_threshold", "45"])
    assert all(row["solved"] for row in metrics["rows"])
