"""37 オンラインsoftmax / The online softmax (transformer_parallel/ring_attention.py)."""

import torch


def merged(sums: Sums, scores: torch.Tensor, values: torch.Tensor) -> Sums:
    """途中まで計算したsoftmaxに、新しく届いたキーの分を加えます。

    sums: これまでに見たキーについての3つのテンソル (m, total, mixed)。
        m: スコアの最大値。形は (..., クエリー, 1)。最初は-infです。
        total: exp(スコア - m) の和。形はmと同じで、最初は0です。
        mixed: exp(スコア - m) × バリュー の和。形は (..., クエリー, ユニット) で、最初は0です。
    scores: 新しく届いたキーのスコア。形は (..., クエリー, キー)。見てはいけないキーは-infです。
        どのクエリーにも、見てよいキーが1つはあります。
    values: そのキーのバリュー。形は (..., キー, ユニット)。
    戻り値: 新しいキーも含めた (m, total, mixed)。形は`sums`と同じです。
    すべてのキーを見終わると、mixed / total がアテンションの出力になります。

    Add the keys that have just come to a softmax that has seen some.

    sums: three tensors, of the keys that have been seen so far: (m, total, mixed).
        m: the largest score, (..., queries, 1); -inf at the beginning.
        total: the sum of exp(score - m), of the same shape; 0 at the beginning.
        mixed: the sum of exp(score - m) x value, (..., queries, units); 0 at the beginning.
    scores: of the keys that have just come, (..., queries, keys). Those that must not be looked at
        have -inf; each query may look at one at least.
    values: of these keys, (..., keys, units).
    Returns (m, total, mixed) of these keys, too, in the same shapes.
    When all keys have been seen, mixed / total is what attention returns.
    """
    largest, total, mixed = sums
    # ここに書きます（4行ほど）。 / Your lines go here (about four).
    return largest, total, mixed
