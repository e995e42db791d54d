"""rpc_rl/main.py with half the messages, and no autograd graph while the observers wait.

What it changes, and what each change buys (docs/measurements/rpc_rl.md):

- the last reward rides along with the next state: one RPC per step instead of two;
- it acts without an autograd graph, and computes the log-probabilities of a whole episode again, in
  one batch, when it learns. So dropout has to be the same both times: its masks are drawn in
  advance, one per step, and not by `nn.Dropout`;
- all random numbers of an episode come in a few large draws, from one generator for each observer.
  So a seed gives the same training whichever observer asks first, and a checkpoint continues it.

It costs 60 lines, and a policy whose forward is written a second time (`FastAgent.probs`).

    python rpc_rl/fast.py --world_size 3                       all processes here
    python rpc_rl/fast.py --check                              the same numbers as one process?
    python rpc_rl/fast.py --checkpoint run.pt                  save it now and then ...
    python rpc_rl/fast.py --checkpoint run.pt --resume         ... and go on, as if never stopped

Last line:
    CartPole-v1 solved in 189 episodes: running reward 476.2 (threshold 475), 102278 environment ...
"""

import torch
from common import checkpoint
from common.cli import refuse
from common.program import run_program
from torch.distributions import Categorical
from torch.nn import functional as F

from rpc_rl import main as tutorial
from rpc_rl.main import role_name
from rpc_rl.results import History, finish, refuse_what_cannot_end


class FastObserver(tutorial.Observer):
    """An observer whose requests bring the reward of the step before."""

    def run_episode(self, agent_rref, n_steps, seed):
        """See `Observer.run_episode`."""
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
    """An agent that acts without a graph; its `finish_episode` is that of `Agent`."""

    observer = FastObserver

    def run_episode(self):
        """See `Agent.run_episode`."""
        self.states = {ob_id: [] for ob_id in self.ob_rrefs}
        self.actions = {ob_id: [] for ob_id in self.ob_rrefs}
        self.masks, self.uniforms = {}, {}
        for ob_id, generator in self.generators.items():
            p, hidden = self.policy.dropout.p, self.policy.affine1.out_features
            keep = torch.bernoulli(torch.full((self.n_steps, hidden), 1 - p), generator=generator)
            self.masks[ob_id] = (keep / (1 - p)).to(self.device)
            self.uniforms[ob_id] = torch.rand(self.n_steps, generator=generator).tolist()
        super().run_episode()

    def select_action(self, ob_id, state, reward=None):
        """Called by an observer over RPC: a state, and the last reward, to an action, 0 or 1."""
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

    def probs(self, states, masks):
        """`Policy.forward` with given dropout masks (..., 128), for states (..., 4)."""
        x = self.policy.affine1(states) * masks
        return F.softmax(self.policy.affine2(F.relu(x)), dim=-1)

    def log_probs(self):
        """Of the recorded actions, observer after observer, in one batch: shape (steps,)."""
        states, actions, masks = [], [], []
        for ob_id, of_observer in self.states.items():
            states += of_observer
            actions += self.actions[ob_id]
            masks.append(self.masks[ob_id][: len(of_observer)])
        probs = self.probs(torch.tensor(states, device=self.device), torch.cat(masks))
        actions = torch.tensor(actions, device=self.device)
        return Categorical(probs, validate_args=False).log_prob(actions)

    def state_dict(self):
        """All that a training needs to go on exactly as if it had never stopped."""
        generators = {ob_id: gen.get_state() for ob_id, gen in self.generators.items()}
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "generators": generators}

    def load_state_dict(self, state):
        """Go on from a `state_dict`, with the learning rate of this run."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.args.lr
        for ob_id, generator in self.generators.items():
            generator.set_state(state["generators"][ob_id])


class SavedHistory(History):
    """A history that begins with `--resume`, and is saved to `--checkpoint`, where its agent is."""

    def __init__(self, agent, args):
        super().__init__(agent, args)
        if args.resume:
            state = checkpoint.load(args)
            agent.load_state_dict(state)
            self.resume(state["history"])

    def add(self, last_reward):
        """See `History.add`."""
        super().add(last_reward)
        if self.episodes % self.args.log_interval == 0:
            self.save()

    def metrics(self):
        """See `History.metrics`."""
        self.save()
        return super().metrics()

    def save(self):
        """Save the training as it is now."""
        if self.args.checkpoint:
            state = {**self.agent.state_dict(), "history": self.kept}
            checkpoint.save(self.args, state)


def run_worker(rank, world_size, args):
    """Like the tutorial's, with the fast agent, and checkpoints."""
    return tutorial.run_worker(rank, world_size, args, FastAgent, SavedHistory)


def build_parser():
    """Return the parser of this program's flags: those of main, and of checkpoints."""
    parser = tutorial.build_parser("rpc_rl_fast", __doc__)
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; metrics or differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    refuse_what_cannot_end(args)
    state = checkpoint.inspect(args, needs=("generators",))
    if state and len(state["generators"]) != args.world_size - 1:
        refuse(f"--world_size {args.world_size} must be {len(state['generators']) + 1}, as in the "
               "checkpoint")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
