"""What the parameter servers of 6_6 report: the metrics, the pictures, the line of numbers."""

import collections
import time
from argparse import Namespace

from common import picture, report

import torch
from torch.distributed import rpc
from torch.utils.data import TensorDataset

from param_server.data import count_batches

CONSISTENCY = {"param_server": "lock",
               "param_server/async_server": "async"}  # by the example's name
MEAN_OF = 10  # steps, in the picture
WORDS = {
    "en": {"title": "{trainers} trainers, one server ({consistency})", "x": "time (s)",
           "y": "loss (nats), mean of {mean} steps", "trainer": "trainer"},
    "ja": {"title": "トレーナー{trainers}個、パラメーターサーバー1個（{consistency}）",
           "x": "時間（秒）", "y": "損失（ナット）、{mean}ステップの平均", "trainer": "トレーナー"},
}
STALENESS = {
    "en": {"title": "How old the weights of a gradient were ({consistency}, mean {age:.2f})",
           "x": "steps between the forward and its step (staleness)", "y": "gradients",
           "trainer": "trainer"},
    "ja": {"title": "勾配を計算した重みの古さ（{consistency}、平均{age:.2f}）",
           "x": "フォワードパスからその勾配による更新までに行われた更新の回数（陳腐化）",
           "y": "勾配の数", "trainer": "トレーナー"},
}


class History:
    """Keeps what a trainer reports: the moment at which it started, and its steps.

    Args:
        rank: of the trainer.
        train_set: the images of all trainers.
        first_epoch: how many epochs the checkpoint has behind it.
        args: the parsed flags.
    """

    def __init__(self, rank: int, train_set: TensorDataset, first_epoch: int, args: Namespace
                 ) -> None:
        self.rank, self.role, self.first_epoch = rank, rpc.get_worker_info().name, first_epoch
        self.started, self.steps = time.time(), [[]]
        n_batches = count_batches(train_set, rank, args)
        self.bar = report.progress(args.epochs * n_batches, "step", first_epoch * n_batches,
                                   show=rank == 1, role=self.role)

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Add a step that has just ended, with the mean loss of its images.

        Raises:
            NotFiniteError: if the loss is not a number any more.
        """
        loss = report.require_finite(loss, f"in epoch {self.first_epoch + len(self.steps)}")
        self.steps[-1].append({"loss": loss, "samples": n_samples, "time": time.time()})
        self.bar.update()

    def end_epoch(self) -> None:
        """Print the mean loss of the epoch's steps."""
        mean_loss = sum(step["loss"] for step in self.steps[-1]) / len(self.steps[-1])
        epoch = self.first_epoch + len(self.steps)
        report.log(self.role, f"epoch {epoch}  loss {mean_loss:.3f}")
        self.steps.append([])

    def of_trainer(self) -> dict:
        """End the bar; return `rank`, `started`, and of each epoch its `steps` (see `summary`)."""
        self.bar.close()
        return {"rank": self.rank, "started": self.started, "steps": self.steps[:-1]}


def summary(metrics: dict, args: Namespace) -> dict:
    """Return the metrics of a run, as metrics.json has them.

    Args:
        metrics: what the first trainer returns: `test_accuracy`, and for each trainer its rank, the
            moment it started, for each epoch its steps (loss, samples, time), and `staleness`, how
            many of its gradients had which, where the server counts it.
        args: the parsed flags.

    Returns:
        `test_accuracy`; `epochs`, with the mean loss of all trainers; `consistency`;
        `updates` of all trainers; `samples_per_s`, None without a step; `staleness` of all, where
        it is counted; `per_trainer`.
    """
    # From another process it comes as JSON, whose keys are texts.
    counts = [collections.Counter({int(age): n for age, n in trainer["staleness"].items()})
              for trainer in metrics["per_trainer"] if "staleness" in trainer]
    per_trainer = [{"rank": trainer["rank"], "started": trainer["started"],
                    "times": [step["time"] for epoch in trainer["steps"] for step in epoch],
                    "losses": [[step["loss"] for step in epoch] for epoch in trainer["steps"]],
                    "samples": sum(step["samples"] for epoch in trainer["steps"] for step in epoch)}
                   for trainer in metrics["per_trainer"]]
    for trainer, of_trainer in zip(per_trainer, counts, strict=False):
        trainer["staleness"] = histogram(of_trainer)
    started = min(trainer["started"] for trainer in per_trainer)
    ended = max(max(trainer["times"], default=started) for trainer in per_trainer)
    epochs = [{"loss": sum(map(sum, same)) / sum(map(len, same))}
              for same in zip(*(trainer["losses"] for trainer in per_trainer), strict=True)]
    samples = sum(trainer["samples"] for trainer in per_trainer)
    return {"test_accuracy": metrics["test_accuracy"], "epochs": epochs,
            "consistency": CONSISTENCY[args.example],
            **({"staleness": histogram(sum(counts, collections.Counter()))} if counts else {}),
            "updates": sum(len(trainer["times"]) for trainer in per_trainer),
            "samples_per_s": samples / (ended - started) if samples else None,
            "per_trainer": per_trainer}


def histogram(counts: collections.Counter) -> dict:
    """Count gradients by staleness, with mean and largest staleness (None without a step)."""
    n_steps = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / n_steps if n_steps else None
    return {"histogram": {str(age): counts[age] for age in sorted(counts)},
            "mean": mean, "max": max(counts, default=None)}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw, print the line of numbers; return the whole metrics."""
    metrics = {**summary(metrics, args), "wall_s": metrics["wall_s"]}
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    if metrics["updates"] and "staleness" in metrics:
        plot_staleness(metrics, args)
    n_trainers = args.world_size - 1
    trainers = "1 trainer" if n_trainers == 1 else f"{n_trainers} trainers"
    speed = (f"{metrics['samples_per_s']:.0f} samples/s" if metrics["samples_per_s"]
             else "nothing left to train")
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after "
          f"{metrics['updates']} updates by {trainers} ({metrics['consistency']}): {speed}")
    return metrics


def plot(metrics: dict, args: Namespace) -> None:
    """Draw `loss.png`: the loss of each trainer over time."""
    for axes, words in picture.in_each_language(
            args.output_dir / "loss.png", WORDS, [metrics], trainers=args.world_size - 1,
            consistency=metrics["consistency"], mean=MEAN_OF):
        zero = min(trainer["started"] for trainer in metrics["per_trainer"])
        for trainer in metrics["per_trainer"]:
            seconds = [time - zero for time in trainer["times"]]
            losses = smooth(sum(trainer["losses"], []))
            axes.plot(seconds[-len(losses):], losses, linewidth=1.5,
                      label=words["trainer"] + str(trainer["rank"]))
        axes.set_ylim(bottom=0)


def plot_staleness(metrics: dict, args: Namespace) -> None:
    """Draw `staleness.png`: how many gradients of each trainer had which staleness."""
    width = 0.8 / len(metrics["per_trainer"])
    for axes, words in picture.in_each_language(
            args.output_dir / "staleness.png", STALENESS, [metrics],
            consistency=metrics["consistency"], age=metrics["staleness"]["mean"]):
        for place, trainer in enumerate(metrics["per_trainer"]):
            ages = {int(age): n for age, n in trainer["staleness"]["histogram"].items()}
            axes.bar([age + (place + 0.5) * width - 0.4 for age in ages], ages.values(), width,
                     label=words["trainer"] + str(trainer["rank"]))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(-0.6, max(1, metrics["staleness"]["max"]) + 0.6)


def smooth(losses: list[float]) -> torch.Tensor:
    """Return the means of `MEAN_OF` steps in a row; the losses themselves if there are fewer."""
    losses = torch.tensor(losses)
    return losses.unfold(0, MEAN_OF, 1).mean(dim=1) if len(losses) >= MEAN_OF else losses
