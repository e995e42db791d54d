"""Report of a training run: its history, metrics.json, the picture, the summary line."""

import argparse
import math
import time
from typing import Protocol

from common import picture, report
from common.cli import refuse

import gymnasium as gym

ENV_NAME = "CartPole-v1"
WORDS = {
    "en": {"title": "{env} over RPC: {observers} observers, one agent", "x": "episode",
           "y": "reward (steps balanced)", "reward": "reward of the worst observer",
           "running": "running reward", "solved": "solved above {threshold:g}"},
    "ja": {"title": "RPCで訓練する{env}：オブザーバー{observers}つ、エージェント1つ",
           "x": "エピソード", "y": "報酬（立て続けたステップ数）",
           "reward": "最も成績の悪いオブザーバーの報酬", "running": "移動平均報酬",
           "solved": "{threshold:g}を超えたら解決"},
}
# A history keeps these values, and a checkpoint saves them.
KEPT = {"episodes": int, "env_steps": int, "running_reward": float, "rewards": list,
        "running_rewards": list}


class Learner(Protocol):
    """An agent, as far as a history needs it."""

    running_reward: float
    rewards: dict[int, list[float]]  # rewards of the episode's steps, by observer


class History:
    """The episodes of a training run so far, which it also shows.

    Args:
        agent: Agent whose running reward and steps are recorded.
        args: Parsed flags.
        kept: `KEPT` of the run that this run resumes; None for a new run.
    """

    def __init__(self, agent: Learner, args: argparse.Namespace, kept: dict | None = None) -> None:
        self.agent, self.args = agent, args
        self.kept = kept or {name: kind() for name, kind in KEPT.items()}  # 0, 0, 0.0, [], []
        self.resumed_steps, self.started = self.kept["env_steps"], time.perf_counter()
        # The bar shows the running reward: how many episodes it will take is not known.
        self.bar = report.progress(math.ceil(args.reward_threshold), "running reward",
                                   int(self.kept["running_reward"]), role="agent")
        self.bar.bar_format = "running reward {n:.0f}/{total} |{bar}| {elapsed}{postfix}"

    def add(self, last_reward: float) -> None:
        """Record an episode, given the reward of the worst observer."""
        agent, args = self.agent, self.args
        self.kept["episodes"] += 1
        self.kept["env_steps"] += sum(map(len, agent.rewards.values()))
        self.kept["running_reward"] = agent.running_reward
        self.kept["rewards"].append(last_reward)
        self.kept["running_rewards"].append(agent.running_reward)
        episodes = self.kept["episodes"]
        if self.bar.disable and episodes % args.log_interval == 0:  # not a terminal
            report.log("agent", f"episode {episodes}  last reward {last_reward:.0f}  "
                                f"running reward {agent.running_reward:.2f}")
        self.bar.update(min(int(agent.running_reward), self.bar.total) - self.bar.n)
        self.bar.set_postfix_str(f"episode {episodes}")

    def metrics(self) -> dict:
        """Return the metrics of the whole run; the speed is that of the new steps."""
        train_s = time.perf_counter() - self.started
        self.bar.close()
        new_steps = self.kept["env_steps"] - self.resumed_steps
        solved = self.agent.running_reward > self.args.reward_threshold
        return {"solved": solved, "env_steps_per_s": new_steps / train_s, **self.kept}


def refuse_what_cannot_end(args: argparse.Namespace) -> None:
    """Refuse a threshold that is out of reach, before any process starts."""
    share = max(1, args.total_steps_per_episode // (args.world_size - 1))
    limit = gym.spec(ENV_NAME).max_episode_steps
    if args.reward_threshold >= min(share, limit) and not args.check:
        why = (f"{limit} steps, the most that {ENV_NAME} has; give less" if limit <= share else
               f"{share} steps, each observer's share of --total_steps_per_episode "
               f"{args.total_steps_per_episode} with --world_size {args.world_size}; "
               "change one of them")
        refuse(f"--reward_threshold {args.reward_threshold:g} cannot be passed in {why}")


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json and the picture, print the summary line; return the saved metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    solved = "solved" if metrics["solved"] else "not solved"
    print(f"{ENV_NAME} {solved} in {metrics['episodes']} episodes: "
          f"running reward {metrics['running_reward']:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


def plot(metrics: dict, args: argparse.Namespace) -> None:
    """Draw `learning_curve.png`: the reward of each episode and the running reward."""
    path = args.output_dir / "learning_curve.png"
    for axes, words in picture.in_each_language(
            path, WORDS, metrics, env=ENV_NAME, observers=args.world_size - 1,
            threshold=args.reward_threshold):
        episodes = range(1, metrics["episodes"] + 1)
        axes.plot(episodes, metrics["rewards"], ".", color="0.7", markersize=4,
                  label=words["reward"])
        axes.plot(episodes, metrics["running_rewards"], color="C0", linewidth=2,
                  label=words["running"])
        axes.axhline(args.reward_threshold, color="C1", linestyle="--", label=words["solved"])
