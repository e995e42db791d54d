"""14 漏れる収益 / Returns that leak (6_5, rpc_rl/main.py)."""

import torch


def finish_episode(self) -> float:
    """記録したエピソードで訓練します（REINFORCE）。どこかに誤りがあります。

    self: `Agent`。`self.rewards`と`self.terminated`は、オブザーバーのidをキーとする辞書で、それぞれ
        各ステップの報酬のリストと、ポールが倒れて終わったかどうかです。
    戻り値: 合計報酬が最も小さいオブザーバーの合計報酬。

    Train on the recorded episodes (REINFORCE). There is a mistake in here.

    self: the `Agent`. `self.rewards` and `self.terminated` are dicts by the id of an observer: the
        reward of each of its steps, a list; and whether its episode ended because the pole fell.
    Returns the total reward of the worst observer.
    """
    rewards = sum(self.rewards.values(), [])
    terminated = all(self.terminated.values())
    returns = self.returns(rewards, terminated)
    returns = torch.tensor(returns, dtype=torch.float64)
    returns = (returns - returns.mean()) / (returns.std(correction=0) + self.eps)

    log_probs = self.log_probs()
    policy_loss = -(log_probs * returns.to(log_probs)).sum()
    report.require_finite(policy_loss, "after an episode")
    self.optimizer.zero_grad()
    policy_loss.backward()
    self.optimizer.step()

    min_reward = min(sum(rewards) for rewards in self.rewards.values())
    self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
    return min_reward
