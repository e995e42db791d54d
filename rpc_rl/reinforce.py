"""What the lesson borrows from the single-process example of policy gradients: no RPC here."""

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, DROPOUT = 128, 0.6
EPS = torch.finfo(torch.float32).eps


class Policy(nn.Module):
    """The tutorial's network, with its dropout mask as an argument.

    The agent acts without a graph and computes the log-probabilities of a whole episode afterwards, in one batch: it
    must use the masks that were in force when it acted. `nn.Dropout` would draw others.
    """

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, HIDDEN)
        self.affine2 = nn.Linear(HIDDEN, 2)

    @staticmethod
    def draw_masks(n_steps, generator):
        """What `nn.Dropout` multiplies with: 0 or 1 / (1 - p), of shape (n_steps, HIDDEN)."""
        keep = torch.full((n_steps, HIDDEN), 1 - DROPOUT)
        return torch.bernoulli(keep, generator=generator) / (1 - DROPOUT)

    def forward(self, x, mask):
        """States (..., 4) and masks (..., HIDDEN) to the probabilities (..., 2) of pushing left and right."""
        x = self.affine1(x) * mask
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=-1)


def discounted_returns(rewards, gamma, after=0.0):
    """The return of each step of one episode: R_t = r_t + gamma * R_(t+1).

    Args:
        rewards: one number per step.
        gamma: discount, 0 to 1.
        after: the return behind the last step.

    Returns:
        A list as long as `rewards`.
    """
    returns, R = [], after
    for r in reversed(rewards):
        R = r + gamma * R
        returns.append(R)
    return returns[::-1]


def policy_loss(log_probs, rewards, fell, gamma, time_limit):
    """REINFORCE: minus the sum over all steps of log-probability times normalised return.

    Args:
        log_probs: of the actions, observer after observer: shape (steps,).
        rewards: `{observer: one number per step}`, in the same order.
        fell: `{observer: whether its episode ended by itself, not by a time limit}`.
        gamma: discount.
        time_limit: "continue" or "end", see `--time_limit`.
    """
    returns = []
    for ob_id, episode in rewards.items():
        # Observer by observer: over the joined rewards, the returns of one would leak into another's. And time that ran
        # out is not a fall: the old gym had one `done` for both, and so punished perfect balance at the limit. Without
        # more knowledge, take it that the last reward would have gone on forever.
        goes_on = time_limit == "continue" and not fell[ob_id]
        after = episode[-1] / max(1 - gamma, EPS) if goes_on else 0.0
        returns += discounted_returns(episode, gamma, after)
    returns = torch.tensor(returns, dtype=torch.float64)  # float32 would make differences of equal returns
    returns = (returns - returns.mean()) / (returns.std(correction=0) + EPS)
    return -(log_probs * returns.to(log_probs)).sum()
