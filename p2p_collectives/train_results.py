"""What `train.py` and its variants show: the accuracy, a line for each epoch, the numbers."""

import time
from argparse import Namespace

from common import report

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


class History:
    """Keeps what is reported of a training: losses and accuracy of its epochs, samples, time.

    Args:
        n_samples: of this rank, in an epoch.
        global_batches: samples of all ranks in each step of an epoch.
        epochs: what is known of those before a checkpoint.
        args: the parsed flags.
    """

    def __init__(self, n_samples: int, global_batches: list[int], epochs: list[dict],
                 args: Namespace) -> None:
        self.n_samples, self.global_batches, self.epochs = n_samples, global_batches, epochs
        self.rank, self.samples, self.train_s = dist.get_rank(), 0, 0.0
        n_steps = len(global_batches)  # in an epoch
        self.bar = report.progress(args.epochs * n_steps, "step", len(epochs) * n_steps,
                                   show=self.rank == 0, role="rank0")

    def begin_epoch(self) -> None:
        """Begin to count the time of an epoch."""
        self.loss, self.began = 0.0, time.perf_counter()

    def add(self, loss: torch.Tensor, n: int) -> None:
        """Add a step that has just ended, with the mean loss of its `n` samples on this rank.

        Raises:
            NotFiniteError: if the loss is not a number any more.
        """
        loss = report.require_finite(loss, f"in epoch {len(self.epochs) + 1}")
        self.loss += loss * n / self.n_samples
        self.ended = time.perf_counter()
        self.bar.update()

    def end_epoch(self, net: nn.Module, test_set: TensorDataset, device: torch.device) -> None:
        """Gather the losses of all ranks; rank 0 takes the accuracy, and prints a line."""
        self.samples += sum(self.global_batches)
        self.train_s += self.ended - self.began  # without what follows
        losses = [torch.zeros((), dtype=torch.float64, device=device)
                  for _ in range(dist.get_world_size())]
        dist.all_gather(losses, torch.tensor(self.loss, dtype=torch.float64, device=device))
        losses = torch.stack(losses)
        epoch = {"loss": losses.mean().item(), "loss_per_rank": losses.tolist()}
        self.epochs.append(epoch)
        if self.rank == 0:  # one is enough: the others wait in their next collective
            epoch["accuracy"] = accuracy(net, test_set, device)
            per_rank = " ".join(f"{loss:.3f}" for loss in epoch["loss_per_rank"])
            report.log("rank0", f"epoch {len(self.epochs):2}  test accuracy "
                                f"{epoch['accuracy']:.1%}  loss of each rank {per_rank}")

    def metrics(self) -> dict:
        """End the bar; return what `finish` takes, complete on rank 0."""
        self.bar.close()
        return {"epochs": self.epochs, "test_accuracy": self.epochs[-1].get("accuracy"),
                "samples": self.samples, "train_s": self.train_s}


def accuracy(net: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Compute the share of the test images that the network, without dropout, recognizes."""
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    net.eval()
    with torch.inference_mode():
        guesses = torch.cat([net(batch).argmax(1) for batch in images.split(500)])
    net.train()
    return (guesses == labels).double().mean().item()


def require_equal_weights(net: nn.Module) -> None:
    """Require bitwise identical weights on all ranks.

    Raises:
        ArithmeticError: if they differ.
        NotFiniteError: if they are not finite any more.
    """
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    if not weights.isfinite().all():
        raise report.NotFiniteError("has weights that are not finite after the last step: training "
                                    "has diverged; give a smaller --lr")
    rank0s = weights.clone()
    dist.broadcast(rank0s, src=0)
    equal = torch.tensor(float(torch.equal(weights, rank0s)), device=weights.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # 1 only if it is 1 everywhere
    if not equal:
        raise ArithmeticError("the replicas have drifted apart")


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print the line of numbers; return the whole metrics."""
    samples, train_s = metrics.pop("samples"), metrics.pop("train_s")
    metrics["samples_per_s"] = samples / train_s if samples else None
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if samples else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} "
          f"epochs on {args.world_size} ranks: {speed}, weights bitwise identical")
    return metrics
