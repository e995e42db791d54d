"""The same episode without RPC, the plain way: what `main.py --check` holds the distributed one against."""

import torch
from torch.distributions import Categorical


def play_alone(policy, env, args):
    """One episode per observer, one after the other, in this process: a graph per step, returns by their definition.

    Args:
        policy: the network, with the weights that the agent had.
        env: the environment, for one observer after the other.
        args: the flags of the run.

    Returns:
        actions, rewards and log_probs, lists over all steps, and gradient, the policy's as a flat list.
    """
    n_steps = min(max(1, args.total_steps_per_episode // (args.world_size - 1)), env.spec.max_episode_steps)
    eps = torch.finfo(torch.float32).eps
    actions, rewards, log_probs, returns = [], [], [], []
    for ob_id in range(1, args.world_size):
        generator = torch.Generator().manual_seed(1000 * args.seed + ob_id)
        masks = policy.draw_masks(n_steps, generator)
        uniforms = torch.rand(n_steps, generator=generator)
        state, _ = env.reset(seed=torch.randint(2**31, (), generator=generator).item())
        episode = []
        for mask, uniform in zip(masks, uniforms, strict=True):
            m = Categorical(policy(torch.from_numpy(state), mask))
            action = int(uniform > m.probs[0])
            actions.append(action)
            log_probs.append(m.log_prob(torch.tensor(action)))
            state, reward, terminated, truncated, _ = env.step(action)
            episode.append(reward)
            if terminated or truncated:
                break
        rewards += episode
        n, gamma = len(episode), args.gamma
        after = 0.0 if terminated or args.time_limit == "end" else episode[-1] / max(1 - gamma, eps)
        returns += [sum(gamma**k * r for k, r in enumerate(episode[t:])) + gamma ** (n - t) * after for t in range(n)]
    log_probs, returns = torch.stack(log_probs), torch.tensor(returns, dtype=torch.float64)
    returns = (returns - returns.mean()) / (returns.std(correction=0) + eps)
    gradient = torch.autograd.grad(-(log_probs * returns).sum(), list(policy.parameters()))
    gradient = torch.cat([g.flatten() for g in gradient])
    return {"actions": actions, "rewards": rewards, "log_probs": log_probs.tolist(), "gradient": gradient.tolist()}
