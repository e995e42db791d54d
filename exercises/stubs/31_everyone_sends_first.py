"""31 全員が先に送る / Everyone sends first (6_4, p2p_collectives/ring_allreduce.py)."""

import torch
import torch.distributed as dist


def allreduce(send: torch.Tensor, recv: torch.Tensor) -> None:
    """テンソル全体をリングに沿って1周させ、各ランクで足し合わせます。どこかに誤りがあります。

    send: このランクのテンソル（形は任意）。
    recv: 和を入れるテンソル。`send`と同じテンソルのこともあります。

    Send whole tensors round the ring, and add them up at every stop. There is a mistake in here.

    send: this rank's tensor, of any shape.
    recv: receives the sum; may be the same tensor.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    send_buff = send.clone()
    recv_buff = send.clone()
    accum = send.clone()

    left = ((rank - 1) + size) % size
    right = (rank + 1) % size

    for i in range(size - 1):
        if i % 2 == 0:
            dist.send(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv_buff[:]
        else:
            dist.send(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
    recv[:] = accum[:]
