"""The oracle of `pitfalls.py`: one process with the samples of all ranks, in float64.

`batchnorm` is compared in the form that the flags ask for. All others end in an error, so only
their fixed forms are compared, also without `--fixed`.
"""

from argparse import Namespace
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict

import torch
from torch import nn

from ddp_basic import pitfalls
from ddp_basic.check import TOLERANCE, WHY, samples_of


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print each comparison; return `{what: difference}` on the reporting process, else None."""
    args.fixed = args.fixed or args.kind != "batchnorm"
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program; return the findings on rank 0, None elsewhere."""
    torch.set_default_dtype(torch.float64)
    metrics = pitfalls.run_worker(rank, world_size, args)
    if metrics is None:
        return None
    findings = Comparison(f"{args.kind} on {world_size} ranks")
    losses = single_process(args)
    findings.equal("steps", map(len, metrics["losses"]), map(len, losses), "of each rank", "rank")
    findings.close("losses", metrics["losses"], losses, TOLERANCE, WHY, unit="rank")
    return findings.as_dict()


def single_process(args: Namespace) -> list[list[float]]:
    """Train in one process; return the losses on each rank's samples before each step."""
    torch.manual_seed(args.seed)
    layers = [nn.Linear(10, n) for n in {"unused": (10, 5, 10, 5),
                                         "batchnorm": (10, 1)}.get(args.kind, (10, 5))]
    scale, shift = torch.ones(10, requires_grad=True), torch.zeros(10, requires_grad=True)
    weights = [weight for layer in layers for weight in layer.parameters()] + [scale, shift]
    inputs, labels = map(torch.stack, zip(*(samples_of(rank, args.seed)
                                            for rank in range(args.world_size)), strict=True))
    steps = [args.steps + rank * (args.kind == "uneven") for rank in range(args.world_size)]
    if args.kind == "batchnorm":
        inputs[:, :, 0] += 10 * torch.arange(args.world_size)[:, None]
        labels = torch.arange(args.world_size)[:, None, None] * torch.ones_like(inputs[:, :, :1])

    def outputs(step):
        if args.kind == "batchnorm":
            # inputs: (ranks, samples, features). The fixed form averages over all ranks, too.
            hidden, axes = layers[0](inputs), (0, 1) if args.fixed else 1
            means = hidden.mean(axes, keepdim=True)
            variances = (hidden - means).square().mean(axes, keepdim=True)
            return layers[1]((hidden - means) / (variances + 1e-5).sqrt() * scale + shift)
        first, second = layers[step % (len(layers) // 2) * 2:][:2]
        return second(first(inputs).clamp(min=0))

    losses = [[] for _ in inputs]
    for step in range(max(steps)):
        losses_now = (outputs(step) - labels).square().mean((1, 2))
        active = [rank for rank, n_steps in enumerate(steps) if step < n_steps]
        for rank in active:
            losses[rank].append(losses_now[rank].item())
        # Ranks that have finished add zeros to the sum; DDP divides it by the number of all ranks.
        total = losses_now[active].sum() / args.world_size
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= args.lr * (0 if gradient is None else gradient)
    return losses
