"""What `main.py` reports: the metrics, the picture, the last line."""

import torch
from common import report


def log_epoch(role, epoch, steps):
    """Print the mean loss of a trainer's steps."""
    mean_loss = sum(step["loss"] for step in steps) / len(steps)
    report.log(role, f"epoch {epoch + 1}  loss {mean_loss:.3f}")


def summary(metrics, args):
    """The metrics of a run.

    Args:
        metrics: what the first trainer returns: `test_accuracy`, and for each trainer its rank, the
            moment it started, and for each epoch its steps (loss, samples, time).
        args: the parsed flags.

    Returns:
        `test_accuracy`; `epochs`, with the mean loss of all trainers; `consistency`; `updates` of
        all trainers; `samples_per_s`, None without a step; `per_trainer`.
    """
    per_trainer = [{"rank": trainer["rank"], "started": trainer["started"],
                    "times": [step["time"] for epoch in trainer["steps"] for step in epoch],
                    "losses": [[step["loss"] for step in epoch] for epoch in trainer["steps"]],
                    "samples": sum(step["samples"] for epoch in trainer["steps"] for step in epoch)}
                   for trainer in metrics["per_trainer"]]
    started = min(trainer["started"] for trainer in per_trainer)
    ended = max(max(trainer["times"], default=started) for trainer in per_trainer)
    epochs = [{"loss": sum(map(sum, same)) / sum(map(len, same))}
              for same in zip(*(trainer["losses"] for trainer in per_trainer), strict=True)]
    samples = sum(trainer["samples"] for trainer in per_trainer)
    return {"test_accuracy": metrics["test_accuracy"], "epochs": epochs,
            "consistency": args.consistency,
            "updates": sum(len(trainer["times"]) for trainer in per_trainer),
            "samples_per_s": samples / (ended - started) if samples else None,
            "per_trainer": per_trainer}


def finish(metrics, args):
    """Write metrics.json, draw, print the last line; the whole metrics."""
    metrics = {**summary(metrics, args), "wall_s": metrics["wall_s"]}
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    n_trainers = args.world_size - 1
    trainers = "1 trainer" if n_trainers == 1 else f"{n_trainers} trainers"
    speed = (f"{metrics['samples_per_s']:.0f} samples/s" if metrics["samples_per_s"]
             else "nothing left to train")
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after "
          f"{metrics['updates']} updates by {trainers} ({args.consistency}): {speed}")
    return metrics


def plot(metrics, args):
    """Draw `loss.png`: the loss of each trainer over time."""
    title = f"{args.world_size - 1} trainers, one server ({args.consistency})"
    with report.picture(args.output_dir / "loss.png", title, "time (s)",
                        "loss, mean of 10 steps") as axes:
        zero = min(trainer["started"] for trainer in metrics["per_trainer"])
        for trainer in metrics["per_trainer"]:
            losses = torch.tensor(sum(trainer["losses"], []))
            times = torch.tensor(trainer["times"], dtype=torch.float64) - zero
            smooth = losses.unfold(0, 10, 1).mean(dim=1) if len(losses) >= 10 else losses
            axes.plot(times[-len(smooth):], smooth, linewidth=1.5,
                      label=f"trainer{trainer['rank']}")
