"""An episode of the oracle: plain CartPoles in one process, with the draws of each program.

`one_by_one` is for lists, as main.py has them; `as_vector` is for vector environments: the same
plain CartPoles, one by one, begin where a vector environment would have reset itself to, and rest
while it does. Both fill what `new_episode` has made.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn

N_STEPS = 40  # of an episode, at most
Envs = dict[tuple[int, int], gym.Env]  # by rank and number
Episode = dict[tuple[int, int], dict[str, list]]


def new_episode(envs: Envs) -> Episode:
    """Make the lists that an episode fills, of each environment: what was seen, chosen, computed.

    `rewards` are those of a stretch that is not over.
    """
    lists = ("states", "actions", "log_probs", "returns", "lengths", "rewards")
    return {where: {what: [] for what in lists} for where in envs}


def uniforms(ob_id: int, number: int, n_envs: int) -> torch.Tensor:
    """Draw from 0 to 1 for an observer's steps and environments in an episode: (`N_STEPS`, K)."""
    generator = torch.Generator().manual_seed(1000 * number + ob_id)
    return torch.rand(N_STEPS, n_envs, generator=generator, dtype=torch.float64)


def one_by_one(envs: Envs, layers: tuple[nn.Linear, nn.Linear], args: argparse.Namespace,
               seeds: dict[int, int], batch: bool, number: int, run: dict) -> Episode:
    """Play as main.py does: all environments at each step, in batches with the draws of a forward.

    Args:
        envs: the environments, by rank and number.
        layers: of the policy: hidden and output.
        args: the flags of the run.
        seeds: of each rank's environments.
        batch: whether in batches, whose draws can be repeated.
        number: of the episode, from 0: without batches, actions are drawn from its `uniforms`.
        run: the recorded episode: without batches, dropout masks are taken from it.

    Returns:
        See `new_episode`.
    """
    hidden, output = layers
    ranks, n_envs = range(1, args.world_size), args.envs_per_observer
    episode = new_episode(envs)
    state = {(rank, k): env.reset(seed=seeds[rank] + k)[0] for (rank, k), env in envs.items()}
    drawn = torch.stack([uniforms(rank - 1, number, n_envs) for rank in ranks], dim=1)
    for step in range(args.num_steps):
        x = hidden(torch.tensor([[state[rank, k].tolist() for k in range(n_envs)]
                                 for rank in ranks], device=hidden.weight.device))
        if batch:
            x = nn.functional.dropout(x, 0.6)
        else:
            for of_request in x:  # makes as many draws
                nn.functional.dropout(of_request, 0.6)
            x = x * torch.stack([run["masks"][rank - 1][step] for rank in ranks]).to(x)
        p = torch.softmax(output(torch.relu(x)), dim=-1)
        right = (torch.multinomial(p.detach().reshape(-1, 2), 1).view(-1, n_envs) if batch
                 else drawn[step].to(p) > p[..., 0])
        p = p.cpu()
        for (rank, k), env in envs.items():
            action = int(right[rank - 1, k])
            over = take_step(episode[rank, k], env, state[rank, k], p[rank - 1, k], action, args)
            state[rank, k] = env.reset()[0] if over else episode[rank, k]["next"]
    return end_of_episode(episode, args)


def as_vector(envs: Envs, layers: tuple[nn.Linear, nn.Linear], args: argparse.Namespace,
              seeds: dict[int, int], rng: np.random.Generator) -> Episode:
    """Play as vector.py does: each observer has its own place in the draws.

    Args:
        envs, layers, args, seeds: see `one_by_one`.
        rng: numpy's generator of dropout and actions.
    """
    hidden, output = layers
    observers, n_envs = args.world_size - 1, args.envs_per_observer
    episode = new_episode(envs)
    drawn = rng.bytes(2 * args.num_steps * observers * n_envs * 128)
    kept = torch.tensor(np.frombuffer(drawn, np.uint16) < 26214)  # of 65536: 0.4
    kept = kept.view(args.num_steps, observers, n_envs, 128)
    uniform = rng.random((args.num_steps, observers, n_envs))
    for rank in range(1, args.world_size):
        mine = [(rank, i) for i in range(n_envs)]
        seed = seeds[rank]
        resets = np.random.default_rng(seed)  # of the vector CartPole
        state, resting = {}, mine
        for step in range(-1, args.num_steps):
            if step >= 0:
                x = hidden(torch.tensor([state[where].tolist() for where in mine]))
                x = torch.relu(x * kept[step, rank - 1] / 0.4)
                p = torch.softmax(output(x), dim=-1)
            over = []
            for i, where in enumerate(mine):
                if where not in resting:
                    action = int(uniform[step, rank - 1, i] > p[i, 0].item())
                    if take_step(episode[where], envs[where], state[where], p[i], action, args):
                        over.append(where)
                    state[where] = episode[where]["next"]
            # What was over at the step before begins anew, with a column of its own each.
            columns = resets.uniform(-0.05, 0.05, (4, len(resting))).T
            for i, (where, column) in enumerate(zip(resting, columns, strict=True)):
                state[where], _ = envs[where].reset(seed=seed + i if step < 0 else None)
                if args.envs == "vector":
                    envs[where].unwrapped.state = column
                    state[where] = column.astype(np.float32)
            resting = over
    return end_of_episode(episode, args)


def take_step(of_env: dict[str, list], env: gym.Env, state: np.ndarray, p: torch.Tensor,
              action: int, args: argparse.Namespace) -> bool:
    """Step with an action of probabilities p in a state; return whether the stretch is over."""
    of_env["states"].append(state.tolist())
    of_env["actions"].append(action)
    of_env["log_probs"].append(torch.log(p[action]))
    of_env["next"], reward, fell, out_of_time, _ = env.step(action)
    of_env["rewards"].append(reward)
    if fell or out_of_time:
        end_of_stretch(of_env, fell, args)
    return fell or out_of_time


def end_of_stretch(of_env: dict[str, list], fell: bool, args: argparse.Namespace) -> None:
    """Add the returns of its steps by definition: the discounted sum of all that follows."""
    rewards, of_env["rewards"] = of_env["rewards"], []
    n, beyond = len(rewards), 0.0 if fell else rewards[-1] / max(1 - args.gamma, 1 / args.num_steps)
    of_env["returns"] += [
        sum(args.gamma**i * r for i, r in enumerate(rewards[t:])) + args.gamma ** (n - t) * beyond
        for t in range(n)]
    of_env["lengths"].append(n)


def end_of_episode(episode: Episode, args: argparse.Namespace) -> Episode:
    """Return the episode, with the stretches that its end has cut off."""
    for of_env in episode.values():
        if of_env["rewards"]:
            end_of_stretch(of_env, False, args)
    return episode
