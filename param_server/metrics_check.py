"""What `main.py --check` holds of the metrics: the means and counts, and the order of the times."""

import itertools
import os

from param_server import results
from param_server.recording import EPOCHS


def compare_metrics(findings, recording, alone, args):
    """What is written to metrics.json."""
    reported, plans = results.summary(recording.metrics, args), alone["plans"]
    losses = {rank: [] for rank in plans}
    for of_update in alone["losses"]:
        for name, loss in of_update.items():
            losses[int(name.removeprefix("trainer"))].append(loss)
    means = []
    for epoch in range(EPOCHS):
        of_epoch = []
        for of_trainer in losses.values():
            n_steps = len(of_trainer)
            of_epoch += of_trainer[epoch * n_steps // EPOCHS : (epoch + 1) * n_steps // EPOCHS]
        means.append(sum(of_epoch) / max(1, len(of_epoch)))
    findings.close("mean losses", [epoch["loss"] for epoch in reported["epochs"]], means, 1e-9,
                   "over the batches of all trainers", "epoch")
    samples = {rank: sum(len(labels) for _, labels in plan) for rank, plan in plans.items()}
    times = [time for trainer in reported["per_trainer"] for time in trainer["times"]]
    started = min(trainer["started"] for trainer in reported["per_trainer"])
    speed = sum(samples.values()) / (max(times) - started)
    same = float(reported["consistency"] == args.consistency)
    findings.close("counts", [[reported["updates"], reported["samples_per_s"], same],
                              *([trainer["rank"], trainer["samples"], len(trainer["times"])]
                                for trainer in reported["per_trainer"])],
                   [[sum(map(len, plans.values())), speed, 1.0],
                    *([rank, samples[rank], len(plan)] for rank, plan in plans.items())],
                   1e-9, "updates and samples of all and of each, samples/s", "row")


def compare_moments(findings, recording, forwards, stepped, args):
    """The times of which samples/s are made, on the clock of this machine."""
    if os.environ["LOCAL_WORLD_SIZE"] != str(args.world_size):
        return  # several machines have several clocks
    wrong = 0
    for trainer in recording.metrics["per_trainer"]:
        rank = trainer["rank"]
        began = [forward["began"] for forward in forwards[rank]]
        ended = [step["moment"] for place, step in zip(stepped, recording.steps, strict=False)
                 if place[0] == rank]
        times = [step["time"] for epoch in trainer["steps"] for step in epoch]
        met = recording.gathered[0] if recording.gathered else float("inf")
        moments = [met, trainer["started"]]
        for of_step in zip(began, ended, times, strict=False):
            moments += of_step
        wrong += sum(after < before - 1e-3 for before, after in itertools.pairwise(moments))
    findings.holds("moments", wrong == 0, "all met, a trainer started, and each of its steps had "
                   f"its forward, its end on the server, its end: {wrong} in another order")
