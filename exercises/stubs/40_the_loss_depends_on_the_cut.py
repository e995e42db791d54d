"""40 切り方で変わる損失 / The loss depends on the cut (ring_attention.py)."""


def pairs(self, owner: int) -> Iterator[tuple[int, int, bool]]:
    """自分のどの区間が、回ってきたどの区間を見るのかを決めます。どこかに誤りがあります。

    self: `Ring`か`Zigzag`。行（文字の列）は同じ長さの区間に分かれます。`self.pieces_of(rank)`は、
        そのランクが受け持つ区間の、行の中での番号のリストです（先頭の区間が0）。`self.rank`は
        このランクの番号です。
    owner: KとVが回ってきたランクの番号。
    yieldする値: (i, j, same)。自分のi番目の区間のクエリーが、`owner`のj番目の区間のキーを見ます。
        `same`がTrueなら、自分より後のキーを隠す三角形のマスクを掛けます。Falseなら、すべてのキーを
        見ます。

    Decide which of our pieces look at which of those that have come. There is a mistake in here.

    self: a `Ring` or a `Zigzag`. A row of characters is cut into pieces of the same length;
        `self.pieces_of(rank)` lists those of a rank by their numbers in the row, where the first
        piece is 0. `self.rank` is the number of this rank.
    owner: the rank whose K and V have come.
    Yields (i, j, same): the queries of our i-th piece look at the keys of the owner's j-th one. If
        `same`, a triangular mask hides the keys that are later than a query; else they see all.
    """
    for i, ours in enumerate(self.pieces_of(self.rank)):
        for j, theirs in enumerate(self.pieces_of(owner)):
            if theirs <= ours:
                yield i, j, i == j
