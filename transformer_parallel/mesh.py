r"""Two kinds of parallelism at once, on a mesh of ranks; and a checkpoint that changes the mesh.

A matrix product that is cut too often is too small, and its sums go through the network; a batch
can only be cut into so many rows. So large trainings do both. The ranks are laid out as a grid:

                  a row has the model once, in parts, and sees the same part of the batch
                  +---------------+---------------+
                  | rank 0        | rank 1        |    the first half of the batch
    a column has  +---------------+---------------+
    the same part | rank 2        | rank 3        |    the second half
    of the model  +---------------+---------------+

What tensor_parallel.py sends often, after each pair of layers, stays inside of a row: ranks of one
machine. What main.py sends, once in a step, goes along the columns, from machine to machine, and is
only this rank's part of the gradients.

    --ways           the model                        the batch
    data             whole on each rank               a part for each rank
    tensor           each layer cut for all ranks     whole on each rank
    pipeline         the list of layers cut for all   whole on each rank, in pieces
    data_tensor      each layer cut in a row          a part for each row: the gradients are
    data_pipeline    the list of layers cut in a row      averaged along the columns
    torch            parallelize_module in a row, fully_shard in a column, where no part is twice
    moved            the same; half way it saves, and goes on with all ranks in one column

A checkpoint of `torch.distributed.checkpoint` (DCP) knows of each DTensor which rectangle of the
whole each rank had. Whoever loads it asks for other rectangles, on as many ranks as there are then.
Each reads what others have written: on several machines, `moved` needs a folder that all share.

    python transformer_parallel/mesh.py                            on 2 x 2 ranks
    python transformer_parallel/mesh.py --twin                     torch's own beside them
    python transformer_parallel/mesh.py --world_size 6 --row 3 --blocks 6
    python transformer_parallel/mesh.py --check                    the same numbers as one process?

Real code: torchtitan, https://github.com/pytorch/torchtitan. Source: Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", https://arxiv.org/abs/2104.04473.
"""

import shutil
from argparse import Namespace

from common.checkpoint import NotSavedError
from common.cli import Parser, bounded, refuse, starts_rank
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Each, Way
from transformer_parallel.model import Shape, Transformer
from transformer_parallel.pipeline import OneFOneB
from transformer_parallel.tensor_parallel import TensorParallel, TorchTensorParallel, cut_by_torch

CHECKPOINT = "mesh.moved"  # the folder in --output_dir, while a training moves


class Grid(Way):
    """Leaves to another class what the ranks of a row do; the rows have parts of the batch.

    It stands in front of that class, as in `DataTensor`: there `super()` is the other one, and
    `part` and `finish_gradients` are these.
    """

    def __init__(self, model: Transformer, args: Namespace) -> None:
        mesh = mesh_of(model, args.row)
        self.column = mesh.get_group("column")  # the ranks of this one's column, in their order
        super().__init__(model, args, mesh.get_group("row"))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the batch's rows that this row of ranks sees."""
        return whole.chunk(dist.get_world_size(self.column))[dist.get_rank(self.column)]

    def finish_gradients(self) -> None:
        """Average over the ranks that have the same part of the model, and saw other rows."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.column)
            parameter.grad /= dist.get_world_size(self.column)


class DataTensor(Grid, TensorParallel):
    """Cuts each layer for the ranks of a row."""


class DataPipeline(Grid, OneFOneB):
    """Gives the ranks of a row a stage each."""


class TorchMesh(TorchTensorParallel):
    """Leaves both to torch."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.mesh = mesh_of(model, args.row)
        Way.__init__(self, cut_twice(model, self.mesh), args)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the batch's rows that this row of ranks sees."""
        return whole.chunk(self.mesh["column"].size())[self.mesh["column"].get_local_rank()]


class Moved(TorchMesh):
    """Saves half way, and goes on as if it had been started anew, on another mesh."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.args, self.steps_made = args, 0
        super().__init__(model, args)

    def after_step(self) -> None:
        """Move, once: half way."""
        self.steps_made += 1
        if self.steps_made == self.args.steps // 2:
            self.move()

    def move(self) -> None:
        """Save; make the model and the optimizer anew, on another mesh; load."""
        folder = self.args.output_dir / CHECKPOINT
        checkpoint.save(self.state(), checkpoint_id=folder)
        if not (folder / ".metadata").exists():  # which rank 0 has written
            raise NotSavedError(f"finds no checkpoint of rank 0 in {folder}: --ways moved "
                                "needs an --output_dir that all machines share")
        device = next(self.model.parameters()).device
        model = Transformer(Shape(blocks=self.args.blocks)).to(device)  # of other weights
        self.mesh = mesh_of(model, row=1)
        self.model = cut_twice(model, self.mesh)
        self.optimizer = optim.AdamW(self.parameters(), lr=self.args.lr)
        state = self.state()  # which rectangle of what goes where
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        dist.barrier()  # all have read it: load() ends with a gathering, but promises none
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    def state(self) -> dict[str, dict]:
        """Return the weights and the optimizer's state: DTensors by their names."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


WAYS = {"data": Each, "tensor": TensorParallel, "pipeline": OneFOneB, "data_tensor": DataTensor,
        "data_pipeline": DataPipeline, "torch": TorchMesh, "moved": Moved}
TWINS = {"data_tensor": "torch"}  # of a way, torch's own


def mesh_of(model: Transformer, row: int) -> DeviceMesh:
    """Lay out the ranks, so many in a row: neighbours, as in the chart."""
    device = next(model.parameters()).device
    return init_device_mesh(device.type, (dist.get_world_size() // row, row),
                            mesh_dim_names=("column", "row"))


def cut_twice(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Cut layers for the ranks of a row, and what each then has for those of its column."""
    model = cut_by_torch(model, mesh["row"], Replicate())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["column"])
    return fully_shard(model, mesh=mesh["column"])


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/mesh", __doc__, WAYS, TWINS)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--row", type=count, default=2, metavar="N", help="ranks that have the model once")
    add("--micro_batches", type=count, default=4, metavar="N",
        help="pieces of the batch that ranks of a pipeline see")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    if args.world_size % args.row:
        refuse(f"--row {args.row} must divide the {args.world_size} ranks")
    results.require_room(
        args, copies=args.world_size if "data" in args.ways else args.world_size // args.row)
    ways = {*args.ways}
    parts = (args.world_size if {"data", "moved"} & ways else
             args.world_size // args.row if {"data_tensor", "data_pipeline", "torch"} & ways else 1)
    if args.batch_size % parts:
        what = "ranks" if parts == args.world_size else "rows of ranks"
        refuse(f"--batch_size {args.batch_size} must be a multiple of {parts} {what}: every part "
               "has as many rows")
    in_a_row = {"data_tensor", "torch", "moved"} & {*args.ways}
    cuts = args.world_size if "tensor" in args.ways else args.row if in_a_row else 1
    shape = Shape()
    for what, number in (("heads", shape.heads), ("characters", shape.vocabulary)):
        if number % cuts:
            refuse(f"{cuts} ranks that share each layer must divide the model's {number} {what}: "
                   "see --world_size and --row")
    for way, stages in (("pipeline", args.world_size), ("data_pipeline", args.row)):
        rows = args.batch_size * stages // args.world_size
        if way in args.ways and args.blocks < stages:
            refuse(f"--blocks {args.blocks} must be at least {stages}: one for each stage of "
                   f"--ways {way}")
        if way in args.ways and rows % args.micro_batches:
            refuse(f"--micro_batches {args.micro_batches} must divide the {rows} rows of the "
                   f"batch that {stages} ranks of --ways {way} see")
    try:
        return run_program(run_worker, args, role_name, results.finish)
    finally:  # of ranks that have ended while they moved
        if "moved" in args.ways and starts_rank(args, 0):
            shutil.rmtree(args.output_dir / CHECKPOINT, ignore_errors=True)


if __name__ == "__main__":
    main()
