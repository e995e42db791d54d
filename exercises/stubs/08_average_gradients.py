"""08 勾配の平均 / The average of the gradients (6_4, p2p_collectives/train.py)."""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, share: float):
    """全ランクの勾配を、サンプル数の割合で重み付けして平均します。

    model: このランクのモデル。`backward()`の後なので、各パラメーターの`param.grad`には、この
        ランクのサンプルだけから求めた勾配（平均損失の勾配）が入っています。
    share: このステップの全サンプルのうち、このランクが持つ割合（0から1の小数、全ランクの合計は1）。
    戻り値はありません。終わったとき、どのランクの`param.grad`にも、ステップの全サンプルの平均損失の
    勾配が入っているようにします。形は変わりません。

    Average the gradients of all ranks, weighted by their numbers of samples.

    model: this rank's model, after `backward()`: each `param.grad` is the gradient of the mean loss
        of this rank's samples only.
    share: this rank's part of all samples of the step, between 0 and 1; together they are 1.
    Returns nothing. Afterwards `param.grad` of every rank is the gradient of the mean loss of all
    samples of the step, in the same shape.
    """
    # ここに書きます（3行ほど）。 / Your lines go here (about three).
