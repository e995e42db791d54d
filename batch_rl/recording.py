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

import importlib
import threading

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorWrapper
from torch import nn
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl import vector
from batch_rl.double_buffering import DoubleBufferedAgent
from batch_rl.fast import FastAgent

TIME_LIMIT = 13  # steps, of observer1's environments
ROWS = 100  # states in a piece of the training

AGENTS = {"batch_rl.main": lesson.Agent, "batch_rl.fast": FastAgent,
          "batch_rl.vector": vector.VectorAgent, "batch_rl.until_solved": vector.VectorAgent,
          "batch_rl.double_buffering": DoubleBufferedAgent}  # of each program

_environments = []  # on an observer: all of its own, or all of its vector environments


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
        return state, distinct(self.rank, self.k, self.steps), *others


def distinct(rank, k, steps):
    """The reward of a step, of each one if `k` and `steps` are arrays."""
    return 1 + 0.1 * rank + 0.01 * k + 0.0001 * steps


class Recorded(gym.Wrapper):
    """Keeps the states and actions of its steps until they are `taken`."""

    def __init__(self, env):
        super().__init__(env)
        self.clear()

    def clear(self):
        """Forget what was recorded."""
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


class RecordedVector(VectorWrapper):
    """`DistinctRewards` and `Recorded` of a vector environment, the first k of which is `first`.

    Where it resets itself nobody plays: nothing is recorded, and there is no reward.
    """

    def __init__(self, env, rank, first):
        super().__init__(env)
        self.rank, self.k = rank, first + np.arange(env.num_envs)
        self.steps = np.zeros(env.num_envs, int)
        self.clear()

    def clear(self):
        """Forget what was recorded."""
        self.states, self.actions = ([[] for _ in self.k] for _ in range(2))

    def reset(self, **options):
        """See gymnasium."""
        self.state, info = super().reset(**options)
        self.over = np.zeros(self.num_envs, bool)
        return self.state, info

    def step(self, actions):
        """See gymnasium."""
        plays = ~self.over
        for i in plays.nonzero()[0]:
            self.states[i].append(self.state[i].tolist())
            self.actions[i].append(int(actions[i]))
        self.state, _, terminated, truncated, info = super().step(actions)
        self.over = terminated | truncated
        self.steps += plays
        rewards = np.where(plays, distinct(self.rank, self.k, self.steps), 0.0)
        return self.state, rewards, terminated, truncated, info


def taken():
    """On an observer: the states and actions since the last time, environment by environment."""
    played = {"states": [], "actions": []}
    for env in _environments:
        vector = isinstance(env, RecordedVector)
        played["states"] += env.states if vector else [env.states]
        played["actions"] += env.actions if vector else [env.actions]
        env.clear()
    return played


def record(rank, world_size, args):
    """Run `args.program`, recorded.

    Returns:
        On rank 0, what the program returned as `run`, and as `episodes` what was seen of each one:
        `batch`; `forwards`, how many; `masks`, by who asked; `observer1` and so on, each with
        `states` and `actions`; `returns` and `log_probs`, for each environment a list;
        `loss`; `gradients` and `weights` by name; `reward` and `running_reward`. None on observers.
    """
    torch.set_default_dtype(torch.float64)
    program = importlib.import_module(args.program)
    if rank > 0:
        record_environments(rank)
        program.run_worker(rank, world_size, args)
        return None
    episodes = []
    record_agent(AGENTS[args.program], episodes)
    if args.timed:
        # The n-th episode takes n seconds of this clock, which looks at what is done.
        lesson.time.perf_counter = lambda: sum(range(1, len(episodes) + 1))
    return {"run": program.run_worker(rank, world_size, args), "episodes": episodes}


def record_environments(rank):
    """From now on, the environments that this observer makes are recorded."""
    make, limit = gym.make, {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}

    def recorded_make(*place, **options):
        env = DistinctRewards(make(*place, **options, **limit), rank, len(_environments))
        _environments.append(Recorded(env))
        return _environments[-1]

    def recorded_make_vec(*place, num_envs, **options):
        env = gym_make_vec(*place, num_envs=num_envs, **options, **limit)
        first = sum(env.num_envs for env in _environments)
        _environments.append(RecordedVector(env, rank, first))
        return _environments[-1]

    gym_make_vec, gym.make, gym.make_vec = gym.make_vec, recorded_make, recorded_make_vec


def record_agent(agent_class, episodes):
    """From now on, append to `episodes` what each one was."""
    run_episode, finish_episode = agent_class.run_episode, agent_class.finish_episode
    select_action, forward = lesson.Agent.select_action, nn.Dropout.forward
    pieces, act = vector.Group.pieces, vector.Group.act
    log_probs, require_finite = agent_class.log_probs, lesson.require_finite
    asking, one_more = threading.local(), threading.Lock()  # two RPC threads answer requests
    now = {}

    def recorded_run_episode(agent, batch):
        now.clear()
        now.update(batch=batch, masks={}, forwards=0, log_probs=[])
        ep_reward = run_episode(agent, batch)
        for rank in range(1, len(agent.ob_rrefs) + 1):
            now[f"observer{rank}"] = rpc.rpc_sync(f"observer{rank}", taken)
        return ep_reward

    def recorded_finish_episode(agent, batch, ep_reward):
        finish_episode(agent, batch, ep_reward)
        named = dict(agent.policy.named_parameters())
        returns, now["log_probs"] = agent.returns, torch.cat(now["log_probs"], dim=1)
        of_actions = {  # where a vector environment reset itself there was none
            what: [row[~none].tolist() for of_observer in zip(numbers, returns.isnan(), strict=True)
                   for row, none in zip(*of_observer, strict=True)]
            for what, numbers in (("returns", returns), ("log_probs", now["log_probs"]))}
        episodes.append({
            **now, **of_actions, "reward": ep_reward, "running_reward": agent.running_reward,
            "gradients": {name: p.grad.tolist() for name, p in named.items()},
            "weights": {name: p.tolist() for name, p in named.items()}})

    def recorded_select_action(agent_rref, ob_id, states):
        asking.ob_id = ob_id
        return select_action(agent_rref, ob_id, states)

    def recorded_dropout(module, x):
        """With what `nn.Dropout` has multiplied, (K, 128) or in batches (observers, K, 128)."""
        y = forward(module, x)
        who = "all" if now["batch"] else str(asking.ob_id)
        with one_more:
            now["forwards"] += 1
        now["masks"].setdefault(who, []).append((y / x).tolist())
        return y

    def recorded_act(group, *states):
        with one_more:
            now["forwards"] += 1
        return act(group, *states)

    def recorded_log_probs(agent, batch):
        now["log_probs"].append(log_probs(agent, batch))
        return now["log_probs"][-1]

    def recorded_pieces(group, *of_episode):
        of_group = []
        for of_piece, weights in pieces(group, *of_episode):
            of_group.append(of_piece.detach())
            yield of_piece, weights
        now["log_probs"].append(torch.cat(of_group).permute(1, 2, 0))

    def recorded_loss(loss, at):
        now["loss"] = require_finite(loss, at)
        return now["loss"]

    agent_class.run_episode = recorded_run_episode
    agent_class.finish_episode = recorded_finish_episode
    agent_class.log_probs = recorded_log_probs
    vector.Group.act, vector.Group.pieces = recorded_act, recorded_pieces
    vector.ROWS = ROWS
    lesson.require_finite = vector.require_finite = recorded_loss
    # Where the observers' requests look it up.
    lesson.Agent.select_action = staticmethod(recorded_select_action)
    recorded_select_action.__module__ = lesson.Agent.__module__
    recorded_select_action.__qualname__ = "Agent.select_action"
    nn.Dropout.forward = recorded_dropout
