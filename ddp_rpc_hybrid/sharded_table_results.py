"""Report of a run of `sharded_table.py`: metrics.json, loss.png and the summary line."""

from argparse import Namespace

from common import report

import torch
from torch import nn

from ddp_rpc_hybrid import results as hybrid

WORDS = {
    "en": {**hybrid.WORDS["en"],
           "title": "A table of {rows:,} rows, spread over {trainers} trainers"},
    "ja": {**hybrid.WORDS["ja"], "title": "{rows:,}行のテーブルをトレーナー{trainers}つに分割"},
}


class History(hybrid.History):
    """Losses, accuracies, bytes and seconds of one trainer's steps.

    Args:
        role, rank: Name and rank of the trainer.
        table: Table that the trainer looks rows up in.
        args: Parsed flags.
    """

    def __init__(self, role: str, rank: int, table: nn.Module, args: Namespace) -> None:
        super().__init__(role, args, show=rank == 0)
        self.rank, self.table = rank, table

    def bytes_of_step(self, indices: torch.Tensor, bags: int) -> float:
        """Return the bytes that the all_to_alls of a step send to other ranks, there and back."""
        others, integer = self.table.world_size - 1, indices.itemsize
        of_row = self.dim * torch.get_default_dtype().itemsize
        asked = (indices // self.table.part != self.rank).sum().item()  # of other owners
        # Two counts for each owner; a row and a bag for each question; sums and their gradients.
        return integer * 2 * (others + asked) + 2 * others * bags * of_row


def of_trainer(history: History, model: nn.Module) -> dict:
    """Return the metrics of one trainer, after the last step of its model."""
    metrics = history.metrics()
    metrics["bytes_per_step"] += hybrid.all_reduce_bytes(model.fc)
    [rows] = model.table.parameters()
    return {**metrics, "table_bytes": rows.untyped_storage().nbytes(),
            "table_gradient_bytes": hybrid.bytes_of(rows.grad)}


def over_trainers(trainers: list[dict]) -> dict:
    """Return means over the trainers; for the table and its gradient, the largest part."""
    largest = {key: max(trainer[key] for trainer in trainers)
               for key in ("table_bytes", "table_gradient_bytes")}
    return {**hybrid.over_trainers(trainers), **largest}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw loss.png, print the summary line; return the complete metrics."""
    device = "cpu" if metrics["backend"] == "gloo" else None
    metrics = report.save_metrics(args, metrics, metrics["backend"], device)
    hybrid.plot(metrics, args, WORDS, args.world_size)
    trainers = "1 trainer" if args.world_size == 1 else f"{args.world_size} trainers"
    print(f"{trainers}, all_to_all: {hybrid.summary(metrics, args)}, "
          f"{metrics['table_bytes'] / 1000:,.1f} kB of the table each")
    return metrics
