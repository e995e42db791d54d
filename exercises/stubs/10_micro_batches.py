"""10 マイクロバッチ / Micro-batches (6_2, model_parallel_resnet/single_machine.py)."""

import torch


def forward(self, x: torch.Tensor) -> torch.Tensor:
    """バッチをマイクロバッチに分け、2つのデバイスが同時に働けるようにフォワードパスします。

    self: `PipelineParallelResNet50`。前半`self.seq1`は`self.dev0`に、後半`self.seq2`と全結合層
        `self.fc`は`self.dev1`にあります。`self.split_size`は1つのマイクロバッチのサンプル数です
        （個数ではありません）。最後のマイクロバッチは、それより小さくてもかまいません。
    x: 画像、形は(サンプル数, 3, 高さ, 幅)。どのデバイスにあってもかまいません。
    戻り値: スコア、形は(サンプル数, クラス数)。`self.dev1`の上にあり、順序は`x`と同じです。
    1つのマイクロバッチの後半を`dev1`で計算させたら、その結果を待たずに、次のマイクロバッチの前半を
    `dev0`で計算させます。後半は`self.fc(self.seq2(...).flatten(1))`です。

    Forward in micro-batches, so that both devices can work at the same time.

    self: the `PipelineParallelResNet50`. The first half, `self.seq1`, is on `self.dev0`; the second
        one, `self.seq2`, and the last layer `self.fc` are on `self.dev1`. `self.split_size` is the
        number of samples in a micro-batch, not the number of micro-batches; the last may be
        smaller.
    x: images, (samples, 3, height, width), on any device.
    Returns scores (samples, classes), on `self.dev1`, in the order of `x`.
    Whenever `dev1` has got the second half of a micro-batch to compute, give `dev0` the first half
    of the next one, without waiting. The second half is `self.fc(self.seq2(...).flatten(1))`.
    """
    # ここを書き換えます（11行ほど）。 / Change this (about eleven lines).
    return super().forward(x)
