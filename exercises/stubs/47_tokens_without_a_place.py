"""47 席のないトークン / Tokens without a place (transformer_parallel/experts.py)."""


def predict(counts, capacity_factor):
    """席がなくて捨てられるトークンの数を予測します。

    counts: ランクごとのリスト。それぞれが、そのランクの何個のトークンがどのエキスパートを望むかの
        リストです。[[6, 2], [2, 6]]なら、ランク0では6個がエキスパート0を、2個がエキスパート1を
        望みます。
    capacity_factor: すべてのエキスパートに同じ数のトークンが来るとして、その何倍の席を用意するか。
    戻り値: 全ランクで捨てられるトークンの数。

    Predict how many tokens are dropped because they get no place.

    counts: for each rank a list: how many of its tokens want each expert. In [[6, 2], [2, 6]], six
        tokens of rank 0 want expert 0, and two of them expert 1.
    capacity_factor: there are places for so many times the tokens that an expert would get, if all
        experts got as many.
    Returns the number of dropped tokens, of all ranks together.
    """
    return 0
