"""`--check`: a whole run over RPC, held against a program of one process that plays it again.

One oracle for all programs of this folder: until_solved.py trains in batches, the others compare
episodes with and without batches in turns. Episodes are short, and the threshold of a training is
one that it passes; recording.py has what else is changed.

With vector environments all draws have their place: one process makes the same ones
(play_check.py). With lists of environments (main.py) only in batches; one by one, whoever
asks first draws first: there actions are drawn from numbers of each observer and step
(recording.py), and the oracle takes dropout masks from the run, and holds them to be random, at the
right rate.
"""

import argparse
import importlib
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, hold_masks, verdict
from common.recorder import Recorder
from common.session import device_for

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from batch_rl import main as lesson
from batch_rl import vector
from batch_rl.play_check import N_STEPS, as_vector, one_by_one
from batch_rl.recording import TIME_LIMIT, DistinctRewards, record_agent, record_environments

# At most, whatever the flags are:
NUM_EPISODE = 3  # to compare, after a warm-up
EPISODES, THRESHOLD = 8, 10.0  # to train, and a running reward that they pass earlier
AGENTS = {"batch_rl.main": lesson.Agent, "batch_rl.vector": vector.VectorAgent,
          "batch_rl.until_solved": vector.VectorAgent}  # of each program


def single_process(args: argparse.Namespace, run: list[dict]) -> list[dict]:
    """Play and learn in this process, one environment after the other where the order is free.

    Args:
        args: the flags of the run, with those that `check` has added.
        run: its episodes: whether they were in batches; and without, their masks.

    Returns:
        A dict for each episode, with what `record_agent` has of it.
    """
    torch.manual_seed(args.seed)
    # The draws of lists are of the agent's device, those of vector environments numpy's.
    device = torch.device("cpu") if args.vector else device_for(args.device)
    hidden, output = nn.Linear(4, 128).to(device), nn.Linear(128, 2).to(device)
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
    for number in range(2 * (1 + args.num_episode) if args.timed else args.max_episodes):
        if not args.timed and (running_reward > args.reward_threshold or number == len(run)):
            break  # solved; or the run has ended here, whether it should or not
        batch = not args.timed or number % 2 == 0
        seeds = {rank: torch.randint(2**30, (), generator=env_seeds).item() for rank in ranks}
        start = (envs, (hidden, output), args, seeds)
        played = (as_vector(*start, rng) if args.vector
                  else one_by_one(*start, batch, number, run[number]))
        returns = torch.tensor([R for where in envs for R in played[where]["returns"]])
        log_probs = torch.stack([log_p for where in envs for log_p in played[where]["log_probs"]])
        spread = returns.std(correction=0) + torch.finfo(torch.float32).eps
        adam.zero_grad()
        loss = -(log_probs * (returns - returns.mean()) / spread).sum() / len(ranks)
        loss.backward()
        adam.step()
        ep_reward = sum(played[where]["lengths"][0] for where in envs) / len(envs)
        running_reward = (running_reward + ep_reward) / 2
        steps = [len(played[where]["actions"]) for where in envs]
        episodes.append({
            "batch": batch, "reward": ep_reward, "running_reward": running_reward,
            "returns": returns.split(steps), "log_probs": log_probs.detach().split(steps),
            "loss": loss.item(),
            "gradients": {name: p.grad.to("cpu", copy=True) for name, p in named.items()},
            "weights": {name: p.detach().to("cpu", copy=True) for name, p in named.items()},
            **{f"observer{rank}": {what: [played[rank, k][what] for k in range(n_envs)]
                                   for what in ("states", "actions")}
               for rank in ranks}})
    return episodes


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run `args.program`, recorded; rank 0 returns the findings."""
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
    return compare(run, episodes, args) if rank == 0 else None


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None.

    A program times episodes, or trains if it has `train`.
    """
    name = program.__name__
    flags = argparse.Namespace(**{
        **vars(args), "program": name, "timed": not hasattr(program, "train"),
        "vector": hasattr(args, "envs"),  # otherwise lists of environments
        "num_steps": min(args.num_steps, N_STEPS),
        "num_episode": min(getattr(args, "num_episode", 0), NUM_EPISODE),
        "max_episodes": min(getattr(args, "max_episodes", 0), EPISODES),
        "reward_threshold": min(getattr(args, "reward_threshold", 0), THRESHOLD)})
    return verdict(launch(record, flags, program.role_name))


def compare(run: dict, episodes: list[dict], args: argparse.Namespace) -> dict:
    """Hold what the program returned, and its episodes, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    modes = [True, False] * (1 + args.num_episode) if args.timed else [True] * len(episodes)
    expected = [args.num_steps * (1 if batch else args.world_size - 1) for batch in modes]
    used = [ep["forwards"] for ep in episodes]
    in_batches = [ep["batch"] for ep in episodes]
    observers = [f"observer{rank}" for rank in range(1, args.world_size)]
    environments = {len(ep[ob]["states"]) for ep in episodes for ob in observers}
    if not (findings.holds("environments", environments == {args.envs_per_observer},
                           f"each observer has {environments}, {args.envs_per_observer} expected")
            and findings.holds("episodes", in_batches == modes,
                           f"in batches: {in_batches}, expected {modes}")
            and findings.holds("forwards", used == expected,
                               f"{used} of the policy with dropout, expected {expected}")):
        return findings.as_dict()  # nothing to play again with
    findings.holds("lock", not any(ep["locked"] for ep in episodes), "in each episode, held in "
                   f"{[ep['locked'] for ep in episodes]} calls of set_result")
    alone = single_process(args, episodes)
    because = "the same seeds, the same draws"
    for what in ("states", "actions"):
        played = [[{ob: ep[ob][what] for ob in observers} for ep in side]
                  for side in (episodes, alone)]
        findings.equal(what, *played, because, "episode")
    for what, tolerance in (("returns", 1e-12), ("log_probs", 1e-9), ("loss", 1e-9),
                            ("gradients", 1e-9), ("weights", 1e-9),
                            ("reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(what.replace("_", " "), [ep[what] for ep in episodes],
                       [ep[what] for ep in alone], tolerance, "float64, sums in another order",
                       "episode")
    if not args.timed:
        solved = alone[-1]["running_reward"] > args.reward_threshold
        findings.holds("end", solved or len(alone) == args.max_episodes,
                       f"after {len(alone)} episodes of at most {args.max_episodes}, with a "
                       f"running reward of {alone[-1]['running_reward']:.2f}, solved above "
                       f"{args.reward_threshold:g}")
        expected = {"episodes": len(alone), "solved": int(solved),
                    "env_steps": sum(steps_of(ep, args) for ep in alone),
                    "rewards": [ep["reward"] for ep in alone],
                    "running_rewards": [ep["running_reward"] for ep in alone]}
        findings.close("metrics", [{what: run[what] for what in expected}], [expected], 1e-12,
                       "what metrics.json has", "training")
        return findings.as_dict()
    if not args.vector:
        hold_masks(findings, torch.cat([mask for ep in episodes if not ep["batch"]
                                        for of in ep["masks"].values() for mask in of]), "states")
    hold_times(findings, run["timed"], alone, args)
    return findings.as_dict()


def steps_of(episode: dict, args: argparse.Namespace) -> int:
    """Count the steps that all environments made in an episode."""
    return sum(len(actions) for rank in range(1, args.world_size)
               for actions in episode[f"observer{rank}"]["actions"])


def hold_times(findings: Comparison, timed: dict[str, list], alone: list[dict],
               args: argparse.Namespace) -> None:
    """Hold the measurements: each in its row, without the warm-up."""
    played = [steps_of(ep, args) for ep in alone]
    expected = {  # episode n, counted from 1, takes n seconds of the clock
        mode: [(2 * i + first, played[2 * i + first - 1]) for i in range(1, 1 + args.num_episode)]
        for mode, first in (("batched", 1), ("single", 2))}
    findings.equal("times", [timed], [expected], "episode n takes n seconds", "run")
