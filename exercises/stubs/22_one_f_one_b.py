"""22 1F1Bの順番 / The order of 1F1B (transformer_parallel/pipeline.py)."""

from transformer_parallel.pipeline import Action


def one_f_one_b(rank: int, n: int, m: int) -> list[Action]:
    """パイプラインの1つのランクが、フォワードパスとバックワードパスを計算する順番を返します。

    rank: 0からn - 1まで。ランクrankにはステージrankがあります。
    n: ランク数。
    m: マイクロバッチの数。nより少ないこともあります。
    戻り値: `Action`のリスト。`Action("F", i, rank)`はマイクロバッチiのフォワードパス、
        `Action("B", i, rank)`はそのバックワードパスです。どちらもi = 0からm - 1まで、
        番号順に1回ずつ現れます。
    フォワードパスは前のランクの結果を、バックワードパスは次のランクが返す勾配を待ちます。

    Return the order in which a rank of a pipeline computes its forwards and backwards.

    rank: From 0 to n - 1. Rank `rank` has stage `rank`.
    n: Number of ranks.
    m: Number of micro-batches. It may be less than n.
    Returns a list of `Action`. `Action("F", i, rank)` is the forward of micro-batch i, and
        `Action("B", i, rank)` its backward. Each occurs once, for i from 0 to m - 1 in this order.
    A forward waits for the result of the rank before, a backward for the gradient from the rank
    after.
    """
    # ここを書き換えます（5行ほど）。 / Change this (about five lines).
    forwards = [Action("F", i, rank) for i in range(m)]
    backwards = [Action("B", i, rank) for i in range(m)]
    return forwards + backwards
