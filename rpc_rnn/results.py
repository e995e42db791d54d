"""Report of a run: metrics, a text written by the model, the picture, the summary line."""

import math
from argparse import Namespace

from common import picture, report
from common.report import NotFiniteError

import torch
from torch import nn
from torch.distributed import rpc

from rpc_rnn.data import Language, get_next_batch

SAMPLE_LENGTH = 200  # characters of generated text
LARGEST_LOSS = 700  # nats; the exponential of a larger loss overflows a float
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
    """The losses and the duration of a training run.

    Args:
        args: Parsed flags.
        table: Training tokens in columns, (length, batch_size).
        epochs: `{"loss", "val_loss"}` of each finished epoch, in nats per token.
        initial_val_loss: Loss of the validation tokens before the first step.

    Attributes:
        clock: Runs during each step.
    """

    def __init__(self, args: Namespace, table: torch.Tensor, epochs: list[dict[str, float]],
                 initial_val_loss: float) -> None:
        self.epochs, self.initial_val_loss = [*epochs], initial_val_loss
        self.losses, self.steps, self.clock = [], 0, report.Clock()
        self.role = rpc.get_worker_info().name
        n_steps = math.ceil((len(table) - 1) / args.bptt)  # of an epoch
        self.bar = report.progress(args.epochs * n_steps, "step", len(epochs) * n_steps,
                                   role=self.role)

    def add(self, loss: torch.Tensor, rows: int) -> None:
        """Add a step: its mean loss per token, and how many rows of tokens it read.

        Raises:
            NotFiniteError: The loss is infinite or not a number.
        """
        at = f"at step {len(self.losses) + 1} of epoch {len(self.epochs) + 1}"
        self.losses.append((report.require_finite(loss, at), rows))
        self.bar.update()

    def end_epoch(self, val_loss: float) -> None:
        """Add an epoch and its validation loss, and print its line."""
        self.epochs.append({"loss": mean_loss(self.losses), "val_loss": val_loss})
        self.steps += len(self.losses)
        self.losses = []
        text = "epoch {}  loss {loss:.3f}  validation loss {val_loss:.3f}"
        report.log(self.role, text.format(len(self.epochs), **self.epochs[-1]))


def mean_loss(losses: list[tuple[float, int]]) -> float:
    """Return the mean loss per token of pieces of text, each (mean loss, rows of tokens)."""
    rows = sum(n for _, n in losses)
    return sum(loss * n / rows for loss, n in losses)


def evaluate(model: nn.Module, criterion: nn.Module, table: torch.Tensor, bptt: int) -> float:
    """Compute the mean loss per token without dropout.

    Args:
        model: The `RNNModel`.
        criterion: Loss of scores (tokens, ntoken) and targets (tokens,).
        table: Tokens in columns, (length, batch_size).
        bptt: Number of rows in a piece of text.
    """
    model.set_mode(training=False, seed=0)
    hidden, losses = model.init_hidden(table.size(1)), []
    with torch.no_grad():
        for data, target in get_next_batch(table, bptt):
            output, hidden = model(data, hidden)
            losses.append((criterion(output.flatten(0, 1), target.flatten()).item(), len(data)))
    return mean_loss(losses)


def generate(model: nn.Module, language: Language, seed: int) -> str:
    """Sample a text: draw each character from the model's prediction and feed it back."""
    model.set_mode(training=False, seed=seed)
    hidden, token, sample = model.init_hidden(batch_size=1), language.val[:1].view(1, 1), []
    with torch.no_grad():
        for _ in range(SAMPLE_LENGTH):
            output, hidden = model(token, hidden)
            token = output.view(-1).softmax(dim=0).multinomial(1).view(1, 1)
            sample.append(language.vocabulary[int(token)])
    return "".join(sample)


def summary(history: History, model: nn.Module, language: Language, args: Namespace) -> dict:
    """Return the metrics of a training run; with `--corpus`, also "sample", a generated text.

    Args:
        history: Losses and duration of the run.
        model: Trained `RNNModel`.
        language: Language that the model learned.
        args: Parsed flags.

    Raises:
        NotFiniteError: The validation loss is too large for a perplexity.
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
            "steps_per_s": report.per_second(history.steps, history.clock.seconds),
            **({"sample": generate(model, language, args.seed)} if args.corpus else {})}


# --- what the user sees


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and `loss.png`, print the summary line; return the saved metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    before, after = metrics["initial_val_loss"], metrics["epochs"][-1]["val_loss"]
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = (f"{metrics['steps_per_s']:.0f} steps/s" if metrics["steps_per_s"]
             else "nothing left to train")
    print(f"loss {before:.2f} -> {after:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | {speed}")
    return metrics


def plot(metrics: dict, args: Namespace) -> None:
    """Draw `loss.png`: the losses per epoch and, if known, the lowest possible losses."""
    words = {language: {**texts, "title": texts["title" if args.corpus else "synthetic"]}
             for language, texts in WORDS.items()}
    for axes, texts in picture.in_each_language(args.output_dir / "loss.png", words, metrics,
                                                processes=args.world_size, corpus=args.corpus):
        losses, val_losses = ([epoch[key] for epoch in metrics["epochs"]]
                              for key in ("loss", "val_loss"))
        axes.plot(range(1, 1 + len(losses)), losses, ".-", color=picture.GREY,
                  label=texts["training"])
        axes.plot([metrics["initial_val_loss"], *val_losses], "o-", color="C0",
                  label=texts["validation"])
        for key, name, color, style in (("floor_without_memory", "without_memory", "C4", ":"),
                                        ("entropy_floor", "floor", "C1", "--")):
            if metrics[key] is not None:
                axes.axhline(metrics[key], color=color, linestyle=style, label=texts[name])
        axes.xaxis.get_major_locator().set_params(integer=True)
