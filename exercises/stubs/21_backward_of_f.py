"""21 入口のバックワードパス / Backward at the input (transformer_parallel/tensor_parallel.py)."""

from typing import Any

import torch
import torch.distributed as dist


@staticmethod
def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    """列で分割した層の入力`x`の勾配を返します。

    レッスンの`forward(ctx, x, group)`は、`group`を`ctx.group`に残し、`x`をそのまま返します。
    ctx: `ctx.group`は、層を分け合うランクのグループ（集合通信の引数`group`）。グループの外のランク
        は、バッチの別の部分を見ています。
    gradient: このランクの列だけから求めた、`x`の勾配。形は`x`と同じで、値はランクごとに違います。
        autogradがほかでも使うことがあるので、書き換えてはいけません。
    戻り値: `x`の勾配（すべての列から求めたもの）と、`group`の勾配の代わりのNone。

    Return the gradient of `x`, the input of a layer that is split by columns.

    `forward(ctx, x, group)` of the lesson keeps `group` as `ctx.group`, and returns `x` itself.
    ctx: `ctx.group` is the group of the ranks that share the layer (`group` of a collective).
        Ranks outside the group see another part of the batch.
    gradient: Gradient of `x` from this rank's columns only, in the shape of `x`. Its values differ
        between ranks. Do not change it, because autograd may use it elsewhere.
    Returns the gradient of `x` from all columns, and None for `group`.
    """
    # ここを書き換えます（3行ほど）。 / Change this (about three lines).
    return gradient, None
