"""43 何も学ばないブロック / The blocks learn nothing (recompute.py)."""

import torch


@staticmethod
def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    """ブロックをもう一度計算し、そこを逆にたどります。どこかに誤りがあります。

    ctx: `ctx.saved_tensors[0]`はフォワードパスで残した入力xで、形は(N, T, units)です。
        `ctx.run(x)`はブロック（`nn.Module`）を計算します。フォワードパスでは、autogradは何も
        記録していません。
    gradient: 出力の勾配。形は入力と同じです。
    戻り値: 入力の勾配と、`forward`のもう1つの引数`run`のためのNone。

    Compute blocks again, and go back through them. There is a mistake in here.

    ctx: `ctx.saved_tensors[0]` is x, the input that the forward has kept, (N, T, units);
        `ctx.run(x)` computes the blocks, modules. In the forward, autograd has noted nothing.
    gradient: of the output, in the shape of the input.
    Returns the gradient of the input, and None for `run`, the other argument of `forward`.
    """
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        y = ctx.run(x)
    return torch.autograd.grad(y, x, gradient)[0], None
