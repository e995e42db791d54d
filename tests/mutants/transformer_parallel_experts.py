"""Mistakes in `transformer_parallel/experts.py`."""

from tests.mutants import Mutant

EXPERTS = "transformer_parallel/experts.py"


def _experts(name, old, new, check):
    return Mutant(name, EXPERTS, old, new, check=check,
                  flags=("--steps", 2, "--seq_len", 6, "--batch_size", 6, "--world_size", 2, "--experts", 4,
                         "--capacity_factor", 0.75, "--balance", 0.5))


MUTANTS = [
    _experts("gradients stay where the experts are", "which is the same exchange.\"\"\"\n        return exchanged(gradient)",
             "which is the same exchange.\"\"\"\n        return gradient", "experts, (gradients|calls)"),
    _experts("what is found is not sent back", "return self.exchange(found).flatten(0, 1)", "return found.flatten(0, 1)",
             "experts, (gradients|losses)"),
    _experts("the gate is forgotten: the router does not learn", " * gate[kept, None]", "", "replicas, (gradients|losses)|error"),
    _experts("one token too many in a box", "kept = place < capacity", "kept = place <= capacity",
             "replicas, (gradients|dropped)|error"),
    _experts("a place too few", "capacity = math.ceil(", "capacity = math.floor(", "replicas, (gradients|dropped)"),
    _experts("places are counted over experts, not tokens", "wanted.cumsum(0)", "wanted.cumsum(1)", "replicas, (gradients|dropped)|error"),
    _experts("the least probable expert", "probabilities.max(-1)", "probabilities.min(-1)", "replicas, (gradients|dropped)"),
    _experts("kept for dropped", "(~kept).sum()", "kept.sum()", "replicas, dropped"),
    _experts("an expert's gradient is that of all losses' sum",
             "            for parameter in layer.experts.parameters():\n                parameter.grad /= self.size\n",
             "            pass\n", "experts, gradients"),
    _experts("experts are averaged over the ranks", 'if ".experts." not in name]', "]", "experts, (gradients|calls)"),
    _experts("every rank has the first experts", "range(rank * count, (rank + 1) * count)", "range(count)",
             "experts, (gradients|losses)|error"),
    _experts("nobody asks for balance", "return loss + self.weight", "return loss + 0", "replicas, (gradients|losses)"),
    _experts("balance without its gradient", "probabilities.mean(0)", "probabilities.detach().mean(0)", "replicas, gradients"),
    _experts("tokens of a rank for those of another", "here.transpose(0, 1).flatten(1, 2)",
             "here.flip(0).transpose(0, 1).flatten(1, 2)", "experts, (gradients|losses)"),
]
