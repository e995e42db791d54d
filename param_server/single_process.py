"""The same network in one process: what `main.py --check` holds the server against. No RPC here."""

import torch
from torch.nn import functional as F


def train_alone(model, batches, lr):
    """Gradients of the batches of all trainers, then a step of SGD with each batch of the first trainer.

    Args:
        model: without dropout, with the weights that the server began with.
        batches: for each trainer a list of batches (images, labels).
        lr: the learning rate.

    Returns:
        gradients, for each trainer and batch one tensor; losses of the steps; weights after them, one tensor.
    """
    gradients = [[gradient_of(model, *batch) for batch in of_trainer] for of_trainer in batches]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for data, target in batches[0]:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {"gradients": gradients, "losses": losses, "weights": weights}


def gradient_of(model, data, target):
    """As one tensor."""
    gradients = torch.autograd.grad(F.nll_loss(model(data), target), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])
