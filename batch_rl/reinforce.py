"""What the agent learns by: returns and loss. No RPC here."""

import torch


def discounted_returns(rewards, gamma, after):
    """The return of each step of one stretch: R_t = r_t + gamma * R_(t+1), with `after` behind the last one."""
    returns, R = [], after
    for r in reversed(rewards):
        R = r + gamma * R
        returns.append(R)
    return returns[::-1]


def policy_loss(log_probs, returns):
    """REINFORCE: minus log-probability times normalised return, summed over all steps, per observer.

    Args:
        log_probs, returns: of the same steps, shape (observers, K, steps).

    Raises:
        ValueError: if the shapes differ. Multiplication would broadcast them, and mix up the observers.
    """
    if log_probs.shape != returns.shape:
        raise ValueError(f"log-probabilities of shape {tuple(log_probs.shape)}, returns of {tuple(returns.shape)}")
    returns = (returns - returns.mean()) / (returns.std(correction=0) + torch.finfo(torch.float32).eps)
    return -(log_probs * returns.to(log_probs)).sum() / len(returns)
