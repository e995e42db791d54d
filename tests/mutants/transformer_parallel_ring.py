"""Mistakes in `transformer_parallel/ring_attention.py`."""

from tests.mutants import Mutant

RING = "transformer_parallel/ring_attention.py"


def _ring(name, old, new, check):
    return Mutant(name, RING, old, new, check=check,
                  flags=("--steps", 2, "--seq_len", 12, "--batch_size", 2, "--world_size", 3))


MUTANTS = [
    _ring("what was mixed is not scaled down", "mixed * smaller + weights", "mixed + weights", "ring, (gradients|losses)"),
    _ring("the total is not scaled down", "total * smaller + weights", "total + weights", "ring, (gradients|losses)"),
    _ring("no largest score is taken off", "larger = torch.maximum(largest, scores.amax(-1, keepdim=True))",
          "larger = torch.zeros_like(largest)", "softmax of large scores"),
    _ring("the largest score of the last piece", "larger = torch.maximum(largest, scores.amax(-1, keepdim=True))",
          "larger = scores.amax(-1, keepdim=True)", "softmax of large scores"),
    _ring("the mask of one piece for all", "    if same:\n", "    if True:\n", "ring, (gradients|losses)"),
    _ring("no mask in the own piece", "    if same:\n", "    if False:\n", "ring, (gradients|losses)"),
    _ring("all pieces are looked at", "                if theirs <= ours:\n", "                if True:\n", "ring, (gradients|losses)"),
    _ring("a piece's number within its rank", "yield i, j, theirs == ours", "yield i, j, i == j", "ring, (gradients|losses)"),
    _ring("zigzag that is not balanced", "return [rank, 2 * self.size - 1 - rank]", "return [2 * rank, 2 * rank + 1]",
          "zigzag, scores"),
    _ring("gradients of K and V stay", "            kv_gradient = passed_on(kv_gradient)\n", "", "ring, (gradients|calls)"),
    _ring("the sum of a row is forgotten", "(g @ v.mT - row_sum)", "(g @ v.mT)", "ring, gradients"),
    _ring("gradients of scores are not scaled", "row_sum) / math.sqrt(q.shape[-1])", "row_sum)", "ring, gradients"),
    _ring("K's gradient for V's", "k_gradient, v_gradient = kv_gradient", "v_gradient, k_gradient = kv_gradient", "ring, gradients"),
    _ring("all ranks are at the first places", "self.model(tokens, places)", "self.model(tokens)", "gather, (gradients|losses)"),
    Mutant("gathered K and V, gradients of this rank alone", "transformer_parallel/tensor_parallel.py",
           "    dist.reduce_scatter(mine, parts, group=group)\n", "    mine.copy_(parts[dist.get_rank(group)])\n",
           program=RING, check="gather, (gradients|calls)",
           flags=("--steps", 2, "--seq_len", 12, "--batch_size", 2, "--world_size", 3)),
    _ring("who has passed by, the other way round", "        yield (rank - hop) % n, kv\n", "        yield (rank + hop) % n, kv\n",
          "ring, (gradients|losses)|error"),
    _ring("no rank waits for what arrives", "        for request in requests:\n            request.wait()\n        kv = arriving\n",
          "        kv = arriving\n", "ring, (gradients|losses)|error"),
    _ring("no rank computes while K and V travel", "        yield (rank - hop) % n, kv\n        for request in requests:\n            request.wait()\n",
          "        for request in requests:\n            request.wait()\n        yield (rank - hop) % n, kv\n", "ring, hops behind attention"),
    _ring("torch adds in float32", "convert_to_f32 = False", "convert_to_f32 = True", "torch_ring, gradients"),
    _ring("torch's ring without the balance of its tokens", "class TorchRing(Zigzag):", "class TorchRing(Ring):", "torch_ring, (gradients|losses)"),
]
