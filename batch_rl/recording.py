"""What `--check` records of a run: the program's own, in its own processes.

Each observer keeps the states and actions of its environments, the agent its returns,
log-probabilities, loss, gradients and weights, and the plain one its dropout masks. Changed is only
what lets a short run show every mistake:

- actions that are not chosen in batches are drawn from numbers of each observer and step, and not
  of whoever asks first;
- float64: in float32 rounding would look like a small mistake, and could change an action;
- observer1's environments have a time limit, so that stretches end in all three ways: the pole
  falls, time runs out, the episode is over;
- rewards are all different: see `DistinctRewards`;
- the vector agent learns from an episode in several pieces;
- the clock of the comparison counts episodes, so that a measurement that is put into the wrong row
  is seen.
"""

import threading
import time
from collections import Counter
from unittest import mock

from common.recorder import Recorder, named_gradients, named_weights

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from torch import nn
from torch.distributed import rpc
from torch.distributions import Categorical

from batch_rl import main as lesson
from batch_rl import vector
from batch_rl.play_check import uniforms

TIME_LIMIT = 13  # steps, of observer1's environments
ROWS = 100  # states in a piece of the training
SLOW_STEPS, SLOW_S = 3, 0.05  # of each episode in batches

_environments = []  # on an observer: all of its own, or its vector environment


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
    """Is `DistinctRewards` and `Recorded` for a vector environment.

    Where it resets itself nobody plays: nothing is recorded, and there is no reward.
    """

    def __init__(self, env: VectorEnv, rank: int) -> None:
        super().__init__(env)
        self.rank, self.k = rank, np.arange(env.num_envs)
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
        several = isinstance(env, RecordedVector)
        played["states"] += env.states if several else [env.states]
        played["actions"] += env.actions if several else [env.actions]
        env.clear()
    return played


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
        env = original(*place, **options, **limit)
        _environments.append(RecordedVector(env, rank))
        return _environments[-1]


def record_agent(recorder: Recorder, agent_class: type[lesson.Agent],
                 episodes: list[dict]) -> None:
    """Append to `episodes` what each one was, from now on.

    That is `batch`; `forwards`, how many; `locked`, how often `set_result` was called with the
    lock; without batches, the `masks` of each observer; `observer1` and so on, each with `states`
    and `actions`; `returns` and `log_probs` of each environment; `loss`; `gradients` and `weights`
    by name; `reward` and `running_reward`.
    """
    asking, one_more = threading.local(), threading.Lock()  # two RPC threads answer requests
    now, answering = {}, {}

    class SlowLock:
        """Lets the last one in before another can go on: whoever takes it twice comes too late."""

        def __init__(self, owner, lock):
            self.owner, self.lock = owner, lock
            self.acquire, self.locked = lock.acquire, lock.locked

        def __enter__(self):
            return self.acquire()

        def __exit__(self, *_):
            self.release()

        def release(self):
            but_one = len(self.owner.states) == len(answering["agent"].ob_rrefs) - 1
            self.lock.release()
            if but_one and now["forwards"] < SLOW_STEPS:
                time.sleep(SLOW_S)

    class GuardedStates(dict):
        """Refuses to be changed by whoever has not taken the lock."""

        def __init__(self, lock, states):
            super().__init__(states)
            self.lock = lock

        def __setitem__(self, ob_id, states):
            if not self.lock.locked():
                raise RuntimeError("self.states is changed without self.lock")
            super().__setitem__(ob_id, states)

    def put_property(owner, name, made):
        recorder.enter_context(mock.patch.object(owner, name, property(
            lambda self: vars(self)[f"recorded {name}"],
            lambda self, value: vars(self).update({f"recorded {name}": made(self, value)})),
            create=True))

    for owner in (lesson.Agent, vector.Group):
        put_property(owner, "lock", SlowLock)
        put_property(owner, "states", lambda self, states: GuardedStates(self.lock, states))

    @recorder.around(agent_class, "run_episode")
    def run_episode(original, agent, batch):
        now.clear()
        now.update(batch=batch, masks={}, answered=Counter(), forwards=0, locked=0)
        answering["agent"] = agent
        ep_reward = original(agent, batch)
        for rank in range(1, len(agent.ob_rrefs) + 1):
            now[f"observer{rank}"] = rpc.rpc_sync(f"observer{rank}", taken)
        return ep_reward

    @recorder.around(torch.futures.Future, "set_result")
    def set_result(original, future, result):
        now["locked"] += answering["agent"].lock.locked()
        original(future, result)
        if now["forwards"] <= SLOW_STEPS:
            time.sleep(SLOW_S)  # the next requests come before whatever follows

    @recorder.around(lesson.Agent, "select_action")
    def select_action(original, agent_rref, ob_id, states):
        asking.ob_id = ob_id
        return original(agent_rref, ob_id, states)

    @recorder.around(nn.Dropout, "forward")
    def dropout(original, module, x):
        """Keep what it has multiplied with, (K, 128)."""
        y = original(module, x)
        with one_more:
            now["forwards"] += 1
        if not now["batch"]:
            now["masks"].setdefault(asking.ob_id, []).append((y / x).detach().cpu())
        return y

    @recorder.around(Categorical, "sample")
    def sample(original, distribution):
        """Draw for each step of each observer numbers of its own, if it is not in batches."""
        if now["batch"]:
            return original(distribution)
        p_left, step = distribution.probs[:, 0], now["answered"][asking.ob_id]
        now["answered"][asking.ob_id] += 1
        drawn = uniforms(asking.ob_id, len(episodes), len(p_left))[step]
        return (drawn.to(p_left) > p_left).long()

    @recorder.around(vector.Group, "act")
    def act(original, group, *states):
        with one_more:
            now["forwards"] += 1
        return original(group, *states)

    @recorder.around(agent_class, "log_probs")
    def log_probs(original, agent, batch):
        now["log_probs"] = original(agent, batch)
        return now["log_probs"]

    @recorder.around(vector.Group, "pieces")
    def pieces(original, group, *of_episode):
        of_pieces = []
        for of_piece, weights in original(group, *of_episode):
            of_pieces.append(of_piece.detach())
            yield of_piece, weights
        now["log_probs"] = torch.cat(of_pieces).permute(1, 2, 0)

    def recorded_loss(require_finite, loss, at):
        now["loss"] = require_finite(loss, at)
        return now["loss"]

    for module in (lesson, vector):
        recorder.around(module, "require_finite")(recorded_loss)
    recorder.put(vector, "ROWS", ROWS)

    @recorder.around(agent_class, "finish_episode")
    def finish_episode(original, agent, batch, ep_reward):
        original(agent, batch, ep_reward)
        returns = agent.returns
        of_actions = {  # where a vector environment reset itself there was none
            what: [row[~none].detach() for of_observer in zip(numbers, returns.isnan(), strict=True)
                   for row, none in zip(*of_observer, strict=True)]
            for what, numbers in (("returns", returns), ("log_probs", now["log_probs"]))}
        episodes.append({
            **now, **of_actions, "reward": ep_reward, "running_reward": agent.running_reward,
            "gradients": named_gradients(agent.policy), "weights": named_weights(agent.policy)})
