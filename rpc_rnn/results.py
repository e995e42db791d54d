"""What a run says of itself: metrics, the picture, the last line."""

import math

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import picture, report
from common.report import NotFiniteError
from torch.distributed import rpc

from rpc_rnn.several_trainers import mean_over_trainers

LARGEST_LOSS = 700  # nats: e to the power of more is no float any more
WORDS = {
    "en": {"title": "A language model on {processes} processes: {corpus}",
           "synthetic": "A language model on {processes} processes: a synthetic Markov language",
           "x": "epoch", "y": "loss (nats per token)", "training": "training",
           "validation": "validation", "without_memory": "best without memory",
           "floor": "entropy of the source: the floor"},
    "ja": {"title": "{processes}プロセスの言語モデル：{corpus}",
           "synthetic": "{processes}プロセスの言語モデル：合成マルコフ言語",
           "x": "エポック", "y": "損失（ナット/トークン）", "training": "訓練",
           "validation": "検証", "without_memory": "記憶なしでの最良値",
           "floor": "情報源のエントロピー（下限）"},
}


# What a timeline shows (common/tracing.py): the parts compute, the trainer waits for some of it.
SPANS = {
    "rpc_rnn.main:EmbeddingTable.forward": ["forward", "backward"],
    "torch.nn:LSTM.forward": ["forward", "backward"],
    "rpc_rnn.main:Decoder.forward": ["forward", "backward"],
    "torch.distributed.autograd:backward": ["remote call"],
    "torch.distributed.optim:DistributedOptimizer.step": ["remote call"],
}


def mean_loss(losses):
    """The mean loss of a token, over all trainers.

    Args:
        losses: (mean loss, how many rows of tokens it stands for) of each piece of text.
    """
    rows = sum(n for _, n in losses)
    return mean_over_trainers(sum(loss * n / rows for loss, n in losses))


def count_round_trips(context_id, opt):
    """The RPCs of a trainer's step, counted by what they leave in its context, before it ends."""
    context = dist_autograd._retrieve_context(context_id)  # torch has no public name for it
    sent, received = len(context._send_functions()), len(context._recv_functions())
    # Every tensor that came or went with a graph sends its gradient back.
    forward, backward = received, sent + received
    average = 2 if dist.is_initialized() and dist.get_rank() == 0 else 0
    step = sum(not optimizer.is_owner() for optimizer in opt.remote_optimizers)
    # At its end, the context is released on all other workers that know it.
    release = len(set(context._known_worker_ids()) - {rpc.get_worker_info().id})
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
        raise NotFiniteError(f"has a validation loss of {val_loss:.3g} after epoch {len(epochs)}: "
                             "training has diverged; give a smaller --lr")
    return {"epochs": epochs, "initial_val_loss": initial_val_loss,
            "entropy_floor": language.entropy_floor,
            "floor_without_memory": language.floor_without_memory,
            "perplexity": math.exp(val_loss),
            "steps_per_s": steps / train_s if train_s else None,
            "rpc_round_trips_per_step": round_trips}


def finish(metrics, args):
    """Write metrics.json, draw `loss.png`, print the last line; the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot([metrics], args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    before, after = metrics["initial_val_loss"], metrics["epochs"][-1]["val_loss"]
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = (f"{metrics['steps_per_s']:.0f} steps/s" if metrics["steps_per_s"]
             else "nothing left to train")
    print(f"loss {before:.2f} -> {after:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | "
          f"{speed}, {metrics['rpc_round_trips_per_step']} RPC round trips a step")
    return metrics


def plot(runs, args):
    """Draw `loss.png`, from the metrics of one or several runs."""
    words = {language: {**texts, "title": texts["title" if args.corpus else "synthetic"]}
             for language, texts in WORDS.items()}
    floors = runs[0]
    for axes, texts in picture.in_each_language(args.output_dir / "loss.png", words, runs,
                                                processes=args.world_size, corpus=args.corpus):
        epochs = range(1, len(floors["epochs"]) + 1)
        losses, val_losses = ([[epoch[key] for epoch in run["epochs"]] for run in runs]
                              for key in ("loss", "val_loss"))
        val_losses = [[run["initial_val_loss"], *of_run]
                      for run, of_run in zip(runs, val_losses, strict=True)]
        picture.line(axes, epochs, losses, ".-", color=picture.GREY, label=texts["training"])
        picture.line(axes, [0, *epochs], val_losses, "o-", color="C0", label=texts["validation"])
        if floors["entropy_floor"] is not None:
            axes.axhline(floors["floor_without_memory"], color="C4", linestyle=":",
                         label=texts["without_memory"])
            axes.axhline(floors["entropy_floor"], color="C1", linestyle="--",
                         label=texts["floor"])
        axes.xaxis.get_major_locator().set_params(integer=True)
