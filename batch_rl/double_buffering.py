r"""`--double_buffering`: an observer plays with one half while the other waits for its actions.

An observer that asks and waits does nothing meanwhile, and the agent does nothing while it plays.
With two groups of environments each side always has one to work on (Sample Factory, section 3.2:
https://arxiv.org/abs/2006.11751):

    observer   | play A | play B | play A | play B |      one request is under way while
                     \      /  \      /  \      /          the answer to the other is used
    agent            | act A | act B | act A | act B |

    python batch_rl/main.py --observers 1 --envs_per_observer 512 --double_buffering

Twice as many messages carry the same states. It wins where there is something to wait for, and a
core that is idle otherwise: between two machines, if a round trip takes about as long as one half
plays, not on the two cores of one (docs/beyond.md).
"""

import torch
from torch.distributed import rpc

from batch_rl.main import Observer
from batch_rl.vector_agent import Environments, VectorAgent


class DoubleBufferedObserver(Observer):
    """An observer with two groups of environments."""

    def __init__(self, args):
        self.id = rpc.get_worker_info().id - 1
        self.gamma = args.gamma
        self.groups = [Environments(args.envs_per_observer // 2, args.envs) for _ in range(2)]

    def run_episode(self, agent_rref, batch, n_steps, seed):
        """See `VectorObserver.run_episode`; the seed is that of the first environment of all."""
        select_action = VectorAgent.select_action_batch if batch else VectorAgent.select_action
        agent, futures = agent_rref.owner(), []
        for g, group in enumerate(self.groups):
            states = group.reset(n_steps, seed + g * group.envs.num_envs)
            futures.append(rpc.rpc_async(agent, select_action, args=(g, self.id, states.tobytes())))
        for step in range(n_steps):
            for g, group in enumerate(self.groups):
                actions = futures[g].wait()  # the other group's request is under way meanwhile
                states = group.step(step, actions)
                if step + 1 < n_steps:
                    futures[g] = rpc.rpc_async(agent, select_action,
                                               args=(g, self.id, states.tobytes()))
        returns, first_lengths = zip(*(group.returns(self.gamma) for group in self.groups),
                                     strict=True)
        return torch.cat(returns), sum(lengths.mean() for lengths in first_lengths).item() / 2


class DoubleBufferedAgent(VectorAgent):
    """An agent whose observers have two groups; each is a batch of its own."""

    observer, n_groups = DoubleBufferedObserver, 2
