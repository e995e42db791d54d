"""09 リングを2周する / Twice round the ring (6_4, p2p_collectives/ring_allreduce.py)."""

import torch
import torch.distributed as dist


def ring_chunked(tensor: torch.Tensor) -> None:
    """全ランクのテンソルの和を、右隣への送信と左隣からの受信だけで求め、`tensor`を書き換えます。

    tensor: このランクのテンソル（連続したメモリー上にあり、形は任意）。全ランクで形が同じです。
    戻り値はありません。終わったとき、どのランクの`tensor`にも全ランクの和が入っているようにします。
    `chunks`は`tensor`をランク数（N個）に分けたタプルで、中身を書き換えると（`add_`など。タプルなので
    `chunks[i] += x`は使えません）`tensor`も変わります。要素数がNで割り切れないときは長さが1だけ
    違い、要素がないものもあります。
    1周目（reduce-scatter、N-1ステップ）では、ステップsで`chunks[rank - s]`を右に送り、左から届いた
    ものを`chunks[rank - s - 1]`に足します。終わると`chunks[rank + 1]`が完成しています。
    2周目（all-gather、N-1ステップ）では、完成したものを順に右へ渡していきます。番号はNで割った
    余りです（負の番号は、そのまま後ろから数えられます。N以上の番号は例外になります）。

    Sum a tensor over all ranks in place, sending to the right neighbour only, and receiving from
    the left one only.

    tensor: of this rank, contiguous, of any shape, which is the same on all ranks.
    Returns nothing. Afterwards `tensor` is the sum over all ranks, on every rank.
    `chunks` is a tuple of N views of `tensor`, one for each rank: to change a chunk in place (with
    `add_`; `chunks[i] += x` is an error in a tuple) changes `tensor`. Their lengths differ by one
    where N does not divide the number of elements; some may be empty.
    First round (reduce-scatter, N-1 steps): in step s send `chunks[rank - s]` to the right, and add
    what comes from the left to `chunks[rank - s - 1]`. Afterwards `chunks[rank + 1]` is complete.
    Second round (all-gather, N-1 steps): pass on what is complete. The numbers of chunks are modulo
    N; a negative one counts from the end, which is the same; one of N or more is an error.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.view(-1).tensor_split(size)
    # ここに書きます（9行ほど）。 / Your lines go here (about nine).
