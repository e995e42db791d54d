"""The same in one process: what `--check` holds the servers against. No RPC here."""

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


def batch_updates_alone(model, batches, lr):
    """One process steps with the mean of the gradients that all trainers compute: what `batch_update.py` must equal.

    Args:
        model: with the weights that the server began with.
        batches: for each trainer a list of batches (images, targets).
        lr: the learning rate.

    Returns:
        losses, for each trainer and update; weights after the updates, SGD's momentum, and BatchNorm's running means
        and variances (statistics), one tensor each.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    running = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    losses = [[] for _ in batches]
    for same_update in zip(*batches, strict=True):
        optimizer.zero_grad()
        moved = {name: [] for name in running}
        for of_trainer, (inputs, labels) in zip(losses, same_update, strict=True):
            model.load_state_dict(running, strict=False)  # every trainer begins with the same statistics
            loss = F.mse_loss(model(inputs), labels)
            (loss / len(batches)).backward()  # the gradients add up in param.grad
            of_trainer.append(loss.item())
            for name, buffer in model.named_buffers():
                if name in moved:
                    moved[name].append(buffer.clone())
        optimizer.step()
        running = {name: torch.stack(buffers).mean(dim=0) for name, buffers in moved.items()}
    momentum = [state["momentum_buffer"].flatten() for state in optimizer.state.values()]
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {"losses": losses, "weights": weights, "momentum": torch.cat(momentum),
            "statistics": torch.cat([buffer.flatten() for buffer in running.values()])}
