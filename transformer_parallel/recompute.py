r"""Activations for the backward pass: recomputed instead of kept, or kept in half the bytes.

The forward pass keeps what the backward pass needs: in a block, 16 times the block's input.
Activation checkpointing keeps only the inputs of blocks. The backward pass computes each block once
more before it goes back through it:

    plain        forward    block 0 ######  block 1 ######  block 2 ######  block 3 ######
                 backward   3, 2, 1, 0 from the kept activations

    recompute    forward    block 0 #       block 1 #       block 2 #       block 3 #
                 backward   3 again ######, then back; 2 again ######, then back; ...

    --ways       kept of the blocks after forward        forward passes of a block
    plain        all activations                         1
    recompute    L / K inputs, with --every K            2
    checkpoint   the same, by torch.utils.checkpoint     2
    bf16         all, in 9/16 of the bytes; copies of    1
                 the weights, in half of their bytes
    autocast     the same, by torch.autocast: 10/16      1

`--every K` keeps the input of every K-th block; backward then holds the activations of K blocks.
With L blocks that each keep 16 times their input, L / K + 16 K is smallest at K = sqrt(L) / 4. (If
a block keeps as much as its input, at the paper's sqrt(L).) This model samples no random numbers.
With dropout, both forward passes must sample the same numbers; torch's checkpoint restores the
generators for that.

Mixed precision computes attention and MLPs in bfloat16. This type has the range of float32 and 8
binary digits, which are 2 to 3 decimal digits. Sums of many numbers stay in float32:

    forward      weight -> copy*        x -> norm -> attention* or MLP*, with copies -> added to x
    backward     gradient of the copy* -> of the weight -> mean over the ranks -> AdamW -> weight
                 * in bfloat16; the rest in float32, with the last norm, the head and the loss

All five variants are data parallelism with buckets, as in main.py.

    python transformer_parallel/recompute.py                        on four ranks
    python transformer_parallel/recompute.py --builtin              and PyTorch's built-in versions
    python transformer_parallel/recompute.py --blocks 16 --every 4
    python transformer_parallel/recompute.py --check                compare with a single process

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174, section 4; Micikevicius et al., "Mixed Precision Training",
https://arxiv.org/abs/1710.03740, sections 3.1 and 3.3. Section 3.2 scales the loss to keep float16
gradients above zero; bfloat16 does not need that.
"""

import math
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from common.cli import Parser, bounded
from common.program import role_name, run_program

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Buckets, Weights, bytes_of
from transformer_parallel.model import Transformer, embed, loss_of


class Recomputed(torch.autograd.Function):
    """A module's forward that keeps only the module's input.

    The input must require a gradient, as the output of an embedding does. Autograd does not see the
    weights inside, so it would not run this backward for the weights alone.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable) -> torch.Tensor:
        """Compute the module; autograd records nothing in here."""
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute the module again, recorded this time, and go back through it.

        The gradients of the weights are added to `.grad`, as in every backward pass. So a bucket
        or a hook of DDP sees each of them once.
        """
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(gradient)
        return x.grad, None


class Plain(Buckets):
    """All activations are kept."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        blocks = list(model.blocks)
        self.groups = [nn.Sequential(*blocks[first : first + args.every])
                       for first in range(0, len(blocks), args.every)]
        self.forwards, self.kept = 0, results.Kept(model)
        for block in blocks:
            block.register_forward_pre_hook(self.one_forward)

    def one_forward(self, *_: Any) -> None:
        """Count the forward of a block."""
        self.forwards += 1

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some rows: the model's forward, in groups of blocks."""
        self.forwards = 0
        x = embed(self.model.embedding, tokens)
        with self.kept:
            for group in self.groups:
                x = self.through(group, x)
        return loss_of(self.model.head(self.model.norm(x)), targets)

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group of blocks: (B, T, units) to (B, T, units)."""
        return group(x)

    def figures(self) -> dict[str, float]:
        """Return the megabytes kept in the last step, and a block's number of forward passes."""
        return {"MB kept": self.kept.bytes() / results.MB,
                "forwards": self.forwards / len(self.model.blocks)}


class Recompute(Plain):
    """Only the inputs of the groups are kept; backward computes each group once more."""

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group, and keep its input only."""
        return Recomputed.apply(x, group)


class TorchCheckpoint(Plain):
    """PyTorch's checkpoint, which recomputes when backward asks for a missing activation."""

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group, and keep its input only."""
        return checkpoint(group, x, use_reentrant=False)


class Bf16(Plain):
    """All activations are kept, most of them in bfloat16: attention and MLPs compute in it."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        for block in model.blocks:
            for module in (block.attention, block.mlp):
                module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group with bfloat16 copies of its weights; the norms keep their own weights.

        Attention and MLP return bfloat16. A block adds it to x, which is float32, so the sum is
        float32.

        Backward casts the gradient of a copy, and adds it to the gradient of the weight itself. So
        the mean over the ranks and AdamW's step are in float32 ("master weights"). In bfloat16, a
        weight of 0.1 would not change if 0.0002 were added to it.
        """
        copies = {name: weight if "norm" in name else weight.bfloat16()
                  for name, weight in group.named_parameters()}
        return functional_call(group, copies, x)


class TorchAutocast(Plain):
    """PyTorch's autocast, which has a list of operators that compute in bfloat16.

    Linear layers and attention are on the list. Query, key and value each cast their input.
    """

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group; its backward uses the types of its forward."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return group(x)


WAYS = {"plain": Plain, "recompute": Recompute, "checkpoint": TorchCheckpoint,
        "bf16": Bf16, "autocast": TorchAutocast}
BUILTIN = {"recompute": "checkpoint", "bf16": "autocast"}  # {variant: PyTorch's built-in version}


def costs_of_plain(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs of `plain`, which keeps 16 inputs of each block; see main.py.

    Norms and attention keep more: the means and deviations of two norms, the sum of each softmax.
    """
    kept = args.blocks * (16 * args.shape.units + 2 * 2 + args.shape.heads)
    return with_kept(args, n, weights, forwards=1, kept=kept)


def costs_of_recompute(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs of `recompute`, which keeps the input of each group."""
    kept = math.ceil(args.blocks / args.every) * args.shape.units
    return with_kept(args, n, weights, forwards=2, kept=kept)


def costs_of_bf16(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs of `bf16`, which keeps the inputs of two norms in float32.

    In bfloat16, it keeps the norms' outputs (2); query, key, value and the output of attention (4);
    in the MLP, four times the units, twice (8). A number of these takes half of a float32.
    """
    kept = args.blocks * ((2 + (2 + 4 + 8) / 2) * args.shape.units + 2 * 2 + args.shape.heads)
    copies = bytes_of({name: weight for name, weight in weights.items()
                       if re.search(r"(attention|mlp)\..*weight", name)}) / 2
    return with_kept(args, n, weights, forwards=1, kept=kept, more=copies)


def with_kept(args: Namespace, n: int, weights: Weights, forwards: int, kept: float,
              more: float = 0) -> dict:
    """Add `kept` numbers for each token, and `more` bytes, to the costs of buckets."""
    numbers = args.batch_size // n * args.seq_len * kept
    n_bytes = next(iter(weights.values())).itemsize * numbers + more
    return {**data_parallel.costs_of_buckets(args, n, weights), "forwards": forwards,
            "MB kept": n_bytes / results.MB}


COSTS = {"plain": costs_of_plain, "recompute": costs_of_recompute, "bf16": costs_of_bf16}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/recompute", __doc__, WAYS, BUILTIN)
    parser.add_argument("--every", type=bounded(int, at_least=1), default=1, metavar="K",
                        help="number of blocks from one kept input to the next")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=args.world_size)
    data_parallel.require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
