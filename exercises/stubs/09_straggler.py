"""09 遅いランク / A straggler (6_3, ddp_basic/skew.py)."""


def predict(rank, slow_rank, world_size, delay):
    """ランクが`backward()`の中で待つ時間を、遅れの何倍かで予測します。

    rank: 予測するランクの番号。
    slow_rank: 遅いランクの番号。このランクだけが、どのステップでも`backward()`の前に`delay`秒余計に
        かかります。ほかのランクの計算は一瞬で終わります。
    world_size: ランクの数。
    delay: 遅れ（秒）。
    戻り値: 1ステップで`rank`が`backward()`の中にいる時間（秒）を`delay`で割った値。

    Predict for how long a rank waits in `backward()`, as a multiple of the delay.

    rank: of which one it is asked.
    slow_rank: this rank alone needs `delay` seconds more before `backward()`, in every step. The
        others compute in no time.
    world_size: the number of ranks.
    delay: in seconds.
    Returns the seconds that `rank` spends in the `backward()` of a step, divided by `delay`.
    """
    return 0.5
