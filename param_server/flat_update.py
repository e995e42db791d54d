"""Batched updates that send one flat tensor each way (`--send flat`): a step beyond tutorial 6_8.

Nothing is packed for it: parameters and running statistics are views of one tensor, gradients and
the room for the statistics behind them are views of another.
"""

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from param_server.batch_update import BatchUpdateParameterServer, Trainer, running_statistics


def numbers_of(model):
    """Parameters, then running statistics."""
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
        """The weights, one flat tensor in a list."""
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
        """The gradients, the running statistics behind them: one flat tensor in a list."""
        self.gradient[self.n_params :] = self.weights[self.n_params :]
        return [self.gradient.cpu()]
