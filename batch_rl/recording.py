"""What `--check` records of a run: the lesson's own, in its own processes.

Each observer keeps the states and actions of its environments, the agent its dropout masks, its
gradients and its weights. Changed is only what lets a short run show every mistake:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- observer1's environments have a time limit, so that stretches end in all three ways: the pole
  falls, time runs out, the episode is over;
- rewards are all different: see `DistinctRewards`;
- the clock of the comparison counts episodes, so that a measurement that is put into the wrong row
  is seen.
"""

import threading

import gymnasium as gym
import torch
from torch import nn
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl.fast_agent import FastAgent

TIME_LIMIT = 13  # steps, of observer1's environments

_environments = []  # on an observer: all of its own


class DistinctRewards(gym.Wrapper):
    """CartPole with rewards of about 1, others for each environment and each of its steps.

    Its own is always 1: two that are swapped, or counted for another step, would not be seen.

    Args:
        env: the CartPole.
        rank: of its observer.
        k: its number among the environments of that observer, from 0.
    """

    def __init__(self, env, rank, k):
        super().__init__(env)
        self.rank, self.k, self.steps = rank, k, 0

    def step(self, action):
        """See gymnasium."""
        state, _, *others = super().step(action)
        self.steps += 1
        return state, 1 + 0.1 * self.rank + 0.01 * self.k + 0.0001 * self.steps, *others


class Recorded(gym.Wrapper):
    """Keeps the states and actions of its steps until they are `taken`."""

    def __init__(self, env):
        super().__init__(env)
        self.states, self.actions = [], []

    def reset(self, **options):
        """See gymnasium."""
        self.state, info = super().reset(**options)
        return self.state, info

    def step(self, action):
        """See gymnasium."""
        self.states.append(self.state.tolist())
        self.actions.append(action)
        self.state, *others = super().step(action)
        return self.state, *others


def taken():
    """On an observer: the states and actions since the last time, environment by environment."""
    played = {"states": [env.states for env in _environments],
              "actions": [env.actions for env in _environments]}
    for env in _environments:
        env.states, env.actions = [], []
    return played


def record(rank, world_size, args):
    """Run the lesson, recorded.

    Returns:
        On rank 0, what the lesson returned as `run`, and as `episodes` what was seen of each one:
        `batch`; `masks`, by who asked; `observer1` and so on, each with `states` and `actions`;
        `gradients` and `weights` by name; `reward` and `running_reward`. None on observers.
    """
    torch.set_default_dtype(torch.float64)
    if rank > 0:
        record_environments(rank)
        lesson.run_worker(rank, world_size, args)
        return None
    episodes = []
    record_agent(FastAgent if args.agent == "fast" else lesson.Agent, episodes)
    if args.mode == "compare":
        # The n-th episode takes n seconds of this clock, which looks at what is done.
        lesson.time.perf_counter = lambda: sum(range(1, len(episodes) + 1))
    return {"run": lesson.run_worker(rank, world_size, args), "episodes": episodes}


def record_environments(rank):
    """From now on, the environments that this observer makes are recorded."""
    make, limit = gym.make, {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}

    def recorded_make(*place, **options):
        env = DistinctRewards(make(*place, **options, **limit), rank, len(_environments))
        _environments.append(Recorded(env))
        return _environments[-1]

    lesson.gym.make = recorded_make


def record_agent(agent_class, episodes):
    """From now on, append to `episodes` what each one was."""
    run_episode, finish_episode = agent_class.run_episode, agent_class.finish_episode
    select_action, forward = agent_class.select_action, nn.Dropout.forward
    asking = threading.local()  # two RPC threads answer requests
    now = {}

    def recorded_run_episode(agent, batch):
        now.clear()
        now.update(batch=batch, masks={})
        ep_reward = run_episode(agent, batch)
        for rank in range(1, len(agent.ob_rrefs) + 1):
            now[f"observer{rank}"] = rpc.rpc_sync(f"observer{rank}", taken)
        return ep_reward

    def recorded_finish_episode(agent, batch, ep_reward):
        finish_episode(agent, batch, ep_reward)
        named = dict(agent.policy.named_parameters())
        episodes.append({
            **now, "reward": ep_reward, "running_reward": agent.running_reward,
            "gradients": {name: p.grad.tolist() for name, p in named.items()},
            "weights": {name: p.tolist() for name, p in named.items()}})

    def recorded_select_action(agent_rref, ob_id, states):
        asking.ob_id = ob_id
        return select_action(agent_rref, ob_id, states)

    def recorded_dropout(module, x):
        """With what `nn.Dropout` has multiplied, (K, 128) or in batches (observers, K, 128)."""
        y = forward(module, x)
        who = "all" if now["batch"] else str(asking.ob_id)
        now["masks"].setdefault(who, []).append((y / x).tolist())
        return y

    agent_class.run_episode = recorded_run_episode
    agent_class.finish_episode = recorded_finish_episode
    # Where the observers' requests look it up.
    lesson.Agent.select_action = staticmethod(recorded_select_action)
    recorded_select_action.__module__ = lesson.Agent.__module__
    recorded_select_action.__qualname__ = "Agent.select_action"
    nn.Dropout.forward = recorded_dropout
