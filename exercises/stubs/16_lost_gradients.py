"""16 失われる勾配 / Gradients that are lost (6_8, param_server/batch_update.py)."""

import time

import torch
from torch.distributed import rpc
from torch.futures import Future


@rpc.functions.async_execution
def update_and_fetch_model(self, rank: int, grads: list[torch.Tensor]) -> Future:
    """トレーナーの勾配を足し、全員の勾配がそろったら更新します。どこかに誤りがあります。

    RPCによって、サーバーの複数のスレッドから同時に呼ばれます。
    self: `BatchUpdateParameterServer`。`self.sums`は和を入れるテンソルのリストで、モデルの`.grad`と
        メモリーを共有しています。`self.batch_update_size`はトレーナーの数です。
    rank: 呼んだトレーナーのランク。
    grads: テンソルのリスト。全パラメーターの勾配と、BatchNormの移動統計量です。
    戻り値: future。値は、更新後のモデルです。

    Add a trainer's gradients, and make the step when those of all are there. There is a mistake in
    here.

    Called over RPC, in several threads of the server at once.
    self: the `BatchUpdateParameterServer`. `self.sums` is a list of tensors for the sums, in the
        same memory as the `.grad`s of the model; `self.batch_update_size`, how many trainers.
    rank: of the trainer that calls.
    grads: a list of tensors: gradients of all parameters, and BatchNorm's running statistics.
    Returns a future of the model after the step.
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
