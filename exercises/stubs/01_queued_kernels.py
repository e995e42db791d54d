"""01 速すぎる訓練時間 / Times that are too good (6_2, model_parallel_resnet/single_machine.py)."""

import argparse
import time

from common import report

import torch
from torch import nn

from model_parallel_resnet.single_machine import synchronize, train


def time_training(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
                  args: argparse.Namespace) -> tuple[float, list[float]]:
    """訓練の時間を測り、秒数と損失のリストを返します。誤りが1つあります。

    `args.devices`は2つのデバイスで、モデルの半分ずつがあります。`train`は数ステップ訓練し、損失
    （テンソル）のリストを返します。`synchronize`は、渡したリストのデバイスの計算が終わるまで待ちます。
    検証は`time.perf_counter()`、`synchronize`、`train`の呼び出しを見ています。

    Time a training run; return the seconds and the losses. It contains one mistake.

    `args.devices` are two devices, each with one half of the model. `train` makes some steps and
    returns a list of losses (tensors). `synchronize` waits until all devices of a list have
    finished. The check watches the calls of `time.perf_counter()`, `synchronize` and `train`.
    """
    synchronize(args.devices)
    start = time.perf_counter()
    losses = train(model, inputs, labels, args)
    seconds = time.perf_counter() - start
    return seconds, [report.require_finite(loss, f"at step {i + 1}")
                     for i, loss in enumerate(losses)]
