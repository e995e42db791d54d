"""23 パイプラインの3つの順番 / Three orders of a pipeline (transformer_parallel/pipeline.py)."""


def predict(schedule, n_ranks, micro_batches, what):
    """パイプラインのバブルか、同時に持つマイクロバッチの数を予測します。

    schedule: "gpipe"（すべてのフォワードパスの後に、すべてのバックワードパス）、"1f1b"（なるべく
        早くバックワードパスを始める）、"interleaved"（各ランクに、長さが半分のステージが2つ）のいずれか。
    n_ranks: ランク数n。
    micro_batches: マイクロバッチの数m。
    what: "bubble"なら、1つのランクが待っている時間が全体の時間に占める割合（0〜1）。
        "in flight"なら、フォワードパスが終わり、バックワードパスがまだのマイクロバッチの数
        （最も多いときの、最も多いランクの値）。
    バックワードパスにはフォワードパスの2倍の時間がかかり、通信には時間がかからないとします。

    Predict the bubble of a pipeline, or the number of micro-batches that it holds.

    schedule: "gpipe" (all forwards, then all backwards), "1f1b" (backwards as early as possible),
        or "interleaved" (two stages of half the length on each rank).
    n_ranks: Number of ranks, n.
    micro_batches: Number of micro-batches, m.
    what: "bubble" for the fraction of the whole time in which a rank is idle (0 to 1), or
        "in flight" for the largest number of micro-batches between their forward and their
        backward, on the rank with the most.
    A backward takes twice as long as a forward, and communication takes no time.
    """
    return 0
