"""12 RPCの往復 / RPC round trips (6_5, rpc_rnn/main.py)."""


def predict(nlayers):
    """トレーナーが、訓練の1ステップで行うRPCの往復の回数を予測します。

    nlayers: トレーナーにあるLSTMの層の数。
    戻り値: 回数。ほかのプロセスへの要求とその応答を、合わせて1回と数えます。

    パラメーターサーバーには埋め込みテーブルとデコーダーが、トレーナーにはLSTMがあります。1ステップは
    次のとおりです。
        フォワードパス   埋め込みテーブルにトークンを送って埋め込みを受け取り、デコーダーにLSTMの
                  出力を送ってスコアを受け取る
        バックワードパス 計算グラフとともにプロセスをまたいだテンソル1つにつき、勾配が1回逆向きに
                  送られる
        更新      opt.step(context_id): パラメーターを所有するほかのプロセスごとに1回
        解放      コンテキストの終わりを、それを知っているほかのプロセスに1回ずつ知らせる

    Predict the RPC round trips that the trainer makes in one step of the training.

    nlayers: the number of layers of the LSTM, which is on the trainer.
    Returns a number: a request to another process and its answer count as one.

    The embedding table and the decoder are on the parameter server, the LSTM on the trainer. A
    step is:
        forward   tokens go to the embedding table and embeddings come back; states of the LSTM go
                  to the decoder and scores come back
        backward  for each tensor that has crossed with its graph, a gradient goes the other way
        step      opt.step(context_id): one for each other process that owns parameters
        release   the end of the context is told, once, to each other process that knows it
    """
    return 0
