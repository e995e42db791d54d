"""What `train.py` and its variants show: the accuracy, a line for each epoch, the last line."""

import time

import torch
import torch.distributed as dist
from common import report

# What a timeline shows (common/tracing.py); DDP's all_reduce is inside of its backward.
SPANS = {
    "p2p_collectives.train:Net.forward": ["forward"],
    "torch:Tensor.backward": ["backward"],
    "torch.distributed:all_reduce": ["all_reduce"],
    "torch.optim:SGD.step": ["step"],
}


class Clock:
    """Count the seconds that are spent inside of it, and how many times it was entered."""

    def __init__(self):
        self.seconds, self.laps = 0.0, 0

    def __enter__(self):
        self.started = time.perf_counter()

    def __exit__(self, *_):
        self.seconds += time.perf_counter() - self.started
        self.laps += 1


def accuracy(net, test_set, device):
    """The share of the test images that the network, without dropout, takes for what they are."""
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    net.eval()
    with torch.inference_mode():
        guesses = torch.cat([net(batch).argmax(1) for batch in images.split(500)])
    net.train()
    return (guesses == labels).double().mean().item()


def losses_of_ranks(loss, world_size, device):
    """The mean training loss of each rank in an epoch, on all ranks."""
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(world_size)]
    dist.all_gather(losses, torch.tensor(loss, dtype=torch.float64, device=device))
    losses = torch.stack(losses)
    return {"loss": losses.mean().item(), "loss_per_rank": losses.tolist()}


def require_equal_weights(net):
    """All ranks must hold bitwise identical weights.

    Raises:
        ArithmeticError: if they do not.
        NotFiniteError: if they are not numbers any more.
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


def log_epoch(epochs):
    """Print the line of the last epoch."""
    per_rank = " ".join(f"{loss:.3f}" for loss in epochs[-1]["loss_per_rank"])
    report.log("rank0", f"epoch {len(epochs):2}  test accuracy {epochs[-1]['accuracy']:.1%}  "
                        f"loss of each rank {per_rank}")


def finish(metrics, args):
    """Write metrics.json and print the last line; the whole metrics."""
    samples, train_s = metrics.pop("samples"), metrics.pop("train_s")
    metrics["samples_per_s"] = samples / train_s if samples else None
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if samples else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} "
          f"epochs on {args.world_size} ranks: {speed}, weights bitwise identical")
    return metrics
