"""17 全員のアクションを1回で / One forward pass for all observers (6_8, batch_rl/main.py)."""

import torch
from torch.distributed import rpc


@staticmethod
@rpc.functions.async_execution
def select_action_batch(agent_rref: rpc.RRef, ob_id: int,
                        states: list[list[float]]) -> torch.futures.Future:
    """オブザーバーがRPCで呼びます。このオブザーバーのK個のアクションを値とするfutureを返します。

    agent_rref: エージェントへのRRef。この関数は、エージェントの複数のスレッドで同時に動きます。
    ob_id: 呼んだオブザーバーの番号（0から`len(self.ob_rrefs) - 1`まで）。
    states: そのオブザーバーのK個の環境の状態（K×4のリスト）。
    `self.lock`: 下の2つを読み書きする間は保持し、`set_result`を呼ぶときは解放しておきます。
    `self.states`: このステップで届いた状態の辞書。キーは`ob_id`で、最初は空です。
    `self.future_actions`: このステップの全員が共有する、未完了のfuture。値は全員のアクションです。
    `self.act(リスト)`: フォワードパス。全員の`states`を`ob_id`の順に渡すと、全員の
    アクション（同じ順のリスト）と対数確率のテンソルを返します。1ステップに1回だけ呼びます。
    `self.saved_log_probs`: 1ステップごとに対数確率を追加するリスト。

    Called by an observer over RPC; return a future of this observer's K actions.

    agent_rref: RRef of the agent. Several threads of the agent run this function at once.
    ob_id: Number of the observer that asks, from 0 to `len(self.ob_rrefs) - 1`.
    states: States of that observer's K environments (K x 4, lists).
    `self.lock`: Hold it while you use the next two, but not during `set_result`.
    `self.states`: Dict of the states of this step by `ob_id`, empty at first.
    `self.future_actions`: Uncompleted future of this step, for the actions of all observers.
    `self.act(a list)`: The forward pass, once per step. It takes the `states` of all observers in
        the order of `ob_id`, and returns a list of their actions and a tensor of log-probabilities.
    `self.saved_log_probs`: List to which each step appends its log-probabilities.
    """
    self = agent_rref.local_value()
    with self.lock:
        self.states[ob_id] = states
        future_actions = self.future_actions
    # ここに書きます（10行ほど。上の行も変えてかまいません）。
    # Write here (about ten lines; you may change the lines above).
    return future_actions
