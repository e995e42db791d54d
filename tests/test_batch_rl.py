"""Tutorial 6_8, second half."""

import json

from common.program import run_program
from common.session import wait_all

import pytest
import torch

from batch_rl import main as batch_rl
from batch_rl import until_solved
from batch_rl.results import Rounds, finish_training
from benchmarks import one_process
from tests.helpers import args_of, commands_in, results_of, script


@pytest.mark.slow
def test_compare(tmp_path):
    """The README's command, with fewer and shorter episodes."""
    less = ["--num_episode", "1", "--num_steps", "40", "--observers", "1", "3"]
    folder, lines = results_of(script(*commands_in("batch_rl/README.md")[0][1:], *less), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [(row["observers"], row["mode"]) for row in metrics["rows"]] == [
        (observers, mode) for observers in (1, 3) for mode in ("batched", "single")]
    assert (metrics["world_size"], metrics["envs_per_observer"]) == (4, 1)
    assert lines[-1].startswith("3 observers: ")


def test_times_of_the_episodes(capsys):
    """Each in its mode, without the warm-up, with the steps that have a return."""
    rounds, nan = Rounds(observers=1, num_episode=1), float("nan")
    for episode in (0, 1):
        rounds.add(episode, True, 2.0 + episode, torch.tensor([[[1.0, nan, 1.0]]]))
        rounds.add(episode, False, 4.0 + episode, torch.tensor([[[1.0, 1.0, 1.0]]]))
    assert rounds.metrics() == {"timed": {"batched": [(3.0, 2)], "single": [(5.0, 3)]}}
    assert capsys.readouterr().out == "[agent] observers 1  batched  warm-up\n"


@pytest.mark.slow
def test_one_seed_gives_one_training_to_the_last_digit(tmp_path):
    """Rewards of many episodes, which depend on all digits of the weights; also that the agent learns."""
    flags = ["--envs_per_observer", "8", "--num_steps", "60", "--lr", "0.01", "--reward_threshold", "45"]
    args = args_of(until_solved, tmp_path, *flags)
    first, second = (run_program(until_solved.run_worker, args, batch_rl.role_name, finish_training) for _ in range(2))
    assert first["solved"]
    assert first["episodes"] > 5
    assert first["rewards"] == second["rewards"]


@pytest.mark.slow
def test_one_process(tmp_path):
    flags = ["--num_envs", "8", "32", "--num_steps", "60", "--output_dir", str(tmp_path)]
    metrics = one_process.main([*flags, "--num_episode", "1"])
    assert [row["num_envs"] for row in metrics["rows"]] == [8, 32]
    metrics = one_process.main([*flags, "--mode", "train", "--lr", "0.02", "--reward_threshold", "45"])
    assert all(row["solved"] for row in metrics["rows"])


def futures(*, failing=()):
    made = [torch.futures.Future() for _ in range(3)]
    for index in failing:
        made[index].set_exception(KeyError(index))
    return made


def test_wait_all_raises_at_once():
    """`torch.futures.wait_all` would wait for the two futures that never end."""
    with pytest.raises(KeyError):
        wait_all(futures(failing=[1]))
    whole = futures()
    for index in (2, 0, 1):
        whole[index].set_result(index)
    assert wait_all(whole) == [0, 1, 2]
    assert wait_all([]) == []
