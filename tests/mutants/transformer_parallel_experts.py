"""Mistakes in `transformer_parallel/experts.py`."""

from tests.mutants import Mutant

EXPERTS, TRAFFIC = "transformer_parallel/experts.py", "transformer_parallel/traffic.py"


def _experts(name, old, new, check, file=EXPERTS):
    return Mutant(name, file, old, new, check=check, program=EXPERTS,
                  flags=("--steps", 2, "--seq_len", 6, "--batch_size", 6, "--world_size", 2, "--experts", 4,
                         "--capacity_factor", 0.75, "--balance", 0.5))


MUTANTS = [
    _experts("gradients stay where the experts are", "return exchanged(gradient, ctx.received, ctx.sent), None, None",
             "return gradient, None, None", "experts, (gradients|calls)|error"),
    _experts("in backward goes what went, not what came", "exchanged(gradient, ctx.received, ctx.sent)",
             "exchanged(gradient, ctx.sent, ctx.received)", "uneven, gradients|error"),
    _experts("what is found is not sent back", "return self.exchange(found.flatten(0, 1), back=True)", "return found.flatten(0, 1)",
             "experts, (gradients|losses)"),
    _experts("the gate is forgotten: the router does not learn", " * gate[kept, None]", "", "replicas, (gradients|losses)|error"),
    _experts("the router learns from tokens without a slot", "torch.zeros_like(tokens)",
             "((gate[:, None] - gate[:, None].detach()) * ~kept[:, None] * tokens)", "replicas, gradients"),
    _experts("one token too many in a buffer", "kept = slot < capacity", "kept = slot <= capacity",
             "replicas, (gradients|dropped)|error"),
    _experts("a slot too few", "capacity = math.ceil(min(self.", "capacity = math.floor(min(self.", "replicas, (gradients|dropped)"),
    Mutant("slots for more tokens than there are", EXPERTS, "min(self.capacity_factor * len(tokens) / self.n_experts, len(tokens))",
           "self.capacity_factor * len(tokens) / self.n_experts", check="experts, bytes sent",
           flags=("--seq_len", 4, "--batch_size", 2, "--world_size", 2, "--blocks", 1, "--experts", 2, "--capacity_factor", 3)),
    _experts("slots are counted over experts, not tokens", "wanted.cumsum(0)", "wanted.cumsum(1)", "replicas, (gradients|dropped)|error"),
    _experts("the least probable expert", "probabilities.max(-1)", "probabilities.min(-1)", "replicas, (gradients|dropped)"),
    _experts("tokens of one rank for those of all", "        dist.all_reduce(counts)\n", "", "replicas, (tokens|dropped)"),
    _experts("kept for dropped", "(~kept).sum()", "kept.sum()", "replicas, dropped"),
    _experts("an expert's gradient is that of all losses' sum",
             "            for parameter in layer.experts.parameters():\n                parameter.grad /= self.size\n",
             "            pass\n", "experts, gradients"),
    _experts("experts are averaged over the ranks", 'if ".experts." not in name]', "]", "experts, (gradients|calls)"),
    _experts("every rank has the first experts", "range(rank * count, (rank + 1) * count)", "range(count)",
             "experts, (gradients|losses)|error"),
    _experts("the loss of the balance is forgotten", "return loss + self.weight", "return loss + 0", "replicas, (gradients|losses)"),
    _experts("balance without its gradient", "probabilities.mean(0)", "probabilities.detach().mean(0)", "replicas, gradients"),
    _experts("tokens of a rank for those of another", "by_expert = here.transpose(0, 1)",
             "by_expert = here.flip(0).transpose(0, 1)", "experts, (gradients|losses)"),
    _experts("uneven: the counts of tokens without a slot, too", "self.counts.clamp(max=buffers.shape[1])", "self.counts",
             "uneven, (gradients|bytes)|error"),
    _experts("uneven: as much comes as goes", "self.coming = exchanged(self.full)", "self.coming = self.full",
             "uneven, (gradients|calls)|error"),
    _experts("uneven: the lengths there are used on the way back", "(self.coming, self.full) if back else (self.full, self.coming)",
             "(self.full, self.coming)", "uneven, (gradients|losses)|error"),
    _experts("uneven: the last slots are sent", "buffers[slots < full[:, None]]",
             "buffers.flip(1)[slots < full[:, None]]", "uneven, (gradients|losses)"),
    _experts("uneven: the empty slots are sent, too", "self.full = self.counts.clamp(max=buffers.shape[1])",
             "self.full = torch.full_like(self.counts, buffers.shape[1])", "uneven, bytes"),
    _experts("what a rank keeps counts as sent", "return mine * (1 - stays)", "return mine", "experts, bytes", TRAFFIC),
    _experts("all parts count as equal", "parts[rank] / sum(parts) if any(parts) else 1 / n", "1 / n", "uneven, bytes", TRAFFIC),
]
