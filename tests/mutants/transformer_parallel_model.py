"""Mistakes in what splits the model: `transformer_parallel/tensor_parallel.py` and `pipeline.py`."""

from tests.mutants import Mutant

TENSOR, PIPELINE = "transformer_parallel/tensor_parallel.py", "transformer_parallel/pipeline.py"
SMALL = ("--steps", 2, "--seq_len", 6, "--batch_size", 6, "--world_size", 2)


def _tensor(name, old, new, check):
    return Mutant(name, TENSOR, old, new, check=check, flags=SMALL)


def _pipeline(name, old, new, check, ranks=3):
    return Mutant(name, PIPELINE, old, new, check=check,
                  flags=(*SMALL[:-1], ranks, "--micro_batches", 6, "--blocks", 6))


MUTANTS = [
    _tensor("f sums nothing in backward", "        \"\"\"Sum over the ranks.\"\"\"\n        return all_reduced(gradient, ctx.group), None\n",
            "        \"\"\"Sum over the ranks.\"\"\"\n        return gradient, None\n", "tensor, gradients"),
    _tensor("g sums once more in backward", "        \"\"\"Return the gradient: every rank has the gradient of the sum.\"\"\"\n        return gradient, None\n",
            "        return all_reduced(gradient, None), None\n", "tensor, gradients"),
    _tensor("the bias is added by every rank", "self.total.apply(F.linear(x, self.weight), self.group) + self.bias",
            "self.total.apply(F.linear(x, self.weight) + self.bias, self.group)", "tensor, gradients"),
    _tensor("norms are not summed over the ranks", 'return "norm" in name or name.endswith(("out.bias", "down.bias"))',
            'return name.endswith(("out.bias", "down.bias"))', "sequence, (gradients|calls)"),
    _tensor("biases are not summed over the ranks", 'return "norm" in name or name.endswith(("out.bias", "down.bias"))',
            'return "norm" in name', "sequence, (gradients|calls)"),
    _tensor("every rank is at the first places", "places.chunk(dist.get_world_size(group))[dist.get_rank(group)]",
            "places.chunk(dist.get_world_size(group))[0]", "sequence, gradients"),
    _tensor("characters of other ranks are looked up, too", "* here[..., None], self.group)", ", self.group)", "tensor, gradients"),
    _tensor("the target of another rank counts", "logits.gather(-1, rows[..., None])[..., 0] * here",
            "logits.gather(-1, rows[..., None])[..., 0]", "tensor, gradients"),
    _tensor("each rank takes its own largest logit", "all_reduced(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)",
            "logits.detach().amax(dim=-1)", "tensor, (gradients|calls)"),
    Mutant("exponentials of large logits overflow", TENSOR, "logits = logits - largest[..., None]", "logits = logits",
           test="tests/test_transformer_parallel.py::test_the_loss_of_large_logits"),
    _tensor("the sum of all logits is this rank's", "total = Sum.apply(logits.exp().sum(dim=-1), group)",
            "total = logits.exp().sum(dim=-1)", "tensor, (gradients|calls)"),
    _tensor("a padded character counts in the loss", "total = Sum.apply(logits.exp().sum(dim=-1), group)",
            "total = Sum.apply(F.pad(logits, (0, 1)).exp().sum(dim=-1), group)", "tensor, (gradients|losses)"),
    _tensor("the wrong half of the inputs", "part_of(layer.weight, 1, group), layer.bias",
            "nn.Parameter(layer.weight.detach().chunk(dist.get_world_size(), 1)[-1 - dist.get_rank()].clone()), layer.bias",
            "tensor, gradients"),
    _tensor("norms see the tokens of all ranks", "enter, leave = Gather, ReduceScatter", "enter, leave = Copy, Sum",
            "sequence, (gradients|calls|MB kept)|error"),
    _tensor("torch does not cut the last norm", '("blocks.*.norm1", "blocks.*.norm2", "norm")', '("blocks.*.norm1", "blocks.*.norm2")',
            "dtensor_sequence|error"),
    _pipeline("the newest weights for an old micro-batch",
              "y.backward(None if stage == self.last else self.receive(micro, stage + 1))\n",
              "y.backward(None if stage == self.last else self.receive(micro, stage + 1))\n        self.optimizer.step()\n",
              "1f1b, gradients|error"),
    _pipeline("a micro-batch weighs as much as a batch", "loss_of(y, self.targets[micro]) / self.m",
              "loss_of(y, self.targets[micro])", "gpipe, gradients"),
    _pipeline("the targets of the first micro-batch", "self.targets[micro]", "self.targets[0]", "gpipe, gradients"),
    _pipeline("all backwards at the end", "return in_turns(forwards, backwards, n - rank - 1)",
              "return in_turns(forwards, backwards, m)", "1f1b, in flight"),
    _pipeline("one forward more ahead", "return in_turns(forwards, backwards, n - rank - 1)",
              "return in_turns(forwards, backwards, n - rank)", "1f1b, in flight"),
    _pipeline("one forward more ahead, in the middle", "return in_turns(forwards, backwards, n - rank - 1)",
              "return in_turns(forwards, backwards, n - rank - (rank in (0, n - 1)))", "1f1b, in flight"),
    _pipeline("interleaved: one stage after the other", "first if within < n else second", "first if number < m else second",
              "interleaved|error"),
    _pipeline("what is held is never let go", "self.held.pop((stage, micro))", "self.held[stage, micro]", "1f1b, in flight"),
    _pipeline("the first stage sends gradients, too", "        if stage > 0:\n", "        if stage >= 0:\n", "gpipe|error"),
    _pipeline("no rank waits until gradients are sent", "        for request, _ in self.returning:\n            request.wait()\n", "",
              "gpipe, never waited for"),
    _pipeline("the loss of one rank is that of all", "data_parallel.mean_of_ranks(loss * self.n)", "data_parallel.mean_of_ranks(loss)",
              "gpipe, losses"),
    _pipeline("torch's losses are added up", "torch.stack(losses).mean()", "torch.stack(losses).sum()", "torch_gpipe, losses"),
    _pipeline("a backward takes as long as a forward", "            ends[action] = clocks[rank] = start + (1 if action.kind == \"F\" else 2)",
              "            ends[action] = clocks[rank] = start + 1", "bubble"),
]
