"""23 パイプラインのバブル / The bubble of a pipeline (6_7, model_parallel_resnet/main.py)."""


def predict(num_split, stages):
    """ワーカーが何もせずに待つ時間の割合を予測します。

    num_split: 1つのバッチを分けたマイクロバッチの数m。
    stages: パイプラインのステージ（モデルの断片、ワーカー）の数n。
    戻り値: 1つのバッチの時間のうち、ワーカーに仕事がない割合（0から1）。通信の時間は無視し、
    どのステージの計算時間も同じとします。

    Predict the share of the time in which a worker has nothing to do.

    num_split: m, the number of micro-batches into which a batch is split.
    stages: n, the number of stages (pieces of the model, workers) of the pipeline.
    Returns a share of the time of a batch, between 0 and 1. Neglect the messages, and let all
    stages compute equally long.
    """
    return 0.0
