"""What a run leaves: the table and the pictures. No RPC here."""

import statistics

from common import report

ENV_NAME = "CartPole-v1"
BATCHED, SINGLE = "batched", "single"


def table_of(args, runs):
    """Rows and speed-ups out of the seconds per episode of each number of observers; prints the tutorial's table."""
    rows, speedup = [], {}
    print(f"{args.num_episode} episodes of {args.num_steps} steps, environments of an observer: "
          f"{args.envs_per_observer}; start-up and a warm-up episode excluded")
    print("observers    batched     single      batched       single   speed-up")
    for observers, seconds in runs.items():
        env_steps = observers * args.envs_per_observer * args.num_steps
        speeds = {mode: env_steps / statistics.median(of_mode) for mode, of_mode in seconds.items()}
        rows += [{"observers": observers, "envs_per_observer": args.envs_per_observer, "mode": mode,
                  "env_steps_per_s": speed} for mode, speed in speeds.items()]
        speedup[observers] = speeds[BATCHED] / speeds[SINGLE]
        print(f"{observers:9} {sum(seconds[BATCHED]):8.2f} s {sum(seconds[SINGLE]):8.2f} s {speeds[BATCHED]:8.0f} /s "
              f"{speeds[SINGLE]:9.0f} /s {speedup[observers]:10.2f}")
    return {"rows": rows, "speedup": speedup}


def plot(metrics, args):
    """Draw `batch_vs_single.png` or `learning_curve.png`."""
    if args.mode == "compare":
        title = f"{ENV_NAME}: one forward for all observers, or one for each"
        path = args.output_dir / "batch_vs_single.png"
        with report.picture(path, title, "observers", "environment steps per second") as axes:
            for mode, label in ((SINGLE, "one by one"), (BATCHED, "in batches")):
                points = [(row["observers"], row["env_steps_per_s"]) for row in metrics["rows"] if row["mode"] == mode]
                axes.plot(*zip(*points, strict=True), "o-", label=label)
            axes.set_xticks(args.observers)
            axes.set_ylim(bottom=0)
    else:
        environments = args.observers[0] * args.envs_per_observer
        title = f"{ENV_NAME} in batches: {environments} environments behind {args.observers[0]} observers"
        path = args.output_dir / "learning_curve.png"
        with report.picture(path, title, "episode", "length of the first stretch (steps)") as axes:
            episodes = range(1, metrics["episodes"] + 1)
            axes.plot(episodes, metrics["rewards"], ".", color="0.6", label="mean of all environments")
            axes.plot(episodes, metrics["running_rewards"], linewidth=2, label="running reward")
            solved = f"solved above {args.reward_threshold:g}"
            axes.axhline(args.reward_threshold, color="C3", linestyle="--", label=solved)
