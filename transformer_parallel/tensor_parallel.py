r"""Tensor parallelism (Megatron): every layer is split, and each rank computes one part of it.

The first of two layers is split by outputs (columns of a product x W), the second by inputs (rows).
Then the pair needs one sum over the ranks. Each rank has some heads and some units of the MLP:

    x --f--> query, key, value  -> its heads -> out   --g--> + x      f: forward nothing,
    x --f--> up                 -> gelu      -> down  --g--> + x         backward all-reduce
             a part of outputs                 a part of inputs       g: forward all-reduce,
                                                                         backward nothing

    --ways      between the layers               sent in a forward pass, for a block
    tensor      all tokens on each rank          2 all-reduces of (batch, tokens, units)
    sequence    T / N tokens on each rank:       2 all-gathers and 2 reduce-scatters: the same
                norms and sums are split, too    bytes, but each rank holds fewer activations
    dtensor, dtensor_sequence                    PyTorch's parallelize_module, for both

The embedding and the head are split by characters of the vocabulary. The loss needs a sum over all
characters; it is computed without gathering the logits.

`train` of main.py calls `forward_backward` of these variants, then `finish_gradients`.

    python transformer_parallel/tensor_parallel.py                 on four ranks
    python transformer_parallel/tensor_parallel.py --builtin       and PyTorch's built-in versions
    python transformer_parallel/tensor_parallel.py --world_size 3 --seq_len 63
    python transformer_parallel/tensor_parallel.py --check         compare with a single process

Sources: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053; Korthikanti et al.,
"Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198, for `sequence`.
"""

import functools
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
from transformer_parallel.main import Way, Weights, bytes_of
from transformer_parallel.model import Transformer, loss_of

Group = dist.ProcessGroup | None  # the ranks that share a layer; None means all ranks


class Copy(torch.autograd.Function):
    """f: every rank uses the same x for its part; backward sums the gradients of all parts."""

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
    """g: every rank gets the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Sum over the ranks."""
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient: every rank has the gradient of the sum."""
        return gradient, None


class Gather(torch.autograd.Function):
    """f of `sequence`: (..., T / N, units) to (..., T, units)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Gather the tokens of all ranks."""
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum over the ranks, and keep this rank's tokens."""
        return reduce_scattered(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """g of `sequence`: (..., T, units) to (..., T / N, units)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Sum over the ranks, and keep this rank's tokens."""
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients of all tokens."""
        return gathered(gradient, ctx.group), None


def all_reduced(x: torch.Tensor, group: Group,
                op: dist.ReduceOp = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the sum (or, with `op`, the maximum) over the ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group)
    return x


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tokens of all ranks, in the order of the ranks."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format)
             for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim=-2)


def reduce_scattered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks; return the sum of this rank's tokens."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=-2)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


class RowLinear(nn.Module):
    """A linear layer with some of its inputs; the bias is added once, to the sum."""

    def __init__(self, layer: nn.Linear, total: type[torch.autograd.Function],
                 group: Group) -> None:
        super().__init__()
        self.weight, self.bias = part_of(layer.weight, 1, group), layer.bias
        self.total, self.group = total, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs from (B, T, inputs / N), and sum them over the ranks."""
        return self.total.apply(F.linear(x, self.weight), self.group) + self.bias


class RowEmbedding(nn.Module):
    """An embedding with the vectors of some characters; other ranks have the remaining ones."""

    def __init__(self, layer: nn.Embedding, total: type[torch.autograd.Function],
                 group: Group) -> None:
        super().__init__()
        self.weight, self.total, self.group = part_of(layer.weight, 0, group), total, group
        self.first = dist.get_rank(group) * len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up this rank's characters, else zeros; sum over the ranks: (B, T, units)."""
        rows, here = rows_here(tokens, self.first, len(self.weight))
        return self.total.apply(F.embedding(rows, self.weight) * here[..., None], self.group)


def rows_here(tokens: torch.Tensor, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find tokens among the n characters from `first` on.

    Returns:
        The row of each token, or 0; and whether the token is one of these characters.
    """
    here = (first <= tokens) & (tokens < first + n)
    return torch.where(here, tokens - first, 0), here


def part_of(weight: torch.Tensor, dim: int, group: Group) -> nn.Parameter:
    """Return this rank's part of a weight, as a parameter with memory of its own."""
    part = weight.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format))


def cut(model: Transformer, enter: type[torch.autograd.Function],
        leave: type[torch.autograd.Function], group: Group) -> Transformer:
    """Split the layers of a model, in place; return the model.

    Args:
        model: Full model.
        enter: Function before a layer that is split by outputs: `Copy` or `Gather`.
        leave: Function after a layer that is split by inputs: `Sum` or `ReduceScatter`.
        group: Ranks that share each layer.
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
    # Before attention, not before its query, key and value: one all-reduce in place of three.
    entered = [part for block in model.blocks for part in (block.attention, block.mlp)]
    for module in [*entered, model.head]:
        module.register_forward_pre_hook(lambda _, inputs: enter.apply(*inputs, group))
    return model


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean cross-entropy; each rank has the logits of some characters.

    Args:
        logits: This rank's logits, (B, T, vocabulary / N).
        targets: Characters of the full vocabulary, (B, T).
        group: Ranks that share the vocabulary.
    """
    largest = all_reduced(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]  # so that no exponential overflows
    total = Sum.apply(logits.exp().sum(dim=-1), group)
    n = logits.shape[-1]
    rows, here = rows_here(targets, dist.get_rank(group) * n, n)
    of_target = Sum.apply(logits.gather(-1, rows[..., None])[..., 0] * here, group)
    return (total.log() - of_target).mean()


def own_places(tokens: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the positions of this rank's tokens, if each rank has a part of every row."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return places.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class TensorParallel(Way):
    """Split layers; each rank reads the full batch, and all ranks have the same loss."""

    enter, leave = Copy, Sum

    def __init__(self, model: Transformer, args: Namespace, group: Group = None) -> None:
        super().__init__(cut(model, self.enter, self.leave, group), args)
        self.group, self.kept = group, results.Kept(model)
        # `with self.kept:` around the blocks, from the first to the last.
        model.blocks[0].register_forward_pre_hook(lambda *_: self.kept.__enter__())
        model.blocks[-1].register_forward_hook(lambda *_: self.kept.__exit__())

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the full batch."""
        return whole

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, the same on all ranks."""
        return vocabulary_loss(self.model(tokens), targets, self.group)

    def figures(self) -> dict[str, float]:
        """Return the megabytes that the blocks kept for the last backward pass."""
        return {"MB kept": self.kept.bytes() / results.MB}


class SequenceParallel(TensorParallel):
    """Split layers, and everything between them: norms, sums and biases, by tokens."""

    enter, leave = Gather, ReduceScatter

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss; this rank's tokens do not stand at the first positions."""
        logits = self.model(tokens, own_places(tokens, self.group))
        return vocabulary_loss(logits, targets, self.group)

    def finish_gradients(self) -> None:
        """Sum the gradients that each rank computed from its tokens only."""
        for name, parameter in self.model.named_parameters():
            if is_replicated(name):
                dist.all_reduce(parameter.grad, group=self.group)


def is_replicated(name: str) -> bool:
    """Return whether every rank holds a parameter in full: norms, and biases added to sums."""
    return "norm" in name or name.endswith(("out.bias", "down.bias"))


class TorchTensorParallel(TensorParallel):
    """PyTorch's `parallelize_module`, which makes DTensors of the weights."""

    between = Replicate()  # placement of the tokens between the layers: all on each rank

    def __init__(self, model: Transformer, args: Namespace) -> None:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        # Way's, because TensorParallel's would split the model a second time.
        Way.__init__(self, cut_by_torch(model, mesh, self.between), args)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute both where PyTorch's loss, and its backward, know that logits are split."""
        with parallel.loss_parallel():
            return super().forward_backward(tokens, targets)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return PyTorch's loss of split logits."""
        return loss_of(self.model(tokens), targets).to_local()

    def figures(self) -> dict[str, float]:
        """Return nothing: the activations that DTensors keep are not counted."""
        return {}


class TorchSequenceParallel(TorchTensorParallel):
    """PyTorch's `parallelize_module`, which also splits the tokens between the layers."""

    between = Shard(1)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss; this rank's tokens do not stand at the first positions."""
        return loss_of(self.model(tokens, own_places(tokens)), targets).to_local()


def cut_by_torch(model: Transformer, mesh: DeviceMesh, between: Placement) -> Transformer:
    """Split the same layers with PyTorch's `parallelize_module`, in place; return the model.

    Args:
        model: Full model.
        mesh: Ranks that share each layer.
        between: Placement of the tokens between the layers: `Replicate()` for all tokens on each
            rank, `Shard(1)` for a part on each rank.
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
BUILTIN = {"tensor": "dtensor", "sequence": "dtensor_sequence"}  # {variant: PyTorch's built-in}


def costs(args: Namespace, n: int, weights: Weights, sequence: bool = False) -> dict:
    """Derive the costs of `tensor` or `sequence`; see `costs_of_each` of main.py."""
    item, units = next(iter(weights.values())).itemsize, args.shape.units
    tokens = item * args.batch_size * args.seq_len
    passes = 4 * args.blocks + 2  # two each in a block, forward and backward; embedding, head
    full = {name: weight for name, weight in weights.items() if is_replicated(name)}
    sent = passes * tokens * units + 3 * tokens  # the loss: maximum, sum, target
    calls = {"all_reduce": passes + 3}
    if sequence:  # an all-reduce becomes an all-gather and a reduce-scatter, of half its bytes each
        calls = {"all_gather": passes, "reduce_scatter": passes, "all_reduce": 3 + len(full)}
        sent += bytes_of(full)
    held = bytes_of(full) + (bytes_of(weights) - bytes_of(full)) / n
    # For each token of a block: the inputs of two norms, their means and deviations; the inputs of
    # query, key and value, and of up. The rest is split: query, key, value, the output of attention
    # (4), the sums of its softmax, and both layers of the MLP (8).
    norms = 2 * units + 2 * 2
    kept = 2 * units + (12 * units + args.shape.heads) / n + (norms / n if sequence else norms)
    return {"calls": calls, "bytes sent": 2 * sent * (n - 1) / n, "weights held": held,
            "gradients held": held, "state held": 2 * held,
            "MB kept": tokens * args.blocks * kept / results.MB}


COSTS = {"tensor": costs, "sequence": functools.partial(costs, sequence=True)}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/tensor_parallel", __doc__, WAYS, BUILTIN)


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=1)
    for what, number in (("heads", args.shape.heads), ("characters", args.shape.vocabulary)):
        if number % args.world_size:
            refuse(f"--world_size {args.world_size} must divide the model's {number} {what}")
    by_tokens = [way for way in args.ways if way in ("sequence", "dtensor_sequence")]
    if by_tokens and args.seq_len % args.world_size:
        refuse(f"--seq_len {args.seq_len} must be a multiple of {args.world_size} ranks: with "
               f"--ways {by_tokens[0]} all ranks must have the same number of characters")
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
