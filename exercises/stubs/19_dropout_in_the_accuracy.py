"""19 測るたびに変わる正解率 / An accuracy that changes each time (6_6, param_server/main.py)."""


def train(self, mode: bool = True) -> Self:
    """訓練モード（ドロップアウトあり）と評価モードを切り替えます。どこかに誤りがあります。

    self: `TrainerNet`。トレーナーのプロセスにあり、ネットワーク本体は持ちません。
        `self.param_server_rref`がサーバーの`ParameterServer`を指します。その`ParameterServer`には
        メソッド`set_mode(training)`があり、`training`がFalseなら、サーバーのネットワークが評価モードに
        なります。
    mode: Trueなら訓練、Falseなら評価。`model.eval()`は`model.train(False)`と同じです。
    戻り値: `self`（`nn.Module.train`と同じ）。

    Switch between training, with dropout, and evaluation. There is a mistake in here.

    self: the `TrainerNet`, on a trainer. The network itself is elsewhere: `self.param_server_rref`
        is an RRef of the `ParameterServer`, which has a method `set_mode(training)`. With False, it
        puts the network on the server into evaluation mode.
    mode: True for training, False for evaluation; `model.eval()` is `model.train(False)`.
    Returns `self`, as `nn.Module.train` does.
    """
    return super().train(mode)
