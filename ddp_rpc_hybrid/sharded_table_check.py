"""The oracle of sharded_table.py: every number of every step, held against one process.

That process has the whole table. It takes the gradients of all trainers' losses on the same
weights, adds up those of the table, averages those of the dense part, and makes one step.

The program trains in its own processes on a table that the trainers cannot divide evenly, and on
one of which the last trainer owns nothing, with dense and with sparse gradients; in the first epoch
all rows that are looked up are the first trainer's. PyTorch's hooks see what a step reads, computes
and changes, a dispatch mode what each collective sends. All in float64.
"""

import copy
import math
import time
from argparse import Namespace
from collections.abc import Callable
from statistics import fmean
from types import ModuleType
from typing import Any

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Recorder, copies, named_gradients, named_weights

import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_rpc_hybrid import sharded_table as lesson
from ddp_rpc_hybrid import sharded_table_results as results
from ddp_rpc_hybrid.check import (
    batches_of,
    epochs_of,
    forward_and_backward,
    hold_speed,
    sums_of,
    teacher_of,
)

EPOCHS = 2
LOCAL_EPOCH = 0  # in it, only rows of the first part are looked up: the other owners add up nothing
BATCHES_S = 0.3  # added to the making of an epoch's batches: no part of the training's time
MOST_ROWS = 1000  # of the table in a check: all of it is kept after each step
SMALLEST_TABLE = "no rows on the last rank"
NOT_COUNTED = "broadcast_"  # with which DDP orders its buckets anew, once
TOLERANCE = 1e-9
WHY = "float64, whose sums may come in another order"
COMPARED = (  # of each step: what, the tolerance, and why
    ("indices", 0.0, "batches of its own for each trainer and epoch"),
    ("offsets", 0.0, "where the bags begin"),
    ("target", 0.0, "the teacher's classes"),
    ("asked", 0.0, "every index comes to the owner of its row, once"),
    ("sums", TOLERANCE, WHY),
    ("loss", TOLERANCE, WHY),
    ("dense gradient", TOLERANCE, "float64; DDP averages over the trainers"),
    ("table gradient", TOLERANCE, "float64; the sum over the trainers, of the rows of each owner"),
    ("dense", TOLERANCE, "weights after the step"),
    ("table", TOLERANCE, "rows of each owner after the step"),
    ("sent", TOLERANCE, "bytes to other ranks, counted from indices and bags"),
)


# --- one process


def single_process(args: Namespace) -> tuple[list[dict], list[list[dict]], list[tuple[dict, ...]]]:
    """Train as all trainers together should have done.

    Args:
        args: the flags of one training.

    Returns:
        For each rank what it should have at first, and its steps, as `Seen` has them; for each step
        of all the bags: the trainers' `forward_and_backward`.
    """
    ranks, part = range(args.world_size), rows_each(args)
    torch.manual_seed(args.seed)
    table = nn.init.normal_(torch.empty(args.num_embeddings, args.embedding_dim))
    torch.manual_seed(args.seed)
    dense = nn.Linear(args.embedding_dim, args.num_classes)
    owned = [slice(rank * part, (rank + 1) * part) for rank in ranks]
    classes_of, steps, alone = teacher_of(args), [[] for _ in ranks], []
    first = [{"table": table[rows].clone(), "dense": copy.deepcopy(dense.state_dict())}
             for rows in owned]
    for epoch in range(args.epochs):
        drawn_from = part if epoch == LOCAL_EPOCH else args.num_embeddings
        drawing = Namespace(**{**vars(args), "num_embeddings": drawn_from})
        of_trainers = (batches_of(rank, epoch, drawing) for rank in ranks)
        for batches in zip(*of_trainers, strict=True):
            of_all, of_dense = zip(*(
                forward_and_backward(dense, bags, sums_of(bags, table), classes_of(bags))
                for bags in batches), strict=True)
            total = torch.zeros_like(table)
            for step in of_all:
                total[step["table gradient"]["rows"]] += step["table gradient"]["entries"]
            table -= args.lr * total
            average = {name: sum(gradient[name] for gradient in of_dense) / args.world_size
                       for name in ("weight", "bias")}
            with torch.no_grad():
                for name, param in dense.named_parameters():
                    param -= args.lr * average[name]
            for rank, rows in enumerate(owned):
                steps[rank].append({
                    **of_all[rank], "sums": of_all[rank]["lookup"], "asked": asked_of(rows, of_all),
                    "dense gradient": average, "table gradient": total[rows].clone(),
                    "dense": copy.deepcopy(dense.state_dict()), "table": table[rows].clone(),
                    "sent": messages_of(rank, of_all, args)})
            alone.append(of_all)
    return first, steps, alone


def rows_each(args: Namespace) -> int:
    """Return how many rows an owner has, if so many are left: their share, rounded up."""
    return math.ceil(args.num_embeddings / args.world_size)


def asked_of(rows: slice, of_all: tuple[dict, ...]) -> torch.Tensor:
    """Return which of an owner's rows all trainers look up, sorted, as often as in the bags."""
    indices = torch.cat([step["indices"] for step in of_all])
    return indices[(indices >= rows.start) & (indices < rows.stop)].sort().values


def messages_of(rank: int, of_all: tuple[dict, ...], args: Namespace) -> dict[str, float]:
    """Count the bytes that a rank should send to the others in a step, by collective.

    An integer or a number of float64 has 8 bytes. What all ranks have alike goes round in rings.
    """
    n, dim = args.world_size, args.embedding_dim
    n_bags = [len(step["offsets"]) for step in of_all]
    dense = args.num_classes * (dim + 1)
    owners = of_all[rank]["indices"] // rows_each(args)
    counts, questions = 2 * (n - 1), 2 * (owners != rank).sum().item()
    answers, gradients = (sum(n_bags) - n_bags[rank]) * dim, (n - 1) * n_bags[rank] * dim
    return {"alltoall_base_": 8 * (counts + questions + answers + gradients),
            "allreduce_": 8 * 2 * (n - 1) / n * dense}


# --- recorded


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program once for each of `trainings_of`, recorded; return the findings on rank 0."""
    torch.set_default_dtype(torch.float64)
    seen = Seen(rank, world_size)
    with Recorder() as recorder:
        recorder.on_forward(seen.before_module, seen.after_module)
        recorder.on_step(after=seen.after_step)
        everyone = recorder.gather_at_end(lambda: seen.trainings)

        @recorder.around(lesson, "train")
        def train_all(original, rank, world_size, args):
            metrics = {}
            for training, flags in trainings_of(args).items():
                seen.begin(training, flags)
                torch.manual_seed(rank)  # nothing may depend on what was drawn before
                with seen.messages:
                    metrics[training] = original(rank, world_size, flags)
            return metrics

        @recorder.around(lesson, "get_next_batch")
        def some_batches(original, rank, epoch, teacher, args):
            time.sleep(BATCHES_S)
            if epoch == LOCAL_EPOCH:
                args = Namespace(**{**vars(args), "num_embeddings": rows_each(args)})
            return original(rank, epoch, teacher, args)

        @recorder.around(results, "over_trainers")
        def over_trainers(original, trainers):
            return {training: original([of_one[training] for of_one in trainers])
                    for training in trainers[0]}

        reported = lesson.run_worker(rank, world_size, args)
    return compare(reported, everyone, args) if rank == 0 else None


def trainings_of(args: Namespace) -> dict[str, Namespace]:
    """Return the flags of the trainings of a check, by name.

    In each table, the last part is shorter than the others; in the smallest, it is empty.
    """
    n = args.world_size
    uneven = max(2, args.num_embeddings // n + 1) * n - 1
    trainings = {}
    for table, rows in (("", uneven), (f", {SMALLEST_TABLE}", max(1, n - 1))):
        for gradient, sparse in (("", False), (" sparse", True)):
            trainings[f"all_to_all{gradient}{table}"] = {"sparse": sparse, "num_embeddings": rows}
    return {name: Namespace(**{**vars(args), **flags}) for name, flags in trainings.items()}


class Messages(TorchDispatchMode):
    """Adds up what this rank sends to the others, by collective: `sent`."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.sent = rank, world_size, {}

    def __torch_dispatch__(self, func: Callable, types: tuple[type, ...], args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name != NOT_COUNTED:
            self.sent[name] = self.sent.get(name, 0) + self.bytes_to_others(name, args)
        return func(*args, **(kwargs or {}))

    def bytes_to_others(self, name: str, args: tuple) -> float:
        """Count those of one collective: pieces of their own size, or what a ring sends."""
        others = self.world_size - 1
        if name == "allreduce_":
            return 2 * others / self.world_size * args[0][0].nbytes
        if name == "alltoall_base_":
            of_entry = args[1].itemsize * args[1].shape[1:].numel()
            return (sum(args[4]) - args[4][self.rank]) * of_entry
        return float("nan")


class Seen:
    """Keeps of each training the `first` weights, and a dict for each of its `steps`.

    indices, offsets, target: the batch.
    sums, loss: those of the bags; a number.
    asked: the rows that this owner has added up, as numbers of the whole table.
    dense gradient, dense: after backward(), and after the step.
    table gradient, table: the same, of the rows that this rank owns.
    sent: the bytes to other ranks, by collective.
    span: when the forward began and the step ended, in seconds.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.trainings = rank, {}
        self.messages = Messages(rank, world_size)

    def begin(self, training: str, flags: Namespace) -> None:
        """Keep from now on what is seen as this training's."""
        self.first_row, self.steps = self.rank * rows_each(flags), []
        self.now = self.trainings[training] = {"steps": self.steps, "first": {}}

    def before_module(self, module: nn.Module, inputs: tuple) -> None:
        """Begin a step with the model's forward."""
        if isinstance(module, lesson.ShardedModel):
            self.model, self.messages.sent = module, {}
            [self.dense] = [part for part in module.modules() if isinstance(part, nn.Linear)]
            self.now["first"] = self.now["first"] or self.weights()
            self.steps.append(dict(zip(("indices", "offsets"), copies(inputs), strict=True)))
            self.started = time.perf_counter()

    def after_module(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep what a part of the model has computed, or the loss."""
        if isinstance(module, nn.EmbeddingBag):
            self.steps[-1]["asked"] = (inputs[0] + self.first_row).cpu().sort().values
        elif isinstance(module, nn.Linear):
            self.steps[-1]["sums"] = copies(inputs)[0]
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": copies(inputs)[1], "loss": output.item()}

    def after_step(self, _: optim.Optimizer) -> None:
        """Keep the gradients of a step, and what it has changed and sent."""
        step, [rows] = self.steps[-1], self.model.table.parameters()
        step["span"] = self.started, time.perf_counter()
        step |= {"sent": dict(self.messages.sent), **self.weights()}
        step["dense gradient"] = named_gradients(self.dense)
        [step["table gradient"]] = copies([rows.grad.to_dense()])

    def weights(self) -> dict:
        """Copy the rows that this rank owns, and the dense part."""
        [rows] = copies(self.model.table.parameters())
        return {"table": rows, "dense": named_weights(self.dense)}


# --- compared


def compare(reported: dict[str, dict], everyone: list[dict], args: Namespace) -> dict:
    """Hold what all ranks have recorded, by training, against one process; return the findings."""
    findings = Comparison(f"{args.world_size} processes")
    for training, flags in trainings_of(args).items():
        of_ranks = [of_rank[training] for of_rank in everyone]
        first, steps, alone = single_process(flags)
        ours = [of_rank["steps"] for of_rank in of_ranks]
        rows = [of_rank["first"].get("table", []) for of_rank in of_ranks]
        findings.equal(f"{training}, first weights", [of_rank["first"] for of_rank in of_ranks],
                       first, "each row is on one rank, and the dense part on all", "rank")
        findings.holds(f"{training}, owners", sum(map(len, rows)) == flags.num_embeddings,
                       f"{' + '.join(str(len(part)) for part in rows)} rows of "
                       f"{flags.num_embeddings}, each with one owner")
        for name, tolerance, because in COMPARED:
            findings.close(f"{training}, {name}", by_rank(ours, name), by_rank(steps, name),
                           tolerance, because)
        replicas = by_rank(ours, "dense")
        findings.equal(f"{training}, replicas of the dense part", replicas,
                       [dict.fromkeys(step, step["rank 0"]) for step in replicas],
                       "DDP gives the same gradients to all")
        hold_reported(findings, training, reported[training], alone, steps, flags)
        hold_speed(findings, reported[training], of_ranks,
                   f"{training}, reported steps per second")
    return findings.as_dict()


def hold_reported(findings: Comparison, training: str, metrics: dict,
                  alone: list[tuple[dict, ...]], steps: list[list[dict]], args: Namespace) -> None:
    """Hold the metrics of a training against what one process has counted."""
    findings.close(f"{training}, reported loss and accuracy", metrics["epochs"], epochs_of(alone),
                   TOLERANCE, WHY, "epoch")
    part, row = rows_each(args), 8 * args.embedding_dim
    last = max(len(of_rank[-1]["asked"]) for of_rank in steps)
    expected = {"bytes_per_step": fmean(sum(step["sent"].values())
                                        for of_rank in steps for step in of_rank),
                "table_bytes": part * row,
                "table_gradient_bytes": last * (row + 8) if args.sparse else part * row}
    for key, number in expected.items():
        findings.close(f"{training}, reported {key}", [metrics[key]], [number], TOLERANCE,
                       "counted from indices, bags and rows", "run")


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.epochs, args.num_embeddings = EPOCHS, min(args.num_embeddings, MOST_ROWS)
    return verdict(launch(record, args, lesson.role_name))
