"""`--agent fast`: half the messages, and no autograd graph while the observers wait.

What it changes, and what each change buys (docs/measurements/rpc_rl.md):

- the last reward rides along with the next state: one RPC per step instead of two;
- it acts without an autograd graph, and computes the log-probabilities of a whole episode again, in
  one batch, when it learns. So dropout has to be the same both times: its masks are drawn in
  advance, one per step, and not by `nn.Dropout`;
- all random numbers of an episode come in a few large draws, from one generator for each observer.
  So a seed gives the same training whichever observer asks first, and a checkpoint continues it.
"""

import torch
from common import timeline
from torch.distributions import Categorical
from torch.nn import functional as F

from rpc_rl.main import Agent, Observer


class FastObserver(Observer):
    """An observer whose requests bring the reward of the step before."""

    def run_episode(self, agent_rref, n_steps, seed):
        """See `Observer.run_episode`."""
        agent = agent_rref.rpc_sync()
        state, _ = self.env.reset(seed=seed)
        reward = None
        for _ in range(n_steps):
            action = agent.select_action(self.id, state.tolist(), reward)
            with timeline.span("env.step"):
                state, reward, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                break
        agent.report_reward(self.id, reward)  # the last one has no next state to ride with
        return terminated


class FastAgent(Agent):
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
        with timeline.span("select_action", observer=ob_id), torch.inference_mode():
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
