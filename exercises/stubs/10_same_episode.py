"""10 同じエピソード / The same episode (6_5, rpc_rl/main.py)."""

import gymnasium as gym
import torch
from torch import optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef, remote


def __init__(self, world_size: int, args: argparse.Namespace) -> None:
    """エージェントを作ります。どこかに誤りがあります。

    self: `Agent`。ランク0で動きます。オブザーバーはランク1から`world_size - 1`までです。
    world_size: プロセスの数。
    args: コマンドのフラグ。
    `self.generators`は、オブザーバーのid（ランク）をキーとする乱数生成器の辞書です。環境の初期状態は
    ここから作ります。`fast.py`では、アクションを選ぶ乱数もここから作ります。

    Make the agent. There is a mistake in here.

    self: the `Agent`, on rank 0. The observers are the ranks 1 to `world_size - 1`.
    world_size: the number of processes.
    args: the flags of the command.
    `self.generators` has, by the id of an observer (its rank), a generator of random numbers. From
    it come the first state of its environment and, with `fast.py`, the choice of its actions.
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
        self.ob_rrefs[ob_info.id] = remote(ob_info, self.observer_class)
        seed = 1000 * args.seed + rpc.get_worker_info().id
        self.generators[ob_info.id] = torch.Generator().manual_seed(seed)
