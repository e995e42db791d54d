"""CartPole with TorchRL: PPO, and a collector that steps several environments.

Run by `python -m benchmarks.peers`, with the Python of its own environment (torchrl.txt).
Prints a line of JSON at the moment when it is solved: the mean of 100 episodes is above 475.
"""

import json
import sys
import time
from collections import deque

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

EPISODES, THRESHOLD = 100, 475
# The settings of the RL Baselines3 Zoo for PPO on CartPole-v1.
NUM_ENVS, ROLLOUT, EPOCHS, LR = 8, 32, 20, 1e-3
MAX_STEPS = 1_000_000


def make_env():
    """A vector environment of gymnasium, with the sum of each episode's rewards."""
    env = GymEnv("CartPole-v1", num_envs=NUM_ENVS, categorical_action_encoding=True)
    return TransformedEnv(env, RewardSum())


def main():
    """Train until solved or for so many steps."""
    seed, frames = int(sys.argv[1]), NUM_ENVS * ROLLOUT
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64, 64], activation_class=nn.Tanh),
                         in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64], activation_class=nn.Tanh),
                           in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0,
                              critic_coeff=0.5, loss_critic_type="l2")
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LR)
    collector = Collector(make_env, actor, frames_per_batch=frames, total_frames=MAX_STEPS)
    collector.set_seed(seed)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(frames), batch_size=256,
                                    sampler=SamplerWithoutReplacement())
    rewards, env_steps = deque(maxlen=EPISODES), 0
    for data in collector:
        env_steps += data.numel()
        over = data["next", "done"].squeeze(-1)
        rewards.extend(data["next", "episode_reward"].squeeze(-1)[over].tolist())
        if len(rewards) == EPISODES and sum(rewards) / EPISODES > THRESHOLD:
            break
        for _ in range(EPOCHS):
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
