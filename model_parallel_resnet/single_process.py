"""The oracle: torchvision's model, whole, in one process."""

import time

import torch
from torch import nn

from model_parallel_resnet.data import get_batch
from model_parallel_resnet.stages import parameters_of, whole_resnet


def step_alone(args):
    """One step without any split, BatchNorm in evaluation mode, in float64.

    Returns:
        `{"outputs", "gradients", "parameters"}` as tensors: of the whole batch, of all parameters before the step, and
        after it; and "outputs, training mode", with the statistics of the whole batch in BatchNorm.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    images, targets = get_batch(args)
    model = whole_resnet(args.arch, args.num_classes, args.seed)
    with torch.no_grad():
        in_training_mode = model.train()(images)
    model = whole_resnet(args.arch, args.num_classes, args.seed).eval()
    outputs = model(images)
    nn.functional.mse_loss(outputs, targets).backward()
    gradients = torch.cat([param.grad.flatten() for param in model.parameters()])
    torch.optim.SGD(model.parameters(), lr=args.lr).step()
    torch.set_default_dtype(usual)
    return {"outputs": outputs.detach(), "gradients": gradients, "parameters": parameters_of(model),
            "outputs, training mode": in_training_mode}


def train_alone(args):
    """The lesson without any split: the same batches in this process. For the benchmark.

    Returns:
        Seconds of each batch, the first of which is the warm-up; and its losses.
    """
    images, targets = get_batch(args)
    model = whole_resnet(args.arch, args.num_classes, args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    seconds, losses = [], []
    for _ in range(args.num_batches + 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return seconds, losses
