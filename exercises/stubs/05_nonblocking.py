"""05 届く前に読まない / Reading before the data arrives (6_4, p2p_collectives/main.py)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from p2p_collectives.main import Outcome


def run_nonblocking(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """ノンブロッキング通信を2通り試します。1つ目に誤りがあります。

    1つ目では、ランク0が1を送り、ランク1が受け取り、ほかのランクは何もしません。
    `yield Outcome(操作, 説明, 前, 後)`で、通信の前と後のテンソルを報告します。

    Try two kinds of non-blocking messages. The first one contains a mistake.

    In the first one, rank 0 sends a 1, rank 1 receives it, and the other ranks do nothing.
    `yield Outcome(operation, words, before, after)` reports the tensor before and after it.
    """
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
    yield Outcome("isend, irecv", "from rank 0 to rank 1", before, tensor)

    outgoing, incoming = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    before = incoming.clone()
    for req in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]):
        req.wait()
    yield Outcome("batch_isend_irecv", "every rank sends its number to the right", before, incoming)
