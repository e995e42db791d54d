"""21 fのバックワード / The backward of f (transformer_parallel/tensor_parallel.py)."""

from typing import Any

import torch
import torch.distributed as dist


@staticmethod
def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    """出力で分割した層の入力`x`について、その勾配を返します。

    `forward(ctx, x, group)`（レッスンにあります）は、`group`を`ctx.group`に残して`x`をそのまま返し
    ます。同じ`x`がどのランクにもあり、各ランクは自分の持つ列だけを使って、自分の出力を計算しました。
    ctx: `ctx.group`は、層を分け合うランクのグループ。`torch.distributed`の関数の引数`group`に
        渡します（Noneは全ランク）。
    gradient: このランクの列だけから求めた、`x`の勾配。形は`x`と同じで、値はランクごとに違います。
        autogradがほかでも使うかもしれないので、書き換えてはいけません。
    戻り値: `forward`の引数`x`と`group`のそれぞれについての勾配。1つめは全部の列から求めた`x`の
        勾配（形は`x`と同じで、全ランクで同じ値）、2つめはテンソルではないのでNoneです。

    Return the gradient of `x`, the input of a layer that is cut by outputs.

    `forward(ctx, x, group)`, which the lesson has, keeps `group` as `ctx.group`, and returns `x` as
    it is. Every rank had the same `x`, and has computed its own outputs from it, with the columns
    that it has.
    ctx: `ctx.group` is the group of the ranks that share the layer, for the argument `group` of the
        functions of `torch.distributed`; None is all ranks.
    gradient: of `x`, as far as it comes from this rank's columns; of the shape of `x`, and other
        numbers on each rank. Autograd may use it elsewhere, so do not change it.
    Returns the gradients of forward's `x` and `group`: first that of `x` from all columns, of its
        shape and the same on all ranks; then None, for what is no tensor.
    """
    # ここを書き換えます（3行ほど）。 / Change this (about three lines).
    return gradient, None
