"""35 バケットのフック / The hook of a bucket (transformer_parallel/main.py)."""

import torch.distributed as dist


def one_is_there(self, number: int) -> None:
    """バックワードパスの途中で、勾配が1つ求まるたびにautogradから呼ばれます。

    self: `Overlap`。
        `self.buckets[number]`: バケット。組 (ベクトル, パラメーターのリスト) です。リストにある
            パラメーターの`grad`はベクトルの一部を指し、autogradはそこに直接書き込みます。
        `self.missing[number]`: そのバケットで、まだ求まっていない勾配の数。最初はリストの長さで、
            `finish_gradients`が毎ステップ、その値に戻します。
        `self.syncing`: このバックワードの勾配を送るかどうか。`--accumulate 2`の1回目は、勾配を
            足すだけで送らないので、Falseです。
        `self.works`: 送信中の集合通信（`Work`）のリスト。バックワードパスが終わると、
            `finish_gradients`がすべてを待ち、そのあとベクトルをランク数で割ります。
    number: 勾配が求まったバケットの番号。
    戻り値はありません。バケットのすべての勾配が求まったら、全ランクでの和をとり始め、すぐに戻ります。

    Called by autograd in the middle of backward, for each gradient that is there.

    self: the `Overlap`.
        `self.buckets[number]`: a bucket, which is (vector, list of parameters). The `grad` of these
            parameters are views of the vector: autograd writes right into it.
        `self.missing[number]`: how many gradients of the bucket are not there yet. It begins with
            the length of the list, and `finish_gradients` puts it back to that in each step.
        `self.syncing`: whether the gradients of this backward are to be sent. It is False in the
            first of the two backwards of `--accumulate 2`, which is only added to.
        `self.works`: a list of the collectives that are under way (`Work`). When backward is over,
            `finish_gradients` waits for all of them, and then divides the vectors by the number of
            ranks.
    number: of the bucket that has one more gradient.
    Returns nothing. When all gradients of the bucket are there, its sum over the ranks is begun,
    and the function returns at once.
    """
    # ここに書きます（4行ほど）。 / Your lines go here (about four).
