"""13 勾配の陳腐化 / The staleness of gradients (6_6, param_server/async_server.py)."""


def predict(n_trainers):
    """勾配の陳腐化（staleness）の平均を予測します。

    n_trainers: トレーナーの数。どのトレーナーも、同じ速さで休みなく、同時に訓練します。
    戻り値: 1回の更新について、フォワードパスでサーバーの重みを読んでから、その勾配で重みを更新する
    までに、ほかのトレーナーが行った更新の回数の平均。

    Predict the mean staleness of a gradient.

    n_trainers: the number of trainers. All train at the same time, are equally fast, and none
        pauses.
    Returns how many updates the other trainers make, on average, between the forward that reads
    the weights on the server and the step that applies the gradient.
    """
    return 0.0
