"""What a training leaves: its history and checkpoints, metrics.json, pictures, the last line."""

import time

import gymnasium as gym
from common import checkpoint, picture, report, timeline, timeline_report
from common.cli import refuse
from torch.distributed import rpc

ENV_NAME = "CartPole-v1"
PLAY_DRAWN_S = 0.02  # with --timeline: of an episode
TIMELINE_TITLE = {"en": f"{ENV_NAME} over RPC: the end of an episode",
                  "ja": f"RPCで訓練する{ENV_NAME}：エピソードの終わり"}
WORDS = {
    "en": {"title": "{env} over RPC: {observers} observers, one agent", "x": "episode",
           "y": "reward (steps balanced)", "reward": "reward of the worst observer",
           "running": "running reward", "solved": "solved above {threshold:g}"},
    "ja": {"title": "RPCで訓練する{env}：オブザーバー{observers}個、エージェント1個",
           "x": "エピソード", "y": "報酬（倒れるまでのステップ数）",
           "reward": "最も低いオブザーバーの報酬", "running": "移動平均報酬",
           "solved": "{threshold:g}を超えたら解決"},
}


class History:
    """What `train` has reached so far; shown, and saved to `--checkpoint`.

    Args:
        agent: whose running reward and steps are recorded, and whose state is saved.
        args: the parsed flags.
    """

    def __init__(self, agent, args):
        self.agent, self.args = agent, args
        self.kept = {"episodes": 0, "env_steps": 0, "running_reward": 0.0, "rewards": [],
                     "running_rewards": []}
        if args.resume:
            state = checkpoint.load(args)
            agent.load_state_dict(state)
            self.kept = state["history"]
            agent.running_reward = self.kept["running_reward"]
        self.resumed_steps, self.started = self.kept["env_steps"], time.perf_counter()
        self.bar = report.progress(args.max_episodes, "episode", self.episodes)

    @property
    def episodes(self):
        """How many there were, those before a resumed checkpoint included."""
        return self.kept["episodes"]

    def add(self, last_reward):
        """Record an episode."""
        agent, args = self.agent, self.args
        self.kept["episodes"] += 1
        self.kept["env_steps"] += sum(map(len, agent.rewards.values()))
        self.kept["running_reward"] = agent.running_reward
        self.kept["rewards"].append(last_reward)
        self.kept["running_rewards"].append(agent.running_reward)
        self.bar.set_postfix_str(f"running reward {agent.running_reward:.1f}", refresh=False)
        self.bar.update()
        if self.episodes % args.log_interval == 0:
            if self.bar.disable:  # not a terminal
                report.log("agent", f"episode {self.episodes}  last reward {last_reward:.0f}  "
                                    f"running reward {agent.running_reward:.2f}")
            self._save()

    def metrics(self):
        """Of the whole training, once it is over; steps per second without the start."""
        train_s = time.perf_counter() - self.started
        self.bar.close()
        self._save()
        new_steps = self.kept["env_steps"] - self.resumed_steps
        solved = self.agent.running_reward > self.args.reward_threshold
        metrics = {"solved": solved, "agent": self.args.agent,
                   "env_steps_per_s": new_steps / train_s, **self.kept}
        if self.args.timeline:
            metrics["spans"] = timeline.recorded()
            for ob_rref in self.agent.ob_rrefs.values():
                metrics["spans"] |= rpc.rpc_sync(ob_rref.owner(), timeline.recorded)
        return metrics

    def _save(self):
        if self.args.checkpoint:
            checkpoint.save(self.args, {**self.agent.state_dict(), "history": self.kept})


def refuse_what_cannot_end(args):
    """Refuse, before any process starts, a threshold out of reach or a foreign checkpoint."""
    share = args.total_steps_per_episode // (args.world_size - 1)
    longest = min(share, gym.spec(ENV_NAME).max_episode_steps)
    if args.reward_threshold >= longest and not args.check:
        refuse(f"--reward_threshold {args.reward_threshold:g} cannot be passed in {longest} steps, "
               f"each observer's share of --total_steps_per_episode {args.total_steps_per_episode} "
               f"with --world_size {args.world_size}; change one of them")
    if args.checkpoint and args.agent == "plain":
        refuse("--checkpoint requires --agent fast: the plain one draws from torch's own generator "
               "in the order of the requests, which no checkpoint can repeat")
    state = checkpoint.inspect(args, needs=("generators",))
    if state and len(state["generators"]) != args.world_size - 1:
        refuse(f"--world_size {args.world_size} must be {len(state['generators']) + 1}, as in the "
               "checkpoint")


def finish(metrics, args):
    """Draw the pictures, write metrics.json, print the last line; the whole metrics."""
    if args.timeline:
        plot_timeline(metrics.pop("spans"), args)
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    solved = "solved" if metrics["solved"] else "not solved"
    print(f"{ENV_NAME} {solved} in {metrics['episodes']} episodes: "
          f"running reward {metrics['running_reward']:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


def plot(metrics, args):
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


def plot_timeline(spans, args):
    """Draw the end of the last episode, and what the agent then learns from it: `timeline.png`."""
    if spans["agent"]:  # otherwise there was nothing left to train
        last = spans["agent"][-1]  # of the agent's work: finish_episode
        window = last["start"] - PLAY_DRAWN_S, last["end"]
        timeline_report.save(spans, args.output_dir, TIMELINE_TITLE, {"": window},
                             report.machine(args))
