"""The check of all programs of this folder: a whole run, compared with a single process.

The run is the program's own, but short, and recorded (recording.py). until_solved.py trains in
batches; main.py and vector.py compare episodes with and without batches.

The single process steps plain CartPoles and draws the same random numbers, if they have a fixed
order. Without batches, main.py has no such order, because observers ask at any time. There the
check draws the actions from numbers of its own and takes the dropout masks from the run. It tests
that the masks are random and have the right rate.
"""

import argparse
import importlib
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, hold_masks, verdict
from common.recorder import Recorder, named_gradients, named_weights
from common.session import device_for

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from batch_rl import main as lesson
from batch_rl import vector
from batch_rl.recording import (
    N_STEPS,
    change_environments,
    distinct,
    limits,
    record_agent,
    uniforms,
)

# Upper limits, whatever the flags are:
NUM_EPISODE = 3  # to compare, after a warm-up
EPISODES, THRESHOLD = 8, 10.0  # to train, and a running reward that such episodes pass earlier
AGENTS = {"batch_rl.main": lesson.Agent, "batch_rl.vector": vector.VectorAgent,
          "batch_rl.until_solved": vector.VectorAgent}


# --- the single process


class Cart:
    """A plain CartPole, and the record of its current episode.

    Args:
        rank: Rank of its observer.
        k: Number among the environments of that observer, from 0.
        args: Flags of the run.
    """

    def __init__(self, rank: int, k: int, args: argparse.Namespace) -> None:
        self.rank, self.k, self.args = rank, k, args
        self.env = gym.make("CartPole-v1", **limits(rank))

    def begin(self) -> None:
        """Begin an episode."""
        self.states, self.actions, self.log_probs, self.returns = [], [], [], []
        self.lengths, self.rewards = [], []  # of the stretches, and of the current stretch
        self.rests = False

    def reset(self, seed: int | None = None, state: np.ndarray | None = None) -> None:
        """Begin a stretch, in a state (4,) if one is given."""
        self.state, _ = self.env.reset(seed=seed)
        if state is not None:
            self.env.unwrapped.state, self.state = state, state.astype(np.float32)

    def step(self, action: int, p: torch.Tensor, number: int) -> bool:
        """Take a step of the run; return whether the stretch is over.

        Args:
            action: 0 or 1.
            p: Probabilities of both actions, with their graph.
            number: Number of the step, counted from the beginning of the run.
        """
        self.states.append(self.state.tolist())
        self.actions.append(action)
        self.log_probs.append(torch.log(p[action]))
        self.state, _, fell, out_of_time, _ = self.env.step(action)
        self.rewards.append(distinct(self.rank, self.k, number))
        if fell or out_of_time:
            self.end_of_stretch(fell)
        return fell or out_of_time

    def end_of_stretch(self, fell: bool = False) -> None:
        """Add the returns by definition: the discounted sum of all rewards that follow."""
        gamma, n = self.args.gamma, len(self.rewards)
        beyond = 0.0 if fell else self.rewards[-1] / max(1 - gamma, 1 / self.args.num_steps)
        following = [*self.rewards, beyond]
        self.returns += [sum(gamma**i * r for i, r in enumerate(following[t:])) for t in range(n)]
        self.lengths.append(n)
        self.rewards = []


def play(carts: list[list[Cart]], policy: nn.ModuleDict, args: argparse.Namespace,
         seeds: list[int], number: int, run: dict, rng: np.random.Generator) -> None:
    """Play an episode.

    Args:
        carts: CartPoles of each observer.
        policy: Its two layers.
        args: Flags of the run.
        seeds: Seed of each observer's environments.
        number: Number of the episode, from 0.
        run: The recorded episode: whether it was in batches, and its dropout masks.
        rng: numpy's generator; the programs with vector environments draw from it.
    """
    batch, weight, n_envs = run["batch"], policy.affine1.weight, args.envs_per_observer
    everyone, shape = sum(carts, []), (args.num_steps, len(carts), n_envs)
    if args.vector:
        bits = np.frombuffer(rng.bytes(2 * 128 * np.prod(shape)), np.uint16)
        masks = torch.tensor(bits < 26214).view(*shape, 128) / 0.4  # 26214 of 65536 are 0.4
        drawn = torch.tensor(rng.random(shape))
    elif not batch:
        masks = torch.stack([torch.stack(of) for of in run["masks"].values()], dim=1)
        drawn = torch.stack([uniforms(i, number, n_envs) for i in range(len(carts))], dim=1)
    for cart in everyone:
        cart.begin()
    resets = [np.random.default_rng(seed) for seed in seeds]  # of the vector CartPole
    for of_observer, seed, draws in zip(carts, seeds, resets, strict=True):
        reset(of_observer, draws, args, seed)
    for step in range(args.num_steps):
        states = torch.tensor(np.array([cart.state for cart in everyone])).to(weight)
        x = policy.affine1(states.view(len(carts), n_envs, 4))
        if args.vector:
            x = x * masks[step]
        elif batch:
            x = nn.functional.dropout(x, 0.6)
        else:
            for of_request in x:  # draws as many numbers as the requests
                nn.functional.dropout(of_request, 0.6)
            x = x * masks[step].to(x)
        p = torch.softmax(policy.affine2(torch.relu(x)), dim=-1)
        right = (torch.multinomial(p.detach().reshape(-1, 2), 1).view(-1, n_envs)
                 if batch and not args.vector else drawn[step].to(p) > p[..., 0])
        for i, of_observer in enumerate(carts):
            resting = [cart for cart in of_observer if cart.rests]
            over = [cart for cart in of_observer if not cart.rests and cart.step(
                int(right[i, cart.k]), p[i, cart.k].cpu(), number * args.num_steps + step)]
            # A vector environment resets in the step after the end of a stretch.
            reset(resting if args.vector else over, resets[i], args)
            for cart in over:
                cart.rests = args.vector
    for cart in everyone:
        if cart.rewards:
            cart.end_of_stretch()


def reset(carts: list[Cart], draws: np.random.Generator, args: argparse.Namespace,
          seed: int | None = None) -> None:
    """Reset these CartPoles of an observer; the vector CartPole draws all states together."""
    columns = draws.uniform(-0.05, 0.05, (4, len(carts))).T
    for i, (cart, column) in enumerate(zip(carts, columns, strict=True)):
        cart.reset(seed if seed is None else seed + i,
                   column if getattr(args, "envs", "") == "vector" else None)
        cart.rests = False


def single_process(args: argparse.Namespace, run: list[dict]) -> list[dict]:
    """Play and learn in this process.

    Args:
        args: Flags of the run, with those that `check` has added.
        run: Recorded episodes.

    Returns:
        Entries like those of `record_agent`, one for each episode.
    """
    torch.manual_seed(args.seed)
    # Programs with vector environments draw from numpy, main.py from the agent's device.
    device = torch.device("cpu") if args.vector else device_for(args.device)
    policy = nn.ModuleDict({"affine1": nn.Linear(4, 128), "affine2": nn.Linear(128, 2)}).to(device)
    adam = torch.optim.Adam(policy.parameters(), lr=args.lr)
    env_seeds, rng = torch.Generator().manual_seed(args.seed), np.random.default_rng(args.seed)
    carts = [[Cart(rank, k, args) for k in range(args.envs_per_observer)]
             for rank in range(1, args.world_size)]
    everyone, episodes, running_reward = sum(carts, []), [], 0.0
    for number, recorded in enumerate(run):
        if not args.timed and running_reward > args.reward_threshold:
            break  # solved
        seeds = [torch.randint(2**30, (), generator=env_seeds).item() for _ in carts]
        play(carts, policy, args, seeds, number, recorded, rng)
        returns = torch.tensor([R for cart in everyone for R in cart.returns])
        log_probs = torch.stack([log_p for cart in everyone for log_p in cart.log_probs])
        spread = returns.std(correction=0) + torch.finfo(torch.float32).eps
        loss = -(log_probs * (returns - returns.mean()) / spread).sum() / len(carts)
        adam.zero_grad()
        loss.backward()
        adam.step()
        ep_reward = sum(cart.lengths[0] for cart in everyone) / len(everyone)
        running_reward = (running_reward + ep_reward) / 2
        episodes.append({
            **{what: {f"observer{cart.rank} environment {cart.k}": getattr(cart, what)
                      for cart in everyone} for what in ("states", "actions", "returns")},
            "loss": loss.item(), "reward": ep_reward, "running_reward": running_reward,
            "gradients": named_gradients(policy), "weights": named_weights(policy)})
    return episodes


# --- what is recorded


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run `args.program` and record it; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    program, episodes = importlib.import_module(args.program), []
    with Recorder() as recorder:
        if rank > 0:
            change_environments(recorder, rank)
        else:
            record_agent(recorder, AGENTS[args.program], episodes)
        metrics = program.run_worker(rank, world_size, args)
    return compare(metrics, episodes, args) if rank == 0 else None


# --- what is compared


def compare(metrics: dict, run: list[dict], args: argparse.Namespace) -> dict:
    """Compare the metrics of a training run, and all episodes, with the single process."""
    findings = Comparison(f"{args.world_size} processes")
    modes = [True, False] * (1 + args.num_episode) if args.timed else [True] * len(run)
    expected = [args.num_steps * (1 if batch else args.world_size - 1) for batch in modes]
    used, in_batches = [ep["forwards"] for ep in run], [ep["batch"] for ep in run]
    if not (findings.holds("episodes", in_batches == modes,
                           f"in batches: {in_batches}, expected {modes}")
            and findings.holds("forwards", used == expected,
                               f"{used} of the policy with dropout, expected {expected}")):
        return findings.as_dict()  # the single process could not play the same episodes
    findings.holds("lock", not any(ep["locked"] for ep in run), "in each episode, held in "
                   f"{[ep['locked'] for ep in run]} calls of set_result")
    alone = single_process(args, run)
    for what in ("states", "actions"):
        findings.equal(what, [ep[what] for ep in run], [ep[what] for ep in alone],
                       "the same seeds, the same draws", "episode")
    for what, tolerance in (("returns", 1e-12), ("loss", 1e-9), ("gradients", 1e-9),
                            ("weights", 1e-9), ("reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(what.replace("_", " "), [ep[what] for ep in run], [ep[what] for ep in alone],
                       tolerance, "float64, sums in another order", "episode")
    if args.timed and not args.vector:
        hold_masks(findings, torch.cat([mask for ep in run for of in ep["masks"].values()
                                        for mask in of]), "states")
    if not args.timed:
        passed = [ep["running_reward"] > args.reward_threshold for ep in alone]
        solved = passed[-1]
        findings.holds("end", not any(passed[:-1]) and len(alone) <= args.max_episodes
                       and (solved or len(alone) == args.max_episodes),
                       f"after {len(alone)} episodes of at most {args.max_episodes}, with a "
                       f"running reward of {alone[-1]['running_reward']:.2f}, solved above "
                       f"{args.reward_threshold:g}")
        numbers = {"episodes": len(alone), "solved": int(solved),
                   "env_steps": sum(len(actions) for ep in alone
                                    for actions in ep["actions"].values()),
                   "rewards": [ep["reward"] for ep in alone],
                   "running_rewards": [ep["running_reward"] for ep in alone]}
        findings.close("metrics", [{what: metrics[what] for what in numbers}], [numbers], 1e-12,
                       "the numbers of metrics.json", "training")
    return findings.as_dict()


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process.

    A program of this folder trains if it has `train`; otherwise it times episodes.
    """
    flags = argparse.Namespace(**{
        **vars(args), "program": program.__name__, "timed": not hasattr(program, "train"),
        "vector": hasattr(args, "envs"),
        "num_steps": min(args.num_steps, N_STEPS),
        "num_episode": min(getattr(args, "num_episode", 0), NUM_EPISODE),
        "max_episodes": min(getattr(args, "max_episodes", 0), EPISODES),
        "reward_threshold": min(getattr(args, "reward_threshold", 0), THRESHOLD)})
    return verdict(launch(record, flags, program.role_name))
