"""10 どのオブザーバーも同じ / The same episode (6_5, rpc_rl/main.py)."""

import argparse

from common.session import device_for

import gymnasium as gym
import torch
from torch import optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef, remote

from rpc_rl.main import OBSERVER_NAME, Observer, Policy
from rpc_rl.results import ENV_NAME


def __init__(self, world_size: int, args: argparse.Namespace) -> None:
    """エージェントをランク0に作ります。オブザーバーはランク1からです。どこかに誤りがあります。

    `self.generators`は、オブザーバーのid（ランク）をキーとする、乱数生成器の辞書です。各エピソードの最初の状態は、
    この生成器から決まります。検証に使う`fast.py`では、アクションもこの生成器から決まります。

    Create the agent on rank 0; the observers start at rank 1. There is a mistake in here.

    `self.generators` maps the id of each observer, which is its rank, to a random number generator.
    The generator decides the first state of each episode. In `fast.py`, whose `--check` judges this
    exercise, it also decides the actions.
    """
    self.args = args
    self.device = device_for(args.device)
    torch.manual_seed(args.seed)
    self.policy = Policy().to(self.device)
    self.optimizer = optim.Adam(self.policy.parameters(), lr=args.lr)
    self.eps = torch.finfo(torch.float32).eps
    self.running_reward = 0.0
    n_steps = args.total_steps_per_episode // (world_size - 1)
    self.n_steps = min(max(1, n_steps), gym.spec(ENV_NAME).max_episode_steps)

    self.agent_rref = RRef(self)
    self.ob_rrefs, self.generators = {}, {}
    for ob_rank in range(1, world_size):
        ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
        self.ob_rrefs[ob_info.id] = remote(ob_info, Observer)
        seed = 1000 * args.seed + rpc.get_worker_info().id
        self.generators[ob_info.id] = torch.Generator().manual_seed(seed)
