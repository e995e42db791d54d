r"""Two kinds of parallelism at once, on a mesh of ranks; and a checkpoint that changes the mesh.

A matrix product that is split too often is too small, and its sums go through the network. A batch
has only so many rows to split. So large training runs do both. The ranks form a grid:

                  a row shares one copy of the model, and reads the same part of the batch
                  +---------------+---------------+
                  | rank 0        | rank 1        |    the first half of the batch
    a column has  +---------------+---------------+
    the same part | rank 2        | rank 3        |    the second half
    of the model  +---------------+---------------+

tensor_parallel.py sends often, after each pair of layers. That traffic stays inside a row: the
ranks of one machine. main.py sends once in a step. That traffic goes along a column, from machine
to machine, and carries the gradients of this rank's part only.

    --ways           the model                        the batch
    data             full on each rank                a part for each rank
    tensor           each layer split over all ranks  full on each rank
    pipeline         a stage on each rank             full on each rank, in micro-batches
    data_tensor      each layer split in a row        a part for each row: the gradients are
    data_pipeline    a stage on each rank of a row       averaged along the columns
    torch            parallelize_module in a row, fully_shard in a column: no weight is held twice
    moved            the same; halfway it saves, and continues with all ranks in one column

A checkpoint of `torch.distributed.checkpoint` (DCP) records which rectangle of each DTensor each
rank had. The ranks that load it ask for other rectangles, and their number may differ. Each rank
reads files of other ranks, so on several machines `moved` needs a shared folder.

    python transformer_parallel/mesh.py                            on 2 x 2 ranks
    python transformer_parallel/mesh.py --builtin                  and PyTorch's built-in version
    python transformer_parallel/mesh.py --world_size 6 --row 3 --blocks 6
    python transformer_parallel/mesh.py --check                    compare with a single process

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
from transformer_parallel import pipeline, results, tensor_parallel
from transformer_parallel.main import Each, Way, Weights, bytes_of
from transformer_parallel.model import Transformer
from transformer_parallel.pipeline import OneFOneB
from transformer_parallel.tensor_parallel import TensorParallel, TorchTensorParallel, cut_by_torch

CHECKPOINT = "mesh.moved"  # folder in --output_dir while a run changes its mesh


class Grid(Way):
    """Data parallelism between the rows of a mesh; another class runs the ranks of a row.

    `Grid` is the first base class, as in `DataTensor`. There `super()` is the other class, and
    `part` and `finish_gradients` are the methods below.
    """

    def __init__(self, model: Transformer, args: Namespace) -> None:
        mesh = mesh_of(model, args.row)
        self.column = mesh.get_group("column")  # the ranks of this rank's column, in order
        super().__init__(model, args, mesh.get_group("row"))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch that this row of ranks reads."""
        return whole.chunk(dist.get_world_size(self.column))[dist.get_rank(self.column)]

    def finish_gradients(self) -> None:
        """Average over the ranks that have the same part of the model and read other rows."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.column)
            parameter.grad /= dist.get_world_size(self.column)


class DataTensor(Grid, TensorParallel):
    """Tensor parallelism in a row, data parallelism along a column."""


class DataPipeline(Grid, OneFOneB):
    """A pipeline in a row, data parallelism along a column."""


class TorchMesh(TorchTensorParallel):
    """PyTorch's built-in versions of both."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.mesh = mesh_of(model, args.row)
        Way.__init__(self, cut_twice(model, self.mesh), args)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of the batch that this row of ranks reads."""
        return whole.chunk(self.mesh["column"].size())[self.mesh["column"].get_local_rank()]


class Moved(TorchMesh):
    """A run that saves halfway, and continues on another mesh as if it had been started again."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.args, self.steps_made = args, 0
        super().__init__(model, args)

    def after_step(self) -> None:
        """Change the mesh halfway through the steps."""
        self.steps_made += 1
        if self.steps_made == self.args.steps // 2:
            self.move()

    def move(self) -> None:
        """Save; make a new model and a new optimizer on another mesh; load.

        Raises:
            NotSavedError: Rank 0 wrote its files to a folder that this rank cannot read.
        """
        folder = self.args.output_dir / CHECKPOINT
        checkpoint.save(self.state(), checkpoint_id=folder)
        if not (folder / ".metadata").exists():  # which rank 0 has written
            raise NotSavedError(f"finds no checkpoint of rank 0 in {folder}: --ways moved "
                                "needs an --output_dir that all machines share")
        device = next(self.model.parameters()).device
        model = Transformer(self.args.shape).to(device)  # with other weights
        self.mesh = mesh_of(model, row=1)
        self.model = cut_twice(model, self.mesh)
        self.optimizer = optim.AdamW(self.parameters(), lr=self.args.lr)
        state = self.state()  # tells which rectangle each rank needs
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        dist.barrier()  # all ranks have read the files: load() does not promise that
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    def state(self) -> dict[str, dict]:
        """Return the weights and the optimizer's state, as DTensors by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


WAYS = {"data": Each, "tensor": TensorParallel, "pipeline": OneFOneB, "data_tensor": DataTensor,
        "data_pipeline": DataPipeline, "torch": TorchMesh, "moved": Moved}
BUILTIN = {"data_tensor": "torch"}  # {variant: PyTorch's built-in version of it}


def mesh_of(model: Transformer, row: int) -> DeviceMesh:
    """Lay out the ranks with `row` neighbors in a row, as in the diagram above."""
    device = next(model.parameters()).device
    return init_device_mesh(device.type, (dist.get_world_size() // row, row),
                            mesh_dim_names=("column", "row"))


def cut_twice(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Split layers over the ranks of a row, and then each rank's part over its column."""
    model = cut_by_torch(model, mesh["row"], Replicate())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["column"])
    return fully_shard(model, mesh=mesh["column"])


def costs_of_tensor(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs of `data_tensor`: those of a row, and averages along the columns."""
    rows = n // args.row
    costs = tensor_parallel.costs(of_row(args, rows), args.row, weights)
    return {**costs, "calls": {"all_reduce": costs["calls"]["all_reduce"] + len(weights)},
            "bytes sent": costs["bytes sent"] + 2 * costs["gradients held"] * (rows - 1) / rows}


def costs_of_pipeline(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs of `data_pipeline`: those of a row, and averages along the columns."""
    rows = n // args.row
    costs = pipeline.COSTS["1f1b"](of_row(args, rows), args.row, weights)
    for rank, mine in enumerate(pipeline.weights_of_stages(args, args.row, weights)):
        costs["bytes sent"][rank] += 2 * bytes_of(mine) * (rows - 1) / rows
        costs["calls"][rank]["all_reduce"] = len(mine)
    return {what: of_ranks * rows for what, of_ranks in costs.items()}


def of_row(args: Namespace, rows: int) -> Namespace:
    """Return the flags of one row of ranks, with its part of the batch."""
    return Namespace(**{**vars(args), "batch_size": args.batch_size // rows})


COSTS = {"data": data_parallel.costs_of_each, "tensor": tensor_parallel.costs,
         "pipeline": pipeline.COSTS["1f1b"], "data_tensor": costs_of_tensor,
         "data_pipeline": costs_of_pipeline}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/mesh", __doc__, WAYS, BUILTIN)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--row", type=count, default=2, metavar="N",
        help="ranks of a row, which share one copy of the model")
    add("--micro_batches", type=count, default=4, metavar="N",
        help="micro-batches of a pipeline: pieces of the rows that it reads")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
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
        refuse(f"--batch_size {args.batch_size} must be a multiple of {parts} {what}: all parts "
               "must have the same number of rows")
    in_a_row = {"data_tensor", "torch", "moved"} & {*args.ways}
    cuts = args.world_size if "tensor" in args.ways else args.row if in_a_row else 1
    for what, number in (("heads", args.shape.heads), ("characters", args.shape.vocabulary)):
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
                   f"batch that {stages} ranks of --ways {way} read")
    try:
        return run_program(run_worker, args, role_name, results.finish)
    finally:  # if a rank ended while the mesh changed
        if "moved" in args.ways and starts_rank(args, 0):
            shutil.rmtree(args.output_dir / CHECKPOINT, ignore_errors=True)


if __name__ == "__main__":
    main()
