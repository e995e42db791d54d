"""The same episode in one process, the plain way: what `main.py --check` holds both modes against. No RPC here."""

import torch


def replay(policy, env, actions, seeds, args):
    """Play an episode again with known actions: one environment after the other, a forward for every single state.

    Args:
        policy: the network, with the weights that the agent had, without dropout.
        env: the environment, for all in turn.
        actions: that each observer received, shape (observers, steps, K).
        seeds: generator of the environments' seeds, in the state in which the agent had it.
        args: the flags of the run.

    Returns:
        states, shape (observers, steps, K, 4), which the environments were in; log_probs of the actions,
        (observers, K, steps); gradient of the loss, the policy's as a flat list.
    """
    n_observers, n_steps, n_envs = len(actions), args.num_steps, args.envs_per_observer
    states = torch.zeros(n_observers, n_steps, n_envs, 4)
    log_probs, returns = [], []
    for ob_id in range(n_observers):
        seed = torch.randint(2**30, (), generator=seeds).item()
        for k in range(n_envs):
            state, _ = env.reset(seed=seed + k)
            start = 0
            for step in range(n_steps):
                action = actions[ob_id][step][k]
                states[ob_id, step, k] = torch.from_numpy(state)
                log_probs.append(policy(torch.from_numpy(state))[action].log())
                state, reward, terminated, truncated, _ = env.step(action)
                if terminated or truncated or step + 1 == n_steps:
                    after = 0.0 if terminated else reward / max(1 - args.gamma, 1 / n_steps)
                    for left in range(step + 1 - start, 0, -1):  # steps; every reward of CartPole is 1
                        returns.append(sum(args.gamma**i for i in range(left)) + args.gamma**left * after)
                    start = step + 1
                    state, _ = env.reset()
    log_probs, returns = torch.stack(log_probs), torch.tensor(returns, dtype=torch.float64)
    returns = (returns - returns.mean()) / (returns.std(correction=0) + torch.finfo(torch.float32).eps)
    loss = -(log_probs * returns).sum() / n_observers
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    return {"states": states.tolist(), "log_probs": log_probs.view(n_observers, n_envs, n_steps).tolist(),
            "gradient": gradient.tolist()}
