"""What a run reports: metrics, the picture, the line of numbers."""

import time
from argparse import Namespace

from common import picture, report

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc

from ddp_rpc_hybrid.data import BATCHES

WORDS = {
    "en": {"title": "DDP and RPC in one model: {trainers} trainers, one table of {rows:,} rows",
           "x": "epoch", "y": "loss (nats)", "y2": "accuracy (%)", "loss": "training loss",
           "accuracy": "accuracy on new batches", "chance": "guessing among {classes} classes"},
    "ja": {"title": "DDPとRPCを組み合わせたモデル：トレーナー{trainers}個、{rows:,}行のテーブル1つ",
           "x": "エポック", "y": "損失（ナット）", "y2": "正解率（%）", "loss": "訓練の損失",
           "accuracy": "新しいバッチでの正解率", "chance": "{classes}クラスから当て推量した場合"},
}


class History:
    """Records the steps of one trainer, and how long they take.

    Args:
        role: of the trainer.
        args: the parsed flags.
        show: whether to print the epochs; one trainer is enough.
    """

    def __init__(self, role: str, args: Namespace, show: bool) -> None:
        self.role, self.show, self.dim = role, show, args.embedding_dim
        self.epochs, self.train_s, self.n_bytes = [], 0.0, 0
        self.bar = report.progress(args.epochs, "epoch", show=show, role=role)

    def begin_epoch(self) -> None:
        """Start the clock; the batches are there."""
        self.steps, self.started = [], time.perf_counter()

    def add(self, loss: torch.Tensor, output: torch.Tensor, target: torch.Tensor,
            indices: torch.Tensor) -> None:
        """Record a step.

        Args:
            loss: before the step.
            output, target: the scores (bags, classes) that it came from, and the classes (bags,).
            indices: of all bags.
        """
        at = f"at step {len(self.steps) + 1} of epoch {len(self.epochs) + 1}"
        right = (output.argmax(dim=1) == target).sum().item()
        self.steps.append((report.require_finite(loss, at), right, len(target)))
        self.n_bytes += self.bytes_of_step(indices, len(target))

    def bytes_of_step(self, indices: torch.Tensor, bags: int) -> float:
        """Count what a step sends over RPC: indices, offsets; the bags' sums and their gradient."""
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
        return {"epochs": self.epochs, "steps_per_s": steps / self.train_s,
                "bytes_per_step": self.n_bytes / steps}


def of_trainer(history: History, model: nn.Module, criterion: nn.Module,
               batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict:
    """Return the metrics of one trainer.

    Args:
        history: of its steps.
        model, criterion: for one more backward pass on `batch`, without a step: how large is the
            table's gradient?
    """
    metrics = history.metrics()
    metrics["bytes_per_step"] += all_reduce_bytes(model)
    return {**metrics, "table_gradient_bytes": table_gradient_bytes(model, criterion, batch)}


def all_reduce_bytes(dense: nn.Module) -> float:
    """Return what a trainer sends in a step for the gradients of the dense part, in a ring."""
    n_trainers = dist.get_world_size()
    return 2 * (n_trainers - 1) / n_trainers * sum(param.nbytes for param in dense.parameters())


def table_gradient_bytes(model: nn.Module, criterion: nn.Module,
                         batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int:
    """Make one backward pass; return how large the gradient is that it makes on the server."""
    indices, offsets, target = batch
    with dist_autograd.context() as context_id:
        output = model(indices, offsets)
        dist_autograd.backward(context_id, [criterion(output, target.to(output.device))])
        return rpc.rpc_sync(model.emb_rref.owner(), _gradient_bytes,
                            args=(model.emb_rref, context_id))


def _gradient_bytes(emb_rref: rpc.RRef, context_id: int) -> int:
    """Return how large the gradient of the table is in a context, on the server."""
    return bytes_here(dist_autograd.get_gradients(context_id)[emb_rref.local_value().weight])


def bytes_here(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on this rank; of a sparse one, those of its entries."""
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def over_trainers(trainers: list[dict]) -> dict:
    """Return the means over what `of_trainer` gave on each trainer."""
    epochs = [{key: sum(epoch[key] for epoch in same) / len(same) for key in ("loss", "accuracy")}
              for same in zip(*(trainer["epochs"] for trainer in trainers), strict=True)]
    means = {key: sum(trainer[key] for trainer in trainers) / len(trainers)
             for key in ("steps_per_s", "bytes_per_step", "table_gradient_bytes")}
    return {"epochs": epochs, **means}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw `loss.png`, print the line of numbers; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot([metrics], args)
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    trainers = "1 trainer" if args.world_size == 3 else f"{args.world_size - 2} trainers"
    print(f"{trainers}: loss {first['loss']:.2f} -> {last['loss']:.2f}, "
          f"accuracy {first['accuracy']:.0%} -> {last['accuracy']:.0%} "
          f"(chance {1 / args.num_classes:.0%}) | {metrics['steps_per_s']:.0f} steps/s per "
          f"trainer, {metrics['bytes_per_step'] / 1000:.1f} kB a step")
    return metrics


def plot(runs: list[dict], args: Namespace, texts: dict[str, dict[str, str]] = WORDS,
         trainers: int | None = None) -> None:
    """Draw `loss.png`: loss and accuracy per epoch, from the metrics of one or several runs."""
    path, values = args.output_dir / "loss.png", {
        "trainers": trainers or args.world_size - 2, "rows": args.num_embeddings,
        "classes": args.num_classes}
    for (upper, lower), words in picture.in_each_language(path, texts, runs, panels=2, height=5.5,
                                                          **values):
        losses, accuracies = ([[epoch[key] for epoch in run["epochs"]] for run in runs]
                              for key in ("loss", "accuracy"))
        numbers = range(1, 1 + len(losses[0]))
        picture.line(upper, numbers, losses, ".-", color="C0", label=words["loss"])
        upper.set_ylim(bottom=0)
        picture.line(lower, numbers, [[100 * share for share in run] for run in accuracies], ".-",
                     color="C2", label=words["accuracy"])
        lower.axhline(100 / args.num_classes, color="0.4", linestyle="--", label=words["chance"])
        lower.set_ylim(0, 105)
