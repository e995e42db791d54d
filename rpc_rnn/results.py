"""What a run says of itself: metrics, the picture, the last line."""

import math

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import report
from common.report import NotFiniteError
from torch.distributed import rpc

from rpc_rnn.several_trainers import mean_over_trainers

LARGEST_LOSS = 700  # nats: e to the power of more is no float any more


def mean_loss(losses):
    """The mean loss of a token, over all trainers.

    Args:
        losses: (mean loss, how many rows of tokens it stands for) of each piece of text.
    """
    rows = sum(n for _, n in losses)
    return mean_over_trainers(sum(loss * n / rows for loss, n in losses))


def count_round_trips(context_id, opt):
    """How many RPCs a trainer's step makes, counted by what they have left in its context, before that ends."""
    context = dist_autograd._retrieve_context(context_id)  # torch has no public name for it
    sent, received = len(context._send_functions()), len(context._recv_functions())
    forward, backward = received, sent + received  # every tensor that came or went with a graph sends its gradient back
    average = 2 if dist.is_initialized() and dist.get_rank() == 0 else 0
    step = sum(not optimizer.is_owner() for optimizer in opt.remote_optimizers)
    release = len(set(context._known_worker_ids()) - {rpc.get_worker_info().id})  # of the context, at its end
    return forward + backward + average + step + release


def log_epoch(role, epochs):
    """Print the line of the last epoch."""
    text = "epoch {}  loss {loss:.3f}  validation loss {val_loss:.3f}"
    report.log(role, text.format(len(epochs), **epochs[-1]))


def summary(epochs, initial_val_loss, language, steps, train_s, round_trips):
    """The metrics of a training.

    Args:
        epochs: `{"loss", "val_loss"}` of each epoch, in nats per token.
        initial_val_loss: the same before the first step.
        language: what was learned.
        steps, train_s: how many steps were made in how many seconds, validation not included.
        round_trips: RPCs of a step, None if there was none.

    Raises:
        NotFiniteError: if there is no perplexity.
    """
    val_loss = epochs[-1]["val_loss"]
    if not val_loss < LARGEST_LOSS:
        raise NotFiniteError(f"has a validation loss of {val_loss:.3g} after epoch {len(epochs)}: training has "
                             "diverged; give a smaller --lr")
    return {"epochs": epochs, "initial_val_loss": initial_val_loss, "entropy_floor": language.entropy_floor,
            "floor_without_memory": language.floor_without_memory, "perplexity": math.exp(val_loss),
            "steps_per_s": steps / train_s if train_s else None, "rpc_round_trips_per_step": round_trips}


def finish(metrics, args):
    """Write metrics.json, draw `loss.png`, print the last line; the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = f"{metrics['steps_per_s']:.0f} steps/s" if metrics["steps_per_s"] else "nothing left to train"
    print(f"loss {metrics['initial_val_loss']:.2f} -> {metrics['epochs'][-1]['val_loss']:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | {speed}, "
          f"{metrics['rpc_round_trips_per_step']} RPC round trips a step")
    return metrics


def plot(metrics, args):
    """Draw `loss.png`."""
    title = f"A language model on {args.world_size} processes: {args.corpus or 'a synthetic Markov language'}"
    with report.picture(args.output_dir / "loss.png", title, "epoch", "loss (nats per token)") as axes:
        epochs = range(1, len(metrics["epochs"]) + 1)
        axes.plot(epochs, [epoch["loss"] for epoch in metrics["epochs"]], ".-", color="0.6", label="training")
        val_losses = [metrics["initial_val_loss"], *(epoch["val_loss"] for epoch in metrics["epochs"])]
        axes.plot([0, *epochs], val_losses, "o-", color="C0", label="validation")
        if metrics["entropy_floor"] is not None:
            axes.axhline(metrics["floor_without_memory"], color="C1", linestyle=":", label="best without memory")
            axes.axhline(metrics["entropy_floor"], color="C3", linestyle="--", label="entropy of the source: the floor")
