"""Batched updates that send one flat tensor each way, not hundreds: beyond tutorial 6_8.

Nothing is packed for it: parameters and running statistics are views of one tensor, gradients and
a place for the statistics behind them are views of another.

What it wins: 5.0 GB in all processes together in place of 5.8 GB. The time is about the same,
3.6 s per update in place of 3.5 s, in ranges that overlap (medians of the command below, on 2
cores; docs/results/*_update.json). What it costs: the code of this file.

    python param_server/flat_update.py                         one server, five trainers, ResNet50
    python param_server/flat_update.py --check                 every number, against one process
    python -m common.tracing param_server/flat_update.py       a timeline of every process

It ends with, about:
    resnet50, 5 trainers: 3.6 s per update in the median, 945 MB each; loss 0.580 -> 0.179
"""

from argparse import Namespace

import torch
from common.cli import Parser
from common.program import run_program
from torch import nn
from torch.distributed.rpc import RRef
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from param_server import batch_update as tutorial
from param_server.batch_update import (
    BatchUpdateParameterServer,
    Trainer,
    role_name,
    running_statistics,
)
from param_server.batch_update_results import finish
from param_server.data import require_sizes


def numbers_of(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters, then running statistics."""
    return [*model.parameters(), *running_statistics(model)]


def use_weights(model: nn.Module, weights: torch.Tensor) -> None:
    """Make parameters and running statistics of a model views of one flat tensor."""
    vector_to_parameters(weights, numbers_of(model))


def flat_gradient(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make the gradients of a model views of one flat tensor, with the statistics behind them.

    Returns:
        That tensor, of zeros, and its views: one for each parameter, one for each statistic.
    """
    numbers = numbers_of(model)
    flat = torch.zeros(sum(tensor.numel() for tensor in numbers), device=numbers[0].device)
    parts = flat.split([tensor.numel() for tensor in numbers])
    views = [part.view_as(tensor) for part, tensor in zip(parts, numbers, strict=True)]
    for param, gradient in zip(model.parameters(), views, strict=False):
        param.grad = gradient
    return flat, views


class FlatParameterServer(BatchUpdateParameterServer):
    """Keeps its weights in one tensor, and the sums of the gradients in another."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.weights = parameters_to_vector(numbers_of(self.model)).detach()
        use_weights(self.model, self.weights)
        total, views = flat_gradient(self.model)
        self.statistics = views[len(list(self.model.parameters())):]
        self.sums = [total]

    def get_model(self) -> list[torch.Tensor]:
        """Return the weights, one flat tensor in a list."""
        return [self.weights]


class FlatTrainer(Trainer):
    """Keeps its gradients in one tensor."""

    def __init__(self, ps_rref: RRef, args: Namespace) -> None:
        super().__init__(ps_rref, args)
        self.gradient, _ = flat_gradient(self.m)
        self.n_params = sum(param.numel() for param in self.m.parameters())

    def set_model(self, numbers: list[torch.Tensor]) -> None:
        """Take over the server's weights, without a copy where they are on the CPU."""
        self.weights = numbers[0].to(self.device)
        use_weights(self.m, self.weights)

    def get_gradients(self) -> list[torch.Tensor]:
        """Return the gradients, the running statistics behind them: one flat tensor in a list."""
        self.gradient[self.n_params :] = self.weights[self.n_params :]
        return [self.gradient.cpu()]


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Do what the tutorial's does, with one tensor each way."""
    return tutorial.run_worker(rank, world_size, args, FlatParameterServer, FlatTrainer)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of batch_update.py."""
    return tutorial.build_parser("param_server/flat_update", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_sizes(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
