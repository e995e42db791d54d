"""02 データの分割 / A partition that loses nothing (6_4, p2p_collectives/train.py)."""

import math
from collections.abc import Sequence
from typing import Any

import torch


def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234):
    """データセットの位置を、指定した割合で、どのサンプルも失わずに分割します。

    self: `DataPartitioner`。`self.partitions`に、各部分の位置（`indexes`の一部）を順に入れます。
    data: データセット。`len(data)`個のサンプルがあります。
    sizes: 各部分の割合（小数、合計は1以下）。ランクがN個なら1/NがN個並びます。
    seed: シャッフルのシード。全ランクで同じです。
    部分kは`indexes`の中で部分k-1の終わりから始まり、最初のk+1個の割合の和×サンプル数を四捨五入した
    位置で終わります。四捨五入は`math.floor(x + 0.5)`とします（`round`は0.5を偶数に丸めます）。

    Cut the positions of a dataset into parts of given shares, without losing a sample.

    self: the `DataPartitioner`; `self.partitions` receives the positions of each part, in order, as
        pieces of `indexes`.
    data: the dataset, of `len(data)` samples.
    sizes: the share of each part, together at most 1; for N ranks, N times 1/N.
    seed: of the shuffle, the same on all ranks.
    Part k begins in `indexes` where part k-1 ends. It ends at the sum of the first k+1 shares times
    the number of samples, rounded with `math.floor(x + 0.5)`; `round` makes an even number of 0.5.
    """
    self.data = data
    self.partitions = []
    indexes = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    # ここを書き換えます（5行ほど）。 / Change this (about five lines).
    for _ in sizes:
        self.partitions.append(indexes)
