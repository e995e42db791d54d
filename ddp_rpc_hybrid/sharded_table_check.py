"""The oracle of `sharded_table.py`: every step of a short training, compared with one process.

The single process is that of `main.py`, with the full table. Each rank's part of the table is
compared with its rows. Flags decide what is checked: with `--world_size 3`, `--num_embeddings 100`
makes unequal parts, and with `--num_embeddings 2` the last rank owns no row.
"""

import math
from argparse import Namespace
from statistics import fmean
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Recorder, copies, named_gradients, named_weights

import torch
import torch.distributed as dist
from torch import nn

from ddp_rpc_hybrid import sharded_table as lesson
from ddp_rpc_hybrid.check import EPOCHS, MOST_ROWS, TOLERANCE, WHY, epochs_of
from ddp_rpc_hybrid.check import single_process as one_training


def single_process(args: Namespace) -> tuple[list[dict], list[list[dict]]]:
    """Train as main.py's oracle does; divide what belongs to an owner.

    Returns:
        For each rank the first weights, "table" and "dense"; for each rank its steps, dicts like
        those of `record`, and "correct": the number of right guesses.
    """
    first, steps = one_training(args, args.world_size)
    part = rows_each(args)
    owned = [slice(rank * part, (rank + 1) * part) for rank in range(args.world_size)]
    for of_all in zip(*steps, strict=True):
        indices = torch.cat([step["indices"] for step in of_all])
        gradient = sum(step["table gradient"] for step in of_all)
        for rank, (step, rows) in enumerate(zip(of_all, owned, strict=True)):
            step |= {"asked": indices[indices // part == rank].sort().values,
                     "table gradient": gradient[rows], "table": step["table"][rows]}
    return [{**first, "table": first["table"][rows]} for rows in owned], steps


def rows_each(args: Namespace) -> int:
    """Return the number of rows of an owner, except the last owners: their share, rounded up."""
    return math.ceil(args.num_embeddings / args.world_size)


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0, None elsewhere.

    Each step is a dict. indices, offsets, target: the batch. asked: the rows that this owner has
    added up, by their numbers in the full table. sums, loss: of this rank's bags. dense gradient,
    dense, table gradient, table: before and after the step, of this rank's rows. sent: the bytes to
    other ranks in all_to_alls.
    """
    torch.set_default_dtype(torch.float64)
    parts, first, steps = {}, {}, []

    def weights():
        [rows] = copies(parts["table"].parameters())
        return {"table": rows, "dense": named_weights(parts["dense"])}

    def before_module(module, inputs):
        if isinstance(module, lesson.ShardedModel):
            if not first:
                [dense] = [part for part in module.modules() if isinstance(part, nn.Linear)]
                parts.update(table=module.table, dense=dense)
                first.update(weights())
            [indices, offsets] = copies(inputs)
            steps.append({"indices": indices, "offsets": offsets, "sent": 0})

    def after_module(module, inputs, output):
        if isinstance(module, nn.EmbeddingBag):
            asked = copies(inputs)[0] + rank * rows_each(args)
            steps[-1]["asked"] = asked.sort().values
        elif isinstance(module, nn.Linear):
            steps[-1]["lookup"] = copies(inputs)[0]
        elif isinstance(module, nn.CrossEntropyLoss):
            steps[-1] |= {"target": copies(inputs)[1], "loss": output.item()}

    def after_step(_):
        [rows] = parts["table"].parameters()
        [gradient] = copies([rows.grad.to_dense()])
        steps[-1] |= {**weights(), "table gradient": gradient,
                      "dense gradient": named_gradients(parts["dense"])}

    with Recorder() as recorder:
        recorder.on_forward(before_module, after_module)
        recorder.on_step(after=after_step)
        everyone = recorder.gather_at_end(lambda: {"first": first, "steps": steps})

        @recorder.around(dist, "all_to_all_single")
        def all_to_all_single(original, received, tensor, receive, send):
            entries = len(tensor) - send[rank]
            steps[-1]["sent"] += entries * tensor.itemsize * tensor.shape[1:].numel()
            return original(received, tensor, receive, send)

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def compare(metrics: dict, everyone: list[dict], args: Namespace) -> dict:
    """Return the findings about `everyone`, the records of all ranks, and about the metrics."""
    findings = Comparison(f"{args.world_size} processes")
    ours, (first, steps) = [of_rank["steps"] for of_rank in everyone], single_process(args)
    findings.equal("first weights", [of_rank["first"] for of_rank in everyone], first,
                   "each row is on one rank, and the dense part on all ranks", "rank")
    for what, key, tolerance, because in (
            ("indices", "indices", 0.0, "each trainer and epoch has its own batches"),
            ("offsets", "offsets", 0.0, "where the bags begin"),
            ("target", "target", 0.0, "the teacher's classes"),
            ("asked", "asked", 0.0, "every index reaches the owner of its row, once"),
            ("sums", "lookup", TOLERANCE, WHY),
            ("loss", "loss", TOLERANCE, WHY),
            ("dense gradient", "dense gradient", TOLERANCE,
             "float64; DDP averages over the trainers"),
            ("table gradient", "table gradient", TOLERANCE,
             "float64; the sum over the trainers, on the owner of each row"),
            ("dense", "dense", TOLERANCE, WHY),
            ("table", "table", TOLERANCE, WHY)):
        findings.close(what, by_rank(ours, key), by_rank(steps, key), tolerance, because)
    findings.close("reported loss and accuracy", metrics["epochs"], epochs_of(steps), TOLERANCE,
                   WHY, "epoch")
    n, row = args.world_size, 8 * args.embedding_dim
    all_reduced = 2 * (n - 1) / n * 8 * args.num_classes * (args.embedding_dim + 1)
    asked = max(len(of_rank[-1]["asked"]) for of_rank in steps)
    expected = {
        "bytes_per_step": all_reduced + fmean(step["sent"] for of_rank in ours
                                              for step in of_rank),
        "table_bytes": rows_each(args) * row,  # of the memory, which a view would share
        "table_gradient_bytes": asked * (row + 8) if args.sparse else rows_each(args) * row}
    for key, number in expected.items():
        findings.close(f"reported {key}", [metrics[key]], [number], TOLERANCE,
                       "counted in the all_to_alls, or from the rows", "run")
    return findings.as_dict()


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process."""
    args.epochs, args.num_embeddings = EPOCHS, min(args.num_embeddings, MOST_ROWS)
    return verdict(launch(record, args, lesson.role_name))
