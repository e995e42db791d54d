"""`--agent fast`: requests without an RRef, and a timeout that names who is late.

An RRef in each request costs a sixth of the steps per second: it is counted on both sides. The
agent is there for as long as the observers are, so its name will do.
"""

from torch.distributed import rpc

from batch_rl.main import AGENT_NAME, OBSERVER_NAME, Agent

_agent = None  # on rank 0, where the requests find it


class AgentName:
    """Used like an RRef of the agent, but only its name travels."""

    def owner(self):
        """The worker that has the agent."""
        return rpc.get_worker_info(AGENT_NAME)

    def local_value(self):
        """The agent, on its worker."""
        return _agent


class FastAgent(Agent):
    """An agent that the observers know by its name."""

    def __init__(self, world_size, args):
        super().__init__(world_size, args)
        self.agent_rref = AgentName()

    def run_episode(self, batch):
        """See `Agent.run_episode`.

        Raises:
            TimeoutError: names the observers for whose states the others have waited too long.
        """
        global _agent
        _agent = self
        try:
            return super().run_episode(batch)
        except RuntimeError as error:
            if "set timeout" not in str(error) or not batch:
                raise
            names = ", ".join(OBSERVER_NAME.format(ob_id + 1) for ob_id in sorted(self.late()))
            waited = f"for {self.args.timeout:g} s"
            raise TimeoutError(f"timed out: no states from {names} {waited}") from None

    def late(self):
        """The observers for whose states a batch waits."""
        return set(range(len(self.ob_rrefs))) - set(self.states)
