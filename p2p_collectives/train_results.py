"""What `train.py` and its variants show: the accuracy, a line for each epoch, the numbers."""

import time
from argparse import Namespace

import torch
import torch.distributed as dist
from common import report
from torch import nn
from torch.utils.data import TensorDataset


class Clock:
    """Counts the seconds that are spent inside of it, and how many times it was entered."""

    def __init__(self) -> None:
        self.seconds, self.laps = 0.0, 0

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self.started
        self.laps += 1


def accuracy(net: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Compute the share of the test images that the network, without dropout, recognizes."""
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    net.eval()
    with torch.inference_mode():
        guesses = torch.cat([net(batch).argmax(1) for batch in images.split(500)])
    net.train()
    return (guesses == labels).double().mean().item()


def losses_of_ranks(loss: float, world_size: int, device: torch.device) -> dict:
    """Gather the losses of all ranks in an epoch: `loss`, which is their mean, `loss_per_rank`."""
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(world_size)]
    dist.all_gather(losses, torch.tensor(loss, dtype=torch.float64, device=device))
    losses = torch.stack(losses)
    return {"loss": losses.mean().item(), "loss_per_rank": losses.tolist()}


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


def log_epoch(epochs: list[dict]) -> None:
    """Print the line of the last epoch."""
    per_rank = " ".join(f"{loss:.3f}" for loss in epochs[-1]["loss_per_rank"])
    report.log("rank0", f"epoch {len(epochs):2}  test accuracy {epochs[-1]['accuracy']:.1%}  "
                        f"loss of each rank {per_rank}")


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print the line of numbers; return the whole metrics."""
    samples, train_s = metrics.pop("samples"), metrics.pop("train_s")
    metrics["samples_per_s"] = samples / train_s if samples else None
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if samples else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} "
          f"epochs on {args.world_size} ranks: {speed}, weights bitwise identical")
    return metrics
