"""Tutorial 6_8, second half."""

import functools
import json
from argparse import Namespace

from common.program import run_program
from common.session import wait_all

import pytest
import torch

from batch_rl import main as batch_rl
from batch_rl import until_solved
from batch_rl.results import finish_training, shown_first
from benchmarks import one_process
from tests.helpers import args_of, commands_in, results_of, script

# --- what it computes


@pytest.mark.slow
def test_compare(tmp_path):
    """The README's command, with fewer and shorter episodes."""
    less = ["--num_episode", "1", "--num_steps", "40", "--observers", "1", "3"]
    folder, lines = results_of(script(*commands_in("batch_rl/README.md")[0][1:], *less), tmp_path)
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


# The training of until_solved.py, with another agent than its own.
train_plain = functools.partial(until_solved.run_worker, agent_class=batch_rl.Agent)


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_seed_gives_one_training_to_the_last_digit(tmp_path):
    """Rewards of many episodes, which depend on all digits of the weights; also that it learns."""
    flags = ["--envs_per_observer", "8", "--num_steps", "60", "--lr", "0.01", "--reward_threshold", "45"]
    args = args_of(until_solved, tmp_path, *flags)
    first, second = (run_program(until_solved.run_worker, args, batch_rl.role_name, finish_training) for _ in range(2))
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


@pytest.mark.slow
def test_one_process(tmp_path):
    flags = ["--num_envs", "8", "32", "--num_steps", "60", "--output_dir", str(tmp_path)]
    metrics = one_process.main([*flags, "--num_episode", "1"])
    assert [row["num_envs"] for row in metrics["rows"]] == [8, 32]
    assert min(row["env_steps_per_s"] for row in metrics["rows"]) > 0
    metrics = one_process.main([*flags, "--mode", "train", "--lr", "0.02", "--reward_threshold", "45"])
    assert all(row["solved"] for row in metrics["rows"])


def futures(*, failing=()):
    made = [torch.futures.Future() for _ in range(3)]
    for index in failing:
        made[index].set_exception(KeyError(index))
    return made


def test_wait_all_raises_at_once():
    """`torch.futures.wait_all` would wait for the two that never end."""
    with pytest.raises(KeyError):
        wait_all(futures(failing=[1]))
    whole = futures()
    for index in (2, 0, 1):
        whole[index].set_result(index)
    assert wait_all(whole) == [0, 1, 2]
    assert wait_all([]) == []
