"""20 勾配の陳腐化 / The staleness of gradients (6_6, param_server/async_server.py)."""


def predict(n_trainers, consistency):
    """勾配の陳腐化（staleness）の平均を予測します。

    n_trainers: トレーナーの数。どのトレーナーも、同じ速さで休みなく訓練します。
    consistency: "async"（全トレーナーが同時に訓練する）または"lock"（フォワードパスから更新までを、
        1つのトレーナーずつ順番に行う）。
    戻り値: 1回の更新について、フォワードパスでサーバーの重みを読んでから、その勾配で重みを更新する
    までに、ほかのトレーナーが行った更新の回数の平均。

    Predict the mean staleness of a gradient.

    n_trainers: the number of trainers. All are equally fast, and none pauses.
    consistency: "async" (all train at the same time) or "lock" (one at a time has the server, from
        its forward to its step).
    Returns how many updates the other trainers make, on average, between the forward that reads
    the weights on the server and the step that applies the gradient.
    """
    return 0.0
