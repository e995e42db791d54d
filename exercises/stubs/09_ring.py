"""09 リングを2周する / Twice around the ring (6_4, p2p_collectives/ring_allreduce.py)."""

import torch
import torch.distributed as dist

from p2p_collectives.fast_ring import flattened


def ring_chunked(tensor: torch.Tensor) -> None:
    """全ランクの`tensor`の和を求め、`tensor`を和で書き換えます。右隣に送り、左隣から受け取ります。

    `chunks`は、`tensor`をN個（ランク数）に分けたタプルです。チャンクの中身を書き換えると（`add_`など）、
    `tensor`も変わります。チャンクの長さは1だけ違うことがあり、0のこともあります。
    1周目（reduce-scatter、N-1ステップ）のステップsでは、`chunks[rank - s]`を右に送り、左から届いた
    値を`chunks[rank - s - 1]`に足します。1周目が終わると、`chunks[rank + 1]`が完成しています。
    2周目（all-gather、N-1ステップ）では、完成したチャンクを順に右へ渡します。
    番号は、Nで割った余りです。負の番号はそのまま使えますが、N以上の番号は例外になります。

    Sum `tensor` over all ranks in place; send to the right neighbor, receive from the left one.

    `chunks` is a tuple of N views of `tensor`, where N is the number of ranks. Changing a chunk in
    place, for example by `add_`, changes `tensor`. Lengths may differ by one; some may be 0.
    First round (reduce-scatter, N-1 steps): in step s, send `chunks[rank - s]` to the right, and
    add what arrives from the left to `chunks[rank - s - 1]`. Then `chunks[rank + 1]` is complete.
    Second round (all-gather, N-1 steps): pass the complete chunks on to the right.
    The numbers are modulo N. A negative number works as it is; N or more raises an exception.
    """
    flat = flattened(tensor)
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = flat.tensor_split(size)
    # ここに書きます（9行ほど）。 / Your lines go here (about nine).
