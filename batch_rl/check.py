"""`--check`: whole runs over RPC, held against a program of one process that plays them again.

The runs are the lesson's own: `--mode train`, always in batches, and `--mode compare`, with and
without batches in turns; each rung of the ladder (rungs.py) in at least one of them. Episodes are
short, and the threshold is one that they pass; recording.py says what else is changed.

Of the vector rungs all draws have their place: one process makes the same ones (play_check.py). Of
lists only in batches; one by one, whoever asks first draws first: there the oracle takes dropout
masks and actions from the run, and holds them as what they are: random, at the right rate.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, in_float64, verdict
from torch import nn

from batch_rl import main as lesson
from batch_rl import metrics_check
from batch_rl.metrics_check import NUM_EPISODE
from batch_rl.play_check import N_STEPS, as_vector, one_by_one
from batch_rl.recording import TIME_LIMIT, DistinctRewards, record

EPISODES, THRESHOLD = 8, 10.0  # to train: at most, and a running reward that they pass earlier
RUNS = [  # each rung
    {"mode": "train", "agent": "plain"}, {"mode": "compare", "agent": "fast"},
    {"mode": "compare", "agent": "plain"}, {"mode": "compare", "envs": "vector"},
    {"mode": "train", "envs": "sync", "double_buffering": True},
]


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
    env_seeds, rng = torch.Generator().manual_seed(args.seed), np.random.default_rng(args.seed)
    ranks, n_envs = range(1, args.world_size), args.envs_per_observer
    envs = {}
    for rank in ranks:
        for k in range(n_envs):
            env = gym.make("CartPole-v1", max_episode_steps=TIME_LIMIT if rank == 1 else None)
            envs[rank, k] = DistinctRewards(env, rank, k)
    episodes, running_reward = [], 0.0
    for number in range(EPISODES if args.mode == "train" else 2 * (1 + NUM_EPISODE)):
        if args.mode == "train" and (running_reward > THRESHOLD or number == len(run)):
            break  # solved; or the run has ended here, whether it should or not
        batch = args.mode == "train" or number % 2 == 0
        seeds = {rank: torch.randint(2**30, (), generator=env_seeds).item() for rank in ranks}
        start = (envs, (hidden, output), args, seeds)
        played = (one_by_one(*start, batch, run[number]) if args.envs == "plain"
                  else as_vector(*start, rng))
        returns = torch.tensor([R for where in envs for R in played[where]["returns"]])
        log_probs = torch.stack([log_p for where in envs for log_p in played[where]["log_probs"]])
        spread = returns.std(correction=0) + torch.finfo(torch.float32).eps
        adam.zero_grad()
        loss = -(log_probs * (returns - returns.mean()) / spread).sum() / len(ranks)
        loss.backward()
        gradients = {name: p.grad.tolist() for name, p in named.items()}
        adam.step()
        ep_reward = sum(played[where]["lengths"][0] for where in envs) / len(envs)
        running_reward = (running_reward + ep_reward) / 2
        steps = [len(played[where]["actions"]) for where in envs]
        episodes.append({
            "batch": batch, "reward": ep_reward, "running_reward": running_reward,
            "returns": [of_env.tolist() for of_env in returns.split(steps)],
            "log_probs": [of_env.tolist() for of_env in log_probs.detach().split(steps)],
            "loss": loss.item(), "gradients": gradients,
            "weights": {name: p.tolist() for name, p in named.items()},
            **{f"observer{rank}": {what: [played[rank, k][what] for k in range(n_envs)]
                                   for what in ("states", "actions", "p_right")}
               for rank in ranks}})
    return episodes


def check(args):
    """Compare both modes and all rungs; the differences in the process that reports, else None."""
    findings = Comparison(f"{args.world_size} processes")
    runs = RUNS
    if dist.is_torchelastic_launched() or args.rank is not None:
        runs = [{"mode": "compare"}]  # one launch
    for run in runs:
        flags = {"num_steps": N_STEPS, "num_episode": NUM_EPISODE,
                 "max_episodes": EPISODES, "reward_threshold": THRESHOLD}
        if runs is RUNS:
            flags |= {"agent": "fast", "envs": "plain", "double_buffering": False}
        flags = argparse.Namespace(**{**vars(args), **flags, **run})
        if flags.envs != "plain":  # of which double buffering makes halves
            flags.envs_per_observer = 2 * args.envs_per_observer
        recorded = launch(record, flags, lesson.role_name)
        if recorded is None:
            return None
        compare(findings, recorded, flags)
    return verdict(findings.as_dict())


def compare(findings, recorded, args):
    """Hold what `record` returned against one process."""
    episodes, name = recorded["episodes"], f"{args.mode}, {rung_of(args)}"
    modes = [True, False] * (1 + NUM_EPISODE)
    if args.mode == "train":
        modes = [True] * len(episodes)
    n_groups = 2 if args.double_buffering else 1
    expected = [n_groups * N_STEPS * (1 if batch else args.world_size - 1) for batch in modes]
    used = [ep["forwards"] for ep in episodes]
    in_batches = [ep["batch"] for ep in episodes]
    if not (findings.holds(f"{name}, episodes", in_batches == modes,
                           f"in batches: {in_batches}, expected {modes}")
            and findings.holds(f"{name}, forwards", used == expected,
                               f"{used} of the policy with dropout, expected {expected}")):
        return  # nothing to play again with
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny: a second thread would only wait, and take a core
    with in_float64():
        alone = single_process(args, episodes)
    torch.set_num_threads(usual)
    observers = [f"observer{rank}" for rank in range(1, args.world_size)]
    because = "the same seeds, the same draws"
    for what in ("states", "actions"):
        played = [[{ob: ep[ob][what] for ob in observers} for ep in side]
                  for side in (episodes, alone)]
        findings.equal(f"{name}, {what}", *played, because, "episode")
    for what, tolerance in (("returns", 1e-12), ("log_probs", 1e-9), ("loss", 1e-9),
                            ("gradients", 1e-9), ("weights", 1e-9),
                            ("reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(f"{name}, {what.replace('_', ' ')}", [ep[what] for ep in episodes],
                       [ep[what] for ep in alone], tolerance, "float64, sums in another order",
                       "episode")
    if args.mode == "train":
        solved = alone[-1]["running_reward"] > THRESHOLD
        findings.holds(f"{name}, end", solved or len(alone) == EPISODES,
                       f"after {len(alone)} episodes of at most {EPISODES}, with a running reward "
                       f"of {alone[-1]['running_reward']:.2f}, solved above {THRESHOLD:g}")
        metrics_check.hold_training(findings, name, recorded["run"], alone, args, solved)
        return
    if args.envs == "plain":
        metrics_check.hold_randomness(findings, name, [ep for ep in episodes if not ep["batch"]],
                                      [ep for ep in alone if not ep["batch"]], observers)
    metrics_check.hold_times(findings, name, recorded["run"]["timed"], alone, args)


def rung_of(args):
    """The name of what plays: "plain agent"."""
    if args.double_buffering:
        return "double buffering"
    return f"{args.agent} agent" if args.envs == "plain" else f"{args.envs} environments"
