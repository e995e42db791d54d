"""05 リングのバイト数 / The bytes of a ring (6_4, p2p_collectives/ring_allreduce.py)."""


def predict(algorithm, world_size, n_bytes):
    """1つのランクが、1回のall-reduceで送るバイト数を予測します。

    algorithm: "ring_naive"（チュートリアルの`allreduce`）または"ring_chunked"（分割して送る）。
    world_size: ランクの数N。
    n_bytes: 各ランクのテンソルの大きさS（バイト）。Nで割り切れます。
    戻り値: バイト数。

    Predict how many bytes one rank sends in one all-reduce.

    algorithm: "ring_naive" (`allreduce` of the tutorial) or "ring_chunked" (chunk by chunk).
    world_size: N, the number of ranks.
    n_bytes: S, the size of the tensor on each rank, in bytes; a multiple of N.
    Returns a number of bytes.
    """
    return 0
