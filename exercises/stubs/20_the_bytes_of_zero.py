"""20 ZeROが送るバイト数 / The bytes that ZeRO sends (transformer_parallel/zero.py)."""


def predict(way, n_ranks, n_bytes):
    """1つのランクが、1ステップで送るバイト数を予測します。

    way: "replicas"（DDPと同じ：勾配をall-reduceで平均する）、"zero1"、"zero2"、"zero3"のいずれか。
    n_ranks: ランクの数N。
    n_bytes: モデルの全パラメーターの大きさP（バイト）。勾配も同じ大きさです。
    戻り値: バイト数。集合通信は、どれもリング型とします。

    Predict how many bytes one rank sends in one step.

    way: "replicas" (as DDP: gradients are averaged by all-reduces), "zero1", "zero2" or "zero3".
    n_ranks: N, the number of ranks.
    n_bytes: P, the size of all parameters of the model, in bytes; the gradients are as large.
    Returns a number of bytes, if every collective goes round a ring.
    """
    return 0
