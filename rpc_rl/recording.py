"""What `--check` records of a training: the lesson's own, in its own processes.

The agent keeps what it is asked, what it answers and what it learns. Changed is only what lets a
short training show every mistake:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- the episodes of observer1 end at its environment's time limit, those of the others at the steps
  that the agent grants, and all of them end early where the pole falls;
- rewards are all different: see `DistinctRewards`.
"""

import threading

import gymnasium as gym
import torch
from torch import nn

from rpc_rl import main as lesson
from rpc_rl.fast_agent import FastAgent

TIME_LIMIT = 13  # steps, of observer1's environment


class DistinctRewards(gym.Wrapper):
    """CartPole with rewards of about 1, others for each observer and each of its steps.

    Its own is always 1: two that are swapped, or counted for another observer, would not be seen.

    Args:
        env: the CartPole.
        ob_id: the rank of its observer.
    """

    def __init__(self, env, ob_id):
        super().__init__(env)
        self.ob_id, self.steps = ob_id, 0

    def step(self, action):
        """See gymnasium."""
        state, _, *others = super().step(action)
        self.steps += 1
        return state, 1 + 0.1 * self.ob_id + 0.001 * self.steps, *others


def record(rank, world_size, args):
    """Run the lesson, recorded.

    Returns:
        On rank 0, the lesson's `metrics`, and as `episodes` what was seen of each one: `observers`,
        each with `states`, `actions`, `rewards` and dropout `masks`; `gradients` and `weights` by
        name; `last_reward` and `running_reward`. None on observers.
    """
    torch.set_default_dtype(torch.float64)
    if rank > 0:
        make, limit = gym.make, {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}
        lesson.gym.make = lambda *a, **k: DistinctRewards(make(*a, **k, **limit), rank)
        lesson.run_worker(rank, world_size, args)
        return None
    episodes = []
    record_agent(FastAgent if args.agent == "fast" else lesson.Agent, episodes)
    return {"metrics": lesson.run_worker(rank, world_size, args), "episodes": episodes}


def record_agent(agent_class, episodes):
    """From now on, append to `episodes` what each one was."""
    run_episode, finish_episode = agent_class.run_episode, agent_class.finish_episode
    select_action, report_reward = agent_class.select_action, agent_class.report_reward
    forward = nn.Dropout.forward
    asking = threading.local()  # two RPC threads answer requests
    now = {}

    def recorded_run_episode(agent):
        now.clear()
        now.update({ob_id: {"states": [], "actions": [], "rewards": [], "masks": []}
                    for ob_id in agent.ob_rrefs})
        run_episode(agent)

    def recorded_select_action(agent, ob_id, state, *reward):
        asking.ob_id = ob_id
        action = select_action(agent, ob_id, state, *reward)
        now[ob_id]["states"].append(state)
        now[ob_id]["actions"].append(action)
        return action

    def recorded_report_reward(agent, ob_id, reward):
        now[ob_id]["rewards"].append(reward)
        report_reward(agent, ob_id, reward)

    def recorded_finish_episode(agent):
        last_reward = finish_episode(agent)
        named = dict(agent.policy.named_parameters())
        episodes.append({
            "observers": list(now.values()), "last_reward": last_reward,
            "running_reward": agent.running_reward,
            "gradients": {name: p.grad.tolist() for name, p in named.items()},
            "weights": {name: p.tolist() for name, p in named.items()}})
        return last_reward

    def recorded_dropout(module, x):
        """With what `nn.Dropout` has multiplied; only the plain agent uses it."""
        y = forward(module, x)
        now[asking.ob_id]["masks"].append((y / x).tolist())
        return y

    agent_class.run_episode = recorded_run_episode
    agent_class.select_action = recorded_select_action
    agent_class.report_reward = recorded_report_reward
    agent_class.finish_episode = recorded_finish_episode
    nn.Dropout.forward = recorded_dropout
