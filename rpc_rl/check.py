"""`--check`: a whole training over RPC, held against a program of one process that plays it again.

The training is the lesson's own: `run_worker` in the same processes, with the flags that were given
but for these, so that a short training meets everything that a long one does:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- episodes are short. That of observer1 ends at its environment's time limit, those of the others at
  the steps that the agent grants, and all of them end early where the pole falls;
- rewards differ from step to step and from observer to observer, so that two that are swapped, or
  counted for another observer, are seen. CartPole itself gives 1 for every step;
- the threshold is one that these episodes pass.
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

from rpc_rl import main as lesson
from rpc_rl.fast_agent import FastAgent

ENV = "CartPole-v1"
TIME_LIMIT, N_STEPS = 13, 17  # steps: of observer1's environment; that the agent grants
THRESHOLD = 5.0  # the running reward passes it after seven episodes or so
MAX_EPISODES = 12
AGENTS = ("plain", "fast")
SIGMAS = 6  # two random choices in a billion are further from what is expected


class DistinctRewards(gym.Wrapper):
    """CartPole with rewards of about 1, all different."""

    def __init__(self, env, ob_id):
        super().__init__(env)
        self.ob_id, self.steps = ob_id, 0

    def step(self, action):
        """See gymnasium."""
        state, _, *others = super().step(action)
        self.steps += 1
        return state, reward_of(self.ob_id, self.steps), *others


def reward_of(ob_id, steps):
    """For the step with this number, counted over all episodes of an observer."""
    return 1 + 0.1 * ob_id + 0.001 * steps


def record(rank, world_size, args):
    """Run the lesson; rank 0 returns what its agent saw and did, episode by episode."""
    torch.set_default_dtype(torch.float64)
    if rank > 0:
        make, limit = gym.make, {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}
        lesson.gym.make = lambda *a, **k: DistinctRewards(make(*a, **k, **limit), rank)
        lesson.run_worker(rank, world_size, args)
        return None
    recorder = Recorder(FastAgent if args.agent == "fast" else lesson.Agent)
    metrics = lesson.run_worker(rank, world_size, args)
    return {"episodes": recorder.episodes, "metrics": metrics}


class Recorder:
    """Wraps the methods of the agent, and listens to its policy and its optimizer."""

    def __init__(self, agent_class):
        self.episodes = []
        select_action, finish_episode = agent_class.select_action, agent_class.finish_episode
        report_reward, run_episode = agent_class.report_reward, agent_class.run_episode

        def recorded_run_episode(agent):
            self.now = {ob_id: {"states": [], "actions": [], "rewards": [], "masks": []}
                        for ob_id in agent.ob_rrefs}
            run_episode(agent)

        asking = threading.local()  # two RPC threads answer requests

        def recorded_select_action(agent, ob_id, state, *reward):
            asking.ob_id = ob_id
            action = select_action(agent, ob_id, state, *reward)
            self.now[ob_id]["states"].append(state)
            self.now[ob_id]["actions"].append(action)
            return action

        def recorded_report_reward(agent, ob_id, reward):
            self.now[ob_id]["rewards"].append(reward)
            report_reward(agent, ob_id, reward)

        def recorded_finish_episode(agent):
            last_reward = finish_episode(agent)
            named = dict(agent.policy.named_parameters())
            self.episodes.append({
                "observers": self.now, "last_reward": last_reward,
                "running_reward": agent.running_reward,
                "gradients": {name: p.grad.tolist() for name, p in named.items()},
                "weights": {name: p.tolist() for name, p in named.items()}})
            return last_reward

        agent_class.run_episode = recorded_run_episode
        agent_class.select_action = recorded_select_action
        agent_class.report_reward = recorded_report_reward
        agent_class.finish_episode = recorded_finish_episode
        forward = nn.Dropout.forward

        def recorded_dropout(module, x):
            """With what `nn.Dropout` has multiplied; only the plain agent uses it."""
            y = forward(module, x)
            self.now[asking.ob_id]["masks"].append((y / x).tolist())
            return y

        nn.Dropout.forward = recorded_dropout


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
    # JSON has made texts of the ranks.
    run = [{**episode, "observers": list(episode["observers"].values())}
           for episode in recorded["episodes"]]
    if args.agent == "plain":
        masks, steps = (sum(len(ob[what]) for ep in run for ob in ep["observers"])
                        for what in ("masks", "actions"))
        if not findings.holds("plain agent, dropout layer", masks == steps,
                              f"used {masks} times for {steps} actions"):
            return  # nothing to play again with
    torch.set_default_dtype(torch.float64)
    try:
        alone = single_process(args, run)
    finally:
        torch.set_default_dtype(torch.float32)

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


# --- one process: it takes the flags, and of a plain agent's run what was drawn at random


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
    ranks = range(1, args.world_size)
    draws = {rank: torch.Generator().manual_seed(1000 * args.seed + rank) for rank in ranks}
    envs = {rank: gym.make(ENV, max_episode_steps=TIME_LIMIT if rank == 1 else None)
            for rank in ranks}
    stepped = dict.fromkeys(ranks, 0)
    episodes, running_reward = [], 0.0
    while running_reward <= THRESHOLD and len(episodes) < MAX_EPISODES:
        observers, log_probs, returns = [], [], []
        for rank in ranks:
            if args.agent == "fast":
                uniforms_below = torch.full((N_STEPS, 128), 0.4)
                masks = torch.bernoulli(uniforms_below, generator=draws[rank]) / 0.4
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
                state, _, fell, out_of_time, _ = envs[rank].step(action)
                stepped[rank] += 1
                seen["rewards"].append(reward_of(rank, stepped[rank]))
                if fell or out_of_time:
                    break
            observers.append(seen)
            # The sum that defines a return. After a time limit, the last reward for ever.
            rewards, g = seen["rewards"], args.gamma
            n, eps = len(rewards), torch.finfo(torch.float32).eps
            goes_on = args.truncation == "bootstrap" and not fell
            beyond = rewards[-1] / max(1 - g, eps) if goes_on else 0.0
            returns += [sum(g**i * r for i, r in enumerate(rewards[t:])) + g ** (n - t) * beyond
                        for t in range(n)]
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
