"""CartPole with Sample Factory: asynchronous PPO, double-buffered sampling, all its processes.

Run by `python -m benchmarks.peers`, with the Python of its own environment (sample_factory.txt).
Prints a line of JSON at the moment when it is solved: the mean of 100 episodes is above 475.
"""

import json
import os
import sys
import tempfile
import time

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

EPISODES, THRESHOLD = 100, 475
FLAGS = {  # those of its own example for CartPole, for two cores; and what only costs time off
    "env": "CartPole-v1", "algo": "APPO", "use_rnn": False, "recurrence": 1, "with_vtrace": False,
    "num_workers": 2, "num_envs_per_worker": 20, "worker_num_splits": 2,
    "policy_workers_per_policy": 1, "batch_size": 512, "reward_scale": 0.1, "device": "cpu",
    "stats_avg": EPISODES, "save_every_sec": 100_000, "experiment_summaries_interval": 1,
    "decorrelate_experience_max_seconds": 0, "train_for_env_steps": 3_000_000,
}


def make_env(full_env_name, cfg=None, env_config=None, render_mode=None):
    """The environment of gymnasium."""
    return gym.make(full_env_name, render_mode=render_mode)


class Solved(AlgoObserver):
    """Ends the program when the mean is above the threshold."""

    def on_training_step(self, runner, training_iteration_since_resume):
        """Called by the runner after each training step."""
        rewards = runner.policy_avg_stats.get("reward")
        if rewards and len(rewards[0]) >= EPISODES and np.mean(rewards[0]) > THRESHOLD:
            print(json.dumps({"at": time.time(), "env_steps": int(sum(runner.env_steps.values())),
                              "episodes": len(rewards[0]), "mean": float(np.mean(rewards[0]))}),
                  flush=True)
            os.killpg(0, 9)  # the whole run: a session of its own


def main():
    """Train until solved, or for so many steps."""
    register_env("CartPole-v1", make_env)
    with tempfile.TemporaryDirectory() as folder:
        flags = {**FLAGS, "seed": int(sys.argv[1]), "train_dir": folder, "experiment": "cartpole"}
        words = [f"--{name}={value}" for name, value in flags.items()]
        parser, _ = parse_sf_args(words)
        cfg, runner = make_runner(parse_full_cfg(parser, words))
        runner.register_observer(Solved())
        runner.init()
        runner.run()


if __name__ == "__main__":
    main()
