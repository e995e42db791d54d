"""17 RPCの往復 / RPC round trips (6_5, rpc_rnn/main.py)."""


def predict(n_trainers, nlayers):
    """最初のトレーナーが、訓練の1ステップで行うRPCの往復の回数を予測します。

    n_trainers: トレーナーの数。
    nlayers: トレーナーにあるLSTMの層の数。
    戻り値: 回数。ほかのプロセスへの要求とその応答を、合わせて1回と数えます。

    パラメーターサーバーには埋め込みテーブルとデコーダーが、トレーナーにはLSTMがあります。1ステップは
    次のとおりです。
        フォワードパス   埋め込みテーブルにトークンを送って埋め込みを受け取り、デコーダーにLSTMの
                  出力を送ってスコアを受け取る
        バックワードパス 計算グラフとともにプロセスをまたいだテンソル1つにつき、勾配が1回逆向きに
                  送られる
        平均      トレーナーが複数のときだけ。最初のトレーナーがサーバーに、部品（埋め込みテーブル、
                  デコーダー）ごとに1回、勾配の平均を頼む
        更新      opt.step(context_id): パラメーターを所有するほかのプロセスごとに1回
        解放      コンテキストの終わりを、それを知っているほかのプロセスに1回ずつ知らせる。
                  トレーナーが複数でも、知っているのは、そのトレーナーとサーバーだけです

    Predict the RPC round trips that the first trainer makes in one step of the training.

    n_trainers: the number of trainers.
    nlayers: the number of layers of the LSTM, which is on the trainer.
    Returns a number: a request to another process and its answer count as one.

    The embedding table and the decoder are on the parameter server, the LSTM on the trainer. A
    step is:
        forward   tokens go to the embedding table and embeddings come back; states of the LSTM go
                  to the decoder and scores come back
        backward  for each tensor that has crossed with its graph, a gradient goes the other way
        average   with several trainers only: the first one asks the server, once for each part
                  (embedding table, decoder), to average the gradients
        step      opt.step(context_id): one for each other process that owns parameters
        release   the end of the context is told, once, to each other process that knows it. Also
                  with several trainers, those are the trainer of this step and the server only
    """
    return 0
