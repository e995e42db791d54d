"""rpc_rl/main.py with half the messages, and no autograd graph while the observers wait.

What it changes:

- the last reward rides along with the next state: one RPC per step instead of two;
- it acts without an autograd graph, and computes the log-probabilities of a whole episode again, in
  one batch, when it learns. So dropout has to be the same both times: its masks are drawn in
  advance, one per step, and not by `nn.Dropout`;
- all random numbers of an episode come in a few large draws, from one generator for each observer.
  So a seed gives the same training whichever observer asks first, and a checkpoint continues it.

It makes 1445 environment steps/s in place of 647 (medians on 2 cores: `python -m benchmarks.rpc_rl
--world_size 3`). It costs 60 lines, and a policy whose forward is written a second time
(`FastAgent.probs`).

    python rpc_rl/fast.py --world_size 3                       all processes here
    python rpc_rl/fast.py --check                              the same numbers as one process?
    python rpc_rl/fast.py --checkpoint run.pt                  save it now and then ...
    python rpc_rl/fast.py --checkpoint run.pt --resume         ... and go on, as if never stopped

It ends with (a CPU that rounds differently takes some episodes more or fewer):
    CartPole-v1 solved in 212 episodes: running reward 475.8 (threshold 475), 115124 environment ...
"""

import argparse

from common import checkpoint
from common.cli import Parser, refuse
from common.program import run_program

import torch
from torch.distributed.rpc import RRef
from torch.distributions import Categorical
from torch.nn import functional as F

from rpc_rl import main as tutorial
from rpc_rl.main import role_name
from rpc_rl.results import KEPT, History, finish, refuse_what_cannot_end


class FastObserver(tutorial.Observer):
    """Sends the reward of a step with the request for the next action."""

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
        agent.report_reward(self.id, reward)  # the last one has no next state to ride with
        return terminated


class FastAgent(tutorial.Agent):
    """Acts without a graph; its `finish_episode` is that of `Agent`."""

    observer_class = FastObserver

    def run_episode(self) -> None:
        """Play as `Agent.run_episode`, with all random numbers drawn first."""
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
        """Answer as `Agent.select_action`, and record the reward of the step before."""
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
        """Compute as `Agent.log_probs`, with one forward for all steps: (steps,)."""
        states, actions, masks = [], [], []
        for ob_id, of_observer in self.states.items():
            states += of_observer
            actions += self.actions[ob_id]
            masks.append(self.masks[ob_id][: len(of_observer)])
        probs = self.probs(torch.tensor(states, device=self.device), torch.cat(masks))
        actions = torch.tensor(actions, device=self.device)
        return Categorical(probs, validate_args=False).log_prob(actions)

    def state_dict(self) -> dict:
        """Return what a training needs beside its history to go on as if it had never stopped."""
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "generators": [generator.get_state() for generator in self.generators.values()]}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, saved in zip(self.generators.values(), state["generators"], strict=True):
            generator.set_state(saved)


class SavedHistory(History):
    """Begins with `--resume` from a checkpoint, and saves itself and its agent to one."""

    def __init__(self, agent: FastAgent, args: argparse.Namespace) -> None:
        kept = None
        if args.resume:
            state = checkpoint.load(args)
            agent.load_state_dict(state)
            kept = state["history"]
            agent.running_reward = kept["running_reward"]
        super().__init__(agent, args, kept)

    def add(self, last_reward: float) -> None:
        """Record an episode; after every `--log_interval` episodes, save the training."""
        super().add(last_reward)
        if self.episodes % self.args.log_interval == 0:
            self.save()

    def metrics(self) -> dict:
        """Save the training, and return the metrics of all of it."""
        self.save()
        return super().metrics()

    def save(self) -> None:
        """Save the training as it is now, if there is a `--checkpoint`."""
        if self.args.checkpoint:
            state = {**self.agent.state_dict(), "history": self.kept}
            checkpoint.save(self.args, state)


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train as main.py does, with the fast agent and checkpoints."""
    return tutorial.run_worker(rank, world_size, args, FastAgent, SavedHistory)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py, and of checkpoints."""
    parser = tutorial.build_parser("rpc_rl/fast", __doc__)
    # Each observer has its own generator, so as many have to go on.
    parser.add_checkpoint_flags("with the same flags: only how long and where may differ")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    refuse_what_cannot_end(args)
    state = checkpoint.inspect(
        args, make_model=tutorial.Policy, weights="policy",
        needs={"optimizer": checkpoint.OPTIMIZER, "generators": [torch.get_rng_state()],
               "history": KEPT})
    if state and len(state["generators"]) != args.world_size - 1:
        refuse(f"--world_size {args.world_size} must be {len(state['generators']) + 1}, as in the "
               "checkpoint")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
