"""26 2ステップ目の失敗 / The second step fails (6_8, batch_rl/main.py)."""

import torch
from torch.distributed import rpc


@staticmethod
@rpc.functions.async_execution
def select_action_batch(agent_rref: rpc.RRef, ob_id: int,
                        states: list[list[float]]) -> torch.futures.Future:
    """オブザーバーからRPCで呼ばれ、全員の状態がそろったら1回のフォワードパスで答えます。どこかに誤りがあります。

    agent_rref: エージェントへのRRef。
    ob_id: 呼んだオブザーバーの番号。0から始まります。
    states: そのオブザーバーのK個の環境の状態（数のリスト、K×4）。
    戻り値: このオブザーバーのK個のアクションのリストを値とするfuture。
    `self.states`（辞書）と`self.future_actions`は、エピソードの初めに空の辞書と新しいfutureになります。

    Called by an observer over RPC: when all states are there, one forward answers. There is a
    mistake in here.

    agent_rref: an RRef of the agent.
    ob_id: the number of the observer that asks, from 0 on.
    states: of that observer's K environments, lists of numbers (K x 4).
    Returns a future of the K actions of this observer, a list.
    When an episode begins, `self.states` is an empty dict, and `self.future_actions` a new future.
    """
    self = agent_rref.local_value()
    with self.lock:
        self.states[ob_id] = states
        batch, future_actions = self.states, self.future_actions
        last = len(batch) == len(self.ob_rrefs)
        if last:
            self.states = {}
    future_action = future_actions.then(lambda future_actions: future_actions.wait()[ob_id])
    if last:
        actions, log_probs = self.act([batch[ob_id] for ob_id in range(len(batch))])
        self.saved_log_probs.append(log_probs)
        future_actions.set_result(actions)
    return future_action
