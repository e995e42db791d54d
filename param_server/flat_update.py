"""Batched updates that send one flat tensor each way, not hundreds: beyond tutorial 6_8.

Nothing is packed for it: parameters and running statistics are views of one tensor, gradients and
the room for the statistics behind them are views of another.

What it wins: 5.0 GB in all processes together in place of 5.8 GB, and about a tenth of the time:
2.0 s per update in place of 2.3 s, in ranges that overlap (medians of the command below, on 2
cores; docs/results/batch_update*.json). What it costs: the code of this file.

    python param_server/flat_update.py                         one server, five trainers, ResNet50
    python param_server/flat_update.py --check                 every number, against one process
    python -m common.tracing param_server/flat_update.py       a timeline of every process

Last line, about:
    resnet50, 5 trainers: 2.0 s per update in the median, 945 MB each; loss 0.580 -> 0.179
"""

import torch
from common.program import run_program
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


def numbers_of(model):
    """Return parameters, then running statistics."""
    return [*model.parameters(), *running_statistics(model)]


def use_weights(model, weights):
    """Make parameters and running statistics of a model views of one flat tensor."""
    vector_to_parameters(weights, numbers_of(model))


def flat_gradient(model):
    """Make the gradients of a model views of one flat tensor, with room for the statistics.

    Returns:
        That tensor of zeros, and its views: one for each parameter, one for each statistic.
    """
    numbers = numbers_of(model)
    flat = torch.zeros(sum(tensor.numel() for tensor in numbers), device=numbers[0].device)
    parts = flat.split([tensor.numel() for tensor in numbers])
    views = [part.view_as(tensor) for part, tensor in zip(parts, numbers, strict=True)]
    for param, gradient in zip(model.parameters(), views, strict=False):
        param.grad = gradient
    return flat, views


class FlatParameterServer(BatchUpdateParameterServer):
    """A parameter server whose weights are one tensor, as are the sums of the gradients."""

    def __init__(self, args):
        super().__init__(args)
        self.weights = parameters_to_vector(numbers_of(self.model)).detach()
        use_weights(self.model, self.weights)
        total, views = flat_gradient(self.model)
        self.statistics = views[len(list(self.model.parameters())):]
        self.sums = [total]

    def get_model(self):
        """Return the weights, one flat tensor in a list."""
        return [self.weights]


class FlatTrainer(Trainer):
    """A trainer whose gradients are one tensor."""

    def __init__(self, ps_rref, args):
        super().__init__(ps_rref, args)
        self.gradient, _ = flat_gradient(self.m)
        self.n_params = sum(param.numel() for param in self.m.parameters())

    def set_model(self, numbers):
        """Take over the server's weights, without a copy where they are on the CPU."""
        self.weights = numbers[0].to(self.device)
        use_weights(self.m, self.weights)

    def get_gradients(self):
        """Return the gradients, the running statistics behind them: one flat tensor in a list."""
        self.gradient[self.n_params :] = self.weights[self.n_params :]
        return [self.gradient.cpu()]


def run_worker(rank, world_size, args):
    """Like the tutorial's, with one tensor each way."""
    return tutorial.run_worker(rank, world_size, args, FlatParameterServer, FlatTrainer)


def build_parser():
    """Return the parser: the flags are the tutorial's."""
    return tutorial.build_parser("param_server_flat_update", __doc__)


def main(argv=None):
    """Train, or `--check`; metrics or differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_sizes(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
