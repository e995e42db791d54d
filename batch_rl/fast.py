"""The experiment of main.py without an RRef in the requests.

What differs: the observers know the agent by its name. An RRef in each request is counted on both
sides; the agent is there for as long as the observers are, so its name will do.

What it wins: an RRef in each request costs about 15% of the environment steps per second
(docs/measurements/batch_rl.md). What it costs: one agent in a process, which a global variable has.

    python batch_rl/fast.py                            with and without batches
    python batch_rl/fast.py --check                    the same numbers as one process?
"""

import argparse

from common.cli import Parser
from torch.distributed import rpc

from batch_rl import main as tutorial
from batch_rl.main import AGENT_NAME, role_name  # noqa: F401  --check looks for role_name

_agent = None  # on rank 0, where the requests find it


class AgentName:
    """Stands for an RRef of the agent, but only its name travels."""

    def owner(self) -> rpc.WorkerInfo:
        """Return the worker that has the agent."""
        return rpc.get_worker_info(AGENT_NAME)

    def local_value(self) -> tutorial.Agent:
        """Return the agent, on its worker."""
        return _agent


class FastAgent(tutorial.Agent):
    """Decides and learns as `Agent`; the observers know it by its name."""

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        super().__init__(world_size, args)
        self.agent_rref = AgentName()

    def run_episode(self, batch: bool) -> float:
        """Play as `Agent.run_episode`; the requests find this agent."""
        global _agent
        _agent = self
        return super().run_episode(batch)


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Time episodes as main.py does, with the fast agent."""
    return tutorial.run_worker(rank, world_size, args, FastAgent)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py."""
    return tutorial.build_parser("batch_rl/fast", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Compare, or `--check`; see main.py."""
    return tutorial.compare(run_worker, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
