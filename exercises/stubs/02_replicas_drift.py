"""02 離れていくレプリカ / Replicas that drift (6_3, ddp_basic/main.py)."""

import argparse

from common import report

import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic.data import toy_samples


def train(ddp_model: DDP, rank: int, device: torch.device,
          args: argparse.Namespace) -> list[float]:
    """DDPで包まれたモデルを訓練し、各ステップの前と最後の損失を返します。誤りが1つあります。

    `toy_samples(rank, args.seed)`は、このランクの入力(20, 10)とラベル(20, 5)を返します。

    Train a model that is wrapped in DDP; return the loss before each step and at the end. It
    contains one mistake.

    `toy_samples(rank, args.seed)` returns this rank's samples: inputs (20, 10), labels (20, 5).
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args.seed))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = ddp_model.module(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = loss_fn(ddp_model.module(inputs), labels)
    return [*losses, report.require_finite(loss, "after the last step")]
