"""Mistakes in the pipeline over RPC that sends each micro-batch back at once (beside tutorial 6_7)."""

from tests.mutants import Mutant

EARLY, MEASURING = "model_parallel_resnet/early_backward.py", "model_parallel_resnet/measuring.py"
SMALL = ("--arch", "resnet18", "--num_splits", "1", "3")
PARTS = "tests/test_model_parallel_resnet.py::test_the_parts_of_a_batch"


def mutant(name, old, new, check="", file=EARLY, test=""):
    """All with the smaller model; its micro-batches are not all of one size."""
    return Mutant(name, file, old, new, check=check, test=test, flags=SMALL, program=EARLY)


MUTANTS = [
    mutant("the mean of the micro-batches' means", " * (len(y) / len(labels))\n", " / number\n", "losses"),
    mutant("the sum of the micro-batches' means", " * (len(y) / len(labels))\n", "\n", "losses"),
    mutant("zero_grad forgotten", "        self.opt.zero_grad()\n", "", "weights"),
    mutant("the last micro-batch's gradients instead of the sum",
           "gradient if param.grad is None else param.grad.add_(gradient)", "gradient", "weights"),
    mutant("one shard without its step", "wait_all([rref.rpc_async().step() for rref in self.rrefs])",
           "self.rrefs[1].rpc_sync().step()", "weights"),
    mutant("one shard's gradients not added", "for rref in self.rrefs])\n\n    def step",
           "for rref in self.rrefs[:1]])\n\n    def step", "weights"),
    mutant("a step for each micro-batch", "            opt.add(context_id)  # the gradients go with their context\n",
           "            opt.add(context_id)\n            opt.step()\n", "steps|weights|error"),
    mutant("step before the gradients are added", "            opt.add(context_id)  # the gradients go with their context\n",
           "        opt.step()\n", "error|weights"),
    mutant("gradients added when their context is gone",
           "            opt.add(context_id)  # the gradients go with their context\n", "        opt.add(context_id)\n",
           "error"),
    mutant("all micro-batches are number 0", "        y_rref = self.p1_rref.remote().forward(RRef(x), i)\n",
           "        i = 0\n        y_rref = self.p1_rref.remote().forward(RRef(x), i)\n", "micro-batches"),
    mutant("images and targets of several sizes", "labels.tensor_split(number)))", "labels.chunk(number)))", "error|outputs|data"),
    mutant("a plain backward, which stays on the master", "dist_autograd.backward(context_id, [loss])", "loss.backward()",
           "error|weights|micro-batches"),
    mutant("the loss of the last micro-batch", "return sum(losses)", "return losses[-1]", "losses"),
    mutant("a wait counted twice", 'parts["messages"] += b - a - waited', 'parts["messages"] += b - a', file=MEASURING, test=PARTS),
    mutant("adding up counted as waiting", '        "add": "step", "step": "step"}', '        "step": "step"}', file=MEASURING, test=PARTS),
]
