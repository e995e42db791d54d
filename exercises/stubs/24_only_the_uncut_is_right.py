"""24 分割していない重みだけが正しい / Only the unsplit weights are right (mesh.py)."""

import torch.distributed as dist


def finish_gradients(self) -> None:
    """バックワードパスの後に、勾配を平均します。どこかに誤りがあります。

    ランクは格子に並びます。同じ行のランクは、モデル1つを分け合い、バッチの同じ部分を見ます。
    `self.model`: モデルのうち、このランクが持つ部分。
    `self.size`: 全ランクの数。
    `self.column`: 同じ列にあるランクのグループ。
    `self.group`: 同じ行にあるランクのグループ。

    Average the gradients after the backward pass. There is a mistake in here.

    The ranks form a grid. The ranks of a row share one model, and see the same part of the batch.
    `self.model`: The part of the model that this rank has.
    `self.size`: Number of all ranks.
    `self.column`: Group of the ranks in the same column.
    `self.group`: Group of the ranks in the same row.
    """
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.size
