"""What a run says of itself: metrics, the picture, the last line."""

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import report
from torch.distributed import rpc

from ddp_rpc_hybrid.data import BATCHES


def of_epoch(steps):
    """The `loss` and the `accuracy` of an epoch.

    Args:
        steps: (loss, how many targets were guessed before the step, how many bags there were) of each step.
    """
    losses, guessed, bags = zip(*steps, strict=True)
    return {"loss": sum(losses) / len(losses), "accuracy": sum(guessed) / sum(bags)}


def log_epoch(role, epochs):
    """Print the line of the last epoch, of every tenth."""
    if len(epochs) % 10 == 0:
        report.log(role, "epoch {:3}  loss {loss:.3f}  accuracy {accuracy:.0%}".format(len(epochs), **epochs[-1]))


def bytes_over_rpc(indices, offsets, dim):
    """What a step sends: the request, the bags' sums of `dim` numbers, and in the backward pass their gradient."""
    return indices.nbytes + offsets.nbytes + 2 * len(offsets) * dim * torch.get_default_dtype().itemsize


def of_trainer(epochs, train_s, rpc_bytes, model, criterion, batch):
    """The metrics of one trainer.

    Args:
        epochs: `of_epoch` for each.
        train_s: seconds of the training loop.
        rpc_bytes: of all steps together.
        model, criterion: for one more backward pass, without a step, on `batch`: how large is the table's gradient?
    """
    steps, n_trainers = len(epochs) * BATCHES, dist.get_world_size()
    dense_bytes = sum(param.nbytes for param in model.parameters())
    all_reduce_bytes = 2 * (n_trainers - 1) / n_trainers * dense_bytes  # what a ring sends
    return {"epochs": epochs, "steps_per_s": steps / train_s, "bytes_per_step": rpc_bytes / steps + all_reduce_bytes,
            "table_gradient_bytes": table_gradient_bytes(model, criterion, batch)}


def table_gradient_bytes(model, criterion, batch):
    """How large the gradient is that one backward pass makes on the server."""
    indices, offsets, target = batch
    with dist_autograd.context() as context_id:
        output = model(indices, offsets)
        dist_autograd.backward(context_id, [criterion(output, target.to(output.device))])
        return rpc.rpc_sync(model.emb_rref.owner(), _gradient_bytes, args=(model.emb_rref, context_id))


def _gradient_bytes(emb_rref, context_id):
    """On the server."""
    gradient = dist_autograd.get_gradients(context_id)[emb_rref.local_value().weight]
    return gradient._values().nbytes + gradient._indices().nbytes if gradient.is_sparse else gradient.nbytes


def over_trainers(trainers):
    """The means over what `of_trainer` gave on each trainer."""
    epochs = [{key: sum(epoch[key] for epoch in same) / len(same) for key in ("loss", "accuracy")}
              for same in zip(*(trainer["epochs"] for trainer in trainers), strict=True)]
    means = {key: sum(trainer[key] for trainer in trainers) / len(trainers)
             for key in ("steps_per_s", "bytes_per_step", "table_gradient_bytes")}
    return {"epochs": epochs, **means}


def finish(metrics, args):
    """Write metrics.json, draw `loss.png`, print the last line; the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    trainers = "1 trainer" if args.world_size == 3 else f"{args.world_size - 2} trainers"
    print(f"{trainers}: loss {first['loss']:.2f} -> {last['loss']:.2f}, accuracy {first['accuracy']:.0%} -> "
          f"{last['accuracy']:.0%} (chance {1 / args.num_classes:.0%}) | {metrics['steps_per_s']:.0f} steps/s per "
          f"trainer, {metrics['bytes_per_step'] / 1000:.1f} kB a step")
    return metrics


def plot(metrics, args):
    """Draw `loss.png`."""
    title = f"DDP and RPC in one model: {args.world_size - 2} trainers, one table of {args.num_embeddings} rows"
    with report.picture(args.output_dir / "loss.png", title, "epoch", "loss (nats)") as axes:
        epochs = range(1, len(metrics["epochs"]) + 1)
        axes.plot(epochs, [epoch["loss"] for epoch in metrics["epochs"]], color="C0", label="loss (left)")
        right = axes.twinx()
        right.plot(epochs, [epoch["accuracy"] for epoch in metrics["epochs"]], color="C1", label="accuracy (right)")
        right.axhline(1 / args.num_classes, color="C1", linestyle="--", label="chance (right)")
        right.set_ylim(0, 1)
        right.set_ylabel("accuracy on new batches")
        right.spines["top"].set_visible(False)
