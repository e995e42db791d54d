"""`--check`: a whole training over RPC, held against a program of one process that plays it again.

The training is the lesson's own, with the flags that were given, but short: few steps are granted,
and the threshold is one that such episodes pass. recording.py says what else is changed.

The fast agent draws from generators whose seeds are known: one process draws the same numbers. The
plain one draws for whoever asks first; there the oracle takes dropout masks and actions from the
run, and holds them as what they are: random, at the right rate.
"""

import argparse
import math

import gymnasium as gym
import torch
import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, in_float64, verdict
from torch import nn

from rpc_rl import main as lesson
from rpc_rl.recording import TIME_LIMIT, DistinctRewards, record

N_STEPS = 17  # of an episode, that the agent grants
THRESHOLD = 5.0  # the running reward passes it after seven episodes or so
MAX_EPISODES = 12
AGENTS = ("plain", "fast")
SIGMAS = 6  # two random choices in a billion are further from what is expected


def single_process(args, run):
    """Play and learn in this process, one observer after the other, a graph for each step.

    Args:
        args: the flags of the run.
        run: of the plain agent, whose draws cannot be repeated, its dropout masks and actions.
            Those of the fast agent are drawn here again.

    Returns:
        A dict for each episode, with what `record` has of it.
    """
    torch.manual_seed(args.seed)
    hidden, output = nn.Linear(4, 128), nn.Linear(128, 2)
    named = {"affine1.weight": hidden.weight, "affine1.bias": hidden.bias,
             "affine2.weight": output.weight, "affine2.bias": output.bias}
    adam = torch.optim.Adam(named.values(), lr=args.lr)
    ranks, eps = range(1, args.world_size), torch.finfo(torch.float32).eps
    draws = {rank: torch.Generator().manual_seed(1000 * args.seed + rank) for rank in ranks}
    envs = {}
    for rank in ranks:
        env = gym.make("CartPole-v1", max_episode_steps=TIME_LIMIT if rank == 1 else None)
        envs[rank] = DistinctRewards(env, rank)
    episodes, running_reward = [], 0.0
    while running_reward <= THRESHOLD and len(episodes) < MAX_EPISODES:
        observers, log_probs, returns = [], [], []
        for rank in ranks:
            if args.agent == "fast":
                share_kept = torch.full((N_STEPS, 128), 0.4)
                masks = torch.bernoulli(share_kept, generator=draws[rank]) / 0.4
                uniforms = torch.rand(N_STEPS, generator=draws[rank])
            elif len(episodes) < len(run):
                masks = torch.tensor(run[len(episodes)]["observers"][rank - 1]["masks"])
                given = run[len(episodes)]["observers"][rank - 1]["actions"]
            else:
                return episodes  # the run has ended too early; its length says so
            state, _ = envs[rank].reset(seed=torch.randint(2**31, (), generator=draws[rank]).item())
            seen = {"states": [], "actions": [], "rewards": [], "p_right": []}
            for step in range(N_STEPS):
                if args.agent == "plain" and step >= len(masks):
                    break
                x = hidden(torch.tensor(state.tolist()))
                x = torch.relu(x * masks[step])
                p = torch.softmax(output(x), dim=0)
                action = int(uniforms[step] > p[0]) if args.agent == "fast" else given[step]
                log_probs.append(torch.log(p[action]))
                seen["states"].append(state.tolist())
                seen["actions"].append(action)
                seen["p_right"].append(p[1].item())
                state, reward, fell, out_of_time, _ = envs[rank].step(action)
                seen["rewards"].append(reward)
                if fell or out_of_time:
                    break
            observers.append(seen)
            goes_on = args.truncation == "bootstrap" and not fell  # the last reward, for ever
            beyond = reward / max(1 - args.gamma, eps) if goes_on else 0.0
            returns += returns_by_definition(seen["rewards"], beyond, args.gamma)
        returns = torch.tensor(returns)
        normalised = (returns - returns.mean()) / (returns.std(correction=0) + eps)
        adam.zero_grad()
        (-(torch.stack(log_probs) * normalised).sum()).backward()
        gradients = {name: p.grad.tolist() for name, p in named.items()}
        adam.step()
        worst = min(sum(observer["rewards"]) for observer in observers)
        running_reward += 0.05 * (worst - running_reward)
        episodes.append({
            "observers": observers, "last_reward": worst, "running_reward": running_reward,
            "gradients": gradients,
            "weights": {name: p.tolist() for name, p in named.items()}})
    return episodes


def returns_by_definition(rewards, beyond, gamma):
    """The discounted sum of what follows, for each step; `beyond` is the value behind the last."""
    n = len(rewards)
    return [sum(gamma**i * r for i, r in enumerate(rewards[t:])) + gamma ** (n - t) * beyond
            for t in range(n)]


def check(args):
    """Compare both agents; the differences in the process that reports, None elsewhere."""
    one_launch = dist.is_torchelastic_launched() or args.rank is not None
    findings = Comparison(f"{args.world_size} processes")
    for agent in [args.agent] if one_launch else AGENTS:
        flags = argparse.Namespace(**{**vars(args), "agent": agent})
        flags.total_steps_per_episode = N_STEPS * (args.world_size - 1)
        flags.reward_threshold, flags.max_episodes = THRESHOLD, MAX_EPISODES
        recorded = launch(record, flags, lesson.role_name)
        if recorded is None:
            return None
        compare(findings, recorded, flags)
    return verdict(findings.as_dict())


def compare(findings, recorded, args):
    """Hold what `record` returned of one agent against one process."""
    run = recorded["episodes"]
    if args.agent == "plain":
        masks, steps = (sum(len(ob[what]) for ep in run for ob in ep["observers"])
                        for what in ("masks", "actions"))
        if not findings.holds("plain agent, dropout layer", masks == steps,
                              f"used {masks} times for {steps} actions"):
            return  # nothing to play again with
    with in_float64():
        alone = single_process(args, run)

    def each(of, what):
        return [{f"observer{ob_id}": observer[what]
                 for ob_id, observer in enumerate(episode["observers"], start=1)} for episode in of]

    unit, rounding = "episode", "float64, sums in another order"
    for what in ("states", "actions", "rewards"):
        findings.equal(f"{args.agent} agent, {what}", each(run, what), each(alone, what),
                       "the same seeds, the same draws", unit)
    for what, tolerance in (("gradients", 1e-9), ("weights", 1e-9),
                            ("last_reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(f"{args.agent} agent, {what.replace('_', ' ')}",
                       [episode[what] for episode in run], [episode[what] for episode in alone],
                       tolerance, rounding, unit)
    expected = summary(alone)
    reported = {what: recorded["metrics"][what] for what in expected}
    findings.close(f"{args.agent} agent, metrics", [reported], [expected], 1e-12,
                   "what metrics.json says", "training")
    if args.agent == "plain":
        hold_randomness(findings, run, alone)


def summary(episodes):
    """What metrics.json has to say of a training that ended as soon as it could."""
    return {"episodes": len(episodes), "solved": int(episodes[-1]["running_reward"] > THRESHOLD),
            "env_steps": sum(len(ob["rewards"]) for ep in episodes for ob in ep["observers"]),
            "running_reward": episodes[-1]["running_reward"],
            "rewards": [episode["last_reward"] for episode in episodes],
            "running_rewards": [episode["running_reward"] for episode in episodes]}


def hold_randomness(findings, run, alone):
    """The plain agent's draws depend on which request comes first: hold them as what they are."""
    masks = [mask for ep in run for ob in ep["observers"] for mask in ob["masks"]]
    kept = [value > 0 for mask in masks for value in mask]
    share, bound = sum(kept) / len(kept), SIGMAS * math.sqrt(0.4 * 0.6 / len(kept))
    findings.holds("plain agent, dropout rate", abs(share - 0.4) < bound,
                   f"{share:.3f} of {len(kept)} hidden units were kept, 0.4 +- {bound:.3f}")
    different = len({str(mask) for mask in masks})
    findings.holds("plain agent, dropout masks", different == len(masks),
                   f"{different} of {len(masks)} steps had their own mask")
    pairs = [(p, action) for ep, ep_run in zip(alone, run, strict=False)
             for ob, ob_run in zip(ep["observers"], ep_run["observers"], strict=True)
             for p, action in zip(ob["p_right"], ob_run["actions"], strict=False)]
    bound = SIGMAS * math.sqrt(sum(p * (1 - p) for p, _ in pairs))
    right = sum(action - p for p, action in pairs)
    findings.holds("plain agent, choices", abs(right) < bound,
                   f"of {len(pairs)} actions, {right:+.1f} more went right than by the policy's "
                   f"probabilities, 0 +- {bound:.1f}")
    likelier = sum((action == (p > 0.5)) - max(p, 1 - p) for p, action in pairs)
    findings.holds("plain agent, likelier choices", abs(likelier) < bound,
                   f"of {len(pairs)} actions, {likelier:+.1f} more were the likelier one, "
                   f"0 +- {bound:.1f}")
