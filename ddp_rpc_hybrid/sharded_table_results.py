"""What a run of `sharded_table.py` reports: metrics, the picture, the line of numbers."""

from argparse import Namespace

from common import report

import torch
from torch import nn

from ddp_rpc_hybrid import results as hybrid
from ddp_rpc_hybrid.results import all_reduce_bytes, bytes_here

WORDS = {
    "en": {**hybrid.WORDS["en"],
           "title": "A table of {rows:,} rows, spread over {trainers} trainers"},
    "ja": {**hybrid.WORDS["ja"], "title": "{rows:,}行のテーブルを{trainers}個のトレーナーに分割"},
}
PER_RANK = ("table_bytes", "table_gradient_bytes")


class History(hybrid.History):
    """Records the steps of one trainer.

    Args:
        role, rank: of the trainer.
        table: which it asks.
        args: the parsed flags.
    """

    def __init__(self, role: str, rank: int, table: nn.Module, args: Namespace) -> None:
        super().__init__(role, args, show=rank == 0)
        self.rank, self.table = rank, table

    def bytes_of_step(self, indices: torch.Tensor, bags: int) -> float:
        """Count what a step sends, there and back, but for DDP's all_reduce.

        What a trainer asks itself does not travel.
        """
        others, integer = self.table.world_size - 1, indices.itemsize
        of_row = self.dim * torch.get_default_dtype().itemsize
        asked = (indices // self.table.part != self.rank).sum().item()
        # Two counts for each owner, a row and a bag for each question; sums, their gradients.
        return integer * 2 * (others + asked) + 2 * others * bags * of_row


def of_trainer(history: History, model: nn.Module) -> dict:
    """Return the metrics of one trainer.

    Args:
        history: of its steps.
        model: after the last step.
    """
    metrics = history.metrics()
    metrics["bytes_per_step"] += all_reduce_bytes(model.fc)
    [rows] = model.table.parameters()
    return {**metrics, "table_bytes": bytes_here(rows.detach()),
            "table_gradient_bytes": bytes_here(rows.grad)}


def over_trainers(trainers: list[dict]) -> dict:
    """Return means over what `of_trainer` gave on each trainer; of the table, the largest part."""
    largest = {key: max(trainer[key] for trainer in trainers) for key in PER_RANK}
    return {**hybrid.over_trainers(trainers), **largest}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw `loss.png`, print the line of numbers; return the whole metrics."""
    device = "cpu" if metrics["backend"] == "gloo" else None
    metrics = report.save_metrics(args, metrics, metrics["backend"], device)
    plot([metrics], args)
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    trainers = "1 trainer" if args.world_size == 1 else f"{args.world_size} trainers"
    print(f"{trainers}, all_to_all: loss {first['loss']:.2f} -> {last['loss']:.2f}, "
          f"accuracy {first['accuracy']:.0%} -> {last['accuracy']:.0%} "
          f"(chance {1 / args.num_classes:.0%}) | {metrics['steps_per_s']:.0f} steps/s per "
          f"trainer, {metrics['bytes_per_step'] / 1000:.1f} kB a step, "
          f"{metrics['table_bytes'] / 1000:,.1f} kB of the table each")
    return metrics


def plot(runs: list[dict], args: Namespace) -> None:
    """Draw `loss.png`: loss and accuracy per epoch, from the metrics of one or several runs."""
    hybrid.plot(runs, args, WORDS, args.world_size)
