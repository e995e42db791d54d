"""The recorder of the check, which watches the program in its own processes.

The agent keeps the states it was asked with, its actions, returns, loss, gradients and weights. In
main.py it also keeps the dropout masks. The following changes make a short run show every mistake:

- float64, because rounding in float32 could look like a mistake, or change an action;
- a time limit in the environments of observer1: there, stretches end in all three ways, because the
  pole falls, time runs out or the episode is over;
- a different reward for each step (`distinct`), so that two exchanged rewards do not go unnoticed;
- in main.py without batches, actions drawn from numbers of each observer and step (`uniforms`),
  because otherwise the observer that asks first would get the next number;
- a pause after `set_result`, in which the observers ask again;
- several pieces per episode when the agent of vector.py learns.
"""

import itertools
import threading
import time
from collections import Counter

from common.recorder import Recorder, named_gradients, named_weights

import gymnasium as gym
import numpy as np
import torch
from gymnasium import wrappers
from torch import nn
from torch.distributions import Categorical

from batch_rl import main as lesson
from batch_rl import vector

N_STEPS = 40  # upper limit for the steps of an episode
TIME_LIMIT = 13  # steps, in the environments of observer1
ROWS = 100  # states in a piece of the training
SLOW_STEPS, SLOW_S = 3, 0.05  # steps of each episode in batches that have a pause, and its length


def limits(rank: int) -> dict[str, int]:
    """Return the options of `gym.make` that limit an observer's stretches."""
    return {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}


def distinct(rank: int, k: int | np.ndarray, step: int) -> float | np.ndarray:
    """Return the reward of environment k of an observer in a step; steps are counted over a run."""
    return 1 + 0.1 * rank + 0.01 * k + 0.0001 * step


def uniforms(ob_id: int, number: int, n_envs: int) -> torch.Tensor:
    """Draw from 0 to 1 for an observer's steps and environments in an episode: (`N_STEPS`, K)."""
    generator = torch.Generator().manual_seed(1000 * number + ob_id)
    return torch.rand(N_STEPS, n_envs, generator=generator, dtype=torch.float64)


def change_environments(recorder: Recorder, rank: int) -> None:
    """Let the environments of this observer have other rewards, and observer1's a time limit."""
    numbers = itertools.count()

    @recorder.around(gym, "make")
    def make(original, *name, **options):
        env = original(*name, **options, **limits(rank))
        k, steps = next(numbers), itertools.count()
        return wrappers.TransformReward(env, lambda _: distinct(rank, k, next(steps)))

    @recorder.around(gym, "make_vec")
    def make_vec(original, *name, **options):
        env = original(*name, **options, **limits(rank))
        every, steps = np.arange(env.num_envs), itertools.count()
        return wrappers.vector.TransformReward(env, lambda _: distinct(rank, every, next(steps)))


def record_races(recorder: Recorder, now: dict) -> None:
    """Let races show from now on, and count in `now["locked"]` the answers sent under the lock."""
    for owner in (lesson.Agent, vector.Group):
        recorder.guard(owner, "states")

    @recorder.around(torch.futures.Future, "set_result")
    def set_result(original, future, result):
        now["locked"] += now["agent"].lock.locked()
        original(future, result)
        if now["forwards"] <= SLOW_STEPS:
            time.sleep(SLOW_S)  # the next requests arrive before the next line of the program


def record_agent(recorder: Recorder, agent_class: type[lesson.Agent],
                 episodes: list[dict]) -> None:
    """Append an entry to `episodes` after each one.

    The entry has "batch"; "forwards" and "locked", two numbers; "masks" of each observer, without
    batches; "states", "actions" and "returns" of each environment; "loss"; "gradients" and
    "weights" by name; "reward" and "running_reward".
    """
    asking, one_more = threading.local(), threading.Lock()  # two RPC threads answer requests
    now = {}
    record_races(recorder, now)

    @recorder.around(agent_class, "run_episode")
    def run_episode(original, agent, batch):
        now.clear()
        observers = range(len(agent.ob_rrefs))
        now.update(agent=agent, batch=batch, forwards=0, locked=0, answered=Counter(),
                   masks={ob_id: [] for ob_id in observers},
                   asked={ob_id: [] for ob_id in observers})
        return original(agent, batch)

    @recorder.around(lesson.Agent, "select_action")
    def select_action(original, agent_rref, ob_id, states):
        asking.ob_id = ob_id
        return original(agent_rref, ob_id, states)

    @recorder.around(lesson.Agent, "act")
    def act(original, agent, states):
        actions, log_probs = original(agent, states)
        if now["batch"]:
            for ob_id, asked in enumerate(zip(states, actions, strict=True)):
                now["asked"][ob_id].append(asked)
        else:
            now["asked"][asking.ob_id].append((states, actions))
        return actions, log_probs

    @recorder.around(vector.Group, "act")
    def act_for_vectors(original, group, states, ob_id=None):
        answers, saved = original(group, states, ob_id)
        with one_more:
            now["forwards"] += 1
        for asking_id, asked in zip(group.observers if ob_id is None else [ob_id],
                                    zip(*saved, strict=True), strict=True):
            now["asked"][asking_id].append([numbers.copy() for numbers in asked])
        return answers, saved

    @recorder.around(nn.Dropout, "forward")
    def dropout(original, module, x):
        y = original(module, x)
        with one_more:
            now["forwards"] += 1
        if not now["batch"]:
            now["masks"][asking.ob_id].append((y / x).detach().cpu())
        return y

    @recorder.around(Categorical, "sample")
    def sample(original, distribution):
        if now["batch"]:
            return original(distribution)
        p_left, step = distribution.probs[:, 0], now["answered"][asking.ob_id]
        now["answered"][asking.ob_id] += 1
        drawn = uniforms(asking.ob_id, len(episodes), len(p_left))[step]
        return (drawn.to(p_left) > p_left).long()

    def recorded_loss(require_finite, loss, at):
        now["loss"] = require_finite(loss, at)
        return now["loss"]

    for module in (lesson, vector):
        recorder.around(module, "require_finite")(recorded_loss)
    recorder.put(vector, "ROWS", ROWS)

    @recorder.around(agent_class, "finish_episode")
    def finish_episode(original, agent, batch, ep_reward):
        original(agent, batch, ep_reward)
        played_by = {"states": {}, "actions": {}, "returns": {}}
        for ob_id, of_observer in enumerate(agent.returns):
            asked = [torch.tensor(np.array(of_steps))  # (steps, K, 4) and (steps, K)
                     for of_steps in zip(*now["asked"][ob_id], strict=True)]
            for k, of_environment in enumerate(of_observer):
                played = ~of_environment.isnan()  # not the steps that reset a vector environment
                numbers = asked[0][played, k], asked[1][played, k], of_environment[played]
                for of_all, of_one in zip(played_by.values(), numbers, strict=True):
                    of_all[f"observer{ob_id + 1} environment {k}"] = of_one
        episodes.append({
            **{what: now[what] for what in ("batch", "forwards", "locked", "masks", "loss")},
            **played_by,
            "reward": ep_reward, "running_reward": agent.running_reward,
            "gradients": named_gradients(agent.policy), "weights": named_weights(agent.policy)})
