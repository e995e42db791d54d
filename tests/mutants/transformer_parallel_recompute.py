"""Mistakes in `transformer_parallel/recompute.py`."""

from tests.mutants import Mutant

RECOMPUTE = "transformer_parallel/recompute.py"


def _recompute(name, old, new, check):
    return Mutant(name, RECOMPUTE, old, new, check=check,
                  flags=("--steps", 2, "--seq_len", 6, "--batch_size", 6, "--world_size", 2, "--every", 2, "--blocks", 3))


MUTANTS = [
    _recompute("the gradient of the input is forgotten", "return x.grad, None", "return None, None", "recompute, gradients|error"),
    _recompute("backward begins with ones", "y.backward(gradient)", "y.backward(torch.ones_like(y))", "recompute, gradients"),
    _recompute("backward goes through it twice", "        y.backward(gradient)\n",
               "        y.backward(gradient, retain_graph=True)\n        y.backward(gradient)\n", "recompute, gradients"),
    _recompute("computed again without being noted", "        with torch.enable_grad():\n", "        with torch.no_grad():\n", "error"),
    _recompute("computed again from its output", "        ctx.save_for_backward(x)\n        ctx.run = run\n        return run(x)\n",
               "        y = run(x)\n        ctx.save_for_backward(y)\n        ctx.run = run\n        return y\n", "recompute, gradients"),
    _recompute("what is computed is kept, too", "return Recomputed.apply(x, group)", "return group(x)", "recompute, MB kept"),
    _recompute("the first group alone", "return Recomputed.apply(x, group)",
               "return Recomputed.apply(x, group) if group is self.groups[0] else group(x)", "recompute, (MB kept|forwards)"),
    _recompute("the blocks behind the last whole group are left out", "range(0, len(blocks), args.every)",
               "range(0, len(blocks) - args.every + 1, args.every)", "plain, (gradients|forwards)|error"),
    _recompute("an input for each block", "blocks[first : first + args.every])\n                       for first in range(0, len(blocks), args.every)]",
               "blocks[first : first + 1])\n                       for first in range(len(blocks))]", "recompute, MB kept"),
]
