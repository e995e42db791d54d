"""18 2種類のパラメーター / Two kinds of parameters (6_9, ddp_rpc_hybrid/main.py)."""

import torch


def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """サーバーの埋め込みテーブルをルックアップし、手元の全結合層でスコアを計算します。

    indices: ルックアップする行の番号。形は(行数,)です。
    offsets: 各バッグ（行の組）が`indices`のどこから始まるか。形は(バッグ数,)です。
    戻り値: スコア。形は(バッグ数, クラス数)です。
    `self.emb_rref`: サーバーのCPUにある`nn.EmbeddingBag`へのRRef。
    その`forward(indices, offsets)`は、バッグごとの行の和を返します。
    形は(バッグ数, 埋め込みの次元)です。
    `self.fc`: DDPで包んだ`nn.Linear`。デバイス`self.device`にあります。

    Look up rows of the server's table, and compute scores with the linear layer of this trainer.

    indices: Numbers of the rows, shape (rows,).
    offsets: Positions in `indices` where the bags of rows begin, shape (bags,).
    Returns scores of shape (bags, classes).
    `self.emb_rref`: RRef of an `nn.EmbeddingBag` on the server's CPU. Its `forward(indices,
        offsets)` returns the sum of the rows of each bag, shape (bags, embedding_dim).
    `self.fc`: `nn.Linear` in DDP, on `self.device`.
    """
    # ここを書き換えます（2行ほど）。 / Change this (about two lines).
    emb_lookup = torch.zeros(len(offsets), self.fc.module.in_features, device=self.device)
    return self.fc(emb_lookup)
