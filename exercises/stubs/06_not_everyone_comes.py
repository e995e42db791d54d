"""06 一部のランクが来ない集合通信 / Not everyone comes (6_4, p2p_collectives/main.py)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist


def run_all_reduce(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """ランク0と1だけで和を求めます。どこかに誤りがあります。

    rank, size: このランクの番号と、ランクの数。
    device: テンソルを置くデバイス。
    `yield Outcome(操作, 説明, 前, 後)`で、テンソル（形は(1,)）の通信の前後の値を報告します。

    Sum over ranks 0 and 1 alone. There is a mistake in here.

    rank, size: the number of this rank, and how many there are.
    device: where the tensors are.
    `yield Outcome(operation, words, before, after)` reports a tensor of shape (1,) before and after
    the sum.
    """
    tensor = torch.ones(1, device=device)
    before = tensor.clone()
    if rank in (0, 1):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    yield Outcome("all_reduce in [0, 1]", "the others take no part", before, tensor)
