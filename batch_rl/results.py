"""What a run leaves: the history of a training, the table, the pictures, the line of numbers."""

import argparse
import math
import statistics
import time
from typing import Protocol

from common import cli, picture, report

import torch

ENV_NAME = "CartPole-v1"
BATCHED, SINGLE = "batched", "single"
WORDS = {
    "compare": {
        "en": {"title": "{env}: one forward for all observers, or one for each",
               "x": "observers (environments of each: {environments})",
               "y": "environment steps per second",
               SINGLE: "one by one", BATCHED: "in batches"},
        "ja": {"title": "{env}：全オブザーバーを1回のフォワードパスで処理するか、1つずつ処理するか",
               "x": "オブザーバーの数（それぞれ環境{environments}個）", "y": "環境ステップ/秒",
               SINGLE: "1つずつ", BATCHED: "バッチ"},
    },
    "train": {
        "en": {"title": "{env} in batches: {environments} environments, {observers} observers",
               "x": "episode", "y": "length of the first stretch (steps)",
               "mean": "mean of all environments", "running": "running reward",
               "solved": "solved above {threshold:g}"},
        "ja": {"title": "{env}のバッチ処理：オブザーバー{observers}個、環境{environments}個",
               "x": "エピソード", "y": "最初に倒れるまでの長さ（ステップ）",
               "mean": "全環境の平均", "running": "移動平均報酬",
               "solved": "{threshold:g}を超えたら解決"},
    },
}
ENV_BYTES, STEP_BYTES = 4000, 200  # an environment, and what is kept of each of its steps, at least
STEPS_SHOWN = 4  # of an episode, in a timeline
BETWEEN_LINES_S = 1.0  # of a comparison, where there is no bar


def env_steps(returns: torch.Tensor) -> int:
    """Count the steps of an episode that have a return: those in which no environment resets."""
    return int((~returns.isnan()).sum())


class Rounds:
    """Shows the episodes of a comparison: a bar on a terminal, lines elsewhere."""

    def __init__(self, observers: int, num_episode: int) -> None:
        self.observers, self.num_episode, self.last_line = observers, num_episode, -math.inf
        self.bar = report.progress(2 * (1 + num_episode), "episode")

    def add(self, mode: str, episode: int) -> None:
        """Show that an episode is over; number 0 is the warm-up."""
        which = f"episode {episode} of {self.num_episode}" if episode else "warm-up"
        text = f"observers {self.observers}  {mode}  {which}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and now - self.last_line > BETWEEN_LINES_S:  # not a terminal
            self.last_line = now
            report.log("agent", text)

    def close(self) -> None:
        """End the bar."""
        self.bar.close()


class Learner(Protocol):
    """Has what a history records: an agent."""

    running_reward: float
    returns: torch.Tensor  # of an episode: (observers, K, steps)


class History:
    """Keeps what the training of until_solved.py has reached so far, and shows it."""

    def __init__(self, agent: Learner, args: argparse.Namespace) -> None:
        self.agent, self.args = agent, args
        self.rewards, self.running_rewards, self.env_steps = [], [], 0
        self.started = time.perf_counter()
        self.bar = report.progress(args.max_episodes, "episode", role="agent")

    @property
    def episodes(self) -> int:
        """Return how many there were."""
        return len(self.rewards)

    def add(self, ep_reward: float) -> None:
        """Record an episode."""
        running_reward = self.agent.running_reward
        self.rewards.append(ep_reward)
        self.running_rewards.append(running_reward)
        self.env_steps += env_steps(self.agent.returns)
        self.bar.set_postfix_str(f"running reward {running_reward:.1f}", refresh=False)
        if self.bar.disable and self.episodes % self.args.log_interval == 0:  # not a terminal
            report.log("agent", f"episode {self.episodes}  last reward {ep_reward:.1f}  "
                                f"running reward {running_reward:.1f}")
        self.bar.update()

    def metrics(self) -> dict:
        """Return the metrics of the whole training, once it is over."""
        self.bar.close()
        return {"solved": self.agent.running_reward > self.args.reward_threshold,
                "episodes": self.episodes, "env_steps": self.env_steps,
                "env_steps_per_s": self.env_steps / (time.perf_counter() - self.started),
                "rewards": self.rewards, "running_rewards": self.running_rewards}


def require_room(args: argparse.Namespace) -> None:
    """Refuse more environments and steps than the memory of this machine can hold."""
    of_observer = args.envs_per_observer * (ENV_BYTES + args.num_steps * STEP_BYTES)
    here = cli.ranks_here(args)
    observers = args.world_size - 1 if 0 in here else len(here)  # the agent keeps all steps
    cli.require_memory(args, ["envs_per_observer", "num_steps"], observers * of_observer)


def finish(runs: dict[int, dict], args: argparse.Namespace) -> dict:
    """Write metrics.json, draw, print the table and the line of numbers; return the metrics.

    Args:
        runs: `{observers: what the run with so many returned}`.
        args: the parsed flags.
    """
    args.world_size = max(args.observers) + 1
    timed = {observers: run["timed"] for observers, run in runs.items()}
    metrics = {**table_of(args, timed), "wall_s": sum(run["wall_s"] for run in runs.values())}
    print_table(args, metrics, timed)
    metrics = report.save_metrics(args, {**flags_of(args), **metrics}, backend="tensorpipe")
    plot([metrics], args)
    batched, single = (row["env_steps_per_s"] for row in metrics["rows"][-2:])
    observers = args.observers[-1]
    print(f"{observers} observer{'s' if observers > 1 else ''}: {batched:.0f} environment "
          f"steps/s in batches, {single:.0f} one by one: {batched / single:.1f} times as many")
    return metrics


def finish_training(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json, draw, print the numbers of until_solved.py; return the metrics."""
    metrics = report.save_metrics(args, {**flags_of(args), **metrics}, backend="tensorpipe")
    plot_training(metrics, args)
    solved = "solved" if metrics["solved"] else "not solved"
    print(f"{ENV_NAME} {solved} in {metrics['episodes']} episodes: running reward "
          f"{metrics['running_rewards'][-1]:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


def flags_of(args: argparse.Namespace) -> dict[str, int | str]:
    """Pick the flags that metrics.json keeps: `envs` only where the program has it."""
    return {flag: getattr(args, flag) for flag in ("envs_per_observer", "envs")
            if hasattr(args, flag)}


def shown_first(spans_by_role: dict[str, list[dict]],
                args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Choose the windows of a timeline: the end of the last episode in batches, and one by one.

    Args:
        spans_by_role: with a step of the agent at the end of each episode.
        args: the parsed flags.

    Returns:
        The windows by their captions.
    """
    spans, windows = spans_by_role["agent"], {}
    modes = (BATCHED, SINGLE) if hasattr(args, "num_episode") else (BATCHED,)
    ends = sorted(span["end"] for span in spans if span["kind"] == "step")
    begins = [0.0, *ends]
    for mode, begin, end in zip(modes, begins[-1 - len(modes) :], ends[-len(modes) :],
                                strict=False):
        forwards = STEPS_SHOWN * (1 if mode == BATCHED else len(spans_by_role) - 1)
        starts = sorted(span["start"] for span in spans
                        if span["kind"] == "forward" and begin < span["start"] < end)
        windows[mode] = starts[-forwards:][0], end
    return windows


def table_of(args: argparse.Namespace, timed: dict[int, dict[str, list]]) -> dict[str, object]:
    """Compute rows and speed-ups, `{"rows": [...], "speedup": {observers: ...}}`.

    Args:
        args: the parsed flags.
        timed: `{observers: {mode: of each episode, seconds and environment steps}}`.
    """
    rows, speedup = [], {}
    for observers, of_run in timed.items():
        speeds = {mode: statistics.median(steps / seconds for seconds, steps in of_run[mode])
                  for mode in (BATCHED, SINGLE)}
        rows += [{"observers": observers, "envs_per_observer": args.envs_per_observer,
                  "mode": mode, "env_steps_per_s": speed} for mode, speed in speeds.items()]
        speedup[observers] = speeds[BATCHED] / speeds[SINGLE]
    return {"rows": rows, "speedup": speedup}


def print_table(args: argparse.Namespace, metrics: dict,
                timed: dict[int, dict[str, list]]) -> None:
    """Print the tutorial's table, with speeds."""
    print(f"medians of {args.num_episode} episodes of {args.num_steps} steps, environments of an "
          f"observer: {args.envs_per_observer}; start-up and a warm-up episode excluded")
    print("observers    batched     single      batched       single   speed-up")
    speeds = {(row["observers"], row["mode"]): row["env_steps_per_s"] for row in metrics["rows"]}
    for observers, of_run in timed.items():
        batched, single = (statistics.median(seconds for seconds, _ in of_run[mode])
                           for mode in (BATCHED, SINGLE))
        print(f"{observers:9} {batched:8.2f} s {single:8.2f} s "
              f"{speeds[observers, BATCHED]:8.0f} /s {speeds[observers, SINGLE]:9.0f} /s "
              f"{metrics['speedup'][observers]:10.2f}")


def plot(runs: list[dict], args: argparse.Namespace) -> None:
    """Draw `batch_vs_single.png`, from the metrics of one or several runs."""
    observers = list(dict.fromkeys(row["observers"] for row in runs[0]["rows"]))
    path = args.output_dir / "batch_vs_single.png"
    for axes, words in picture.in_each_language(path, WORDS["compare"], runs, env=ENV_NAME,
                                                environments=args.envs_per_observer):
        for mode, colour in ((SINGLE, "C1"), (BATCHED, "C0")):
            speeds = [[row["env_steps_per_s"] for row in run["rows"] if row["mode"] == mode]
                      for run in runs]
            picture.line(axes, observers, speeds, color=colour, label=words[mode])
        axes.set_xticks(observers)
        axes.set_ylim(bottom=0)


def plot_training(metrics: dict, args: argparse.Namespace) -> None:
    """Draw `learning_curve.png`."""
    path, threshold = args.output_dir / "learning_curve.png", args.reward_threshold
    observers = args.world_size - 1
    for axes, words in picture.in_each_language(
            path, WORDS["train"], [metrics], env=ENV_NAME, observers=observers,
            environments=observers * args.envs_per_observer, threshold=threshold):
        episodes = range(1, metrics["episodes"] + 1)
        axes.plot(episodes, metrics["rewards"], ".", color="0.6", label=words["mean"])
        axes.plot(episodes, metrics["running_rewards"], linewidth=2, label=words["running"])
        axes.axhline(threshold, color="C1", linestyle="--", label=words["solved"])
