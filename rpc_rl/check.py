"""`--check`: a whole training over RPC, held against a program of one process that plays it again.

The training is the program's own, with the flags that were given, but short: few steps are granted,
and the threshold is one that such episodes pass. The agent keeps what it is asked, what it answers
and what it learns. Changed is only what lets a short training show every mistake:

- float64: in float32 rounding would look like a small mistake, and could change an action;
- the episodes of observer1 end at its environment's time limit, those of the others at the steps
  that the agent grants, and all of them end early where the pole falls;
- rewards are all different: see `DistinctRewards`.

The fast agent draws from generators whose seeds are known: one process draws the same numbers. The
tutorial's draws for whoever asks first. There the check draws the actions, from numbers of each
observer and step; dropout masks are taken from the run, and held to be random, at the right rate.
"""

import argparse
import importlib
import threading
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, hold_masks, verdict
from common.recorder import Recorder, named_gradients, named_weights

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

from rpc_rl import main as tutorial
from rpc_rl.fast import FastAgent

# At most, whatever the flags are:
N_STEPS = 17  # of an episode, that the agent grants
THRESHOLD = 5.0  # the running reward passes it after seven episodes or so
MAX_EPISODES = 12
TIME_LIMIT = 13  # steps, of observer1's environment


class DistinctRewards(gym.Wrapper):
    """Gives rewards of about 1, others for each observer and each of its steps.

    CartPole's is always 1: two that are swapped, or counted for another observer, would go unseen.

    Args:
        env: the CartPole.
        ob_id: the rank of its observer.
    """

    def __init__(self, env: gym.Env, ob_id: int) -> None:
        super().__init__(env)
        self.ob_id, self.steps = ob_id, 0

    def step(self, action: int) -> tuple:
        """Step as `gym.Env.step`, with another reward."""
        state, _, *others = super().step(action)
        self.steps += 1
        return state, 1 + 0.1 * self.ob_id + 0.001 * self.steps, *others


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the program `args.program`, recorded; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    program, episodes = importlib.import_module(args.program), []
    with Recorder() as recorder:
        if rank > 0:
            @recorder.around(gym, "make")
            def make(original, *place, **options):
                limit = {"max_episode_steps": TIME_LIMIT} if rank == 1 else {}
                return DistinctRewards(original(*place, **options, **limit), rank)
        else:
            record_agent(recorder, FastAgent if args.fast else tutorial.Agent, episodes)
        metrics = program.run_worker(rank, world_size, args)
    return compare(metrics, episodes, args) if rank == 0 else None


def record_agent(recorder: Recorder, agent_class: type[tutorial.Agent],
                 episodes: list[dict]) -> None:
    """Append to `episodes` what each one was, from now on.

    That is `observers`, each with `states`, `actions`, `rewards` and dropout `masks`; `gradients`
    and `weights` by name; `last_reward` and `running_reward`.
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

    @recorder.around(Categorical, "sample")
    def sample(original, distribution):
        """Draw for each step of each observer a number of its own; the fast agent has its own."""
        step, ob_id = len(now[asking.ob_id]["actions"]), asking.ob_id
        return (uniforms(ob_id, len(episodes))[step] > distribution.probs[0]).long()

    @recorder.around(agent_class, "report_reward")
    def report_reward(original, agent, ob_id, reward):
        now[ob_id]["rewards"].append(reward)
        original(agent, ob_id, reward)

    @recorder.around(agent_class, "finish_episode")
    def finish_episode(original, agent):
        last_reward = original(agent)
        episodes.append({
            "observers": list(now.values()), "last_reward": last_reward,
            "running_reward": agent.running_reward,
            "gradients": named_gradients(agent.policy), "weights": named_weights(agent.policy)})
        return last_reward

    @recorder.around(nn.Dropout, "forward")
    def dropout(original, module, x):
        """Keep what `nn.Dropout` has multiplied with; only the tutorial's agent uses it."""
        y = original(module, x)
        now[asking.ob_id]["masks"].append((y / x).detach().cpu())
        return y


def uniforms(ob_id: int, episode: int) -> torch.Tensor:
    """Draw a number from 0 to 1 for each step of an episode of an observer: (`N_STEPS`,)."""
    generator = torch.Generator().manual_seed(1000 * episode + ob_id)
    return torch.rand(N_STEPS, generator=generator, dtype=torch.float64)


def single_process(args: argparse.Namespace, run: list[dict]) -> list[dict]:
    """Play and learn in this process, one observer after the other, a graph for each step.

    Args:
        args: the flags of the run.
        run: the recorded episodes, from which the tutorial's agent's dropout masks are taken.

    Returns:
        A dict for each episode, with what `record_agent` has of it.
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
    n_steps = args.total_steps_per_episode // len(ranks)
    episodes, running_reward = [], 0.0
    while running_reward <= args.reward_threshold and len(episodes) < args.max_episodes:
        observers, log_probs, returns = [], [], []
        for rank in ranks:
            if args.fast:
                share_kept = torch.full((n_steps, 128), 0.4)
                masks = torch.bernoulli(share_kept, generator=draws[rank]) / 0.4
                drawn = torch.rand(n_steps, generator=draws[rank])
            elif len(episodes) < len(run):
                masks = run[len(episodes)]["observers"][rank - 1]["masks"]
                drawn = uniforms(rank, len(episodes))
            else:
                return episodes  # the run has ended here, whether it should or not
            state, _ = envs[rank].reset(seed=torch.randint(2**31, (), generator=draws[rank]).item())
            seen = {"states": [], "actions": [], "rewards": []}
            for step in range(n_steps):
                if not args.fast and step >= len(masks):
                    break
                x = hidden(torch.tensor(state.tolist()))
                x = torch.relu(x * masks[step])
                p = torch.softmax(output(x), dim=0)
                action = int(drawn[step] > p[0])
                log_probs.append(torch.log(p[action]))
                seen["states"].append(state.tolist())
                seen["actions"].append(action)
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
        adam.step()
        worst = min(sum(observer["rewards"]) for observer in observers)
        running_reward += 0.05 * (worst - running_reward)
        episodes.append({
            "observers": observers, "last_reward": worst, "running_reward": running_reward,
            "gradients": {name: p.grad.clone() for name, p in named.items()},
            "weights": {name: p.detach().clone() for name, p in named.items()}})
    return episodes


def returns_by_definition(rewards: list[float], beyond: float, gamma: float) -> list[float]:
    """Return the discounted sum of what follows, for each step; `beyond` is behind the last."""
    n = len(rewards)
    return [sum(gamma**i * r for i, r in enumerate(rewards[t:])) + gamma ** (n - t) * beyond
            for t in range(n)]


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    flags = argparse.Namespace(**vars(args), program=program.__name__,
                               fast=program.__name__ == FastAgent.__module__)
    flags.total_steps_per_episode = min(args.total_steps_per_episode,
                                        N_STEPS * (args.world_size - 1))
    flags.reward_threshold = min(args.reward_threshold, THRESHOLD)
    flags.max_episodes = min(args.max_episodes, MAX_EPISODES)
    return verdict(launch(record, flags, program.role_name))


def compare(metrics: dict, run: list[dict], args: argparse.Namespace) -> dict:
    """Hold the metrics and the recorded episodes against one process; return the findings."""
    findings = Comparison(f"{args.world_size} processes")
    if not args.fast:
        masks, steps = (sum(len(ob[what]) for ep in run for ob in ep["observers"])
                        for what in ("masks", "actions"))
        if not findings.holds("dropout layer", masks == steps,
                              f"used {masks} times for {steps} actions"):
            return findings.as_dict()  # nothing to play again with
    alone = single_process(args, run)

    def each(of, what):
        return [{f"observer{ob_id}": observer[what]
                 for ob_id, observer in enumerate(episode["observers"], start=1)} for episode in of]

    unit, rounding = "episode", "float64, sums in another order"
    for what in ("states", "actions", "rewards"):
        findings.equal(what, each(run, what), each(alone, what),
                       "the same seeds, the same draws", unit)
    for what, tolerance in (("gradients", 1e-9), ("weights", 1e-9),
                            ("last_reward", 1e-12), ("running_reward", 1e-12)):
        findings.close(what.replace("_", " "),
                       [episode[what] for episode in run], [episode[what] for episode in alone],
                       tolerance, rounding, unit)
    running_reward = alone[-1]["running_reward"]
    solved = running_reward > args.reward_threshold
    findings.holds("end", solved or len(alone) == args.max_episodes,
                   f"after {len(alone)} episodes of at most {args.max_episodes}, with a running "
                   f"reward of {running_reward:.2f}, solved above {args.reward_threshold:g}")
    expected = {"episodes": len(alone), "solved": int(solved), "running_reward": running_reward,
                "env_steps": sum(len(ob["rewards"]) for ep in alone for ob in ep["observers"]),
                "rewards": [episode["last_reward"] for episode in alone],
                "running_rewards": [episode["running_reward"] for episode in alone]}
    findings.close("metrics", [{what: metrics[what] for what in expected}], [expected], 1e-12,
                   "what metrics.json has", "training")
    if not args.fast:
        hold_masks(findings, torch.stack(
            [mask for ep in run for ob in ep["observers"] for mask in ob["masks"]]), "steps")
    return findings.as_dict()
