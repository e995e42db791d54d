"""`--mode train`, beyond the tutorial: play and learn in batches until CartPole is solved.

The tutorial compares speeds, and nobody sees whether the agent learns. Here it goes on until the
pole is balanced for long enough:

    python batch_rl/main.py --mode train --observers 5
    python batch_rl/main.py --mode train --observers 2 --envs_per_observer 8
"""

import gymnasium as gym
from common.cli import bounded

from batch_rl.results import ENV_NAME, History


def train(agent, args):
    """Train with batches until the running reward is above the threshold; the metrics."""
    history = History(agent, args)
    while agent.running_reward <= args.reward_threshold and history.episodes < args.max_episodes:
        ep_reward = agent.run_episode(batch=True)
        agent.finish_episode(True, ep_reward)
        history.add(ep_reward)
    return history.metrics()


def add_flags(parser):
    """Add the flags of `--mode train` to those of the lesson."""
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--max_episodes", type=count, default=500, metavar="N", help="to train; then give up")
    add("--reward_threshold", type=bounded(float, above=0), metavar="R",
        default=gym.spec(ENV_NAME).reward_threshold,
        help="to train: solved when the running reward is above it")
    add("--log_interval", type=count, default=5, metavar="N", help="episodes between two lines")
