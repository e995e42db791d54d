"""Mistakes in `transformer_parallel/mesh.py`, and in how split layers use their groups."""

from tests.mutants import Mutant

MESH, TENSOR = "transformer_parallel/mesh.py", "transformer_parallel/tensor_parallel.py"
PIPELINE = "transformer_parallel/pipeline.py"


def _mesh(name, old, new, check, file=MESH):
    return Mutant(name, file, old, new, check=check, program=MESH,
                  flags=("--steps", 3, "--seq_len", 6, "--batch_size", 8, "--world_size", 4, "--blocks", 4,
                         "--micro_batches", 2))


MUTANTS = [
    _mesh("averaged over all ranks", "dist.all_reduce(parameter.grad, group=self.column)", "dist.all_reduce(parameter.grad)",
          "data_(tensor|pipeline), gradients|error"),
    _mesh("averaged by the number of all ranks", "parameter.grad /= dist.get_world_size(self.column)",
          "parameter.grad /= self.size", "data_tensor, gradients"),
    _mesh("a sum for the mean", "            parameter.grad /= dist.get_world_size(self.column)\n", "",
          "data_tensor, gradients"),
    _mesh("no rank averages", "            dist.all_reduce(parameter.grad, group=self.column)\n", "",
          "data_tensor, gradients"),
    _mesh("rows and columns for each other", 'self.column = mesh.get_group("column")', 'self.column = mesh.get_group("row")',
          "data_tensor, gradients|error"),
    _mesh("the ranks of a row see other rows of the batch", "whole.chunk(dist.get_world_size(self.column))[dist.get_rank(self.column)]",
          "whole.chunk(self.size)[dist.get_rank()]", "data_tensor, gradients|error"),
    _mesh("all rows see the first part of the batch", "[dist.get_rank(self.column)]", "[0]", "data_tensor, gradients"),
    _mesh("torch: all rows see the first part", '[self.mesh["column"].get_local_rank()]', "[0]", "torch, gradients"),
    _mesh("moved: the weights stay behind", '{"model": model, "optimizer": optimizer}', '{"model": {}, "optimizer": optimizer}',
          "moved, gradients|error"),
    _mesh("moved: the optimizer begins anew", "        if dist.get_rank() == 0:\n            shutil",
          "        self.optimizer = optim.AdamW(self.parameters(), lr=self.args.lr)\n        if dist.get_rank() == 0:\n            shutil",
          "moved, weights|error"),
    _mesh("moved: what is loaded is what was there", "        checkpoint.load(state, checkpoint_id=folder)\n", "", "moved, gradients|error"),
    _mesh("f sums over all ranks", "return all_reduced(gradient, ctx.group), None", "return all_reduced(gradient, None), None",
          "data_tensor, gradients|error", TENSOR),
    _mesh("the loss's sum is that of all ranks", "total = Sum.apply(logits.exp().sum(dim=-1), group)",
          "total = Sum.apply(logits.exp().sum(dim=-1), None)", "data_tensor, (gradients|losses)|error", TENSOR),
    _mesh("targets by the rank in the world", "rows_here(targets, dist.get_rank(group) * n, n)", "rows_here(targets, dist.get_rank() * n, n)",
          "data_tensor, (gradients|losses)|error", TENSOR),
    _mesh("neighbors of the wrong dimension", "group_dst=to % self.n", "group_dst=0 * to", "data_pipeline|error", PIPELINE),
    _mesh("a stage by the rank in the world", "self.n, self.rank = dist.get_world_size(group), dist.get_rank(group)",
          "self.n, self.rank = dist.get_world_size(group), dist.get_rank() % 2 ^ 1", "data_pipeline|error", PIPELINE),
]
