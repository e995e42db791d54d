"""What `sharded_table.py --check` records of its trainings: the lesson's own, in its own processes.

Each way of exchange trains on tables whose parts are not alike. PyTorch's hooks see what a step
reads, computes and leaves behind; a dispatch mode sees what each collective sends. All in float64.
"""

import time
from argparse import Namespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_rpc_hybrid import sharded_table as lesson
from ddp_rpc_hybrid import sharded_table_results as results

LOCAL_EPOCH = 0  # in it, only rows of the first part are looked up: the other owners add up nothing
BATCHES_S = 0.3  # added to the making of an epoch's batches: no part of the training's time
SMALLEST_TABLE = "no rows on the last rank"
# Beside a wait and a wrapper: by a broadcast, DDP orders its buckets anew, once.
NOT_COUNTED = ("wait_tensor", "_wrap_tensor_autograd", "broadcast_")


def trainings_of(args):
    """`{name: flags}` of the trainings of a check.

    In each table, the last part is shorter than the others; in the smallest, it is empty.
    """
    n = args.world_size
    uneven = max(2, args.num_embeddings // n + 1) * n - 1
    trainings = {"dtensor": {"exchange": "dtensor", "sparse": False, "num_embeddings": uneven}}
    for table, rows in (("", uneven), (f", {SMALLEST_TABLE}", max(1, n - 1))):
        for gradient, sparse in (("", False), (" sparse", True)):
            trainings[f"all_to_all{gradient}{table}"] = {
                "exchange": "all_to_all", "sparse": sparse, "num_embeddings": rows}
    return {name: Namespace(**{**vars(args), **flags}) for name, flags in trainings.items()}


def part_of(args):
    """How many rows a rank owns, unless there are fewer left."""
    return -(-args.num_embeddings // args.world_size)


class Messages(TorchDispatchMode):
    """Adds up what this rank sends to the others, by collective: `sent`."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size, self.sent = rank, world_size, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # first it must say what it does
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in NOT_COUNTED:
            self.sent[name] = self.sent.get(name, 0) + self.bytes_to_others(name, args)
        return func(*args, **(kwargs or {}))

    def bytes_to_others(self, name, args):
        """Those of one collective: pieces of their own size, or what a ring sends."""
        others = self.world_size - 1
        if name == "allreduce_":
            return 2 * others / self.world_size * args[0][0].nbytes
        if name == "alltoall_base_":
            of_entry = args[1].itemsize * args[1].shape[1:].numel()
            return (sum(args[4]) - args[4][self.rank]) * of_entry
        if name == "allgather_":
            return others * args[1][0].nbytes
        if name == "all_gather_into_tensor":
            return others * args[0].nbytes
        if name == "reduce_scatter_tensor":
            return others / self.world_size * args[0].nbytes
        return float("nan")


class Recorder:
    """Keeps of each training the `first` weights, and a dict for each of its `steps`.

    indices, offsets, target: the batch.
    sums, loss: those of the bags; a number.
    asked: of all_to_all, the rows that this owner has added up, as numbers of the whole table.
    dense gradient, dense: after backward(), and after the step.
    table gradient, table: the same, of the rows that this rank owns.
    sent: the bytes to other ranks, by collective.
    span: when the forward began and the step ended, in seconds.
    """

    def __init__(self, rank, world_size):
        self.rank, self.trainings = rank, {}
        self.messages = Messages(rank, world_size)

    def begin(self, training, flags):
        """From now on, this training runs."""
        self.first_row, self.steps = self.rank * part_of(flags), []
        self.now = self.trainings[training] = {"steps": self.steps, "first": {}}

    def before_module(self, module, inputs):
        """Before the forward of a step."""
        if isinstance(module, lesson.ShardedModel):
            self.model, self.messages.sent = module, {}
            [self.dense] = [part for part in module.modules() if isinstance(part, nn.Linear)]
            self.now["first"] = self.now["first"] or self.weights()
            indices, offsets = (tensor.cpu().clone() for tensor in inputs)
            self.steps.append({"indices": indices, "offsets": offsets})
            self.started = time.perf_counter()

    def after_module(self, module, inputs, output):
        """After the forward of a part of the model, or of the loss."""
        if isinstance(module, nn.EmbeddingBag):
            self.steps[-1]["asked"] = (inputs[0] + self.first_row).cpu().sort().values
        elif isinstance(module, nn.Linear):
            self.steps[-1]["sums"] = inputs[0].detach().cpu().clone()
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": inputs[1].cpu().clone(), "loss": output.item()}

    def after_step(self, *_):
        """What the step has left behind."""
        step, [rows] = self.steps[-1], self.model.table.parameters()
        step["span"] = self.started, time.perf_counter()
        step |= {"sent": dict(self.messages.sent), **self.weights()}
        step["dense gradient"] = {name: param.grad.cpu().clone() for name, param
                                  in self.dense.named_parameters()}
        gradient = rows.grad
        if hasattr(gradient, "to_local"):  # DTensor's has all rows of the table, on all ranks
            gradient = gradient.to_local()[self.first_row :][: len(step["table"])]
        step["table gradient"] = gradient.to_dense().cpu().clone()

    def weights(self):
        """Copies on the CPU: of the rows that this rank owns, and of the dense part."""
        [rows] = self.model.table.parameters()
        rows = rows.to_local() if hasattr(rows, "to_local") else rows
        return {"table": rows.detach().cpu().clone(),
                "dense": {name: param.detach().cpu().clone() for name, param
                          in self.dense.named_parameters()}}


def record_trainings(rank, world_size, args):
    """Run the lesson with a recorder, once for each of `trainings_of`.

    Returns:
        On rank 0 `{training: metrics}`, as the lesson reports them, and for each rank its
        `Recorder.trainings`; None and nothing of use elsewhere.
    """
    torch.set_default_dtype(torch.float64)
    recorder, everyone = Recorder(rank, world_size), [None] * world_size
    honest_train, honest_batches = lesson.train, lesson.get_next_batch
    honest_over_trainers = results.over_trainers

    def train_all(rank, world_size, args):
        metrics = {}
        for training, flags in trainings_of(args).items():
            recorder.begin(training, flags)
            torch.manual_seed(rank)  # nothing may depend on what was drawn before
            with recorder.messages:
                metrics[training] = honest_train(rank, world_size, flags)
        dist.all_gather_object(everyone, recorder.trainings)
        return metrics

    def over_trainers(trainers):
        return {training: honest_over_trainers([of_one[training] for of_one in trainers])
                for training in trainers[0]}

    def some_batches(rank, epoch, teacher, args):
        time.sleep(BATCHES_S)
        if epoch == LOCAL_EPOCH:
            args = Namespace(**{**vars(args), "num_embeddings": part_of(args)})
        return honest_batches(rank, epoch, teacher, args)

    hooks = [register_module_forward_pre_hook(recorder.before_module),
             register_module_forward_hook(recorder.after_module),
             register_optimizer_step_post_hook(recorder.after_step)]
    with (mock.patch.object(lesson, "train", train_all),
          mock.patch.object(lesson, "get_next_batch", some_batches),
          mock.patch.object(results, "over_trainers", over_trainers)):
        metrics = lesson.run_worker(rank, world_size, args)
    for hook in hooks:
        hook.remove()
    return metrics, everyone
