"""What a training leaves: its history, metrics.json, the picture, the line of numbers."""

import argparse
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
    "ja": {"title": "RPCで訓練する{env}：オブザーバー{observers}個、エージェント1個",
           "x": "エピソード", "y": "報酬（立て続けたステップ数）",
           "reward": "最も成績の悪いオブザーバーの報酬", "running": "移動平均報酬",
           "solved": "{threshold:g}を超えたら解決"},
}
# What a history keeps, and a checkpoint has of it.
KEPT = {"episodes": int, "env_steps": int, "running_reward": float, "rewards": list,
        "running_rewards": list}


class Learner(Protocol):
    """Has what a history records: an agent."""

    running_reward: float
    rewards: dict[int, list[float]]  # of an episode, by observer


class History:
    """Records what `train` has reached so far, and shows it.

    Args:
        agent: whose running reward and steps are recorded.
        args: the parsed flags.
        kept: of the training that this one goes on with, if there is one.
    """

    def __init__(self, agent: Learner, args: argparse.Namespace, kept: dict | None = None) -> None:
        self.agent, self.args = agent, args
        self.kept = kept or {name: kind() for name, kind in KEPT.items()}  # 0, 0, 0.0, [], []
        self.resumed_steps, self.started = self.kept["env_steps"], time.perf_counter()
        self.bar = report.progress(self.args.max_episodes, "episode", self.episodes, role="agent")

    @property
    def episodes(self) -> int:
        """Return how many there were, those before a resumed checkpoint included."""
        return self.kept["episodes"]

    def add(self, last_reward: float) -> None:
        """Record an episode."""
        agent, args = self.agent, self.args
        self.kept["episodes"] += 1
        self.kept["env_steps"] += sum(map(len, agent.rewards.values()))
        self.kept["running_reward"] = agent.running_reward
        self.kept["rewards"].append(last_reward)
        self.kept["running_rewards"].append(agent.running_reward)
        self.bar.set_postfix_str(f"running reward {agent.running_reward:.1f}", refresh=False)
        if self.bar.disable and self.episodes % args.log_interval == 0:  # not a terminal
            report.log("agent", f"episode {self.episodes}  last reward {last_reward:.0f}  "
                                f"running reward {agent.running_reward:.2f}")
        self.bar.update()

    def metrics(self) -> dict:
        """Return the metrics of the whole training; steps per second without the start."""
        train_s = time.perf_counter() - self.started
        self.bar.close()
        new_steps = self.kept["env_steps"] - self.resumed_steps
        solved = self.agent.running_reward > self.args.reward_threshold
        return {"solved": solved, "env_steps_per_s": new_steps / train_s, **self.kept}


def refuse_what_cannot_end(args: argparse.Namespace) -> None:
    """Refuse, before any process starts, a threshold that is out of reach."""
    share = max(1, args.total_steps_per_episode // (args.world_size - 1))
    limit = gym.spec(ENV_NAME).max_episode_steps
    if args.reward_threshold >= min(share, limit) and not args.check:
        why = (f"{limit} steps, the most that {ENV_NAME} has; give less" if limit <= share else
               f"{share} steps, each observer's share of --total_steps_per_episode "
               f"{args.total_steps_per_episode} with --world_size {args.world_size}; "
               "change one of them")
        refuse(f"--reward_threshold {args.reward_threshold:g} cannot be passed in {why}")


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Draw the picture, write metrics.json, print the line of numbers; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    solved = "solved" if metrics["solved"] else "not solved"
    print(f"{ENV_NAME} {solved} in {metrics['episodes']} episodes: "
          f"running reward {metrics['running_reward']:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


def plot(metrics: dict, args: argparse.Namespace) -> None:
    """Draw `learning_curve.png`."""
    path = args.output_dir / "learning_curve.png"
    for axes, words in picture.in_each_language(
            path, WORDS, [metrics], env=ENV_NAME, observers=args.world_size - 1,
            threshold=args.reward_threshold):
        episodes = range(1, metrics["episodes"] + 1)
        axes.plot(episodes, metrics["rewards"], ".", color="0.7", markersize=4,
                  label=words["reward"])
        axes.plot(episodes, metrics["running_rewards"], color="C0", linewidth=2,
                  label=words["running"])
        axes.axhline(args.reward_threshold, color="C1", linestyle="--", label=words["solved"])
