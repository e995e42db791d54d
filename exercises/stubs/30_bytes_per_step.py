"""30 1ステップのバイト数 / The bytes of a step (6_9, ddp_rpc_hybrid/main.py)."""


def predict(n_trainers, num_embeddings, embedding_dim, num_classes, n_indices, n_bags):
    """1つのトレーナーの1ステップで、ネットワークを流れるテンソルのバイト数を予測します。

    n_trainers: トレーナーの数。
    num_embeddings, embedding_dim: サーバーの埋め込みテーブルの行数と、1行の数の個数。
    num_classes: クラスの数。トレーナーの`nn.Linear(embedding_dim, num_classes)`は、重みとバイアスを
        持ちます。
    n_indices, n_bags: 1ステップで引く行の数と、バッグ（行の組）の数。どちらも平均です。
    戻り値: バイト数（平均）。数えるのは、RPCで送るテンソルとその答え、RPCで戻る勾配、そして
        全結合層の勾配のall-reduceでこのトレーナーが送る分です。all-reduceはリング型
        （reduce-scatterとall-gather）とします。インデックスとオフセットは8バイトの整数、ほかはすべて
        4バイトの浮動小数点数です。RPCのヘッダーなどは数えません。

    Predict how many bytes of tensors a step of one trainer sends over the network.

    n_trainers: how many there are.
    num_embeddings, embedding_dim: rows of the table on the server, and numbers in a row.
    num_classes: of the trainer's `nn.Linear(embedding_dim, num_classes)`, which has a bias.
    n_indices, n_bags: the rows that a step looks up, and the bags that they are in, on average.
    Returns a mean number of bytes: of the tensors of the lookup's RPC, of its answer, of the
        gradient that goes back to the server, and of what this trainer sends in the all-reduce of
        the linear layer's gradients, in a ring (reduce-scatter, all-gather). Indices and offsets
        are integers of 8 bytes; all else is floating point numbers of 4. Headers do not count.
    """
    return 0
