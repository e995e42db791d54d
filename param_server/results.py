"""Report of the parameter servers of 6_6: metrics, pictures and the summary line."""

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
    "ja": {"title": "トレーナー{trainers}つ、パラメーターサーバー1つ（{consistency}）",
           "x": "時間（秒）", "y": "損失（ナット）、{mean}ステップの平均", "trainer": "トレーナー"},
}
STALENESS = {
    "en": {"title": "How old the weights of a gradient were ({consistency}, mean {age:.2f})",
           "x": "steps between the forward and its step (staleness)", "y": "gradients",
           "trainer": "trainer"},
    "ja": {"title": "勾配の古さ（{consistency}、平均{age:.2f}）",
           "x": "フォワードパスからその勾配による更新までに行われた更新の回数",
           "y": "勾配の数", "trainer": "トレーナー"},
}


class History:
    """The report of one trainer: the time of its start, and its steps.

    Args:
        rank: rank of the trainer.
        train_set: images of all trainers.
        first_epoch: number of epochs before the checkpoint.
        args: parsed flags.
    """

    def __init__(self, rank: int, train_set: TensorDataset, first_epoch: int, args: Namespace
                 ) -> None:
        self.rank, self.role, self.first_epoch = rank, rpc.get_worker_info().name, first_epoch
        self.started, self.times, self.losses, self.samples = time.time(), [], [[]], 0
        n_batches = count_batches(train_set, rank, args)
        self.bar = report.progress(args.epochs * n_batches, "step", first_epoch * n_batches,
                                   show=rank == 1, role=self.role)

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Add a step that has just ended, with the mean loss of its images.

        Raises:
            NotFiniteError: if the loss is infinite or not a number.
        """
        loss = report.require_finite(loss, f"in epoch {self.first_epoch + len(self.losses)}")
        self.losses[-1].append(loss)
        self.times.append(time.time())
        self.samples += n_samples
        self.bar.update()

    def end_epoch(self) -> None:
        """Print the mean loss of the epoch's steps."""
        mean_loss = sum(self.losses[-1]) / len(self.losses[-1])
        epoch = self.first_epoch + len(self.losses)
        report.log(self.role, f"epoch {epoch}  loss {mean_loss:.3f}")
        self.losses.append([])

    def of_trainer(self) -> dict:
        """End the bar; return the trainer's rank, start, time and loss of each step, and images.

        `losses` holds a list for each epoch. Times are seconds of `time.time()`.
        """
        self.bar.close()
        return {"rank": self.rank, "started": self.started, "times": self.times,
                "losses": self.losses[:-1], "samples": self.samples}


def summary(metrics: dict, args: Namespace) -> dict:
    """Return the metrics of a run for metrics.json.

    Args:
        metrics: `test_accuracy` and `per_trainer`, the result of every trainer: what
            `History.of_trainer` returns and, from async_server.py, `staleness`, a list with a
            number for each gradient.
        args: parsed flags.

    Returns:
        `test_accuracy`; `epochs`, with the mean loss over the steps of all trainers; `consistency`;
        `updates` by all trainers; `samples_per_s`, None without a step; `staleness` of all
        gradients, from async_server.py; `per_trainer`.
    """
    per_trainer = [dict(trainer) for trainer in metrics["per_trainer"]]
    ages = [trainer["staleness"] for trainer in per_trainer if "staleness" in trainer]
    for trainer, of_trainer in zip(per_trainer, ages, strict=False):
        trainer["staleness"] = histogram(of_trainer)
    started = min(trainer["started"] for trainer in per_trainer)
    ended = max(max(trainer["times"], default=started) for trainer in per_trainer)
    epochs = [{"loss": sum(map(sum, same)) / sum(map(len, same))}
              for same in zip(*(trainer["losses"] for trainer in per_trainer), strict=True)]
    return {"test_accuracy": metrics["test_accuracy"], "epochs": epochs,
            "consistency": CONSISTENCY[args.example],
            **({"staleness": histogram(sum(ages, []))} if ages else {}),
            "updates": sum(len(trainer["times"]) for trainer in per_trainer),
            "samples_per_s": report.per_second(sum(trainer["samples"] for trainer in per_trainer),
                                               ended - started),
            "per_trainer": per_trainer}


def histogram(ages: list[int]) -> dict:
    """Count gradients by staleness, with mean and largest staleness (None without a step)."""
    counts = collections.Counter(ages)
    return {"histogram": {str(age): counts[age] for age in sorted(counts)},
            "mean": sum(ages) / len(ages) if ages else None, "max": max(ages, default=None)}


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, draw the pictures, print the summary line; return all metrics."""
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
    """Draw `loss.png`: the loss of each trainer over time, as means of `MEAN_OF` steps."""
    for axes, words in picture.in_each_language(
            args.output_dir / "loss.png", WORDS, metrics, trainers=args.world_size - 1,
            consistency=metrics["consistency"], mean=MEAN_OF):
        zero = min(trainer["started"] for trainer in metrics["per_trainer"])
        for trainer in metrics["per_trainer"]:
            seconds = [time - zero for time in trainer["times"]]
            losses = torch.tensor(sum(trainer["losses"], []))
            if len(losses) >= MEAN_OF:
                losses = losses.unfold(0, MEAN_OF, 1).mean(dim=1)
            axes.plot(seconds[-len(losses):], losses, linewidth=1.5,
                      label=words["trainer"] + str(trainer["rank"]))
        axes.set_ylim(bottom=0)


def plot_staleness(metrics: dict, args: Namespace) -> None:
    """Draw `staleness.png`: the number of gradients of each trainer by staleness."""
    width = 0.8 / len(metrics["per_trainer"])
    for axes, words in picture.in_each_language(
            args.output_dir / "staleness.png", STALENESS, metrics,
            consistency=metrics["consistency"], age=metrics["staleness"]["mean"]):
        for place, trainer in enumerate(metrics["per_trainer"]):
            ages = {int(age): n for age, n in trainer["staleness"]["histogram"].items()}
            axes.bar([age + (place + 0.5) * width - 0.4 for age in ages], ages.values(), width,
                     label=words["trainer"] + str(trainer["rank"]))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(-0.6, max(1, metrics["staleness"]["max"]) + 0.6)
