"""01 速すぎる訓練時間 / Times that are too good (6_2, model_parallel_resnet/single_machine.py)."""

import time

import torch
from torch import nn


def time_training(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
                  args: argparse.Namespace) -> tuple[float, list[float]]:
    """訓練にかかる時間を測ります。どこかに誤りがあります。

    model: 訓練するモデル。
    inputs, labels: 1つのバッチ。
    args: コマンドラインの値。`args.devices`は2つのデバイスです。
    `train(model, inputs, labels, args)`は数ステップ訓練し、損失のリストを返します（損失はデバイスの
    上のテンソルです）。`synchronize(devices)`は、デバイスに渡した計算がすべて終わるまで待ちます
    （CPUでは何もしません）。
    戻り値: 秒数と、損失（小数）のリスト。

    Measure how long a training takes. There is a mistake in here.

    model: what is trained.
    inputs, labels: one batch.
    args: the flags, with the two devices `args.devices`.
    `train(model, inputs, labels, args)` makes some steps, and returns a list of losses, tensors on
    their device. `synchronize(devices)` waits until the devices have computed all they were given
    (on CPUs it does nothing).
    Returns the seconds, and the losses as a list of numbers.
    """
    synchronize(args.devices)
    start = time.perf_counter()
    losses = train(model, inputs, labels, args)
    seconds = time.perf_counter() - start
    return seconds, [report.require_finite(loss, f"at step {i + 1}")
                     for i, loss in enumerate(losses)]
