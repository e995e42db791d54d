"""Mistakes in `transformer_parallel/recompute.py`."""

from tests.mutants import Mutant

RECOMPUTE = "transformer_parallel/recompute.py"


CAST = "module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())\n"


def _recompute(name, old, new, check, *flags):
    return Mutant(name, RECOMPUTE, old, new, check=check,
                  flags=("--steps", 2, "--seq_len", 6, "--batch_size", 6, "--world_size", 2, "--every", 2, "--blocks", 3, *flags))


def _mixed(name, old, new, check):
    return _recompute(name, old, new, check, "--ways", "bf16", "autocast")


def _added(name, method, check):
    """A method more in `Bf16`."""
    return _mixed(name, CAST, f"{CAST}\n    {method}\n", check)


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
    _mixed("nothing is cast", '"bf16": Bf16', '"bf16": Plain', "bf16, (a rank's gradients|MB kept)"),
    _mixed("the MLPs are not cast", "return functional_call(group, copies, x)",
           "group.apply(lambda module: module._forward_pre_hooks.clear() if hasattr(module, 'up') else None)\n"
           "        return functional_call(group, {k: v for k, v in copies.items() if 'mlp' not in k}, x)", "bf16, (a rank's gradients|MB kept)"),
    _mixed("the norms in bfloat16, too", 'weight if "norm" in name else weight.bfloat16()',
           'weight.bfloat16().to(weight.dtype) if "norm" in name else weight.bfloat16()', "bf16, a rank's gradients"),
    _mixed("the sums in bfloat16, too", "functional_call(group, copies, x)", "functional_call(group, copies, x.bfloat16().to(x.dtype))",
           "bf16, a rank's gradients"),
    _mixed("copies without a way back to the weights", "else weight.bfloat16()", "else weight.detach().bfloat16()", "bf16, a rank's gradients|error"),
    _mixed("copies of the first step", "        return functional_call(group, copies, x)\n",
           "        self.first = getattr(self, 'first', {})\n        copies = {name: weight + (self.first.setdefault((id(group), name), weight.detach()\n"
           "                  .clone()) - weight).detach() for name, weight in copies.items()}\n        return functional_call(group, copies, x)\n",
           "bf16, a rank's gradients"),
    _added("weights in bfloat16", "def after_step(self):\n        for weight in self.model.parameters():\n"
           "            weight.data = weight.data.bfloat16().to(weight.dtype)\n", "bf16, AdamW's step"),
    _added("moments in bfloat16", "def after_step(self):\n        for state in self.optimizer.state.values():\n"
           "            state['exp_avg_sq'].copy_(state['exp_avg_sq'].bfloat16())\n", "bf16, AdamW's step"),
    _added("the mean in bfloat16", "def finish_gradients(self):\n        super().finish_gradients()\n        for vector, _ in self.buckets:\n"
           "            vector.copy_(vector.bfloat16())\n", "bf16, their mean"),
    _added("gradients travel in bfloat16", "def finish_gradients(self):\n        for vector, _ in self.buckets:\n            half = vector.bfloat16()\n"
           "            torch.distributed.all_reduce(half)\n            vector.copy_(half / self.size)\n", "bf16, (their mean|bytes sent)"),
    _added("the sum for the mean", "def finish_gradients(self):\n        for vector, _ in self.buckets:\n            torch.distributed.all_reduce(vector)\n",
           "bf16, their mean"),
    _added("the loss in bfloat16", "def loss(self, tokens, targets):\n        return super().loss(tokens, targets).bfloat16()\n", "bf16, losses"),
    _added("head and loss in bfloat16", "def loss(self, tokens, targets):\n        with torch.autocast('cpu', torch.bfloat16):\n"
           "            return super().loss(tokens, targets)\n", "bf16, (a rank's gradients|losses|MB kept)"),
    _mixed("autocast: float16", "torch.autocast(x.device.type, torch.bfloat16)", "torch.autocast(x.device.type, torch.float16)",
           "autocast, a rank's gradients"),
    _mixed("autocast: switched off", "torch.autocast(x.device.type, torch.bfloat16)", "torch.autocast(x.device.type, torch.bfloat16, enabled=False)",
           "autocast, (a rank's gradients|MB kept)"),
]
