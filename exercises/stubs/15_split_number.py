"""15 見かけだけの高速化 / A speedup that is not there (6_7, model_parallel_resnet/main.py)."""

from common.session import wait_all

import torch
from torch.distributed.rpc import RRef


def forward(self, xs: torch.Tensor) -> torch.Tensor:
    """画像をマイクロバッチに分け、2つのワーカーに順に計算させます。どこかに誤りがあります。

    self.num_split: マイクロバッチの数。大きさの差は1枚以内で、大きいものが先です。
    self.p1_rref, self.p2_rref: worker1にある前半と、worker2にある後半へのRRef。
    xs: 画像 (N, 3, H, W)。
    戻り値: ロジット (N, num_classes)。画像と同じ順序です。

    Send the micro-batches of a batch through two workers. There is a mistake in here.

    self.num_split: Number of micro-batches. Their sizes differ by at most one, larger ones first.
    self.p1_rref, self.p2_rref: RRefs to the first half, on worker1, and to the second, on worker2.
    xs: Images (N, 3, H, W).
    Returns logits (N, num_classes), in the order of the images.
    """
    out_futures = []
    for x in xs.split(self.num_split):
        x_rref = RRef(x)
        y_rref = self.p1_rref.remote().forward(x_rref)
        z_fut = self.p2_rref.rpc_async().forward(y_rref)
        out_futures.append(z_fut)
    return torch.cat(wait_all(out_futures))
