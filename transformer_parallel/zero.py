r"""ZeRO: data parallelism that splits what would be the same on every rank.

For P bytes of weights, AdamW also needs P bytes of gradients and 2 P of moments. With N ranks:

    --ways      weights    gradients    moments     sent in a step, in units of P (N-1)/N
    replicas    P          P            2 P         2: all-reduce = reduce-scatter + all-gather
    zero1       P          P            2 P / N     2: reduce-scatter of gradients, all-gather of
                                                       the weights that each rank updated
    zero2       P          P / N        2 P / N     2: the same, during the backward pass, which
                                                       waits
    zero3       P / N      P / N        2 P / N     3: all-gather of weights in forward, and again
                                                       in backward; reduce-scatter of gradients
    fsdp        PyTorch's fully_shard (FSDP2), which works like zero3
    fsdp_zero2  the same with reshard_after_forward=False: no second all-gather. It sends as much
                as zero2, and holds the full weights from forward to backward only

`zero3` holds the weights of a block only while the block computes:

    forward    gather 0, compute, free | gather 1, compute, free | ...
    backward   ... | gather 1, compute, scatter gradients, free | gather 0, ...

`train` of main.py calls, in each step, the methods of the classes `Zero1`, `Zero2` and `Zero3`:

    forward_backward     forward and backward; zero2 and zero3 work in their hooks
    finish_gradients     zero1 scatters the gradients
    optimizer.step       each rank updates its shards
    after_step           zero1 and zero2 gather the updated weights

    python transformer_parallel/zero.py                 on four ranks
    python transformer_parallel/zero.py --builtin       and PyTorch's built-in versions
    python transformer_parallel/zero.py --ways zero3
    python transformer_parallel/zero.py --check         compare with a single process

Source: Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054, sections 5 and 7.
"""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator

from common.cli import Parser
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Each, Way, Weights
from transformer_parallel.model import Transformer, unit_of


class Unit:
    """The parameters of a module as one long vector; this rank updates one shard of it.

    Attributes:
        whole: Weights of all ranks, padded so that all shards have the same length. The module's
            parameters are views of it.
        part: This rank's shard, a parameter for the optimizer. It is a view of `whole`.
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
        """Return the shard of each rank, as views of `whole`."""
        return self.whole.chunk(self.size)

    def pieces(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a vector in the shapes of the parameters."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return [piece.view_as(parameter) for piece, parameter in
                zip(vector[: sum(sizes)].split(sizes), self.parameters, strict=True)]

    def scatter_gradients(self) -> None:
        """Reduce-scatter the gradients: each rank keeps the mean for its shard, nothing else."""
        gradients = torch.zeros_like(self.whole)
        for parameter, piece in zip(self.parameters, self.pieces(gradients), strict=True):
            piece.copy_(parameter.grad)
            parameter.grad = None
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter(self.part.grad, list(gradients.chunk(self.size)))
        self.part.grad /= self.size

    def gather_weights(self) -> None:
        """Gather the shards of all ranks."""
        dist.all_gather(list(self.parts()), self.part.detach())


class ShardedUnit(Unit):
    """A unit that holds `whole` only between `gather_weights` and `free`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.bytes = self.whole.nbytes
        self.part = nn.Parameter(self.part.detach().clone())
        self.free()

    def gather_weights(self) -> None:
        """Gather the shards of all ranks into the same storage as before: autograd looks there."""
        self.whole.untyped_storage().resize_(self.bytes)
        super().gather_weights()

    def free(self) -> None:
        """Free the memory of `whole`."""
        self.whole.untyped_storage().resize_(0)


class Zero1(Way):
    """A sharded optimizer: each rank updates one shard of the weights."""

    make_unit = Unit

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.modules = units_of(model)
        self.units = [self.make_unit(module) for module in self.modules]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's shards."""
        return (unit.part for unit in self.units)

    def finish_gradients(self) -> None:
        """Reduce-scatter the gradients after the backward pass."""
        require_gradients(sum(parameter.grad is None for unit in self.units
                              for parameter in unit.parameters))
        for unit in self.units:
            unit.scatter_gradients()

    def after_step(self) -> None:
        """Gather the shards that the other ranks updated."""
        for unit in self.units:
            unit.part.grad = None
            unit.gather_weights()


class Zero2(Zero1):
    """Sharded gradients, too: a unit scatters them as soon as they are all computed.

    The backward pass waits for each unit, so this saves memory, not time.
    """

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.missing = [len(unit.parameters) for unit in self.units]
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.one_is_there(number))

    def one_is_there(self, number: int) -> None:
        """Count a gradient of a unit; autograd calls this hook. The last gradient completes it."""
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.complete(self.units[number])

    def complete(self, unit: Unit) -> None:
        """Reduce-scatter a unit's gradients once all of them are computed."""
        unit.scatter_gradients()

    def finish_gradients(self) -> None:
        """Require that the backward pass has scattered every unit, and count from the start."""
        require_gradients(sum(self.missing))
        self.missing = [len(unit.parameters) for unit in self.units]


class Zero3(Zero2):
    """Sharded weights, too: a unit holds its full weights while it computes.

    FSDP gathers the next unit meanwhile; here each rank waits for every unit.
    """

    make_unit = ShardedUnit

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        for module, unit in zip(self.modules, self.units, strict=True):
            module.register_forward_pre_hook(lambda *_, unit=unit: unit.gather_weights())
            module.register_forward_hook(
                lambda module, inputs, output, unit=unit: self.forward_is_over(unit, output))

    def forward_is_over(self, unit: ShardedUnit, output: torch.Tensor) -> None:
        """Free a unit's weights until the backward pass reaches the unit's output."""
        unit.free()
        output.register_hook(lambda gradient: unit.gather_weights())

    def complete(self, unit: ShardedUnit) -> None:
        """Reduce-scatter a unit's gradients, and free its weights.

        The last gradient of a unit belongs to its first layer. After it, backward needs no weight
        of the unit.
        """
        unit.scatter_gradients()
        unit.free()

    def after_step(self) -> None:
        """Drop the gradients; the next forward pass gathers the weights it needs."""
        for unit in self.units:
            unit.part.grad = None


class TorchFSDP(Way):
    """PyTorch's `fully_shard`, which splits each parameter along its first dimension."""

    reshard_after_forward = True

    def __init__(self, model: Transformer, args: Namespace) -> None:
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in units_of(model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        # The last call joins the units into one model. DDP sends rank 0's weights to all ranks;
        # `fully_shard` does not, so all ranks must have made the same weights. The optimizer is
        # made after it, from the shards.
        super().__init__(fully_shard(model, mesh=mesh), args)


class TorchFSDPZero2(TorchFSDP):
    """`fully_shard` that keeps weights from the forward pass until the backward pass is over."""

    reshard_after_forward = False


def units_of(model: Transformer) -> list[nn.Module]:
    """Return the modules that gather their weights at once; each parameter belongs to one."""
    return [model.embedding, *model.blocks, model.norm, model.head]


def require_gradients(missing: int) -> None:
    """Require a gradient for every parameter: a unit is updated as a whole or not at all.

    Args:
        missing: Number of parameters without a gradient.

    Raises:
        RuntimeError: Some parameters do not take part in the loss.
    """
    if missing:
        raise RuntimeError(f"{missing} parameters got no gradient in this step: ZeRO needs every "
                           "parameter to take part in the loss")


WAYS = {"replicas": Each, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3,
        "fsdp": TorchFSDP, "fsdp_zero2": TorchFSDPZero2}
BUILTIN = {"zero2": "fsdp_zero2", "zero3": "fsdp"}  # {variant: PyTorch's built-in version of it}


def costs_of_stage(stage: int) -> Callable[..., dict]:
    """Return what derives the costs of a ZeRO stage; see `costs_of_each` of main.py."""
    def costs(args: Namespace, n: int, weights: Weights) -> dict:
        item, units = next(iter(weights.values())).itemsize, Counter()
        for name, weight in weights.items():
            units[unit_of(name)] += weight.nbytes
        # Padded, so that all shards have the same length.
        shards = [item * math.ceil(unit / item / n) for unit in units.values()]
        shard, full, gathers = sum(shards), sum(units.values()), 2 if stage == 3 else 1
        # Backward reaches the last unit first; the units after it have scattered their gradients.
        peaks = [unit + sum(shards[number + 1:]) for number, unit in enumerate(units.values())]
        return {"calls": {"all_gather": gathers * len(units), "reduce_scatter": len(units)},
                "bytes sent": (1 + gathers) * shard * (n - 1),
                "weights held": shard if stage == 3 else n * shard,
                "weights held at most": shard + n * max(shards) if stage == 3 else n * shard,
                "gradients held": full if stage == 1 else shard,
                "gradients held at most": full if stage == 1 else max(peaks),
                "state held": 2 * shard}
    return costs


COSTS = {"replicas": data_parallel.costs_of_each,
         **{f"zero{stage}": costs_of_stage(stage) for stage in (1, 2, 3)}}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/zero", __doc__, WAYS, BUILTIN)


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    sharded = {*args.ways} <= {"zero3", "fsdp"}
    results.require_room(args, copies=1 if sharded else args.world_size)
    data_parallel.require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
