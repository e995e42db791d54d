"""05 ノンブロッキング通信 / Messages in the background (6_4, p2p_collectives/main.py)."""

import torch
import torch.distributed as dist


def run_nonblocking(rank: int, size: int, device: torch.device):
    """ノンブロッキング通信を2通り試します。1つ目のどこかに誤りがあります。

    rank, size: このランクの番号と、ランクの数。
    device: テンソルを置くデバイス。
    `yield Outcome(操作, 説明, 前, 後)`で、テンソル（形は(1,)）の通信の前後の値を報告します。
    1つ目では、ランク0が1を送り、ランク1が受け取り、ほかのランクは何もしません。
    2つ目では、全ランクが自分の番号を右隣のランクに送ります。

    Try two kinds of non-blocking messages. There is a mistake in the first one.

    rank, size: the number of this rank, and how many there are.
    device: where the tensors are.
    `yield Outcome(operation, words, before, after)` reports a tensor of shape (1,) before and after
    the messages. In the first operation, rank 0 sends a 1 to rank 1, and the others do nothing; in
    the second one, every rank sends its number to its right neighbour.
    """
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
    says = "from rank 0 to rank 1, in the background"
    yield Outcome("isend, irecv", says, before, tensor)

    outgoing, incoming = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    before = incoming.clone()
    for req in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]):
        req.wait()
    yield Outcome("batch_isend_irecv", "everyone sends its rank to the right", before, incoming)
