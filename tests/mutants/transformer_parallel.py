"""Mistakes in `transformer_parallel/main.py`, `zero.py` and what all programs of the folder share."""

from tests.mutants import Mutant

MAIN, ZERO, MODEL = (f"transformer_parallel/{name}.py" for name in ("main", "zero", "model"))
TRAFFIC = "transformer_parallel/traffic.py"
UNUSED = "tests/test_transformer_parallel.py::test_a_parameter_without_a_gradient"
SMALL = ("--steps", 2, "--seq_len", 6, "--batch_size", 12, "--world_size", 3)
ONE_SUM = """            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size
"""


def _mutant(name, file, old, new, check, program=MAIN, *flags):
    return Mutant(name, file, old, new, check=check, program=program, flags=(*SMALL, *flags))


MUTANTS = [
    _mutant("the sum for the mean", MAIN, ONE_SUM, ONE_SUM.splitlines(keepends=True)[0], "each, gradients"),
    _mutant("the last gradient only", MAIN, ONE_SUM,
            "            pass\n        dist.all_reduce(parameter.grad)\n        parameter.grad /= self.size\n",
            "each, gradients"),
    _mutant("buckets, the sum for the mean", MAIN, "            dist.all_reduce(vector)\n            vector /= self.size\n",
            "            dist.all_reduce(vector)\n", "buckets, gradients"),
    _mutant("overlap, no rank waits for the buckets", MAIN, "            work.wait()\n", "            pass\n",
            "overlap, gradients|error"),
    _mutant("overlap, a bucket leaves before its last gradient", MAIN, "if self.missing[number] == 0:\n                self.works",
            "if self.missing[number] == 1:\n                self.works", "overlap, gradients|error"),
    _mutant("overlap, sent for each accumulated backward", MAIN, "        self.syncing = False\n", "",
            "overlap, (gradients|calls)|error", MAIN, "--accumulate", 2),
    _mutant("overlap, a bucket is waited for in backward", MAIN,
            "self.works.append(dist.all_reduce(self.buckets[number][0], async_op=True))",
            "dist.all_reduce(self.buckets[number][0])", "overlap, gradients behind"),
    _mutant("overlap, all buckets leave with the last gradient", MAIN,
            """            if self.missing[number] == 0:
                self.works.append(dist.all_reduce(self.buckets[number][0], async_op=True))
""", """            if not any(self.missing):
                self.works = [dist.all_reduce(vector, async_op=True) for vector, _ in self.buckets]
""", "overlap, gradients behind"),
    _mutant("overlap, averaged after each accumulated backward", MAIN,
            "        self.syncing = False\n        yield\n        self.syncing = True\n",
            "        yield\n        self.finish_gradients()\n", "overlap, (calls|bytes sent)", MAIN, "--accumulate", 2),
    _mutant("a bucket for each gradient", MAIN, "        if held >= n_bytes:\n", "        if held:\n", "buckets, calls"),
    _mutant("accumulated gradients weigh twice", MAIN, "self.loss(*piece) / n", "self.loss(*piece)",
            "each, gradients", MAIN, "--accumulate", 2),
    _mutant("all ranks have the first rows", MAIN, "whole.chunk(self.size)[dist.get_rank()]", "whole.chunk(self.size)[0]",
            "each, gradients"),
    _mutant("other weights on each rank", MAIN, "    torch.manual_seed(args.seed)  # the same weights on all ranks\n", "",
            "each, gradients"),
    _mutant("tokens look ahead", MODEL, "is_causal=True", "is_causal=False", "each, gradients"),
    _mutant("an all-reduce counts once", TRAFFIC, "return 2 * tensors[0]", "return tensors[0]", "each, bytes"),
    _mutant("a loss that is twice as large", MAIN, "mean = value.detach().clone()",
            "mean = 2 * value.detach()", "each, losses"),
    _mutant("zero: the sum for the mean", ZERO, "        self.part.grad /= self.size\n", "", "zero1, gradients", ZERO),
    _mutant("zero: gradients of the first parameter for all", ZERO, "piece.copy_(parameter.grad)",
            "piece.copy_(piece)", "zero1, gradients", ZERO),
    _mutant("zero: no rank gathers what the others updated", ZERO,
            "            unit.part.grad = None\n            unit.gather_weights()\n", "            unit.part.grad = None\n",
            "zero1, (weights|calls)", ZERO),
    _mutant("zero: gradients of the step before stay", ZERO,
            "weights it needs.\"\"\"\n        for unit in self.units:\n            unit.part.grad = None\n", "weights it needs.\"\"\"\n",
            "zero3, gradients held at most", ZERO),
    _mutant("zero: gradients are not dropped", ZERO, "            parameter.grad = None\n", "", "zero2, gradients", ZERO),
    _mutant("zero: each rank updates the first shard", ZERO, "self.part = nn.Parameter(self.parts()[self.rank])",
            "self.part = nn.Parameter(self.parts()[0])", "zero1, (gradients|weights)", ZERO),
    _mutant("zero3, weights stay", ZERO, "        self.whole.untyped_storage().resize_(0)\n", "        pass\n",
            "zero3, weights held", ZERO),
    _mutant("zero3, weights stay until backward", ZERO, "        unit.free()\n        output.register_hook",
            "        output.register_hook", "zero3, weights held at most", ZERO),
    _mutant("zero3, no rank frees in backward", ZERO, "        unit.scatter_gradients()\n        unit.free()\n",
            "        unit.scatter_gradients()\n", "zero3, weights", ZERO),
    _mutant("zero3, weights are not gathered for backward", ZERO,
            "        output.register_hook(lambda gradient: unit.gather_weights())\n", "", "zero3|error", ZERO),
    Mutant("zero1: a parameter without a gradient", ZERO,
           "        require_gradients(sum(parameter.grad is None for unit in self.units\n"
           "                              for parameter in unit.parameters))\n", "", test=UNUSED),
    Mutant("zero2: a unit with a parameter without a gradient is not updated", ZERO,
           "        require_gradients(sum(self.missing))\n", "", test=UNUSED),
]
