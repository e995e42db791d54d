"""`--check`, continued: what is random is held as what it is, and each measured time to its row."""

import math

import torch

from batch_rl import results

NUM_EPISODE = 2  # to compare, after a warm-up
SIGMAS = 6  # two random choices in a billion are further from what is expected


def hold_randomness(findings, name, run, alone, observers):
    """Without batches the draws depend on who asks first: hold them as what they are."""
    masks = torch.tensor([ep["masks"][who] for ep in run for who in ep["masks"]]).flatten(0, -2)
    share, bound = (masks > 0).double().mean().item(), SIGMAS * math.sqrt(0.24 / masks.numel())
    findings.holds(f"{name}, dropout rate", abs(share - 0.4) < bound,
                   f"{share:.3f} of {masks.numel()} hidden units were kept, 0.4 +- {bound:.3f}")
    different = len(masks.unique(dim=0))
    findings.holds(f"{name}, dropout masks", different == len(masks),
                   f"{different} of {len(masks)} states had their own mask")
    p = torch.tensor([ep[ob]["p_right"] for ep in alone for ob in observers]).flatten()
    action = torch.tensor([ep[ob]["actions"] for ep in run for ob in observers]).flatten()
    bound = SIGMAS * (p * (1 - p)).sum().sqrt().item()
    likelier = 1.0 * (action == (p > 0.5))
    for what, off in (("right", action - p), ("the likelier way", likelier - p.maximum(1 - p))):
        off = off.sum().item()
        findings.holds(f"{name}, choices {what}", abs(off) < bound,
                       f"of {len(p)} actions, {off:+.1f} more than by the policy's probabilities, "
                       f"0 +- {bound:.1f}")


def hold_times(findings, name, timed, alone, args):
    """Hold the measurements: each in its row, without the warm-up, as steps per second."""
    played = [sum(map(len, (actions for rank in range(1, args.world_size)
                            for actions in ep[f"observer{rank}"]["actions"]))) for ep in alone]
    expected = {  # episode n, counted from 1, takes n seconds of the clock
        mode: [(2 * i + first, played[2 * i + first - 1]) for i in range(1, 1 + NUM_EPISODE)]
        for mode, first in (("batched", 1), ("single", 2))}
    if findings.equal(f"{name}, times", [timed], [expected], "episode n takes n seconds", "run"):
        return
    observers = args.world_size - 1
    table = results.table_of(args, {observers: timed})
    middle = {mode: sum(steps / seconds for seconds, steps in of_mode) / NUM_EPISODE
              for mode, of_mode in expected.items()}
    middle["speed-up"] = middle["batched"] / middle["single"]
    reported = {row["mode"]: row["env_steps_per_s"] for row in table["rows"]}
    reported["speed-up"] = table["speedup"][observers]
    findings.close(f"{name}, table", [reported], [middle], 1e-12, "steps / seconds, median", "run")


def hold_training(findings, name, run, alone, args, solved):
    """Hold what metrics.json says of a training.

    Args:
        findings: where to.
        name: of the run.
        run: what the lesson returned.
        alone: the oracle's episodes.
        args: the flags of the run.
        solved: whether the oracle's training was.
    """
    steps = sum(len(actions) for ep in alone for rank in range(1, args.world_size)
                for actions in ep[f"observer{rank}"]["actions"])
    expected = {"episodes": len(alone), "env_steps": steps, "solved": int(solved),
                "rewards": [ep["reward"] for ep in alone],
                "running_rewards": [ep["running_reward"] for ep in alone]}
    reported = {what: run[what] for what in expected}
    findings.close(f"{name}, metrics", [reported], [expected], 1e-12, "what metrics.json says",
                   "training")
