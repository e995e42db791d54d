"""23 パイプラインの3つの順番 / Three orders of a pipeline (transformer_parallel/pipeline.py)."""


def predict(schedule, n_ranks, micro_batches, what):
    """パイプラインのバブル、または一度に抱えるマイクロバッチの数を予測します。

    schedule: "gpipe"（フォワードをすべて終えてから、バックワードをすべて行う）、"1f1b"（できるだけ
        早くバックワードを始める）、"interleaved"（各ランクが、半分の長さのステージを2つ持つ）のいずれか。
    n_ranks: ランクの数n。"gpipe"と"1f1b"では、ステージの数でもあります。
    micro_batches: マイクロバッチの数m。どのランクでも、バックワードにはフォワードの2倍の時間が
        かかり、通信の時間は0とします。
    what: "bubble"なら、1つのランクが全体の時間のうち待っている割合（0から1）。"in flight"なら、
        フォワードを終えてバックワードを待つマイクロバッチの数の最大（一番多いランクの値）。
    戻り値: 割合、または個数。

    Predict the bubble of a pipeline, or how many micro-batches it holds at a time.

    schedule: "gpipe" (all forwards, then all backwards), "1f1b" (a backward as soon as there can be
        one), or "interleaved" (each rank has two stages, of half the length).
    n_ranks: n, the number of ranks; of "gpipe" and "1f1b" the number of stages, too.
    micro_batches: m. On all ranks a backward takes twice as long as a forward, and it takes no time
        to communicate.
    what: "bubble", for the share of the whole time in which a rank waits, from 0 to 1; or "in
        flight", for the most micro-batches that have passed forward and wait for backward, on the
        rank that has the most.
    Returns the share, or the number.
    """
    return 0
