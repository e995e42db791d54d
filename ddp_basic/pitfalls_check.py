"""The oracle of `pitfalls.py`: one process with the samples of all ranks, in float64.

The mistakes of `unused` and `uneven` have no numbers to be compared: their way out is checked, also
without `--mended`. `batchnorm` is checked as it is given.
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
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.mended = args.mended or args.kind != "batchnorm"
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program; return the findings on rank 0."""
    torch.set_default_dtype(torch.float64)
    metrics = pitfalls.run_worker(rank, world_size, args)
    if metrics is None:
        return None
    findings = Comparison(f"{args.kind} on {world_size} ranks")
    losses = single_process(args)
    lengths = [len(of_rank) for of_rank in metrics["losses"]]
    findings.equal("steps", lengths, [len(of_rank) for of_rank in losses], "of each rank", "rank")
    findings.close("losses", metrics["losses"], losses, TOLERANCE, WHY, unit="rank")
    return findings.as_dict()


def single_process(args: Namespace) -> list[list[float]]:
    """Train alone; return the losses of each rank's samples, before each step."""
    torch.manual_seed(args.seed)
    layers = [nn.Linear(10, n) for n in {"unused": (10, 5, 10, 5), "uneven": (10, 5),
                                         "batchnorm": (10, 1)}[args.kind]]
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
            hidden, of_whom = layers[0](inputs), (0, 1) if args.mended else 1
            means = hidden.mean(of_whom, keepdim=True)
            variances = (hidden - means).square().mean(of_whom, keepdim=True)
            return layers[1]((hidden - means) / (variances + 1e-5).sqrt() * scale + shift)
        first, second = layers[step % (len(layers) // 2) * 2:][:2]
        return second(first(inputs).clamp(min=0))

    losses = [[] for _ in inputs]
    for step in range(max(steps)):
        of_ranks = (outputs(step) - labels).square().mean((1, 2))
        active = [rank for rank, of_rank in enumerate(steps) if step < of_rank]
        for rank in active:
            losses[rank].append(of_ranks[rank].item())
        # Of those that are done, DDP adds up zeros; it divides by the number of all.
        total = of_ranks[active].sum() / args.world_size
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= args.lr * (0 if gradient is None else gradient)
    return losses
