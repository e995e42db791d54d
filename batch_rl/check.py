"""`--check`: whole runs over RPC, held against a program of one process that plays them again.

Two runs, which are the lesson's own: `--mode train`, always in batches, and `--mode compare`, with
and without batches in turns; one with the plain and one with the fast agent. Episodes are short,
and the threshold is one that they pass; recording.py says what else is changed.

In batches the order of all draws is known: one process with the same seed makes the same ones. One
by one, whoever asks first draws first; there the oracle takes dropout masks and actions from the
run, and holds them as what they are: random, at the right rate.
"""

import argparse
import math

import gymnasium as gym
import torch
import torch.distributed as dist
from common.launch import launch
from common.oracle import Comparison, in_float64, verdict
from torch import nn

from batch_rl import main as lesson
from batch_rl import results
from batch_rl.recording import TIME_LIMIT, DistinctRewards, record

N_STEPS = 40  # of an episode
EPISODES, THRESHOLD = 8, 10.0  # to train: at most, and a running reward that they pass earlier
NUM_EPISODE = 2  # to compare, after a warm-up
PLAYED = ("states", "actions", "p_right")
SIGMAS = 6  # two random choices in a billion are further from what is expected


def single_process(args, run):
    """Play and learn in this process, one environment after the other where the order is free.

    Args:
        args: the flags of the run.
        run: its episodes: whether they were in batches; and without, their masks and actions.

    Returns:
        A dict for each episode, with what `record` has of it.
    """
    torch.manual_seed(args.seed)
    hidden, output = nn.Linear(4, 128), nn.Linear(128, 2)
    named = {"affine1.weight": hidden.weight, "affine1.bias": hidden.bias,
             "affine2.weight": output.weight, "affine2.bias": output.bias}
    adam = torch.optim.Adam(named.values(), lr=args.lr)
    env_seeds = torch.Generator().manual_seed(args.seed)
    ranks, n_envs = range(1, args.world_size), args.envs_per_observer
    envs = {}
    for rank in ranks:
        for k in range(n_envs):
            env = gym.make("CartPole-v1", max_episode_steps=TIME_LIMIT if rank == 1 else None)
            envs[rank, k] = DistinctRewards(env, rank, k)
    episodes, running_reward = [], 0.0
    for number in range(EPISODES if args.mode == "train" else 2 * (1 + NUM_EPISODE)):
        if args.mode == "train" and running_reward > THRESHOLD:
            break
        batch = args.mode == "train" or number % 2 == 0
        state, played = {}, {where: {what: [] for what in PLAYED} for where in envs}
        rewards, lengths, returns, log_probs = ({where: [] for where in envs} for _ in range(4))
        for rank in ranks:
            seed = torch.randint(2**30, (), generator=env_seeds).item()
            for k in range(n_envs):
                state[rank, k], _ = envs[rank, k].reset(seed=seed + k)
        for step in range(N_STEPS):
            x = hidden(torch.tensor([[state[rank, k].tolist() for k in range(n_envs)]
                                     for rank in ranks]))
            if batch:
                x = nn.functional.dropout(x, 0.6)
            else:
                masks = run[number]["masks"]
                x = x * torch.tensor([masks[str(rank - 1)][step] for rank in ranks])
                torch.bernoulli(torch.empty_like(x), 0.4)  # as many draws as the requests made
            p = torch.softmax(output(torch.relu(x)), dim=-1)
            drawn = torch.multinomial(p.detach().reshape(-1, 2), 1).view(len(ranks), n_envs)
            for rank, k in envs:
                action = drawn[rank - 1, k].item()
                if not batch:
                    action = run[number][f"observer{rank}"]["actions"][k][step]
                played[rank, k]["states"].append(state[rank, k].tolist())
                played[rank, k]["actions"].append(action)
                played[rank, k]["p_right"].append(p[rank - 1, k, 1].item())
                log_probs[rank, k].append(torch.log(p[rank - 1, k, action]))
                state[rank, k], reward, fell, out_of_time, _ = envs[rank, k].step(action)
                rewards[rank, k].append(reward)
                if fell or out_of_time or step == N_STEPS - 1:  # a stretch is over
                    beyond = 0.0 if fell else reward / max(1 - args.gamma, 1 / N_STEPS)
                    returns[rank, k] += returns_by_definition(rewards[rank, k], beyond, args.gamma)
                    lengths[rank, k].append(len(rewards[rank, k]))
                    rewards[rank, k] = []
                    state[rank, k], _ = envs[rank, k].reset()
        all_returns = torch.tensor([returns[where] for where in envs])
        spread = all_returns.std(correction=0) + torch.finfo(torch.float32).eps
        normalised = (all_returns - all_returns.mean()) / spread
        all_log_probs = torch.stack([torch.stack(log_probs[where]) for where in envs])
        adam.zero_grad()
        (-(all_log_probs * normalised).sum() / len(ranks)).backward()
        gradients = {name: p.grad.tolist() for name, p in named.items()}
        adam.step()
        ep_reward = sum(of_env[0] for of_env in lengths.values()) / len(envs)
        running_reward = (running_reward + ep_reward) / 2
        episodes.append({
            "batch": batch, "reward": ep_reward, "running_reward": running_reward,
            "gradients": gradients, "weights": {name: p.tolist() for name, p in named.items()},
            **{f"observer{rank}": {what: [played[rank, k][what] for k in range(n_envs)]
                                   for what in PLAYED} for rank in ranks}})
    return episodes


def returns_by_definition(rewards, beyond, gamma):
    """The discounted sum of what follows, for each step; `beyond` is the value behind the last."""
    n = len(rewards)
    return [sum(gamma**i * r for i, r in enumerate(rewards[t:])) + gamma ** (n - t) * beyond
            for t in range(n)]


def check(args):
    """Compare both modes and agents; the differences in the process that reports, else None."""
    findings = Comparison(f"{args.world_size} processes")
    runs = [("train", "plain"), ("compare", "fast"), ("compare", "plain")]
    if dist.is_torchelastic_launched() or args.rank is not None:
        runs = [("compare", args.agent)]  # one launch
    for mode, agent in runs:
        flags = {"mode": mode, "agent": agent, "num_steps": N_STEPS, "num_episode": NUM_EPISODE,
                 "max_episodes": EPISODES, "reward_threshold": THRESHOLD}
        flags = argparse.Namespace(**{**vars(args), **flags})
        recorded = launch(record, flags, lesson.role_name)
        if recorded is None:
            return None
        compare(findings, recorded, flags)
    return verdict(findings.as_dict())


def compare(findings, recorded, args):
    """Hold what `record` returned against one process."""
    episodes, name = recorded["episodes"], f"{args.mode}, {args.agent} agent"
    modes = [True, False] * (1 + NUM_EPISODE)
    if args.mode == "train":
        modes = [True] * len(episodes)
    expected = [N_STEPS if batch else N_STEPS * (args.world_size - 1) for batch in modes]
    used = [sum(map(len, ep["masks"].values())) for ep in episodes]
    in_batches = [ep["batch"] for ep in episodes]
    if not (findings.holds(f"{name}, episodes", in_batches == modes,
                           f"in batches: {in_batches}, expected {modes}")
            and findings.holds(f"{name}, forwards", used == expected,
                               f"{used} of the policy with dropout, expected {expected}")):
        return  # nothing to play again with
    with in_float64():
        alone = single_process(args, episodes)
    observers = [f"observer{rank}" for rank in range(1, args.world_size)]
    because = "the same seeds, the same draws"
    for what in ("states", "actions"):
        played = [[{ob: ep[ob][what] for ob in observers} for ep in side]
                  for side in (episodes, alone)]
        findings.equal(f"{name}, {what}", *played, because, "episode")
    for what, tolerance in (("gradients", 1e-9), ("weights", 1e-9),
                            ("reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(f"{name}, {what.replace('_', ' ')}", [ep[what] for ep in episodes],
                       [ep[what] for ep in alone], tolerance, "float64, sums in another order",
                       "episode")
    if args.mode == "compare":
        hold_randomness(findings, name, [ep for ep in episodes if not ep["batch"]],
                        [ep for ep in alone if not ep["batch"]], observers)
        hold_times(findings, name, recorded["run"]["seconds"], args)
    else:
        steps = len(alone) * N_STEPS * args.envs_per_observer * (args.world_size - 1)
        solved = alone[-1]["running_reward"] > THRESHOLD
        expected = {"episodes": len(alone), "env_steps": steps, "solved": int(solved),
                    "rewards": [ep["reward"] for ep in alone],
                    "running_rewards": [ep["running_reward"] for ep in alone]}
        reported = {what: recorded["run"][what] for what in expected}
        findings.close(f"{name}, metrics", [reported], [expected], 1e-12, "what metrics.json says",
                       "training")


def hold_randomness(findings, name, run, alone, observers):
    """Without batches the draws depend on who asks first: hold them as what they are."""
    masks = torch.tensor([ep["masks"][who] for ep in run for who in ep["masks"]]).flatten(0, -2)
    share, bound = (masks > 0).double().mean().item(), SIGMAS * math.sqrt(0.24 / masks.numel())
    findings.holds(f"{name}, dropout rate", abs(share - 0.4) < bound,
                   f"{share:.3f} of {masks.numel()} hidden units were kept, 0.4 +- {bound:.3f}")
    different = len(masks.unique(dim=0))
    findings.holds(f"{name}, dropout masks", different == len(masks),
                   f"{different} of {len(masks)} states had their own mask")
    p = torch.tensor([ep[ob]["p_right"] for ep in alone for ob in observers]).flatten()
    action = torch.tensor([ep[ob]["actions"] for ep in run for ob in observers]).flatten()
    bound = SIGMAS * (p * (1 - p)).sum().sqrt().item()
    likelier = 1.0 * (action == (p > 0.5))
    for what, off in (("right", action - p), ("the likelier way", likelier - p.maximum(1 - p))):
        off = off.sum().item()
        findings.holds(f"{name}, choices {what}", abs(off) < bound,
                       f"of {len(p)} actions, {off:+.1f} more than by the policy's probabilities, "
                       f"0 +- {bound:.1f}")


def hold_times(findings, name, seconds, args):
    """Hold the measurements: each in its row, without the warm-up, as steps per second."""
    timed = {"batched": [2 * i + 1 for i in range(1, NUM_EPISODE + 1)],
             "single": [2 * i + 2 for i in range(1, NUM_EPISODE + 1)]}
    if findings.equal(f"{name}, times", [seconds], [timed], "episode n takes n seconds", "run"):
        return
    observers = args.world_size - 1
    table = results.table_of(args, {observers: seconds})
    steps = observers * args.envs_per_observer * N_STEPS
    middle = {mode: (of_mode[0] + of_mode[-1]) / 2 for mode, of_mode in timed.items()}
    expected = {"batched": steps / middle["batched"], "single": steps / middle["single"],
                "speed-up": middle["single"] / middle["batched"]}
    reported = {row["mode"]: row["env_steps_per_s"] for row in table["rows"]}
    reported["speed-up"] = table["speedup"][observers]
    findings.close(f"{name}, table", [reported], [expected], 1e-12, "steps / median", "run")
