"""rpc_rl/main.py with half the messages, and no autograd graph while the observers wait.

The changes:

- The last reward is sent together with the next state: one RPC per step instead of two.
- The agent acts without an autograd graph. When it learns, it computes the log-probabilities of a
  whole episode again, in one batch. Both times need the same dropout, so the masks are drawn in
  advance, one per step, and not by `nn.Dropout`.
- All random numbers of an episode are drawn in a few large draws, from one generator per observer.
  The order in which observers ask therefore does not matter: a seed gives the same training run
  each time, and a checkpoint continues it.

It makes 1445 environment steps/s in place of 647 (medians on 2 cores: `python -m benchmarks.rpc_rl
--world_size 3`). The cost: 60 more lines, and a second version of the policy's forward pass
(`FastAgent.probs`).

    python rpc_rl/fast.py --world_size 3                       all processes here
    python rpc_rl/fast.py --check                              compare with a single process
    python rpc_rl/fast.py --checkpoint run.pt                  save a checkpoint now and then ...
    python rpc_rl/fast.py --checkpoint run.pt --resume         ... and continue as if never stopped

It ends with this line; on a CPU that rounds differently, the number of episodes differs:
    CartPole-v1 solved in 212 episodes: running reward 475.8 (threshold 475), 115124 environment ...
"""

import argparse

from common import checkpoint
from common.cli import Parser, refuse
from common.program import run_program
from common.session import rpc_options

import torch
from torch.distributed import rpc
from torch.distributed.rpc import RRef, remote
from torch.distributions import Categorical
from torch.nn import functional as F

from rpc_rl import main as tutorial
from rpc_rl.main import RPC_THREADS, role_name
from rpc_rl.results import History, finish, refuse_what_cannot_end


class FastObserver(tutorial.Observer):
    """An observer that sends the reward of a step with the request for the next action."""

    def run_episode(self, agent_rref: RRef, n_steps: int, seed: int) -> bool:
        """Play as `Observer.run_episode`."""
        agent = agent_rref.rpc_sync()
        state, _ = self.env.reset(seed=seed)
        reward = None
        for _ in range(n_steps):
            action = agent.select_action(self.id, state.tolist(), reward)
            state, reward, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                break
        agent.report_reward(self.id, reward)  # after the last step, there is no next request
        return terminated


class FastAgent(tutorial.Agent):
    """An agent that acts without a graph; it inherits `Agent.finish_episode`."""

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        super().__init__(world_size, args)
        # Each process replaces its plain observer.
        self.ob_rrefs = {ob_id: remote(ob_id, FastObserver) for ob_id in self.ob_rrefs}

    def run_episode(self) -> None:
        """Draw all random numbers of the episode, then play as `Agent.run_episode`."""
        self.states = {ob_id: [] for ob_id in self.ob_rrefs}
        self.actions = {ob_id: [] for ob_id in self.ob_rrefs}
        self.masks, self.uniforms = {}, {}
        for ob_id, generator in self.generators.items():
            p, hidden = self.policy.dropout.p, self.policy.affine1.out_features
            keep = torch.bernoulli(torch.full((self.n_steps, hidden), 1 - p), generator=generator)
            self.masks[ob_id] = (keep / (1 - p)).to(self.device)
            self.uniforms[ob_id] = torch.rand(self.n_steps, generator=generator).tolist()
        super().run_episode()

    def select_action(self, ob_id: int, state: list[float], reward: float | None = None) -> int:
        """Choose an action as `Agent.select_action`; record the reward of the step before."""
        if reward is not None:
            self.report_reward(ob_id, reward)
        step = len(self.states[ob_id])
        with torch.inference_mode():
            probs = self.probs(torch.tensor(state, device=self.device), self.masks[ob_id][step])
        # A uniform number falls above P(left) with probability P(right).
        action = int(self.uniforms[ob_id][step] > probs[0].item())
        self.states[ob_id].append(state)
        self.actions[ob_id].append(action)
        return action

    def probs(self, states: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Compute `Policy.forward` of states (..., 4) with given dropout masks (..., 128)."""
        x = self.policy.affine1(states) * masks
        return F.softmax(self.policy.affine2(F.relu(x)), dim=-1)

    def log_probs(self) -> torch.Tensor:
        """Compute `Agent.log_probs` in one forward pass over all steps: (steps,)."""
        states, actions, masks = [], [], []
        for ob_id, of_observer in self.states.items():
            states += of_observer
            actions += self.actions[ob_id]
            masks.append(self.masks[ob_id][: len(of_observer)])
        probs = self.probs(torch.tensor(states, device=self.device), torch.cat(masks))
        actions = torch.tensor(actions, device=self.device)
        return Categorical(probs, validate_args=False).log_prob(actions)

    def state_dict(self) -> dict:
        """Return the state that, with the history, resumes a run as if it had never stopped."""
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "generators": [generator.get_state() for generator in self.generators.values()]}

    def load_state_dict(self, state: dict) -> None:
        """Load a `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, saved in zip(self.generators.values(), state["generators"], strict=True):
            generator.set_state(saved)


def load(agent: FastAgent, args: argparse.Namespace) -> dict:
    """Load the agent from `--checkpoint`; return what its history has kept."""
    state = checkpoint.load(args)
    agent.load_state_dict(state)
    agent.running_reward = state["history"]["running_reward"]
    return state["history"]


def save(agent: FastAgent, history: History, args: argparse.Namespace) -> None:
    """Save the agent and its history to `--checkpoint` if given."""
    if args.checkpoint:
        checkpoint.save(args, {**agent.state_dict(), "history": history.kept})


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train as main.py does, with the fast agent, and save checkpoints."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = None
    if rank == 0:
        agent = FastAgent(world_size, args)
        history = History(agent, args, load(agent, args) if args.resume else None)
        episode = history.kept["episodes"]  # 0, or those before the checkpoint
        while agent.running_reward <= args.reward_threshold and episode < args.max_episodes:
            agent.run_episode()
            last_reward = agent.finish_episode()
            history.add(last_reward)
            episode += 1
            if episode % args.log_interval == 0:
                save(agent, history, args)
        save(agent, history, args)  # with the episodes since the last checkpoint
        metrics = history.metrics()
    rpc.shutdown()
    return metrics


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py and those of checkpoints."""
    parser = tutorial.build_parser("rpc_rl/fast", __doc__)
    # Each observer has its own generator, so their number must stay the same.
    parser.add_checkpoint_flags("with the same flags: only how long and where may differ")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process if `--check` is given; see main.py."""
    args = build_parser().parse_args(argv)
    refuse_what_cannot_end(args)
    state = checkpoint.inspect(args, tutorial.Policy, weights="policy")
    if state and len(state["generators"]) != args.world_size - 1:
        refuse(f"--world_size {args.world_size} must be {len(state['generators']) + 1}, as in the "
               "checkpoint")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
