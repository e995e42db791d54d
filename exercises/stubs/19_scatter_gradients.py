"""19 勾配を分けて持つ / Sharded gradients (transformer_parallel/zero.py)."""

import torch
import torch.distributed as dist


def scatter_gradients(self) -> None:
    """ユニットの勾配を全ランクで平均し、このランクの部分だけを残します。

    `self.parameters`: ユニットのパラメーターのリスト。`grad`は、このランクの行から求めた勾配です。
    `self.whole`: 全パラメーターの重みを並べたベクトル。長さがランク数で割り切れるように、末尾に0が
        足してあります。
    `self.pieces(ベクトル)`: 同じ長さのベクトルの、各パラメーターと同じ形のビューのリスト。ビューに
        書き込むと、ベクトルが変わります。
    `self.part`: `self.whole`をランク数に等分したうちの、このランクの部分。
    `self.size`: ランク数。
    終わったとき、`self.part.grad`（形は`self.part`と同じ）はこの部分の勾配の平均で、パラメーターの
    `grad`はすべてNoneです。

    Average a unit's gradients over the ranks, and keep this rank's shard only.

    `self.parameters`: List of the unit's parameters. Each `grad` comes from this rank's rows.
    `self.whole`: Vector of the weights of all parameters. Zeros at its end make its length a
        multiple of the number of ranks.
    `self.pieces(vector)`: List of views of a vector of this length, in the shapes of the
        parameters. Writing to a view changes the vector.
    `self.part`: This rank's shard of `self.whole`, which is split into equal shards.
    `self.size`: Number of ranks.
    Afterwards, `self.part.grad` (in the shape of `self.part`) is the mean of the ranks' gradients
    of this shard, and each parameter's `grad` is None.
    """
    gradients = torch.zeros_like(self.whole)
    # ここに書きます（6行ほど）。 / Write here (about six lines).
