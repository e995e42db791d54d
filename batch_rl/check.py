"""`--check`: whole runs over RPC, held against a program of one process that plays them again.

Two runs, which are the lesson's own: `--mode train`, always in batches, and `--mode compare`, with
and without batches in turns; one with the plain and one with the fast agent. Changed is only:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- episodes are short, and observer1's environments have a time limit, so that stretches end in all
  three ways: the pole falls, time runs out, the episode is over;
- rewards differ from step to step and from one environment to the next, so that two that are
  swapped, or counted for another one, are seen. CartPole itself gives 1 for every step;
- the threshold is one that these episodes pass;
- the clock of the comparison counts episodes, so that a measurement that is put into the wrong row
  is seen.

In batches the order of all draws is known: one process with the same seed makes the same ones. One
by one, whoever asks first draws first; there the oracle takes dropout masks and actions from the
run, and holds them as what they are: random, at the right rate.
"""

import argparse
import math
import threading

import gymnasium as gym
import torch
import torch.distributed as dist
from common.launch import launch
from common.oracle import Comparison, verdict
from torch import nn
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl import results
from batch_rl.fast_agent import FastAgent

N_STEPS, TIME_LIMIT = 40, 13  # of an episode; of observer1's environments
EPISODES, THRESHOLD = 8, 10.0  # to train: at most, and a running reward that they pass earlier
NUM_EPISODE = 2  # to compare, after a warm-up
SIGMAS = 6  # two random choices in a billion are further from what is expected

_played = []  # on an observer: (environment, state before, action) of each step


class Recording(gym.Wrapper):
    """CartPole with rewards of about 1, all different, which keeps what is played."""

    made = 0

    def __init__(self, env, rank):
        super().__init__(env)
        self.rank, self.k, self.steps = rank, Recording.made, 0
        Recording.made += 1

    def reset(self, **options):
        """See gymnasium."""
        self.state, info = super().reset(**options)
        return self.state, info

    def step(self, action):
        """See gymnasium."""
        _played.append((self.k, self.state.tolist(), action))
        self.state, _, *others = super().step(action)
        self.steps += 1
        return self.state, reward_of(self.rank, self.k, self.steps), *others


def reward_of(rank, k, steps):
    """For the step with this number, counted over all episodes of an environment."""
    return 1 + 0.1 * rank + 0.01 * k + 0.0001 * steps


def taken():
    """On an observer: what was played since the last time, `{states, actions}`, step by step."""
    envs = max((k for k, _, _ in _played), default=0) + 1
    by_env = [[played[1:] for played in _played if played[0] == k] for k in range(envs)]
    _played.clear()
    return {"states": [[state for state, _ in env] for env in by_env],
            "actions": [[action for _, action in env] for env in by_env]}


def record(rank, world_size, args):
    """Run the lesson; rank 0 returns what its agent and the observers saw, episode by episode."""
    torch.set_default_dtype(torch.float64)
    if rank > 0:
        make, limit = gym.make, {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}
        lesson.gym.make = lambda *a, **k: Recording(make(*a, **k, **limit), rank)
        lesson.run_worker(rank, world_size, args)
        return None
    episodes = []
    record_agent(FastAgent if args.agent == "fast" else lesson.Agent, episodes)
    if args.mode == "compare":
        # The n-th episode takes n seconds of this clock, which looks at what is done.
        lesson.time.perf_counter = lambda: sum(range(1, len(episodes) + 1))
    return {"run": lesson.run_worker(rank, world_size, args), "episodes": episodes}


def record_agent(agent_class, episodes):
    """Append to `episodes` what each one was, masks and gradients included."""
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
    torch.set_default_dtype(torch.float64)
    try:
        alone = single_process(args, episodes)
    finally:
        torch.set_default_dtype(torch.float32)
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
    for what, off in (("right", action - p), ("the likelier way",
                                              1.0 * (action == (p > 0.5)) - p.maximum(1 - p))):
        off = off.sum().item()
        findings.holds(f"{name}, choices {what}", abs(off) < bound,
                       f"of {len(p)} actions, {off:+.1f} more than by the policy's probabilities, "
                       f"0 +- {bound:.1f}")


# --- one process: it takes the flags, and one by one what was drawn at random


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
    envs = {(rank, k): gym.make("CartPole-v1", max_episode_steps=TIME_LIMIT if rank == 1 else None)
            for rank in ranks for k in range(n_envs)}
    stepped = dict.fromkeys(envs, 0)
    episodes, running_reward = [], 0.0
    for number in range(EPISODES if args.mode == "train" else 2 * (1 + NUM_EPISODE)):
        if args.mode == "train" and running_reward > THRESHOLD:
            break
        batch = args.mode == "train" or number % 2 == 0
        state, played = {}, {where: ([], [], []) for where in envs}  # states, actions, P(right)
        stretch, log_probs, returns, firsts = ({where: [] for where in envs} for _ in range(4))
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
                for kept, value in zip(played[rank, k], (state[rank, k].tolist(), action,
                                                         p[rank - 1, k, 1].item()), strict=True):
                    kept.append(value)
                log_probs[rank, k].append(torch.log(p[rank - 1, k, action]))
                state[rank, k], _, fell, out_of_time, _ = envs[rank, k].step(action)
                stepped[rank, k] += 1
                stretch[rank, k].append(reward_of(rank, k, stepped[rank, k]))
                if fell or out_of_time or step == N_STEPS - 1:
                    rewards, g = stretch[rank, k], args.gamma
                    n = len(rewards)
                    beyond = 0.0 if fell else rewards[-1] / max(1 - g, 1 / N_STEPS)
                    returns[rank, k] += [sum(g**i * r for i, r in enumerate(rewards[t:]))
                                         + g ** (n - t) * beyond for t in range(n)]
                    firsts[rank, k].append(n)
                    stretch[rank, k] = []
                    state[rank, k], _ = envs[rank, k].reset()
        all_returns = torch.tensor([returns[where] for where in envs])
        spread = all_returns.std(correction=0) + torch.finfo(torch.float32).eps
        normalised = (all_returns - all_returns.mean()) / spread
        all_log_probs = torch.stack([torch.stack(log_probs[where]) for where in envs])
        adam.zero_grad()
        (-(all_log_probs * normalised).sum() / len(ranks)).backward()
        gradients = {name: p.grad.tolist() for name, p in named.items()}
        adam.step()
        reward = sum(lengths[0] for lengths in firsts.values()) / len(envs)
        running_reward = (running_reward + reward) / 2
        episodes.append({
            "batch": batch, "reward": reward, "running_reward": running_reward,
            "gradients": gradients, "weights": {name: p.tolist() for name, p in named.items()},
            **{f"observer{rank}": {
                what: [played[rank, k][i] for k in range(n_envs)]
                for i, what in enumerate(("states", "actions", "p_right"))} for rank in ranks}})
    return episodes
