"""The report of a run: times, the table, metrics.json, the pictures, the summary lines."""

import argparse
import math
import statistics
import time
from typing import Protocol

from common import cli, picture, report
from common.report import per_second

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
        "ja": {"title": "{env}のバッチ処理：オブザーバー{observers}つ、環境{environments}個",
               "x": "エピソード", "y": "最初に倒れるまでの長さ（ステップ）",
               "mean": "全環境の平均", "running": "移動平均報酬",
               "solved": "{threshold:g}を超えたら解決"},
    },
}
ENV_BYTES, STEP_BYTES = 4000, 200  # least memory of an environment and of the record of a step
STEPS_SHOWN = 4  # of an episode, in a timeline
BETWEEN_LINES_S = 1.0  # between two lines of a comparison, if there is no bar


def env_steps(returns: torch.Tensor) -> int:
    """Count the steps of an episode that have a return; a step that was a reset has NaN."""
    return int((~returns.isnan()).sum())


class Rounds:
    """The times of the episodes of a comparison; it also shows which episode is over."""

    def __init__(self, observers: int, num_episode: int) -> None:
        self.observers, self.num_episode, self.last_line = observers, num_episode, -math.inf
        self.timed = {BATCHED: [], SINGLE: []}
        self.bar = report.progress(2 * (1 + num_episode), "episode")

    def add(self, episode: int, batch: bool, seconds: float, returns: torch.Tensor) -> None:
        """Add an episode, given its duration and its returns; episode 0 is the warm-up."""
        mode = BATCHED if batch else SINGLE
        if episode > 0:
            self.timed[mode].append((seconds, env_steps(returns)))
        which = f"episode {episode} of {self.num_episode}" if episode else "warm-up"
        text = f"observers {self.observers}  {mode}  {which}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and now - self.last_line > BETWEEN_LINES_S:  # not a terminal
            self.last_line = now
            report.log("agent", text)

    def metrics(self) -> dict:
        """Return "timed", by mode, (seconds, environment steps) of each episode."""
        self.bar.close()
        return {"timed": self.timed}


class Learner(Protocol):
    """An agent, as far as a history needs it."""

    running_reward: float
    returns: torch.Tensor  # returns of an episode, (observers, K, steps)


class History:
    """The episodes of the training run of until_solved.py so far, which it also shows."""

    def __init__(self, agent: Learner, args: argparse.Namespace) -> None:
        self.agent, self.args = agent, args
        self.rewards, self.running_rewards, self.env_steps = [], [], 0
        self.started = time.perf_counter()
        # The bar shows the running reward: how many episodes it will take is not known.
        self.bar = report.progress(math.ceil(args.reward_threshold), "running reward", role="agent")
        self.bar.bar_format = "running reward {n:.0f}/{total} |{bar}| {elapsed}{postfix}"

    def add(self, ep_reward: float) -> None:
        """Record an episode, given the mean length of the first stretches."""
        running_reward = self.agent.running_reward
        self.rewards.append(ep_reward)
        self.running_rewards.append(running_reward)
        self.env_steps += env_steps(self.agent.returns)
        episodes = len(self.rewards)
        if self.bar.disable and episodes % self.args.log_interval == 0:  # not a terminal
            report.log("agent", f"episode {episodes}  last reward {ep_reward:.1f}  "
                                f"running reward {running_reward:.1f}")
        self.bar.update(min(int(running_reward), self.bar.total) - self.bar.n)
        self.bar.set_postfix_str(f"episode {episodes}")

    def metrics(self) -> dict:
        """Return the metrics of the whole run."""
        self.bar.close()
        return {"solved": self.agent.running_reward > self.args.reward_threshold,
                "episodes": len(self.rewards), "env_steps": self.env_steps,
                "env_steps_per_s": self.env_steps / (time.perf_counter() - self.started),
                "rewards": self.rewards, "running_rewards": self.running_rewards}


def require_room(args: argparse.Namespace) -> None:
    """Refuse more environments and steps than the memory of this machine can hold."""
    of_observer = args.envs_per_observer * (ENV_BYTES + args.num_steps * STEP_BYTES)
    here = cli.ranks_here(args)
    observers = args.world_size - 1 if 0 in here else len(here)  # the agent holds all steps
    cli.require_memory(args, ["envs_per_observer", "num_steps"], observers * of_observer)


def finish(runs: dict[int, dict], args: argparse.Namespace) -> dict:
    """Write metrics.json and the picture, print the table and the summary line.

    Args:
        runs: `{observers: metrics of the run}`.
        args: Parsed flags.

    Returns:
        The saved metrics.
    """
    args.world_size = max(args.observers) + 1
    print(f"medians of {args.num_episode} episodes of {args.num_steps} steps, environments of an "
          f"observer: {args.envs_per_observer}; start-up and a warm-up episode excluded")
    print("observers    batched     single      batched       single    speedup")
    rows, speedup = [], {}
    for observers, run in runs.items():
        seconds, speeds = {}, {}
        for mode, timed in run["timed"].items():
            seconds[mode] = statistics.median(s for s, _ in timed)
            speeds[mode] = statistics.median(per_second(steps, s) for s, steps in timed)
        speedup[observers] = speeds[BATCHED] / speeds[SINGLE]
        rows += [{"observers": observers, "envs_per_observer": args.envs_per_observer,
                  "mode": mode, "env_steps_per_s": speed} for mode, speed in speeds.items()]
        print(f"{observers:9} {seconds[BATCHED]:8.2f} s {seconds[SINGLE]:8.2f} s "
              f"{speeds[BATCHED]:8.0f} /s {speeds[SINGLE]:9.0f} /s {speedup[observers]:10.2f}")
    metrics = report.save_metrics(args, {
        **flags_of(args), "rows": rows, "speedup": speedup,
        "wall_s": sum(run["wall_s"] for run in runs.values())}, backend="tensorpipe")
    plot(metrics, args)
    print(f"{observers} observer{'s' if observers > 1 else ''}: {speeds[BATCHED]:.0f} environment "
          f"steps/s in batches, {speeds[SINGLE]:.0f} one by one: {speedup[observers]:.1f} times as "
          "many")
    return metrics


def finish_training(metrics: dict, args: argparse.Namespace) -> dict:
    """Write metrics.json and the picture of until_solved.py, print the summary line."""
    metrics = report.save_metrics(args, {**flags_of(args), **metrics}, backend="tensorpipe")
    plot_training(metrics, args)
    solved = "solved" if metrics["solved"] else "not solved"
    print(f"{ENV_NAME} {solved} in {metrics['episodes']} episodes: running reward "
          f"{metrics['running_rewards'][-1]:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


def flags_of(args: argparse.Namespace) -> dict[str, int | str]:
    """Return the flags that metrics.json keeps; only some programs have `--envs`."""
    return {flag: getattr(args, flag) for flag in ("envs_per_observer", "envs")
            if hasattr(args, flag)}


def shown_first(spans_by_role: dict[str, list[dict]],
                args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Choose the windows of a timeline: the end of the last episode of each mode.

    Args:
        spans_by_role: Spans of each process; each episode ends with a "step" of the agent.
        args: Parsed flags.

    Returns:
        `{caption: (begin, end)}`.
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


def plot(metrics: dict, args: argparse.Namespace) -> None:
    """Draw `batch_vs_single.png`: the speed of both modes for each number of observers."""
    path = args.output_dir / "batch_vs_single.png"
    for axes, words in picture.in_each_language(path, WORDS["compare"], metrics, env=ENV_NAME,
                                                environments=args.envs_per_observer):
        for mode, color in ((SINGLE, "C1"), (BATCHED, "C0")):
            rows = [row for row in metrics["rows"] if row["mode"] == mode]
            observers = [row["observers"] for row in rows]
            axes.plot(observers, [row["env_steps_per_s"] for row in rows], "o-", color=color,
                      label=words[mode])
        axes.set_xticks(observers)
        axes.set_ylim(bottom=0)


def plot_training(metrics: dict, args: argparse.Namespace) -> None:
    """Draw `learning_curve.png`: the reward of each episode and the running reward."""
    path, threshold = args.output_dir / "learning_curve.png", args.reward_threshold
    observers = args.world_size - 1
    for axes, words in picture.in_each_language(
            path, WORDS["train"], metrics, env=ENV_NAME, observers=observers,
            environments=observers * args.envs_per_observer, threshold=threshold):
        episodes = range(1, metrics["episodes"] + 1)
        axes.plot(episodes, metrics["rewards"], ".", color="0.6", label=words["mean"])
        axes.plot(episodes, metrics["running_rewards"], linewidth=2, label=words["running"])
        axes.axhline(threshold, color="C1", linestyle="--", label=words["solved"])
