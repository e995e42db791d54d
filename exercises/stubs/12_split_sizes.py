"""12 分割サイズ / Split sizes (6_2, model_parallel_resnet/single_machine.py)."""


def predict(batch_size, split_size, what):
    """バッチを`split(split_size)`で分けたときの、マイクロバッチの数または最後の大きさを予測します。

    batch_size: バッチの画像の枚数。
    split_size: `PipelineParallelResNet50`の分割サイズ。フォワードパスの
        `x.split(self.split_size, dim=0)`で使います。
    what: "micro_batches" なら、前半（seq1）が処理するマイクロバッチの数、
        "last" なら、最後のマイクロバッチの画像の枚数。
    戻り値: 整数。

    Predict what `split(split_size)` makes of a batch: how many micro-batches, how large the last.

    batch_size: images in the batch.
    split_size: of `PipelineParallelResNet50`, for its `x.split(self.split_size, dim=0)`.
    what: "micro_batches", for how many of them the first half (seq1) gets; or "last", for the
        images in the last one.
    Returns a whole number.
    """
    return 0
