"""What the lesson trains: the tutorial's networks, samples that they can learn, a training loop. No other rank here."""

import torch
from torch import nn, optim


class ToyModel(nn.Module):
    """The tutorial's network: inputs (n, 10) to outputs (n, 5)."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        """On the device of the weights."""
        return self.net2(self.relu(self.net1(x)))


class ToyMpModel(nn.Module):
    """The same network, split: its first half on `dev0`, its second on `dev1`."""

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0 = dev0
        self.dev1 = dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        """From any device; the outputs are on `dev1`."""
        x = x.to(self.dev0)
        x = self.relu(self.net1(x))
        x = x.to(self.dev1)
        return self.net2(x)


def seeded(model_class, seed, *devices):
    """A new model. One seed for the weights, on all ranks; the samples have one for each rank, see `toy_samples`."""
    torch.manual_seed(seed)
    return model_class(*devices)


def toy_samples(ranks, args):
    """The samples of `ranks`, joined: inputs (n, 10), and labels (n, 5) that a linear teacher gives them."""
    def draw(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    # A seed for each rank: with one for all, they would all train on the same samples. The weights have one: `seeded`.
    inputs = torch.cat([draw(1000 * args.seed + 1 + rank, args.local_batch_size, 10) for rank in ranks])
    return inputs, inputs @ draw(args.seed, 10, 5) / 10**0.5


def train(model, samples, args):
    """`--steps` steps of SGD on the same samples, whether the model is wrapped in DDP or not.

    Returns:
        The gradients that each step was made with, shape (steps, parameters), on the CPU.
    """
    inputs, labels = samples
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    gradients = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss_fn(outputs, labels.to(outputs.device)).backward()  # in here, DDP waits for all ranks and averages
        gradients.append(flat(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return torch.stack(gradients)


def loss_on(samples, model):
    """The mean squared error of the model as it is."""
    inputs, labels = samples
    with torch.inference_mode():
        outputs = model(inputs.to(next(model.parameters()).device))
        return nn.functional.mse_loss(outputs, labels.to(outputs.device)).item()


def flat(tensors):
    """Tensors of any devices as one vector on the CPU."""
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])
