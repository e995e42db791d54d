"""What `--check` records of a run: the program's own, in its own processes.

Each observer keeps the states and actions of its environments, the agent its returns,
log-probabilities, loss, gradients and weights, and the plain one its dropout masks. Changed is only
what lets a short run show every mistake:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- observer1's environments have a time limit, so that stretches end in all three ways: the pole
  falls, time runs out, the episode is over;
- rewards are all different: see `DistinctRewards`;
- the vector agent learns from an episode in several pieces;
- the clock of the comparison counts episodes, so that a measurement that is put into the wrong row
  is seen.
"""

import argparse
import importlib
import threading
import time
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from common.recorder import Recorder, named_gradients, named_weights
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import nn
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl import vector
from batch_rl.double_buffering import DoubleBufferedAgent
from batch_rl.fast import FastAgent

TIME_LIMIT = 13  # steps, of observer1's environments
ROWS = 100  # states in a piece of the training
SLOW_STEPS, SLOW_S = 3, 0.02  # of each episode in batches

AGENTS = {"batch_rl.main": lesson.Agent, "batch_rl.fast": FastAgent,
          "batch_rl.vector": vector.VectorAgent, "batch_rl.until_solved": vector.VectorAgent,
          "batch_rl.double_buffering": DoubleBufferedAgent}  # of each program

_environments = []  # on an observer: all of its own, or all of its vector environments


class DistinctRewards(gym.Wrapper):
    """Gives rewards of about 1, others for each environment and each of its steps.

    CartPole's is always 1: two that are swapped, or counted for another step, would not be seen.

    Args:
        env: the CartPole.
        rank: of its observer.
        k: its number among the environments of that observer, from 0.
    """

    def __init__(self, env: gym.Env, rank: int, k: int) -> None:
        super().__init__(env)
        self.rank, self.k, self.steps = rank, k, 0

    def step(self, action: int) -> tuple:
        """Step as `gym.Env.step`, with another reward."""
        state, _, *others = super().step(action)
        self.steps += 1
        return state, distinct(self.rank, self.k, self.steps), *others


def distinct(rank: int, k: int | np.ndarray, steps: int | np.ndarray) -> float | np.ndarray:
    """Return the reward of a step, of each one if `k` and `steps` are arrays."""
    return 1 + 0.1 * rank + 0.01 * k + 0.0001 * steps


class Recorded(gym.Wrapper):
    """Keeps the states and actions of its steps until they are `taken`."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.states, self.actions = [], []

    def reset(self, **options) -> tuple:
        """Reset as `gym.Env.reset`, and keep the state."""
        self.state, info = super().reset(**options)
        return self.state, info

    def step(self, action: int) -> tuple:
        """Step as `gym.Env.step`, and keep the state before and the action."""
        self.states.append(self.state.tolist())
        self.actions.append(action)
        self.state, *others = super().step(action)
        return self.state, *others


class RecordedVector(VectorWrapper):
    """Is `DistinctRewards` and `Recorded` for a vector environment, the first k of it `first`.

    Where it resets itself nobody plays: nothing is recorded, and there is no reward.
    """

    def __init__(self, env: VectorEnv, rank: int, first: int) -> None:
        super().__init__(env)
        self.rank, self.k = rank, first + np.arange(env.num_envs)
        self.steps = np.zeros(env.num_envs, int)
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.states, self.actions = ([[] for _ in self.k] for _ in range(2))

    def reset(self, **options) -> tuple:
        """Reset as `VectorEnv.reset`, and keep the states."""
        self.state, info = super().reset(**options)
        self.over = np.zeros(self.num_envs, bool)
        return self.state, info

    def step(self, actions: np.ndarray) -> tuple:
        """Step as `VectorEnv.step`, with other rewards; keep the states before and the actions."""
        plays = ~self.over
        for i in plays.nonzero()[0]:
            self.states[i].append(self.state[i].tolist())
            self.actions[i].append(int(actions[i]))
        self.state, _, terminated, truncated, info = super().step(actions)
        self.over = terminated | truncated
        self.steps += plays
        rewards = np.where(plays, distinct(self.rank, self.k, self.steps), 0.0)
        return self.state, rewards, terminated, truncated, info


def taken() -> dict[str, list]:
    """Return, on an observer, states and actions since the last time, for each environment."""
    played = {"states": [], "actions": []}
    for env in _environments:
        vector = isinstance(env, RecordedVector)
        played["states"] += env.states if vector else [env.states]
        played["actions"] += env.actions if vector else [env.actions]
        env.clear()
    return played


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run `args.program`, recorded.

    Returns:
        On rank 0, what the program returned as `run`, and as `episodes` what was seen of each one:
        `batch`; `forwards`, how many; `masks`, by who asked; `observer1` and so on, each with
        `states` and `actions`; `returns` and `log_probs`, for each environment a list;
        `loss`; `gradients` and `weights` by name; `reward` and `running_reward`. None on observers.
    """
    torch.set_default_dtype(torch.float64)
    program, episodes = importlib.import_module(args.program), []
    with Recorder() as recorder:
        if rank > 0:
            record_environments(recorder, rank)
        else:
            record_agent(recorder, AGENTS[args.program], episodes)
            if args.timed:
                # The n-th episode takes n seconds of this clock, which looks at what is done.
                recorder.put(lesson.time, "perf_counter", lambda: sum(range(1, len(episodes) + 1)))
        run = program.run_worker(rank, world_size, args)
    return {"run": run, "episodes": episodes} if rank == 0 else None


def record_environments(recorder: Recorder, rank: int) -> None:
    """Record the environments that this observer makes from now on."""
    limit = {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}

    @recorder.around(gym, "make")
    def make(original, *place, **options):
        env = DistinctRewards(original(*place, **options, **limit), rank, len(_environments))
        _environments.append(Recorded(env))
        return _environments[-1]

    @recorder.around(gym, "make_vec")
    def make_vec(original, *place, **options):
        first = sum(env.num_envs for env in _environments)
        env = original(*place, **options, **limit)
        _environments.append(RecordedVector(env, rank, first))
        return _environments[-1]


def record_agent(recorder: Recorder, agent_class: type[lesson.Agent],
                 episodes: list[dict]) -> None:
    """Append to `episodes` what each one was, from now on."""
    asking, one_more = threading.local(), threading.Lock()  # two RPC threads answer requests
    now = {}

    class SlowStates(dict):
        """Lets the others ask before this thread can count who has: only a lock keeps them out."""

        def __setitem__(self, ob_id, states):
            super().__setitem__(ob_id, states)
            if now["forwards"] < SLOW_STEPS:
                time.sleep(SLOW_S)

    for owner in (lesson.Agent, vector.Group):
        recorder.enter_context(mock.patch.object(owner, "states", property(
            lambda self: self.slow_states,
            lambda self, states: setattr(self, "slow_states", SlowStates(states))), create=True))

    @recorder.around(agent_class, "run_episode")
    def run_episode(original, agent, batch):
        now.clear()
        now.update(batch=batch, masks={}, forwards=0, log_probs=[])
        ep_reward = original(agent, batch)
        for rank in range(1, len(agent.ob_rrefs) + 1):
            now[f"observer{rank}"] = rpc.rpc_sync(f"observer{rank}", taken)
        return ep_reward

    @recorder.around(lesson.Agent, "select_action")
    def select_action(original, agent_rref, ob_id, states):
        asking.ob_id = ob_id
        return original(agent_rref, ob_id, states)

    @recorder.around(nn.Dropout, "forward")
    def dropout(original, module, x):
        """Keep with what it has multiplied, (K, 128) or in batches (observers, K, 128)."""
        y = original(module, x)
        who = "all" if now["batch"] else str(asking.ob_id)
        with one_more:
            now["forwards"] += 1
        now["masks"].setdefault(who, []).append((y / x).tolist())
        return y

    @recorder.around(vector.Group, "act")
    def act(original, group, *states):
        with one_more:
            now["forwards"] += 1
        return original(group, *states)

    @recorder.around(agent_class, "log_probs")
    def log_probs(original, agent, batch):
        now["log_probs"].append(original(agent, batch))
        return now["log_probs"][-1]

    @recorder.around(vector.Group, "pieces")
    def pieces(original, group, *of_episode):
        of_group = []
        for of_piece, weights in original(group, *of_episode):
            of_group.append(of_piece.detach())
            yield of_piece, weights
        now["log_probs"].append(torch.cat(of_group).permute(1, 2, 0))

    def recorded_loss(require_finite, loss, at):
        now["loss"] = require_finite(loss, at)
        return now["loss"]

    for module in (lesson, vector):
        recorder.around(module, "require_finite")(recorded_loss)
    recorder.put(vector, "ROWS", ROWS)

    @recorder.around(agent_class, "finish_episode")
    def finish_episode(original, agent, batch, ep_reward):
        original(agent, batch, ep_reward)
        returns, now["log_probs"] = agent.returns, torch.cat(now["log_probs"], dim=1)
        of_actions = {  # where a vector environment reset itself there was none
            what: [row[~none].tolist() for of_observer in zip(numbers, returns.isnan(), strict=True)
                   for row, none in zip(*of_observer, strict=True)]
            for what, numbers in (("returns", returns), ("log_probs", now["log_probs"]))}
        episodes.append({
            **now, **of_actions, "reward": ep_reward, "running_reward": agent.running_reward,
            "gradients": as_lists(named_gradients(agent.policy)),
            "weights": as_lists(named_weights(agent.policy))})


def as_lists(named: dict[str, torch.Tensor]) -> dict[str, list]:
    """Return tensors by name as what JSON can hold."""
    return {name: tensor.tolist() for name, tensor in named.items()}
