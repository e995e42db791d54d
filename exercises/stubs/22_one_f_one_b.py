"""22 1F1Bの順番 / The order of 1F1B (transformer_parallel/pipeline.py)."""


def one_f_one_b(rank: int, n: int, m: int) -> list[Action]:
    """パイプラインの1つのランクが、フォワードとバックワードを計算する順番を返します。

    rank: 0からn - 1まで。ランクrankにはステージrankがあります。
    n: ランクの数。
    m: マイクロバッチの数（nより少ないこともあります）。
    戻り値: `Action`のリスト。`Action("F", i, rank)`はマイクロバッチiのフォワード、
        `Action("B", i, rank)`はそのバックワードです。どちらもi = 0からm - 1まで、番号の小さい順に
        1回ずつ現れます。

    フォワードは前のランクの結果を、バックワードは次のランクが返す勾配を待ちます（最後のランクは、
    自分のフォワードがあれば、すぐにバックワードを計算できます）。ランクrankが同時に持つマイクロ
    バッチは、n - rank個までです。

    Return the order in which a rank of a pipeline computes its forwards and backwards.

    rank: from 0 to n - 1. It has stage number `rank`.
    n: how many ranks there are.
    m: how many micro-batches there are; maybe fewer than n.
    Returns a list of `Action`: `Action("F", i, rank)` is the forward of micro-batch i, and
        `Action("B", i, rank)` its backward. Each is there once, i from 0 to m - 1 in this order.

    A forward waits for the result of the rank before, a backward for the gradient that the next
    rank sends back; the last rank can compute a backward as soon as it has done the forward. A rank
    holds n - rank micro-batches at most.
    """
    # ここを書き換えます（5行ほど）。 / Change this (about five lines).
    forwards = [Action("F", i, rank) for i in range(m)]
    backwards = [Action("B", i, rank) for i in range(m)]
    return forwards + backwards
