"""CartPole with TorchRL: PPO, and a collector that steps several environments in each process.

Run by `python -m benchmarks.peers`, with the Python of its own environment (torchrl.txt).
Prints a line of JSON at the moment when it is solved: the mean of 100 episodes is above 475.
"""

import argparse
import functools
import json
import time
from collections import deque

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

EPISODES, THRESHOLD = 100, 475


def make_env(num_envs):
    """A vector environment of gymnasium, with the sum of each episode's rewards."""
    env = GymEnv("CartPole-v1", num_envs=num_envs, categorical_action_encoding=True)
    return TransformedEnv(env, RewardSum())


def main():
    """Train until solved or for so many steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collectors", type=int, default=1, help="processes; 1: this one")
    parser.add_argument("--num_envs", type=int, default=8, help="of each collector")
    parser.add_argument("--rollout", type=int, default=32, help="steps of each environment")
    parser.add_argument("--epochs", type=int, default=20, help="of each batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_steps", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are small
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64, 64], activation_class=nn.Tanh),
                         in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64], activation_class=nn.Tanh),
                           in_keys=["observation"])
    # The settings of the RL Baselines3 Zoo for PPO on CartPole-v1.
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0,
                              critic_coeff=0.5, loss_critic_type="l2")
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.lr)
    frames = args.collectors * args.num_envs * args.rollout
    create = functools.partial(make_env, args.num_envs)
    common = {"frames_per_batch": frames, "total_frames": args.max_steps}
    collector = (Collector(create, actor, **common) if args.collectors == 1 else
                 MultiSyncCollector([create] * args.collectors, actor, cat_results="stack",
                                        **common))
    collector.set_seed(args.seed)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(frames), batch_size=256,
                                    sampler=SamplerWithoutReplacement())
    rewards, env_steps = deque(maxlen=EPISODES), 0
    for data in collector:
        env_steps += data.numel()
        over = data["next", "done"].squeeze(-1)
        rewards.extend(data["next", "episode_reward"].squeeze(-1)[over].tolist())
        if len(rewards) == EPISODES and sum(rewards) / EPISODES > THRESHOLD:
            break
        for _ in range(args.epochs):
            with torch.no_grad():
                advantage(data)
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                losses = loss_module(batch)
                loss = losses["loss_objective"] + losses["loss_critic"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()
    print(json.dumps({"at": time.time(), "env_steps": env_steps, "episodes": len(rewards),
                      "mean": sum(rewards) / max(1, len(rewards))}), flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
