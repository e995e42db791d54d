"""Mistakes in rpc_rl/main.py and rpc_rl/fast.py."""

from tests.mutants import Mutant

MAIN, FAST = "rpc_rl/main.py", "rpc_rl/fast.py"

MUTANTS = [
    Mutant("zero_grad forgotten", MAIN, "        self.optimizer.zero_grad()\n", "", check="gradients"),
    Mutant("step doubled", MAIN, "        self.optimizer.step()\n",
           "        self.optimizer.step()\n        self.optimizer.step()\n", check="weights"),
    Mutant("mean for sum", MAIN, "returns.to(log_probs)).sum()", "returns.to(log_probs)).mean()", check="gradients"),
    Mutant("returns leak between observers", MAIN,
           "        for ob_id, rewards in self.rewards.items():\n"
           "            returns += self.returns(rewards, self.terminated[ob_id])\n",
           "        returns = self.returns(sum(self.rewards.values(), []), True)\n", check="gradients"),
    Mutant("returns in reverse order", MAIN, "return returns[::-1]", "return returns", check="gradients"),
    Mutant("a fall taken for a time limit", MAIN, "and not terminated", "and terminated", check="gradients"),
    Mutant("the time limit taken for a fall", MAIN, "        return terminated\n\n\nclass Agent",
           "        return terminated or truncated\n\n\nclass Agent", check="gradients"),
    Mutant("the fast observer takes the time limit for a fall", FAST, "        return terminated\n",
           "        return terminated or truncated\n", check="gradients"),
    Mutant("no discount", MAIN, "R = r + self.args.gamma * R", "R = r + R", check="gradients"),
    Mutant("solved by the best observer", MAIN, "min_reward = min(", "min_reward = max(", check="running reward"),
    Mutant("running reward the wrong way round", MAIN, "0.05 * min_reward + (1 - 0.05) * self.running_reward",
           "0.95 * min_reward + (1 - 0.95) * self.running_reward", check="running reward"),
    Mutant("identical environments", MAIN, "1000 * args.seed + ob_info.id  #", "1000 * args.seed  #", check="states"),
    Mutant("the same episode every time", MAIN, "state, _ = self.env.reset(seed=seed)",
           "state, _ = self.env.reset(seed=self.id)", check="states"),
    Mutant("rewards of all observers in one list", MAIN, "self.rewards[ob_id].append(reward)",
           "self.rewards[min(self.rewards)].append(reward)", check="gradients|error"),
    Mutant("the last reward of the fast observer is lost", FAST,
           "        agent.report_reward(self.id, reward)  # the last one has no next state to ride with\n", "",
           check="rewards|error"),
    Mutant("dropout never on", MAIN, "        x = self.dropout(x)\n", "", check="dropout layer"),
    Mutant("dropout at the wrong rate", MAIN, "nn.Dropout(p=0.6)", "nn.Dropout(p=0.4)", check="dropout"),
    Mutant("eval mode", MAIN, "self.policy = Policy().to(self.device)",
           "self.policy = Policy().to(self.device).eval()", check="dropout|gradients|error"),
    Mutant("the greedy action", MAIN, "action = m.sample()", "action = probs.argmax()", check="actions"),
    Mutant("one action in ten is forced", MAIN, "action = m.sample()",
           "action = m.sample() if len(self.rewards[ob_id]) % 10 else torch.tensor(0)", check="actions|states"),
    Mutant("the probability instead of its logarithm", MAIN, "m.log_prob(action)", "probs[action]", check="gradients"),
    Mutant("other dropout masks for learning", FAST, "self.masks[ob_id][: len(of_observer)]",
           "self.masks[ob_id][-len(of_observer):]", check="gradients"),
    Mutant("one random number for all steps", FAST, "self.uniforms[ob_id][step]", "self.uniforms[ob_id][0]",
           check="actions"),
    Mutant("the threshold compared with the last reward", MAIN, "while agent.running_reward <= args.reward_threshold",
           "last_reward = 0\n    while last_reward <= args.reward_threshold", check="end"),
    Mutant("another learning rate", MAIN, "lr=args.lr)", "lr=2 * args.lr)", check="weights"),
]
