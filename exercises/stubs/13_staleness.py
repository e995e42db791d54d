"""13 勾配の古さ / The staleness of gradients (6_6, param_server/async_server.py)."""


def predict(n_trainers):
    """勾配の古さ（staleness）の平均を予測します。

    あるトレーナーがフォワードパスで重みを読んでから、その勾配で更新するまでに、ほかのトレーナーが行う
    更新の回数です。
    n_trainers: トレーナーの数。どれも同じ速さで、休みなく、同時に訓練します。

    Predict the mean staleness of a gradient.

    The staleness is the number of updates that the other trainers make between the forward that
    reads the weights and the update that applies the gradient.
    n_trainers: Number of trainers. All are equally fast and train at the same time, without pauses.
    """
    return 0.0
