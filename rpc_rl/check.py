"""The check of main.py and fast.py: a whole training run, compared with a single process.

The run is the program's own, with the flags that were given, but short: few steps are granted, and
such episodes pass its threshold. Three more changes make a short run show every mistake:

- float64, because rounding in float32 could look like a mistake, or change an action;
- a time limit in the environment of observer1, so its episodes do not end as those of the others;
- a different reward for each step (`make_env`).

The fast agent draws from generators with known seeds, so the single process draws the same numbers.
In main.py, the observer that asks first gets the next number. There the check draws the actions,
from numbers of each observer and step. It takes the dropout masks from the run, and tests that they
are random and have the right rate.
"""

import argparse
import functools
import importlib
import itertools
import threading
from collections.abc import Callable
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, hold_masks, verdict
from common.recorder import Recorder, named_gradients, named_weights

import gymnasium as gym
import torch
from gymnasium.wrappers import TransformReward
from torch import nn
from torch.distributions import Categorical

from rpc_rl import main as tutorial
from rpc_rl.fast import FastAgent

# Upper limits, whatever the flags are:
N_STEPS = 17  # of an episode, granted by the agent
THRESHOLD = 5.0  # the running reward passes it after about seven episodes
MAX_EPISODES = 12
TIME_LIMIT = 13  # steps, in the environment of observer1
BECAUSE = "float64, sums in another order"


def make_env(rank: int, *name: str, make: Callable = gym.make, **options: object) -> gym.Env:
    """Make an observer's environment as `gym.make`, with rewards of about 1 that all differ.

    With CartPole's own reward, which is always 1, two exchanged rewards would go unnoticed.
    """
    env = make(*name, **options, max_episode_steps=TIME_LIMIT if rank == 1 else None)
    steps = itertools.count(1)
    return TransformReward(env, lambda _: 1 + 0.1 * rank + 0.001 * next(steps))


def uniforms(rank: int, episode: int) -> torch.Tensor:
    """Draw a number from 0 to 1 for each step of an observer's episode: (`N_STEPS`,)."""
    generator = torch.Generator().manual_seed(1000 * episode + rank)
    return torch.rand(N_STEPS, generator=generator, dtype=torch.float64)


# --- the single process


def single_process(args: argparse.Namespace, run: list[dict]) -> list[dict]:
    """Play and learn in this process, one observer after the other, with a graph for each step.

    Args:
        args: Flags of the run.
        run: Recorded episodes; for main.py, the dropout masks are taken from them.

    Returns:
        Entries like those of `record_agent`, one for each episode, with "last_reward" and
        "running_reward".
    """
    torch.manual_seed(args.seed)
    hidden, output = nn.Linear(4, 128), nn.Linear(128, 2)
    policy = nn.ModuleDict({"affine1": hidden, "affine2": output})
    adam = torch.optim.Adam(policy.parameters(), lr=args.lr)
    ranks, eps = range(1, args.world_size), torch.finfo(torch.float32).eps
    draws = {rank: torch.Generator().manual_seed(1000 * args.seed + rank) for rank in ranks}
    envs = {rank: make_env(rank, "CartPole-v1") for rank in ranks}
    n_steps = args.total_steps_per_episode // len(ranks)
    episodes, running_reward = [], 0.0
    while running_reward <= args.reward_threshold and len(episodes) < args.max_episodes:
        number = len(episodes)
        if not args.fast and number == len(run):
            break  # no more masks: the run has ended too early
        observers, log_probs, returns = [], [], []
        for rank in ranks:
            if args.fast:
                share_kept = torch.full((n_steps, 128), 0.4)
                masks = torch.bernoulli(share_kept, generator=draws[rank]) / 0.4
                drawn = torch.rand(n_steps, generator=draws[rank])
            else:
                masks, drawn = run[number]["observers"][rank - 1]["masks"], uniforms(rank, number)
            state, _ = envs[rank].reset(seed=torch.randint(2**31, (), generator=draws[rank]).item())
            seen = {"states": [], "actions": [], "rewards": []}
            for mask, uniform in zip(masks, drawn, strict=False):
                x = hidden(torch.tensor(state.tolist()))
                p = torch.softmax(output(torch.relu(x * mask)), dim=0)
                action = int(uniform > p[0])
                log_probs.append(torch.log(p[action]))
                seen["states"].append(state.tolist())
                seen["actions"].append(action)
                state, reward, fell, out_of_time, _ = envs[rank].step(action)
                seen["rewards"].append(reward)
                if fell or out_of_time:
                    break
            observers.append(seen)
            # Unless the pole fell, the last reward continues forever.
            goes_on = args.truncation == "bootstrap" and not fell
            beyond = reward / max(1 - args.gamma, eps) if goes_on else 0.0
            following = [*seen["rewards"], beyond]
            returns += [sum(args.gamma**i * r for i, r in enumerate(following[t:]))
                        for t in range(len(following) - 1)]
        returns = torch.tensor(returns)
        normalized = (returns - returns.mean()) / (returns.std(correction=0) + eps)
        adam.zero_grad()
        (-(torch.stack(log_probs) * normalized).sum()).backward()
        adam.step()
        worst = min(sum(observer["rewards"]) for observer in observers)
        running_reward += 0.05 * (worst - running_reward)
        episodes.append({
            "observers": observers, "last_reward": worst, "running_reward": running_reward,
            "gradients": named_gradients(policy), "weights": named_weights(policy)})
    return episodes


# --- what is recorded


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the program `args.program` and record it; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    program, episodes = importlib.import_module(args.program), []
    with Recorder() as recorder:
        if rank > 0:
            recorder.put(gym, "make", functools.partial(make_env, rank))
        else:
            record_agent(recorder, FastAgent if args.fast else tutorial.Agent, episodes)
        metrics = program.run_worker(rank, world_size, args)
    return compare(metrics, episodes, args) if rank == 0 else None


def record_agent(recorder: Recorder, agent_class: type[tutorial.Agent],
                 episodes: list[dict]) -> None:
    """Append an entry to `episodes` after each one.

    The entry has "observers", each with "states", "actions", "rewards" and dropout "masks"; the
    "gradients" and "weights" by name.
    """
    asking = threading.local()  # two RPC threads answer requests
    now = {}

    @recorder.around(agent_class, "run_episode")
    def run_episode(original, agent):
        now.clear()
        now.update({ob_id: {"states": [], "actions": [], "rewards": [], "masks": []}
                    for ob_id in agent.ob_rrefs})
        original(agent)

    @recorder.around(agent_class, "select_action")
    def select_action(original, agent, ob_id, state, *reward):
        asking.ob_id = ob_id
        action = original(agent, ob_id, state, *reward)
        now[ob_id]["states"].append(state)
        now[ob_id]["actions"].append(action)
        return action

    @recorder.around(nn.Dropout, "forward")
    def dropout(original, module, x):
        y = original(module, x)
        now[asking.ob_id]["masks"].append((y / x).detach().cpu())
        return y

    @recorder.around(Categorical, "sample")
    def sample(original, distribution):
        drawn = uniforms(asking.ob_id, len(episodes))[len(now[asking.ob_id]["actions"])]
        return (drawn > distribution.probs[0]).long()

    @recorder.around(agent_class, "report_reward")
    def report_reward(original, agent, ob_id, reward):
        now[ob_id]["rewards"].append(reward)
        original(agent, ob_id, reward)

    @recorder.around(agent_class, "finish_episode")
    def finish_episode(original, agent):
        last_reward = original(agent)
        episodes.append({
            "observers": list(now.values()),
            "gradients": named_gradients(agent.policy), "weights": named_weights(agent.policy)})
        return last_reward


# --- what is compared


def compare(metrics: dict, run: list[dict], args: argparse.Namespace) -> dict:
    """Compare the metrics and the recorded episodes with the single process."""
    findings = Comparison(f"{args.world_size} processes")
    masks = [mask for ep in run for ob in ep["observers"] for mask in ob["masks"]]
    steps = sum(len(ob["actions"]) for ep in run for ob in ep["observers"])
    if not args.fast and not findings.holds("dropout layer", len(masks) == steps,
                                            f"used {len(masks)} times for {steps} actions"):
        return findings.as_dict()  # the single process would lack masks
    alone = single_process(args, run)
    for what in ("states", "actions", "rewards"):
        played = [[{f"observer{rank}": observer[what]
                    for rank, observer in enumerate(episode["observers"], start=1)}
                   for episode in side] for side in (run, alone)]
        findings.equal(what, *played, "the same seeds, the same draws", "episode")
    for what in ("gradients", "weights"):
        findings.close(what, [episode[what] for episode in run],
                       [episode[what] for episode in alone], 1e-9, BECAUSE, "episode")
    running_rewards = [episode["running_reward"] for episode in alone]
    findings.close("running reward", metrics["running_rewards"], running_rewards, 1e-12, BECAUSE,
                   "episode")
    solved = running_rewards[-1] > args.reward_threshold
    findings.holds("end", solved or len(alone) == args.max_episodes,
                   f"after {len(alone)} episodes of at most {args.max_episodes}, with a running "
                   f"reward of {running_rewards[-1]:.2f}, solved above {args.reward_threshold:g}")
    expected = {"episodes": len(alone), "solved": int(solved),
                "running_reward": running_rewards[-1],
                "env_steps": sum(len(ob["rewards"]) for ep in alone for ob in ep["observers"]),
                "rewards": [episode["last_reward"] for episode in alone]}
    findings.close("metrics", [{what: metrics[what] for what in expected}], [expected], 1e-12,
                   "the numbers of metrics.json", "training")
    if not args.fast:
        hold_masks(findings, torch.stack(masks), "steps")
    return findings.as_dict()


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process."""
    flags = argparse.Namespace(**vars(args), program=program.__name__,
                               fast=program.__name__ == FastAgent.__module__)
    flags.total_steps_per_episode = min(args.total_steps_per_episode,
                                        N_STEPS * (args.world_size - 1))
    flags.reward_threshold = min(args.reward_threshold, THRESHOLD)
    flags.max_episodes = min(args.max_episodes, MAX_EPISODES)
    return verdict(launch(record, flags, program.role_name))
