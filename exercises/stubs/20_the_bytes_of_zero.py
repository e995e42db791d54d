"""20 ZeROが送るバイト数 / The bytes that ZeRO sends (transformer_parallel/zero.py)."""


def predict(way, n_ranks, n_bytes):
    """1つのランクが1ステップで送るバイト数を予測します。集合通信は、どれもリング型とします。

    way: "replicas"（DDPと同じで、勾配をall-reduceで平均する）、"zero1"、"zero2"、"zero3"の1つ。
    n_ranks: ランク数N。
    n_bytes: 全パラメーターの大きさP（バイト）。勾配も同じ大きさです。

    Predict the bytes that one rank sends in one step, if every collective uses a ring.

    way: "replicas" (like DDP, averages gradients by all-reduces), "zero1", "zero2" or "zero3".
    n_ranks: Number of ranks, N.
    n_bytes: Size P of all parameters in bytes. The gradients have the same size.
    """
    return 0
