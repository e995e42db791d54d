"""Report of a run of `main.py`: metrics.json, loss.png and the summary line."""

import time
from argparse import Namespace

from common import picture, report

import torch
import torch.distributed as dist
from torch import nn

from ddp_rpc_hybrid.data import BATCHES

WORDS = {
    "en": {"title": "DDP and RPC in one model: {trainers} trainers, one table of {rows:,} rows",
           "x": "epoch", "y": "loss (nats)", "y2": "accuracy (%)", "loss": "training loss",
           "accuracy": "accuracy on new batches", "chance": "guessing among {classes} classes"},
    "ja": {"title": "DDPとRPCを組み合わせたモデル：トレーナー{trainers}つ、{rows:,}行のテーブル1つ",
           "x": "エポック", "y": "損失（ナット）", "y2": "正解率（%）", "loss": "訓練の損失",
           "accuracy": "新しいバッチでの正解率", "chance": "{classes}クラスから当て推量した場合"},
}


class History:
    """Losses, accuracies, bytes and seconds of one trainer's steps.

    Args:
        role: Name of the trainer.
        args: Parsed flags.
        show: Whether this trainer prints the epochs; one trainer is enough.
    """

    def __init__(self, role: str, args: Namespace, show: bool) -> None:
        self.role, self.show, self.dim = role, show, args.embedding_dim
        self.epochs, self.train_s, self.n_bytes = [], 0.0, 0
        self.bar = report.progress(args.epochs, "epoch", show=show, role=role)

    def begin_epoch(self) -> None:
        """Start the clock after the batches have been made."""
        self.steps, self.started = [], time.perf_counter()

    def add(self, loss: torch.Tensor, output: torch.Tensor, target: torch.Tensor,
            indices: torch.Tensor) -> None:
        """Record a step.

        Args:
            loss: Loss before the step, shape ().
            output, target: Scores (bags, classes) and right classes (bags,).
            indices: Indices of all bags, shape (n,).

        Raises:
            NotFiniteError: if the loss is infinite or not a number.
        """
        at = f"at step {len(self.steps) + 1} of epoch {len(self.epochs) + 1}"
        right = (output.argmax(dim=1) == target).sum().item()
        self.steps.append((report.require_finite(loss, at), right, len(target)))
        self.n_bytes += self.bytes_of_step(indices, len(target))

    def bytes_of_step(self, indices: torch.Tensor, bags: int) -> float:
        """Return the bytes that a step sends over RPC: indices, offsets, sums, their gradients."""
        of_bag = 2 * self.dim * torch.get_default_dtype().itemsize
        return (len(indices) + bags) * indices.itemsize + bags * of_bag

    def end_epoch(self) -> None:
        """Stop the clock, and print the line of every tenth epoch."""
        self.train_s += time.perf_counter() - self.started
        losses, guessed, bags = zip(*self.steps, strict=True)
        self.epochs.append({"loss": sum(losses) / len(losses),
                            "accuracy": sum(guessed) / sum(bags)})
        if self.show and len(self.epochs) % 10 == 0:
            line = "epoch {:3}  loss {loss:.3f}  accuracy {accuracy:.0%}"
            report.log(self.role, line.format(len(self.epochs), **self.epochs[-1]))
        self.bar.update()

    def metrics(self) -> dict:
        """Return `epochs`, `steps_per_s` and `bytes_per_step`, the mean of `bytes_of_step`."""
        self.bar.close()
        steps = len(self.epochs) * BATCHES
        return {"epochs": self.epochs, "steps_per_s": report.per_second(steps, self.train_s),
                "bytes_per_step": self.n_bytes / steps}


def of_trainer(history: History, model: nn.Module, table_gradient_bytes: int) -> dict:
    """Return the metrics of one trainer.

    Args:
        history: Steps of this trainer.
        model: Model whose parameters on this trainer are those of the dense part.
        table_gradient_bytes: Size of the table's gradient in the last batch.
    """
    metrics = history.metrics()
    metrics["bytes_per_step"] += all_reduce_bytes(model)
    return {**metrics, "table_gradient_bytes": table_gradient_bytes}


def all_reduce_bytes(dense: nn.Module) -> float:
    """Return the bytes that a trainer sends per step to average the dense gradients in a ring."""
    n_trainers = dist.get_world_size()
    return 2 * (n_trainers - 1) / n_trainers * sum(param.nbytes for param in dense.parameters())


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; if it is sparse, the bytes of its values and indices."""
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def over_trainers(trainers: list[dict]) -> dict:
    """Return means over the trainers' results (`of_trainer`)."""
    epochs = [{key: sum(epoch[key] for epoch in same) / len(same) for key in ("loss", "accuracy")}
              for same in zip(*(trainer["epochs"] for trainer in trainers), strict=True)]
    means = {key: sum(trainer[key] for trainer in trainers) / len(trainers)
             for key in ("steps_per_s", "bytes_per_step", "table_gradient_bytes")}
    return {"epochs": epochs, **means}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw loss.png, print the summary line; return the complete metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args, WORDS, args.world_size - 2)
    trainers = "1 trainer" if args.world_size == 3 else f"{args.world_size - 2} trainers"
    print(f"{trainers}: {summary(metrics, args)}")
    return metrics


def summary(metrics: dict, args: Namespace) -> str:
    """Return the summary line without the number of trainers."""
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    return (f"loss {first['loss']:.2f} -> {last['loss']:.2f}, "
            f"accuracy {first['accuracy']:.0%} -> {last['accuracy']:.0%} "
            f"(chance {1 / args.num_classes:.0%}) | {metrics['steps_per_s']:.0f} steps/s per "
            f"trainer, {metrics['bytes_per_step'] / 1000:.1f} kB a step")


def plot(metrics: dict, args: Namespace, texts: dict[str, dict[str, str]], trainers: int) -> None:
    """Draw loss.png: loss and accuracy per epoch."""
    epochs = range(1, 1 + len(metrics["epochs"]))
    losses, accuracies = ([epoch[key] for epoch in metrics["epochs"]]
                          for key in ("loss", "accuracy"))
    for (upper, lower), words in picture.in_each_language(
            args.output_dir / "loss.png", texts, metrics, panels=2, height=5.5,
            trainers=trainers, rows=args.num_embeddings, classes=args.num_classes):
        upper.plot(epochs, losses, ".-", color="C0", label=words["loss"])
        upper.set_ylim(bottom=0)
        lower.plot(epochs, [100 * share for share in accuracies], ".-", color="C2",
                   label=words["accuracy"])
        lower.axhline(100 / args.num_classes, color="0.4", linestyle="--", label=words["chance"])
        lower.set_ylim(0, 105)
