"""12 1ステップのRPCの往復 / The round trips of a step (6_5, rpc_rnn/main.py)."""


def predict(nlayers):
    """訓練の1ステップでの、RPCの往復の回数を予測します。要求とその応答で1往復です。

    nlayers: LSTMの層の数。

    パラメーターサーバーには埋め込みテーブルとデコーダーが、トレーナーにはLSTMがあります。
        フォワードパス   トークンを送って埋め込みを受け取る。LSTMの出力を送ってスコアを受け取る
        バックワードパス 計算グラフとともにプロセスをまたいだテンソルごとに、勾配が逆向きに送られる
        更新             `opt.step(context_id)`: パラメーターを所有する、ほかのプロセスごとに1往復
        解放             コンテキストの終わりを、それを知るほかのプロセスごとに1往復で知らせる

    Predict the RPC round trips of one training step. A request and its response are one round trip.

    nlayers: Number of layers of the LSTM.

    The embedding table and the decoder are on the parameter server, the LSTM is on the trainer.
        forward   send tokens, receive embeddings; send the LSTM's output, receive scores
        backward  for each tensor that crossed with its graph, a gradient travels the other way
        update    `opt.step(context_id)`: one for each other process that owns parameters
        release   at the end of the context, one for each other process that knows it
    """
    return 0
