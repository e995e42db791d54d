r"""The experiment of vector.py; an observer plays with one half while the other waits for actions.

What differs: an observer that asks and waits does nothing meanwhile, and the agent does nothing
while it plays. With two groups of environments each side always has one to work on (Sample Factory,
section 3.2: https://arxiv.org/abs/2006.11751):

    observer   | play A | play B | play A | play B |      one request is under way while
                     \      /  \      /  \      /          the answer to the other is used
    agent            | act A | act B | act A | act B |

    python batch_rl/double_buffering.py --observers 1 --envs_per_observer 64 --envs sync
    python batch_rl/double_buffering.py --check        the same numbers as one process?

What it wins: 1.4 times the environment steps/s between two machines that are 2 ms apart, with 512
environments (python -m benchmarks.latency). It takes something to wait for, and a core that is idle
otherwise: a round trip that takes about as long as one half plays (docs/beyond.md).

What it costs: twice as many messages for the same states. On the two cores of one machine it wins
nothing (0.97 times, docs/results/batch_rl_double.json).
"""

import argparse

import torch
from common.cli import Parser, refuse
from torch.distributed import rpc

from batch_rl import main as tutorial
from batch_rl import vector
from batch_rl.fast import AgentName
from batch_rl.main import role_name  # noqa: F401  --check looks for it here
from batch_rl.vector import Environments, VectorAgent


class DoubleBufferedObserver:
    """Owns two groups of environments, which play in turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.gamma = args.gamma
        self.groups = [Environments(args.envs_per_observer // 2, args.envs) for _ in range(2)]

    def run_episode(self, agent_rref: AgentName, batch: bool, n_steps: int,
                    seed: int) -> tuple[torch.Tensor, float]:
        """Play as `VectorObserver.run_episode`; the seed is the first environment's."""
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
    """Decides for observers with two groups; each is a batch of its own."""

    observer_class = DoubleBufferedObserver
    n_groups = 2


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Time episodes as main.py does, with double buffering."""
    return tutorial.run_worker(rank, world_size, args, DoubleBufferedAgent)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of vector.py."""
    return vector.build_parser("batch_rl/double_buffering", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Compare, or `--check`; see main.py."""
    args = build_parser().parse_args(argv)
    if args.envs_per_observer % 2:
        refuse(f"--envs_per_observer {args.envs_per_observer} must be even: double buffering "
               "halves them")
    return tutorial.compare(run_worker, args)


if __name__ == "__main__":
    main()
