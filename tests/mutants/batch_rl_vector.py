"""Mistakes in batch_rl's vector environments."""

from tests.mutants import Mutant

VECTOR = "batch_rl/vector.py"
SMALL = ["--envs_per_observer", 2]


def mutant(name, old, new, check, file=VECTOR, program="", flags=SMALL):
    return Mutant(name, file, old, new, check=check, program=program, flags=flags)


MUTANTS = [
    mutant("the step of a reset counted", "        returns[resets] = np.nan\n", "", "returns"),
    mutant("resets counted as environment steps", "(~returns.isnan()).sum()", "returns.numel()",
           "metrics", "batch_rl/results.py", "batch_rl/until_solved.py"),
    mutant("the last step of a stretch taken for the reset", "np.concatenate([np.zeros_like(over[:1]), over[:-1]])",
           "over.copy()", "returns"),
    mutant("returns over several stretches", "np.where(over[step], beyond[step], R)", "R", "returns"),
    mutant("a terminal state bootstrapped", "np.where(self.terminated, 0.0, self.rewards", "np.where(False, 0.0, self.rewards",
           "returns"),
    mutant("the time limit taken for a fall", "beyond = np.where(self.terminated, 0.0",
           "beyond = np.where(self.terminated | self.truncated, 0.0", "returns"),
    mutant("a time limit that does not end a stretch", "over = self.terminated | self.truncated", "over = self.terminated.copy()",
           "returns"),
    mutant("the end of the episode taken for a fall", "        over[-1] = True  # the episode ends\n",
           "        over[-1] = True\n        self.terminated[-1] = True\n", "returns"),
    mutant("the end of the episode does not end a stretch", "        over[-1] = True  # the episode ends\n", "",
           "(returns|reward)"),
    mutant("returns cut one step early", "R = self.rewards[step] + gamma * np.where(over[step], beyond[step], R)",
           "R = np.where(over[step], beyond[step], self.rewards[step] + gamma * R)", "returns"),
    mutant("first lengths off by one", "over.argmax(0) + 1.0", "over.argmax(0) + 0.0", "reward"),
    mutant("one seed for all observers", "self.envs.reset(n_steps, seed)", "self.envs.reset(n_steps, 0)", "states"),
    mutant("rewards of the wrong step", "(states, self.rewards[step], self.terminated[step]",
           "(states, self.rewards[step - 1], self.terminated[step]", "returns"),
    mutant("environments and steps exchanged", "torch.tensor(returns.T)", "torch.tensor(returns.reshape(returns.T.shape))",
           "returns|error"),
    mutant("resets in the mean and the spread", "torch.std_mean(self.returns[played], correction=0)",
           "torch.std_mean(self.returns.nan_to_num(), correction=0)", "loss"),
    mutant("zero_grad for each piece", "            piece_loss.backward()  # the loss",
           "            self.optimizer.zero_grad()\n            piece_loss.backward()  # the loss", "gradients"),
    mutant("zero_grad forgotten", "        self.optimizer.zero_grad()\n", "", "gradients"),
    mutant("only the last piece of an episode", "        for first in range(0, len(states), steps):\n",
           "        for first in range(steps * ((len(states) - 1) // steps), len(states), steps):\n", "error|gradients"),
    mutant("other dropout masks when it learns", "self.probs(states[piece], self.keep[piece])",
           "self.probs(states[piece], self.keep[::-1][piece].copy())", "gradients"),
    mutant("each piece with the masks of the first", "self.probs(states[piece], self.keep[piece])",
           "self.probs(states[piece], self.keep[: len(states[piece])])", "gradients"),
    mutant("dropout without its scale", "policy.affine2.weight / (1 - policy.dropout.p)", "policy.affine2.weight", "(actions|gradients)"),
    mutant("one dropout mask for all steps", "self.keep[where])[..., 0]", "self.keep[0 if ob_id is None else (0, [ob_id])])[..., 0]",
           "(actions|states)"),
    mutant("left for right", "(self.uniforms[where] > left)", "(self.uniforms[where] < left)", "actions"),
    mutant("the greedy action", "(self.uniforms[where] > left)", "(left < 0.5)", "actions"),
    mutant("one by one, the random numbers of another observer", "(len(saved), [ob_id])",
           "(len(saved), [0])", "(actions|states)"),
    mutant("one by one, the answer of the first environment for all", "        return actions[0]\n",
           "        return actions[0][:1] * len(actions[0])\n", "actions"),
    mutant("saved by request, not by observer", "group.saved_log_probs[ob_id].append(saved)", "group.saved_log_probs[0].append(saved)",
           "error"),
    mutant("states overwritten that the training still needs", "        states = np.frombuffer(b\"\".join(states), np.float32).reshape(-1, self.num_envs, 4)\n",
           "        states = np.frombuffer(b\"\".join(states), np.float32).reshape(-1, self.num_envs, 4)\n"
           "        memory = self.__dict__.setdefault(str(ob_id), np.empty_like(states))\n        memory[:] = states\n        states = memory\n",
           "gradients"),
    mutant("one observer's answer for another", "        return answers[ob_id]\n", "        return answers[-1 - ob_id]\n",
           "(actions|states)"),
    mutant("states in the order in which they came", "[asked[ob_id] for ob_id in self.observers]", "list(asked.values())",
           "(actions|states)"),
    mutant("answers never renewed", "            if last:\n                self.next_step()\n",
           "            if last:\n                self.states = {}\n", "error|actions|states|forwards"),
    mutant("a mask of another rate", "round(2**16 * kept)", "round(2**16 * (1 - kept))", "(actions|states)"),
]
