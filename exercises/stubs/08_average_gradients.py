"""08 勾配を平均する / Average the gradients (6_4, p2p_collectives/train.py)."""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, share: float) -> None:
    """全ランクの勾配を、サンプル数の割合で重み付けして平均します。

    model: このランクのモデル。`param.grad`には、このランクのサンプルの平均損失の勾配があります。
    share: このステップの全サンプルのうち、このランクの割合。全ランクの合計は1です。
    終わると、全ランクの`param.grad`が、全サンプルの平均損失の勾配になります。

    Average the gradients of all ranks, weighted by their shares of the samples.

    model: This rank's model. `param.grad` holds the gradient of the mean loss of its samples.
    share: This rank's fraction of the step's samples. The shares of all ranks add up to 1.
    Afterwards, `param.grad` on every rank is the gradient of the mean loss of all samples.
    """
    # ここに書きます（3行ほど）。 / Write here (about three lines).
