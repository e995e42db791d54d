"""17 全員のアクションを1回で / One forward for all observers (6_8, batch_rl/main.py)."""

import torch
from torch.distributed import rpc


@staticmethod
@rpc.functions.async_execution
def select_action_batch(agent_rref: rpc.RRef, ob_id: int,
                        states: list[list[float]]) -> torch.futures.Future:
    """オブザーバーからRPCで呼ばれ、futureを返します。全員の状態がそろったら、1回のフォワードパスで答えます。

    agent_rref: エージェントへのRRef。この関数はエージェントのプロセスで、複数のスレッドから同時に
        呼ばれます。
    ob_id: 呼んだオブザーバーの番号（0から`len(self.ob_rrefs) - 1`まで）。
    states: そのオブザーバーのK個の環境の状態（数のリスト、K×4）。
    戻り値: `torch.futures.Future`。完了したときの値は、このオブザーバーのK個のアクションの
    リストです。
    エージェントが持つもの:
    `self.lock`: 下の2つを読み書きする間、保持するロック。`set_result`を呼ぶときは離しておきます。
    `self.states`: このステップで届いた状態の辞書（キーは`ob_id`）。エピソードの初めは空です。
    `self.future_actions`: このステップの全員が共有する、未完了のfuture。値は全員のアクションです。
    `self.act(リスト)`: 全員の`states`を`ob_id`の順に並べたリスト（要素はK×4のリスト）から、
        全員のアクション（同じ順。要素はK個のアクションのリスト）と対数確率のテンソルを返します。フォワードパスは、
        1ステップにつきこの1回だけです。
    `self.saved_log_probs`: ステップごとの対数確率を追加していくリスト。

    Called by an observer over RPC, returns a future: one forward answers when all states are there.

    agent_rref: an RRef of the agent. This runs on the agent's process, in several threads at once.
    ob_id: the number of the observer that asks, from 0 to `len(self.ob_rrefs) - 1`.
    states: of that observer's K environments, lists of numbers (K x 4).
    Returns a `torch.futures.Future`, whose value will be the K actions of this observer, a list.
    What the agent has:
    `self.lock`: to be held while the next two are read or changed, and not in `set_result`.
    `self.states`: those that have come in this step, by `ob_id`; an empty dict at the beginning.
    `self.future_actions`: the future of this step, shared by all, for the actions of all.
    `self.act(a list)`: the `states` of all (each K x 4), in the order of `ob_id`, to a list of the
        actions of all (each a list of K) in the same order, and a tensor of their
        log-probabilities. This is the forward, once in each step.
    `self.saved_log_probs`: a list, to which those of each step are appended.
    """
    self = agent_rref.local_value()
    with self.lock:
        self.states[ob_id] = states
        future_actions = self.future_actions
    # ここに書きます（10行ほど。上の行も変えてかまいません）。
    # Your lines go here (about ten; you may change those above).
    return future_actions
