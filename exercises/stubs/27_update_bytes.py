"""27 1回の更新のバイト数 / The bytes of an update (6_8, param_server/batch_update.py)."""


def predict(n_trainers, n_parameters, n_statistics):
    """パラメーターサーバーの1回の更新で、ネットワークを流れるバイト数を予測します。

    n_trainers: トレーナーの数。1回の更新には、全トレーナーの勾配が必要です。
    n_parameters: モデルのパラメーター（重みとバイアス）の、数の個数。
    n_statistics: BatchNormの移動統計量（平均と分散）の、数の個数。勾配はありませんが、評価のときに
        使うので、トレーナーの統計量の平均をサーバーが求めます。
    戻り値: 全トレーナーとサーバーの間を、両方向に流れるバイト数の合計。数は1つ4バイトです。
    RPCのヘッダーなどは数えません。

    Predict how many bytes one update of the parameter server sends over the network.

    n_trainers: how many there are; an update takes the gradients of all.
    n_parameters: numbers in the parameters of the model.
    n_statistics: numbers in the running means and variances of its BatchNorms. They have no
        gradients, but evaluation needs them: the server takes the mean of the trainers'.
    Returns the bytes between all trainers and the server, both ways. A number has 4 bytes. The
    headers of RPC do not count.
    """
    return 0
