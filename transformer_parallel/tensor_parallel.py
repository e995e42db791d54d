r"""Tensor parallelism (Megatron): every layer is cut, and each rank computes a part of it.

Two layers, of which the first is cut by outputs (columns of a product x W) and the second by
inputs (rows), need one sum over the ranks. So each rank has some heads and some units of the MLP:

    x --f--> query, key, value  -> its heads -> out   --g--> + x      f: forward nothing,
    x --f--> up                 -> gelu      -> down  --g--> + x         backward all-reduce
             a part of outputs                 a part of inputs       g: forward all-reduce,
                                                                         backward nothing

    --ways      between the layers               sent in a forward, for a block
    tensor      all tokens on each rank          2 all-reduces of (batch, tokens, units)
    sequence    T / N tokens on each rank:       2 all-gathers and 2 reduce-scatters: as many
                norms and sums are cut, too      bytes, and fewer activations are held
    dtensor, dtensor_sequence                    torch's parallelize_module, which is both

The embedding and the head are cut by characters of the vocabulary; the loss, which needs the sum
over all of them, is computed without ever gathering the logits.

    python transformer_parallel/tensor_parallel.py                 on four ranks
    python transformer_parallel/tensor_parallel.py --twin          torch's own beside them
    python transformer_parallel/tensor_parallel.py --world_size 3 --seq_len 63
    python transformer_parallel/tensor_parallel.py --check         the same numbers as one process?

Sources: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053; Korthikanti et al.,
"Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198, for `sequence`.
"""

from argparse import Namespace
from typing import Any

from common.cli import Parser, refuse
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.nn import functional as F

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Way
from transformer_parallel.model import Shape, Transformer, loss_of

Group = dist.ProcessGroup | None  # whose ranks have the parts; None is all


class Copy(torch.autograd.Function):
    """Is f: what every rank has, each uses for its part; the gradients of all parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Return x."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum over the ranks."""
        return all_reduced(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """Is g: the sum of what the ranks have, on each of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Sum over the ranks."""
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient: every rank has that of the sum."""
        return gradient, None


class Gather(torch.autograd.Function):
    """Takes the place of f in `sequence`: (..., T / N, units) to (..., T, units)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Fetch the tokens of all ranks."""
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum over the ranks, and keep the own tokens."""
        return reduce_scattered(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """Takes the place of g in `sequence`: (..., T, units) to (..., T / N, units)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Sum over the ranks, and keep the own tokens."""
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Fetch the gradients of all tokens."""
        return gathered(gradient, ctx.group), None


def all_reduced(x: torch.Tensor, group: Group,
                op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum, or the maximum, over the ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group)
    return x


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tokens of all ranks, side by side."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format)
             for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim=-2)


def reduce_scattered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the ranks, of this rank's tokens."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=-2)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


class RowLinear(nn.Module):
    """Has some of the inputs of a linear layer; the bias is added once, to the sum."""

    def __init__(self, layer: nn.Linear, total: type[torch.autograd.Function],
                 group: Group) -> None:
        super().__init__()
        self.weight, self.bias = part_of(layer.weight, 1, group), layer.bias
        self.total, self.group = total, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (B, T, some inputs) to outputs, summed over the ranks."""
        return self.total.apply(F.linear(x, self.weight), self.group) + self.bias


class RowEmbedding(nn.Module):
    """Has the vectors of some characters; for all others, another rank has one."""

    def __init__(self, layer: nn.Embedding, total: type[torch.autograd.Function],
                 group: Group) -> None:
        super().__init__()
        self.weight, self.total, self.group = part_of(layer.weight, 0, group), total, group
        self.first = dist.get_rank(group) * len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up what is here, zero elsewhere; sum over the ranks: (B, T, units)."""
        rows, here = rows_here(tokens, self.first, len(self.weight))
        return self.total.apply(F.embedding(rows, self.weight) * here[..., None], self.group)


def rows_here(tokens: torch.Tensor, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token among the n from `first` on, or 0; and whether it is there."""
    here = (first <= tokens) & (tokens < first + n)
    return torch.where(here, tokens - first, 0), here


def part_of(weight: torch.Tensor, dim: int, group: Group) -> nn.Parameter:
    """Return this rank's part of a weight, a parameter of its own memory."""
    part = weight.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))


def cut(model: Transformer, enter: type[torch.autograd.Function],
        leave: type[torch.autograd.Function], group: Group) -> Transformer:
    """Cut the layers of a model, in place.

    Args:
        model: the whole model.
        enter, leave: what stands before a layer cut by outputs, and behind one cut by inputs:
            `Copy` and `Sum`, or `Gather` and `ReduceScatter`.
        group: of the ranks that have a part each.
    """
    model.embedding = RowEmbedding(model.embedding, leave, group)
    for block in model.blocks:
        for layer in (block.attention.query, block.attention.key, block.attention.value,
                      block.mlp.up):
            layer.weight = part_of(layer.weight, 0, group)
            layer.bias = part_of(layer.bias, 0, group)
        block.attention.out = RowLinear(block.attention.out, leave, group)
        block.mlp.down = RowLinear(block.mlp.down, leave, group)
    model.head.weight = part_of(model.head.weight, 0, group)
    # In front of attention, not of its query, key and value: one all-reduce in place of three.
    entered = [part for block in model.blocks for part in (block.attention, block.mlp)]
    for module in [*entered, model.head]:
        module.register_forward_pre_hook(lambda _, inputs: enter.apply(*inputs, group))
    return model


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean cross-entropy of logits of which each rank has some characters.

    Args:
        logits: (B, T, vocabulary / N).
        targets: (B, T), characters of the whole vocabulary.
        group: of these ranks.
    """
    largest = all_reduced(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]  # so that no exponential overflows
    total = Sum.apply(logits.exp().sum(dim=-1), group)
    n = logits.shape[-1]
    rows, here = rows_here(targets, dist.get_rank(group) * n, n)
    of_target = Sum.apply(logits.gather(-1, rows[..., None])[..., 0] * here, group)
    return (total.log() - of_target).mean()


def own_places(tokens: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return where this rank's tokens are, if each rank has a part of every row."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return places.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class TensorParallel(Way):
    """Cuts the layers; each rank sees the whole batch, and all have the same loss."""

    enter, leave = Copy, Sum

    def __init__(self, model: Transformer, args: Namespace, group: Group = None) -> None:
        super().__init__(cut(model, self.enter, self.leave, group), args)
        self.group, self.kept = group, results.Kept(model)
        # `with self.kept:` around the blocks: from in front of the first to behind the last.
        model.blocks[0].register_forward_pre_hook(lambda *_: self.kept.__enter__())
        model.blocks[-1].register_forward_hook(lambda *_: self.kept.__exit__())

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the whole batch."""
        return whole

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, the same on all ranks."""
        return vocabulary_loss(self.model(tokens), targets, self.group)

    def figures(self) -> dict[str, float]:
        """Return what the blocks have kept for the last backward."""
        return {"MB kept": self.kept.bytes() / results.MB}


class SequenceParallel(TensorParallel):
    """Cuts what lies between the layers, too: norms, sums and biases, by tokens."""

    enter, leave = Gather, ReduceScatter

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss; the places of this rank's tokens are not the first ones."""
        logits = self.model(tokens, own_places(tokens, self.group))
        return vocabulary_loss(logits, targets, self.group)

    def finish_gradients(self) -> None:
        """Sum what each rank has found from its tokens alone."""
        for name, parameter in self.model.named_parameters():
            if "norm" in name or name.endswith(("out.bias", "down.bias")):
                dist.all_reduce(parameter.grad, group=self.group)


class TorchTensorParallel(TensorParallel):
    """Leaves it to `parallelize_module`, which makes DTensors of the weights."""

    between = Replicate()  # what lies between the layers: on each rank

    def __init__(self, model: Transformer, args: Namespace) -> None:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        # TensorParallel's would cut, too.
        Way.__init__(self, cut_by_torch(model, mesh, self.between), args)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute both where torch's loss, and its backward, know that logits are cut."""
        with parallel.loss_parallel():
            return super().forward_backward(tokens, targets)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return torch's own loss of logits that are cut."""
        return loss_of(self.model(tokens), targets).to_local()

    def figures(self) -> dict[str, float]:
        """Return nothing: what DTensors keep is not counted."""
        return {}


class TorchSequenceParallel(TorchTensorParallel):
    """Leaves it to `parallelize_module`, and cuts what lies between the layers, too."""

    between = Shard(1)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss; the places of this rank's tokens are not the first ones."""
        return loss_of(self.model(tokens, own_places(tokens)), targets).to_local()


def cut_by_torch(model: Transformer, mesh: DeviceMesh, between: Placement) -> Transformer:
    """Cut the same layers with torch's `parallelize_module`, in place.

    Args:
        model: the whole model.
        mesh: of the ranks that have a part each.
        between: where the tokens between the layers are: `Replicate()` all on each rank, `Shard(1)`
            a part each.
    """
    column, row = parallel.ColwiseParallel, parallel.RowwiseParallel
    plan = {"embedding": row(input_layouts=Replicate(), output_layouts=between),
            "head": column(input_layouts=between, output_layouts=Shard(-1),
                           use_local_output=False)}
    for name in ("attention", "mlp"):  # once for query, key and value: one all-reduce, not three
        plan[f"blocks.*.{name}"] = parallel.PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate())
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        plan[f"blocks.*.{name}"] = column()
    for name in ("attention.out", "mlp.down"):
        plan[f"blocks.*.{name}"] = row(output_layouts=between)
    if between.is_shard():
        for name in ("blocks.*.norm1", "blocks.*.norm2", "norm"):
            plan[name] = parallel.SequenceParallel()
    return parallel.parallelize_module(model, mesh, plan)


WAYS = {"tensor": TensorParallel, "sequence": SequenceParallel, "dtensor": TorchTensorParallel,
        "dtensor_sequence": TorchSequenceParallel}
TWINS = {"tensor": "dtensor", "sequence": "dtensor_sequence"}  # of a way, torch's own


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/tensor_parallel", __doc__, WAYS, TWINS)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=1)
    shape = Shape()
    for what, number in (("heads", shape.heads), ("characters", shape.vocabulary)):
        if number % args.world_size:
            refuse(f"--world_size {args.world_size} must divide the model's {number} {what}")
    by_tokens = [way for way in args.ways if way in ("sequence", "dtensor_sequence")]
    if by_tokens and args.seq_len % args.world_size:
        refuse(f"--seq_len {args.seq_len} must be a multiple of {args.world_size} ranks: in "
               f"--ways {by_tokens[0]} each has as many characters")
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
