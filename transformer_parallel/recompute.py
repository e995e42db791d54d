r"""Activation checkpointing: what backward needs is computed again rather than kept.

Forward keeps what each operation will need in backward; for a block that is more than ten times its
input. Here only the inputs of the blocks are kept, and backward computes a block once more before
it goes back through it:

    plain        forward    block 0 ######  block 1 ######  block 2 ######  block 3 ######
                 backward   3, 2, 1, 0 from what was kept

    recompute    forward    block 0 #       block 1 #       block 2 #       block 3 #
                 backward   3 again ######, then back; 2 again ######, then back; ...

    --ways       kept of the blocks after forward        forwards of a block in a step
    plain        all                                     1
    recompute    L / N inputs, with --every N            2
    checkpoint   the same, by torch.utils.checkpoint     2

`--every N` keeps the input of each N-th block; backward then holds what N blocks keep. With L
blocks, each of which keeps 16 times its input, L / N + 16 N is least at N = sqrt(L) / 4. (Where a
block keeps as much as its input, at the paper's sqrt(L).) Nothing in this model is drawn by chance.
Where dropout is, the second forward must draw what the first one drew: torch's checkpoint puts the
generators back.

Underneath it is data parallelism with buckets, as in main.py.

    python transformer_parallel/recompute.py                        all three, on four ranks
    python transformer_parallel/recompute.py --blocks 16 --every 4
    python transformer_parallel/recompute.py --check                the same numbers as one process?

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174, section 4.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from common.cli import Parser, bounded
from common.program import run_program
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from transformer_parallel import main as tutorial
from transformer_parallel import results
from transformer_parallel.main import Buckets, role_name
from transformer_parallel.model import Transformer, embed, loss_of


class Recomputed(torch.autograd.Function):
    """Runs a module without keeping anything of it but its input."""

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


class Kept:
    """Counts the bytes that autograd keeps of what is computed within, besides the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.storages = {}

    def __call__(self) -> saved_tensors_hooks:
        """Return what stands around a computation."""
        return saved_tensors_hooks(self.note, lambda tensor: tensor)

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is kept; a storage counts once."""
        if tensor.data_ptr() not in self.weights:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def bytes(self) -> int:
        """Return how many bytes they are."""
        return sum(self.storages.values())


class Plain(Buckets):
    """Keeps everything."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        blocks = list(model.blocks)
        self.groups = [nn.Sequential(*blocks[first : first + args.every])
                       for first in range(0, len(blocks), args.every)]
        self.forwards = 0
        for block in blocks:
            block.register_forward_pre_hook(self.one_forward)

    def one_forward(self, *_: Any) -> None:
        """Count it."""
        self.forwards += 1

    def loss(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's rows: the model's forward, in groups of blocks."""
        self.forwards, self.kept = 0, Kept(self.model)
        x = embed(self.model.embedding, tokens)
        with self.kept():
            for group in self.groups:
                x = self.through(group, x)
        return loss_of(self.model.head(self.model.norm(x)), following)

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group: (N, T, units) to the same."""
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


class Torchs(Plain):
    """Leaves it to torch, which lets backward ask for what it misses."""

    def through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a group, and forget how."""
        return checkpoint(group, x, use_reentrant=False)


WAYS = {"plain": Plain, "recompute": Recompute, "checkpoint": Torchs}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return tutorial.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = tutorial.shared_parser("transformer_parallel/recompute", __doc__, WAYS)
    parser.add_argument("--every", type=bounded(int, at_least=1), default=1, metavar="N",
                        help="blocks between two inputs that are kept")
    parser.set_defaults(bucket_kb=1000)
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    tutorial.require_room(args)
    tutorial.require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
