"""13 割引収益 / Discounted returns (6_5, rpc_rl/main.py)."""


def returns(self, rewards: list[float], terminated: bool) -> list[float]:
    """1つのオブザーバーの1エピソードについて、各ステップの割引収益（return）を求めます。

    self: `Agent`。`self.args.gamma`は割引率、`self.args.truncation`は時間切れの扱い
        （"bootstrap"または"terminal"）、`self.eps`は0で割るのを防ぐ小さな数です。
    rewards: 各ステップの報酬（数値）のリスト。1つ以上あります。
    terminated: ポールが倒れて終わったならTrue、時間切れで終わったならFalse。
    戻り値: `rewards`と同じ長さ、同じ順序のリスト。

    tステップ目の収益は R_t = r_t + gamma * R_{t+1} です。最後のステップの後の値Rは、
    倒れた場合は0、時間切れの場合は truncation が
        "bootstrap" なら、最後の報酬がずっと続くとみなした値
            rewards[-1] / max(1 - gamma, self.eps)
        "terminal" なら0 です。

    The discounted return of each step of one observer's episode.

    self: the `Agent`. `self.args.gamma` is the discount, `self.args.truncation` says what is behind
        a time limit ("bootstrap" or "terminal"), `self.eps` is a small number, against a division
        by zero.
    rewards: of each step, a list of numbers; there is at least one.
    terminated: True if the episode ended because the pole fell, False if its time was up.
    Returns a list as long as `rewards`, in the same order.

    The return of step t is R_t = r_t + gamma * R_{t+1}. Behind the last step, R is 0 if the pole
    fell. If the time was up, it depends on truncation: with "bootstrap" it is as if the last reward
    went on for ever, rewards[-1] / max(1 - gamma, self.eps); with "terminal" it is 0.
    """
    # ここを書き換えます（6行ほど）。 / Change this (about six lines).
    return [0.0] * len(rewards)
