r"""What backward needs: computed again rather than kept, or kept in half the bytes.

Forward keeps what each operation will need in backward; for a block that is 16 times its input.
Activation checkpointing keeps the inputs of the blocks alone, and backward computes a block once
more before it goes back through it:

    plain        forward    block 0 ######  block 1 ######  block 2 ######  block 3 ######
                 backward   3, 2, 1, 0 from what was kept

    recompute    forward    block 0 #       block 1 #       block 2 #       block 3 #
                 backward   3 again ######, then back; 2 again ######, then back; ...

    --ways       kept of the blocks after forward        forwards of a block in a step
    plain        all                                     1
    recompute    L / K inputs, with --every K            2
    checkpoint   the same, by torch.utils.checkpoint     2
    bf16         all, in 9/16 of the bytes; copies of    1
                 the weights, in half of theirs
    autocast     the same, by torch.autocast: 10/16      1

`--every K` keeps the input of each K-th block; backward then holds what K blocks keep. With L
blocks, each of which keeps 16 times its input, L / K + 16 K is least at K = sqrt(L) / 4. (Where a
block keeps as much as its input, at the paper's sqrt(L).) Nothing in this model is drawn by chance.
Where dropout is, the second forward must draw what the first one drew: torch's checkpoint puts the
generators back.

Mixed precision computes attention and MLPs in bfloat16, which has float32's range and 8 binary
digits, 2 to 3 decimal ones. What adds up many numbers, or small ones to large ones, stays exact:

    forward      weight -> copy*        x -> norm -> attention* or MLP*, with copies -> added to x
    backward     gradient of the copy* -> that of the weight -> mean of the ranks -> AdamW -> weight
                 * in bfloat16; all else in float32, and so are the last norm, the head and the loss

Underneath, all five are data parallelism with buckets, as in main.py.

    python transformer_parallel/recompute.py                        on four ranks
    python transformer_parallel/recompute.py --twin                 torch's own beside them
    python transformer_parallel/recompute.py --blocks 16 --every 4
    python transformer_parallel/recompute.py --check                the same numbers as one process?

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174, section 4; Micikevicius et al., "Mixed Precision Training",
https://arxiv.org/abs/1710.03740, sections 3.1 and 3.3. Its 3.2, a loss that is scaled so that
gradients are not zero in float16, bfloat16 does without.
"""

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
from transformer_parallel.main import Buckets
from transformer_parallel.model import Transformer, embed, loss_of


class Recomputed(torch.autograd.Function):
    """Runs a module without keeping anything of it but its input.

    That must need a gradient, as what an embedding returns does: of the weights inside, autograd
    knows nothing here, and would not come back for them alone.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable) -> torch.Tensor:
        """Compute it; in here autograd notes nothing."""
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Compute it again, noted this time, and go back through it.

        The gradients of the weights are added where every backward adds them; so a bucket, or
        DDP's hook, sees them once.
        """
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(gradient)
        return x.grad, None


class Plain(Buckets):
    """Keeps everything."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        blocks = list(model.blocks)
        self.groups = [nn.Sequential(*blocks[first : first + args.every])
                       for first in range(0, len(blocks), args.every)]
        self.forwards, self.kept = 0, results.Kept(model)
        for block in blocks:
            block.register_forward_pre_hook(self.one_forward)

    def one_forward(self, *_: Any) -> None:
        """Count it."""
        self.forwards += 1

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's rows: the model's forward, in groups of blocks."""
        self.forwards = 0
        x = embed(self.model.embedding, tokens)
        with self.kept:
            for group in self.groups:
                x = self.through(group, x)
        return loss_of(self.model.head(self.model.norm(x)), targets)

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group: (B, T, units) to the same."""
        return group(x)

    def figures(self) -> dict[str, float]:
        """Return what was kept in the last step, and how often a block was computed."""
        return {"MB kept": self.kept.bytes() / results.MB,
                "forwards": self.forwards / len(self.model.blocks)}


class Recompute(Plain):
    """Keeps the inputs of the groups, and computes each once more."""

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group, and forget how."""
        return Recomputed.apply(x, group)


class TorchCheckpoint(Plain):
    """Leaves it to torch, which lets backward ask for what it misses."""

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group, and forget how."""
        return checkpoint(group, x, use_reentrant=False)


class Bf16(Plain):
    """Keeps everything, most of it in half the bytes: attention and MLPs compute in bfloat16."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        for block in model.blocks:
            for module in (block.attention, block.mlp):
                module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group with copies of its weights, in bfloat16; those of norms as they are.

        A block adds what attention and MLP return, in bfloat16, to x, in float32: that is float32.

        Backward casts the gradient of a copy, and adds it to that of the weight itself. So the mean
        over the ranks and AdamW's step are in float32 ("master weights"). In bfloat16, a weight of
        0.1 would stay what it is when 0.0002 are added to it.
        """
        copies = {name: weight if "norm" in name else weight.bfloat16()
                  for name, weight in group.named_parameters()}
        return functional_call(group, copies, x)


class TorchAutocast(Plain):
    """Leaves the casts to torch, which has a list of operators that compute in bfloat16.

    Linear layers and attention are on it. Query, key and value are three: each casts its input.
    """

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group; its backward computes in the types of its forward."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return group(x)


WAYS = {"plain": Plain, "recompute": Recompute, "checkpoint": TorchCheckpoint,
        "bf16": Bf16, "autocast": TorchAutocast}
TWINS = {"recompute": "checkpoint", "bf16": "autocast"}  # of a way, torch's own


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/recompute", __doc__, WAYS, TWINS)
    parser.add_argument("--every", type=bounded(int, at_least=1), default=1, metavar="K",
                        help="blocks between two inputs that are kept")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=args.world_size)
    data_parallel.require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
