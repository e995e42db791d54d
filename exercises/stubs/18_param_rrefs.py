"""18 パラメーターのRRef / RRefs of the parameters (6_6, param_server/main.py)."""

from torch.distributed import rpc


def get_param_rrefs(self):
    """パラメーターサーバーの上で呼ばれ、モデルの各パラメーターへのRRefを返します。

    self: `ParameterServer`。`self.model`が訓練するネットワークです。
    戻り値: `rpc.RRef`のリスト。`self.model`のパラメーターと同じ数、同じ順序です。トレーナーはこれを
    `DistributedOptimizer`に渡し、`opt.step(cid)`でサーバーにあるパラメーターを更新します。

    Called on the parameter server: an RRef for each parameter of the model.

    self: the `ParameterServer`; `self.model` is the network that is trained.
    Returns a list of `rpc.RRef`, as many as `self.model` has parameters, in their order. A trainer
    gives it to its `DistributedOptimizer`, whose `opt.step(cid)` updates what is on the server.
    """
    # ここを書き換えます（1、2行）。 / Change this (one or two lines).
    return []
