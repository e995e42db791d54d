"""39 all-to-allのバックワード / The backward of an all-to-all (transformer_parallel/experts.py)."""

from typing import Any

import torch
import torch.distributed as dist


@staticmethod
def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """届いた行の勾配を、その行を送ってきたランクに送り返します。

    `forward(ctx, x, sent, received)`（レッスンにあります）は、`x`の行を前から順に切り分け、部分rを
    ランクrに送りました。結果は、ランク0、1、2、...から届いた部分を、この順に並べたものです。
    ctx: `ctx.sent`は各ランクに送った行数のリスト、`ctx.received`は各ランクから届いた行数の
        リスト。どちらもNoneなら、どの部分も同じ行数です。
    gradient: 届いた行の勾配。行数は届いた行数の合計です。
    戻り値: `forward`の引数`x`、`sent`、`received`についての勾配。1つめは`x`の勾配（形は`x`と
        同じ）、あとの2つはテンソルではないのでNoneです。
    `dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)`は、`input`の
    部分rをランクrに送り、各ランクから届いたものを`output`に並べます。行数のリストがNoneなら
    等分です。

    Send the gradients of the rows that came back to the ranks that had sent them.

    `forward(ctx, x, sent, received)`, which the lesson has, has cut the rows of `x` into parts, and
    has sent part r to rank r. Its result are the parts that came from ranks 0, 1, 2, ..., in this
    order.
    ctx: `ctx.sent` lists how many rows went to each rank, `ctx.received` how many came from each.
        Both are None where all parts have as many.
    gradient: of the rows that came, as many as these.
    Returns the gradients of forward's `x`, `sent` and `received`: first that of `x`, of its shape;
        then None twice, for what is no tensor.
    `dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes)` sends part r of
    `input` to rank r, and lays what comes from each rank into `output`. Without lists, the parts
    are equal.
    """
    # ここを書き換えます（4行ほど）。 / Change this (about four lines).
    return gradient, None, None
