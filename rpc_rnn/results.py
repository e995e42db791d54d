"""What a run leaves: metrics, a text of the model, the picture, the line of numbers."""

import math
import time
from argparse import Namespace

from common import picture, report
from common.report import NotFiniteError

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn.data import Language, get_next_batch

SAMPLE_LENGTH = 200  # characters of generated text
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


# --- the metrics


class History:
    """Keeps what is reported of a training: losses of its epochs, its time, its round trips.

    Args:
        args: the parsed flags.
        table: the tokens that are trained on, in columns.
        epochs: `{"loss", "val_loss"}` of each epoch so far, in nats per token.
        initial_val_loss: the loss of the validation tokens before the first step.
        opt: what steps the model.
    """

    def __init__(self, args: Namespace, table: torch.Tensor, epochs: list[dict[str, float]],
                 initial_val_loss: float, opt: DistributedOptimizer) -> None:
        self.epochs, self.initial_val_loss, self.opt = [*epochs], initial_val_loss, opt
        self.steps, self.train_s, self.round_trips = 0, 0.0, None
        self.role = rpc.get_worker_info().name
        n_steps = math.ceil((len(table) - 1) / args.bptt)  # of an epoch
        self.bar = report.progress(args.epochs * n_steps, "step", len(epochs) * n_steps,
                                   role=self.role)

    def begin_epoch(self) -> None:
        """Begin to count the time of an epoch."""
        self.losses, self.began = [], time.perf_counter()

    def add(self, loss: torch.Tensor, rows: int, context_id: int) -> None:
        """Add a step.

        Args:
            loss: its mean loss of a token.
            rows: how many rows of tokens it has read.
            context_id: of its distributed autograd context, in which its round trips are counted.

        Raises:
            NotFiniteError: if the loss is not a number any more.
        """
        at = f"at step {len(self.losses) + 1} of epoch {len(self.epochs) + 1}"
        self.losses.append((report.require_finite(loss, at), rows))
        self.count_round_trips(context_id)
        self.ended = time.perf_counter()
        self.bar.update()

    def count_round_trips(self, context_id: int) -> None:
        """Count the RPCs of a step by what they leave in its context, before it ends."""
        context = dist_autograd._retrieve_context(context_id)  # torch has no public name for it
        sent, received = len(context._send_functions()), len(context._recv_functions())
        # Every tensor that came or went with a graph sends its gradient back.
        forward, backward = received, sent + received
        step = sum(not optimizer.is_owner() for optimizer in self.opt.remote_optimizers)
        # At its end, the context is released on all other workers that know it.
        release = len(set(context._known_worker_ids()) - {rpc.get_worker_info().id})
        self.round_trips = forward + backward + step + release

    def end_epoch(self, val_loss: float) -> None:
        """Add the epoch, with the loss of the validation tokens after it, and print its line."""
        self.epochs.append({"loss": mean_loss(self.losses), "val_loss": val_loss})
        self.steps += len(self.losses)
        self.train_s += self.ended - self.began  # without the validation
        text = "epoch {}  loss {loss:.3f}  validation loss {val_loss:.3f}"
        report.log(self.role, text.format(len(self.epochs), **self.epochs[-1]))


def mean_loss(losses: list[tuple[float, int]]) -> float:
    """Return the mean loss of a token.

    Args:
        losses: (mean loss, how many rows of tokens it stands for) of each piece of text.
    """
    rows = sum(n for _, n in losses)
    return sum(loss * n / rows for loss, n in losses)


def evaluate(model: nn.Module, criterion: nn.Module, table: torch.Tensor, bptt: int) -> float:
    """Return the mean loss of a token without dropout.

    Args:
        model, criterion: as in the training: an `RNNModel`, and a loss of scores and targets.
        table: the tokens, in columns: shape (length, batch_size).
        bptt: how many rows are read at a time.
    """
    model.set_mode(training=False, seed=0)
    hidden, losses = model.init_hidden(table.size(1)), []
    with torch.no_grad():
        for data, target in get_next_batch(table, bptt):
            output, hidden = model(data, hidden)
            losses.append((criterion(output.flatten(0, 1), target.flatten()).item(), len(data)))
    return mean_loss(losses)


def generate(model: nn.Module, language: Language, seed: int) -> str:
    """Write a text: draw each character by the model's probabilities, then read it as input."""
    model.set_mode(training=False, seed=seed)
    hidden, token, sample = model.init_hidden(batch_size=1), language.val[:1].view(1, 1), []
    with torch.no_grad():
        for _ in range(SAMPLE_LENGTH):
            output, hidden = model(token, hidden)
            token = output.view(-1).softmax(dim=0).multinomial(1).view(1, 1)
            sample.append(language.vocabulary[int(token)])
    return "".join(sample)


def summary(history: History, model: nn.Module, language: Language, args: Namespace) -> dict:
    """Return the metrics of a training; with `--corpus`, also "sample", a text of the model.

    Args:
        history: what has happened.
        model: the `RNNModel` that has been trained.
        language: what was learned.
        args: the parsed flags.

    Raises:
        NotFiniteError: if there is no perplexity.
    """
    history.bar.close()
    val_loss = history.epochs[-1]["val_loss"]
    if not val_loss < LARGEST_LOSS:
        raise NotFiniteError(f"has a validation loss of {val_loss:.3g} after epoch "
                             f"{len(history.epochs)}: training has diverged; give a smaller --lr")
    return {"epochs": history.epochs, "initial_val_loss": history.initial_val_loss,
            "entropy_floor": language.entropy_floor,
            "floor_without_memory": language.floor_without_memory,
            "perplexity": math.exp(val_loss),
            "steps_per_s": history.steps / history.train_s if history.steps else None,
            "rpc_round_trips_per_step": history.round_trips,
            **({"sample": generate(model, language, args.seed)} if args.corpus else {})}


# --- what the user sees


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw `loss.png`, print the line of numbers; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot([metrics], args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    before, after = metrics["initial_val_loss"], metrics["epochs"][-1]["val_loss"]
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = (f"{metrics['steps_per_s']:.0f} steps/s, "
             f"{metrics['rpc_round_trips_per_step']} RPC round trips a step"
             if metrics["steps_per_s"] else "nothing left to train")
    print(f"loss {before:.2f} -> {after:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | {speed}")
    return metrics


def plot(runs: list[dict], args: Namespace) -> None:
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
