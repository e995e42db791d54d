"""15 見かけだけの高速化 / A speed-up that is not there (6_7, model_parallel_resnet/main.py)."""

import torch
from torch.distributed.rpc import RRef


def forward(self, xs: torch.Tensor) -> torch.Tensor:
    """画像をマイクロバッチに分け、2つのワーカーに続けて計算させます。どこかに誤りがあります。

    self: `DistResNet50`。`self.num_split`はマイクロバッチの個数です。大きさの差は1枚以内で、
        大きいものが先です。`self.p1_rref`はworker1にある前半、`self.p2_rref`はworker2にある
        後半へのRRefです。
    xs: 画像。形は(N, 3, H, W)です。
    戻り値: ロジット。形は(N, num_classes)で、画像と同じ順序です。
    `wait_all(futures)`は、futureの結果のリストを同じ順序で返します。

    Split the images into micro-batches that follow each other through two workers. There is a
    mistake in here.

    self: the `DistResNet50`. `self.num_split` is the number of micro-batches, whose sizes differ by
        one image at most, the larger ones first; `self.p1_rref` and `self.p2_rref` are RRefs of the
        two halves of the model, on worker1 and worker2.
    xs: images, of shape (N, 3, H, W).
    Returns logits, of shape (N, num_classes), in the order of the images.
    `wait_all(futures)` returns the results of futures, a list in the same order.
    """
    out_futures = []
    for i, x in enumerate(xs.split(self.num_split)):
        x_rref = RRef(x)
        y_rref = self.p1_rref.remote().forward(x_rref, i)
        out_futures.append(self.p2_rref.rpc_async().forward(y_rref, i))
    return torch.cat(wait_all(out_futures))
