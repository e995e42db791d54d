"""Output of `train.py` and its variants: the progress, a line per epoch, the summary line."""

from argparse import Namespace

from common import report

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


class Progress:
    """Progress of a training run, and its time.

    Args:
        epochs: Results of the epochs so far, to which the program adds.
        global_batches: Samples of all ranks in each step of an epoch.
        args: The parsed flags.
    """

    def __init__(self, epochs: list[dict], global_batches: list[int], args: Namespace) -> None:
        self.epochs, self.global_batches, self.first = epochs, global_batches, len(epochs)
        n_steps = len(global_batches)
        self.clock = report.Clock()  # without evaluation and checkpoints
        self.bar = report.progress(args.epochs * n_steps, "step", self.first * n_steps,
                                   show=dist.get_rank() == 0, role="rank0")

    def step(self, loss: torch.Tensor) -> float:
        """Count a step, and return its loss as a number.

        Raises:
            NotFiniteError: if the loss is not finite any more.
        """
        self.bar.update()
        return report.require_finite(loss, f"in epoch {len(self.epochs) + 1}")

    def metrics(self) -> dict:
        """Close the progress bar; return the arguments of `finish`, complete on rank 0."""
        self.bar.close()
        trained = len(self.epochs) - self.first
        return {"epochs": self.epochs, "test_accuracy": self.epochs[-1].get("accuracy"),
                "samples": trained * sum(self.global_batches), "train_s": self.clock.seconds}


def show_epoch(epochs: list[dict]) -> None:
    """Print the results of the last epoch."""
    per_rank = " ".join(f"{loss:.3f}" for loss in epochs[-1]["loss_per_rank"])
    report.log("rank0", f"epoch {len(epochs):2}  test accuracy {epochs[-1]['accuracy']:.1%}  "
                        f"loss of each rank {per_rank}")


def accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Compute the fraction of test images that the model recognizes, without dropout."""
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    model.eval()
    with torch.inference_mode():
        guesses = torch.cat([model(batch).argmax(1) for batch in images.split(500)])
    model.train()
    return (guesses == labels).double().mean().item()


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print the summary line; return the complete metrics."""
    samples, train_s = metrics.pop("samples"), metrics.pop("train_s")
    metrics["samples_per_s"] = report.per_second(samples, train_s)
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if samples else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} "
          f"epoch{'s' if args.epochs != 1 else ''} on {args.world_size} "
          f"rank{'s' if args.world_size != 1 else ''}: {speed}, weights bitwise identical")
    return metrics
