"""16 失われる勾配 / Gradients that are lost (6_8, param_server/batch_update.py)."""

import time

import torch
from torch.distributed import rpc
from torch.futures import Future

from param_server.batch_update import running_statistics
from param_server.batch_update_results import seconds_since


@rpc.functions.async_execution
def update_and_fetch_model(self, rank: int, grads: list[torch.Tensor]) -> Future:
    """トレーナーの勾配を足し、全員の分がそろったら更新します。どこかに誤りがあります。

    RPCが、サーバーの複数のスレッドから同時に呼びます。
    self.sums: 和を入れるテンソルのリスト。モデルの`.grad`とメモリーを共有しています。
    self.arrived: 勾配が届いた時刻の辞書。キーはトレーナーのランクです。
    self.lock: `self.sums`と`self.arrived`を守るロック。
    self.batch_update_size: トレーナーの数。
    rank: 呼び出したトレーナーのランク。
    grads: 全パラメーターの勾配と、BatchNormの移動統計量。
    戻り値: 更新後のモデルのfuture。

    Add a trainer's gradients; update when all have arrived. There is a mistake in here.

    RPC calls this in several threads of the server at the same time.
    self.sums: Tensors for the sums. They share their memory with the `.grad` of the model.
    self.arrived: Dict of the times at which gradients arrived, by the trainer's rank.
    self.lock: Lock that protects `self.sums` and `self.arrived`.
    self.batch_update_size: Number of trainers.
    rank: Rank of the trainer that calls.
    grads: Gradients of all parameters, then BatchNorm's running statistics.
    Returns a future of the updated model.
    """
    for total, g in zip(self.sums, grads, strict=True):
        total += g
    with self.lock:
        self.arrived[rank] = time.perf_counter()
        fut = self.future_model
        if len(self.arrived) < self.batch_update_size:
            return fut
        for total in self.sums:
            total /= self.batch_update_size
        self.optimizer.step()
        for buffer, mean in zip(running_statistics(self.model), self.statistics, strict=True):
            buffer.copy_(mean)
        for total in self.sums:
            total.zero_()
        self.waits.append(seconds_since(self.arrived))
        self.arrived, self.future_model = {}, Future()
    fut.set_result(self.get_model())
    return fut
