"""45 1つのランクのメモリー / The memory of a rank (transformer_parallel/zero.py)."""


def predict(way, n_ranks, n_parameters):
    """バックワードパスが終わったときに、1つのランクが持つバイト数を予測します。

    way: "replicas"（DDPと同じ）、"zero1"、"zero2"、"zero3"のいずれか。
    n_ranks: ランクの数N。モデルのどの部分も、N個に等しく分けられます。
    n_parameters: モデルのパラメーターの数。どれもfloat32（4バイト）です。
    戻り値: 重み、勾配、AdamWの状態を合わせたバイト数。活性は数えません。

    Predict how many bytes one rank holds when a backward is over.

    way: "replicas" (as DDP), "zero1", "zero2" or "zero3".
    n_ranks: N, the number of ranks; all parts of the model divide by it.
    n_parameters: the number of parameters of the model, all in float32, of 4 bytes.
    Returns the bytes of weights, gradients and AdamW's state together, without activations.
    """
    return 0
