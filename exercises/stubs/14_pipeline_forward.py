"""14 パイプラインのフォワードパス / A pipeline's forward (6_7, model_parallel_resnet/main.py)."""

import torch
from torch.distributed.rpc import RRef


def forward(self, xs: torch.Tensor) -> torch.Tensor:
    """バッチをマイクロバッチに分け、worker1、worker2の順に通します。

    self: `DistResNet50`（マスターの上）。
        `self.num_split`: マイクロバッチの数。
        `self.p1_rref`, `self.p2_rref`: worker1にあるモデルの前半と、worker2にある後半へのRRef。
        どちらにもメソッド`forward(x_rref, i)`があります。`x_rref`は入力を指すRRef、`i`は
        マイクロバッチの番号（0から）です。ワーカーは`x_rref.to_here()`で入力を取り寄せます。
    xs: 画像。形は (N, 3, H, W)。Nが`num_split`で割り切れないときは、マイクロバッチの大きさの差が
        1枚以内になるように分けます（`tensor_split`の分け方）。
    戻り値: ロジット。形は (N, num_classes)、画像と同じ順序。

    どのマイクロバッチも、前のものの結果を待たずに送り出します。`wait_all(futures)`は、すべての
    futureを待ち、値をfutureの順に並べたリストを返します。

    Split a batch into micro-batches, and send each through worker1 and worker2.

    self: the `DistResNet50`, on the master.
        `self.num_split`: the number of micro-batches.
        `self.p1_rref`, `self.p2_rref`: RRefs of the first half of the model, on worker1, and of the
        second half, on worker2. Both have a method `forward(x_rref, i)`: `x_rref` is an RRef of the
        input, `i` the number of the micro-batch, from 0. A worker gets the input by
        `x_rref.to_here()`.
    xs: images (N, 3, H, W). If N is not a multiple of `num_split`, the sizes of the micro-batches
        differ by one image at most, as `tensor_split` makes them.
    Returns logits (N, num_classes), in the order of the images.

    No micro-batch waits for the result of the one before. `wait_all(futures)` waits for all of
    them, and returns the list of their values, in their order.
    """
    out_futures = []
    # ここに書きます（4行ほど）。 / Your lines go here (about four).
    return torch.cat(wait_all(out_futures))
