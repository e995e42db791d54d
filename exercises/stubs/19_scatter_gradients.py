"""19 勾配のreduce-scatter / The reduce-scatter of gradients (transformer_parallel/zero.py)."""

import torch
import torch.distributed as dist


def scatter_gradients(self) -> None:
    """ユニットの勾配を全ランクで平均し、このランクの受け持つ部分だけを残します。

    ユニット（1つのブロックなど）の勾配がすべて求まると、バックワードパスの途中で呼ばれます。
    self: `Unit`。
        `self.parameters`: ユニットのパラメーターのリスト。`grad`には、このランクの行から求めた
            勾配が入っています。
        `self.whole`: 全パラメーターの重みを並べた1本のベクトル。長さがランク数で割り切れるように、
            末尾に0を足してあります。
        `self.pieces(ベクトル)`: `self.whole`と同じ長さのベクトルを、各パラメーターと同じ形の
            ビューに分けたリスト（`self.parameters`と同じ順）。書き換えると、ベクトルも変わります。
        `self.part`: `self.whole`をランク数に等分したうちの、このランクの部分。オプティマイザーは
            これだけを更新し、その勾配を`self.part.grad`から読みます。
        `self.size`: ランク数。
    戻り値はありません。終わったとき、`self.part.grad`（形は`self.part`と同じ）にはこのランクの
    部分の勾配の平均が入り、パラメーターの`grad`はすべてNoneになっています。

    Average a unit's gradients over the ranks, and keep this rank's part alone.

    Called in the middle of backward, when all gradients of a unit, such as a block, are there.
    self: the `Unit`.
        `self.parameters`: a list of the unit's parameters. Their `grad` are of this rank's rows.
        `self.whole`: the weights of all parameters, one vector; zeros at its end make it a multiple
            of the number of ranks.
        `self.pieces(vector)`: the views of a vector that is as long as `self.whole`, in the shapes
            and the order of `self.parameters`. To change a view changes the vector.
        `self.part`: this rank's part of `self.whole`, which is cut into as many equal parts as
            there are ranks. The optimizer steps it alone, by `self.part.grad`.
        `self.size`: the number of ranks.
    Returns nothing. Afterwards `self.part.grad`, of the shape of `self.part`, is the mean of the
    ranks' gradients of this part, and the `grad` of all parameters are None.
    """
    gradients = torch.zeros_like(self.whole)
    # ここに書きます（6行ほど）。 / Your lines go here (about six).
