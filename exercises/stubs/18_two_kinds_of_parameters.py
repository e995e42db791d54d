"""18 2種類のパラメーター / Two kinds of parameters (6_9, ddp_rpc_hybrid/main.py)."""

import torch
from torch.distributed import rpc


def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """サーバーの埋め込みテーブルを引き、手元の全結合層でスコアを計算します。

    self: `HybridModel`。`self.emb_rref`は、サーバーの`nn.EmbeddingBag`へのRRefです。`self.fc`は
        DDPで包んだ`nn.Linear`で、デバイス`self.device`に置かれています。
    indices: 引く行の番号。形は(行数,)です。
    offsets: 各バッグ（行の組）が`indices`のどこから始まるか。形は(バッグ数,)です。
    戻り値: スコア。形は(バッグ数, クラス数)です。
    `nn.EmbeddingBag`の`forward(indices, offsets)`は、バッグごとの行の和（形は(バッグ数, 埋め込みの
    次元)）を返します。テーブルはサーバーのCPUにあり、トレーナーへコピーしてはいけません。

    Look up the table of the server, and compute scores with the linear layer that is here.

    self: the `HybridModel`. `self.emb_rref` is an RRef of an `nn.EmbeddingBag` on the server;
        `self.fc` is an `nn.Linear` inside of DDP, on `self.device`.
    indices: the rows to look up, of shape (rows,).
    offsets: where in `indices` each bag of rows begins, of shape (bags,).
    Returns scores, of shape (bags, classes).
    `forward(indices, offsets)` of an `nn.EmbeddingBag` returns the sum of the rows of each bag, of
    shape (bags, embedding_dim). The table is on the server's CPU, and must not be copied here.
    """
    # ここを書き換えます（2行ほど）。 / Change this (about two lines).
    emb_lookup = torch.zeros(len(offsets), self.fc.module.in_features, device=self.device)
    return self.fc(emb_lookup)
