"""41 ほとんどの勾配は正しい / Almost all gradients are right (tensor_parallel.py)."""

import torch.distributed as dist


def finish_gradients(self) -> None:
    """バックワードパスの後に、足りない勾配を補います。どこかに誤りがあります。

    self: `SequenceParallel`（`--ways sequence`）。`self.model.named_parameters()`は、
        このランクにあるパラメーターを、名前との組で順に返します。名前は"blocks.0.norm1.weight"や
        "blocks.0.mlp.up.bias"などです。各ランクは、どの層もその一部を持ち、層と層の間では、
        トークンの一部だけを持ちます。`self.group`は、層を分け合うランクのグループです。

    Complete the gradients when backward is over. There is a mistake in here.

    self: a `SequenceParallel` (`--ways sequence`). `self.model.named_parameters()` gives the
        parameters of this rank with their names, such as "blocks.0.norm1.weight" or
        "blocks.0.mlp.up.bias". Each rank has a part of every layer, and between the layers some of
        the tokens. `self.group` has the ranks that share the layers.
    """
    for name, parameter in self.model.named_parameters():
        if "norm" in name:
            dist.all_reduce(parameter.grad, group=self.group)
