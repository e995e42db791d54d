r"""ZeRO: what data parallelism repeats on each rank, cut into a part for each.

Of P bytes of weights, AdamW needs P bytes of gradients and 2 P of moments besides. With N ranks:

    --ways      weights    gradients    moments     sent in a step, in sizes of P (N-1)/N
    replicas    P          P            2 P         2: all-reduce = reduce-scatter + all-gather
    zero1       P          P            2 P / N     2: reduce-scatter of gradients, all-gather of
                                                       the weights that each rank has stepped
    zero2       P          P / N        2 P / N     2: the same, during backward, which waits
    zero3       P / N      P / N        2 P / N     3: all-gather of weights in forward, and again
                                                       in backward; reduce-scatter of gradients
    fsdp        torch's fully_shard (FSDP2), which is zero3
    fsdp_zero2  the same, with reshard_after_forward=False: no second all-gather. It sends what
                zero2 does, and has whole weights from forward to backward only

`zero3` has the weights of a block only while it computes:

    forward    gather 0, compute, free | gather 1, compute, free | ...
    backward   ... | gather 1, compute, scatter gradients, free | gather 0, ...

    python transformer_parallel/zero.py                 on four ranks
    python transformer_parallel/zero.py --twin          torch's own beside them
    python transformer_parallel/zero.py --ways zero3
    python transformer_parallel/zero.py --check         the same numbers as one process?

Source: Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054, sections 5 and 7.
"""

from argparse import Namespace
from collections.abc import Iterator

from common.cli import Parser
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Each, Way
from transformer_parallel.model import Transformer


class Unit:
    """Keeps the parameters of a module as one long vector, of which this rank steps a part.

    Attributes:
        whole: the weights of all ranks, padded to parts of the same length. The parameters of the
            module are views of it.
        part: this rank's, a parameter for the optimizer. It lies in `whole`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.parameters = list(module.parameters())
        weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.whole = torch.cat([weights, weights.new_zeros(-len(weights) % self.size)])
        self.part = nn.Parameter(self.parts()[self.rank])
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            parameter.data = piece

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the part of each rank, views of the whole."""
        return self.whole.chunk(self.size)

    def pieces(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of a vector that have the parameters' shapes."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return [piece.view_as(parameter) for piece, parameter in
                zip(vector[: sum(sizes)].split(sizes), self.parameters, strict=True)]

    def scatter_gradients(self) -> None:
        """Give each rank the mean of all ranks' gradients of its part, and drop the others."""
        gradients = torch.zeros_like(self.whole)
        for parameter, piece in zip(self.parameters, self.pieces(gradients), strict=True):
            piece.copy_(parameter.grad)
            parameter.grad = None
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter(self.part.grad, list(gradients.chunk(self.size)))
        self.part.grad /= self.size

    def gather_weights(self) -> None:
        """Fetch the parts of all ranks."""
        dist.all_gather(list(self.parts()), self.part.detach())


class ShardedUnit(Unit):
    """Keeps this rank's part alone, and the whole only between `gather_weights` and `free`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.bytes = self.whole.nbytes
        self.part = nn.Parameter(self.part.detach().clone())
        self.free()

    def gather_weights(self) -> None:
        """Fetch the parts of all ranks, into the same storage as before: autograd looks there."""
        self.whole.untyped_storage().resize_(self.bytes)
        super().gather_weights()

    def free(self) -> None:
        """Give the memory of the whole back."""
        self.whole.untyped_storage().resize_(0)


class Zero1(Way):
    """Shards the optimizer's state: each rank steps a part of the weights."""

    make_unit = Unit

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.modules = units_of(model)
        self.units = [self.make_unit(module) for module in self.modules]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parts."""
        return (unit.part for unit in self.units)

    def finish_gradients(self) -> None:
        """Scatter the gradients when backward is over."""
        for unit in self.units:
            unit.scatter_gradients()

    def after_step(self) -> None:
        """Fetch what the other ranks have stepped."""
        for unit in self.units:
            unit.part.grad = None
            unit.gather_weights()


class Zero2(Zero1):
    """Shards the gradients, too: those of a unit are scattered as soon as they are there.

    Backward waits for that. It saves memory, not time.
    """

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.missing = [len(unit.parameters) for unit in self.units]
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.one_is_there(number))

    def one_is_there(self, number: int) -> None:
        """Note a gradient of a unit; autograd calls it."""
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.missing[number] = len(self.units[number].parameters)
            self.complete(self.units[number])

    def complete(self, unit: Unit) -> None:
        """Scatter the gradients of a unit, which are all there."""
        unit.scatter_gradients()

    def finish_gradients(self) -> None:
        """Return at once: backward has scattered all."""


class Zero3(Zero2):
    """Shards the weights, too: a unit is whole while it computes.

    FSDP fetches the next unit meanwhile; here each is waited for.
    """

    make_unit = ShardedUnit

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        for module, unit in zip(self.modules, self.units, strict=True):
            module.register_forward_pre_hook(lambda *_, unit=unit: unit.gather_weights())
            module.register_forward_hook(
                lambda module, inputs, output, unit=unit: self.forward_is_over(unit, output))

    def forward_is_over(self, unit: ShardedUnit, output: torch.Tensor) -> None:
        """Free the weights of a unit, until backward comes to its output."""
        unit.free()
        output.register_hook(lambda gradient: unit.gather_weights())

    def complete(self, unit: ShardedUnit) -> None:
        """Scatter the gradients of a unit, and free its weights: backward has passed it.

        The last gradient of a unit is that of its first layer; behind it nothing needs its weights.
        """
        unit.scatter_gradients()
        unit.free()

    def after_step(self) -> None:
        """Drop the gradients; the next forward fetches the weights that it needs."""
        for unit in self.units:
            unit.part.grad = None


class TorchFSDP(Way):
    """Leaves it to `fully_shard`, which cuts each parameter along its first dimension."""

    reshard_after_forward = True

    def __init__(self, model: Transformer, args: Namespace) -> None:
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in units_of(model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        # The last call joins the units into one model. It does not send rank 0's weights, as DDP
        # does: all ranks must have made the same. The optimizer is made after it, of the parts.
        super().__init__(fully_shard(model, mesh=mesh), args)


class TorchFSDPZero2(TorchFSDP):
    """Leaves it to `fully_shard`, and keeps what forward has gathered until backward is over."""

    reshard_after_forward = False


def units_of(model: Transformer) -> list[nn.Module]:
    """Return the modules that are whole at a time; each parameter belongs to one of them."""
    return [model.embedding, *model.blocks, model.norm, model.head]


WAYS = {"replicas": Each, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3,
        "fsdp": TorchFSDP, "fsdp_zero2": TorchFSDPZero2}
TWINS = {"zero2": "fsdp_zero2", "zero3": "fsdp"}  # of a way, torch's own


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/zero", __doc__, WAYS, TWINS)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    sharded = {*args.ways} <= {"zero3", "fsdp"}
    results.require_room(args, copies=1 if sharded else args.world_size)
    data_parallel.require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
