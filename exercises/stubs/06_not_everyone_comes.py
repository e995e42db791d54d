"""06 一部のランクが来ない集合通信 / A collective that some ranks skip (6_4, p2p_collectives)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from p2p_collectives.main import Outcome


def run_all_reduce(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """ランク0と1だけで和を求めます。誤りが1つあります。

    `yield Outcome(操作, 説明, 前, 後)`で、通信の前と後のテンソルを報告します。

    Add up over ranks 0 and 1 only. It contains one mistake.

    `yield Outcome(operation, words, before, after)` reports the tensor before and after it.
    """
    tensor = torch.ones(1, device=device)
    before = tensor.clone()
    if rank in (0, 1):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    yield Outcome("all_reduce in [0, 1]", "the other ranks take no part", before, tensor)
