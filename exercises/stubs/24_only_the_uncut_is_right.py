"""24 分割していない重みだけが正しい / Only what is not cut is right (mesh.py)."""

import torch.distributed as dist


def finish_gradients(self) -> None:
    """バックワードパスの後に、勾配を平均します。どこかに誤りがあります。

    self: `DataTensor`か`DataPipeline`。ランクは格子に並び、同じ行のランクがモデル1つ分を分け合い、
        バッチの同じ部分を見ます。`self.model`はこのランクにある部分、`self.size`は全ランクの数です。
        `self.column`は同じ列にあるランクの、`self.group`は同じ行にあるランクのグループです。

    Average the gradients when backward is over. There is a mistake in here.

    self: a `DataTensor` or a `DataPipeline`. The ranks are laid out as a grid: those of a row have
        the model once, in parts, and see the same part of the batch. `self.model` is the part that
        is here; `self.size`, the number of all ranks; `self.column`, the group of the ranks in the
        same column; `self.group`, of those in the same row.
    """
    for parameter in self.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.size
