"""The oracle of the batched updates: one process without RPC that steps with the mean gradients.

`record` runs the lesson's own training in its own processes: it sees what the trainers compute
with, and on the server the gradients and weights of each step. All trainers are let in at the same
moment, so that an addition without the lock would be seen.

All is in double precision: fifty BatchNorms in training mode magnify the rounding of single
precision beyond any tolerance that could tell it from a mistake. From update to update they would
magnify that of double precision, too, where a BatchNorm sees two numbers that are nearly equal; so
the one process begins each update with the weights of the server, which it has held against its
own. The sizes of batches and images are cut, so that all numbers fit into one process.
"""

import itertools
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Self

from common.launch import launch
from common.oracle import Comparison, flat, verdict
from common.recorder import Recorder, named_gradients, named_weights
from common.vision import import_torchvision

import torch
from torch import nn

from param_server import batch_update as lesson
from param_server import batch_update_results as results

UPDATES, BATCH_SIZE, IMAGE_SIZE = 2, 4, 40  # at most
MEETING_S = 10  # that the server waits for the gradients of all trainers, to add them at once
BECAUSE = "double precision; only the order of sums may differ"


# --- one process, which knows of the lesson only the flags


def single_process(args: Namespace, stepped: Sequence[dict]) -> dict:
    """Step with the mean of all trainers' gradients, by SGD with momentum.

    Args:
        args: the flags.
        stepped: the weights of the server after each update, from which the next one begins.

    Returns:
        `plans`: by rank, the batches. One entry for each update: `losses` of the trainers, and
        `gradients`, their mean. `weights`, and `statistics`, the running ones of BatchNorm: at the
        beginning, and after each update.
    """
    torch.manual_seed(args.seed)
    model = import_torchvision().models.get_model(args.arch, num_classes=args.num_classes)
    params = dict(model.named_parameters())
    plans = {rank: planned_batches(rank, args) for rank in range(1, args.world_size)}
    buffers = {name: buffer for name, buffer in model.named_buffers()
               if name.endswith(("running_mean", "running_var"))}
    velocity = {name: torch.zeros_like(param) for name, param in params.items()}
    alone = {"plans": plans, "losses": [], "gradients": [],
             "weights": [{name: param.detach().clone() for name, param in params.items()}],
             "statistics": [{name: buffer.clone() for name, buffer in buffers.items()}]}
    for update in range(args.num_updates):
        before = alone["statistics"][-1]
        gradients = {name: torch.zeros_like(param) for name, param in params.items()}
        moved = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        losses = {}
        for rank, plan in plans.items():
            images, targets = plan[update]
            for name, buffer in buffers.items():
                buffer.copy_(before[name])  # every trainer begins with the same statistics
            loss = ((model(images) - targets) ** 2).sum() / targets.numel()
            of_trainer = torch.autograd.grad(loss, list(params.values()))
            for name, gradient in zip(params, of_trainer, strict=True):
                gradients[name] += gradient / len(plans)
            for name, buffer in buffers.items():
                moved[name] += buffer / len(plans)
            losses[f"trainer{rank}"] = loss.item()
        with torch.no_grad():
            for name, param in params.items():
                velocity[name] = 0.9 * velocity[name] + gradients[name]
                param -= args.lr * velocity[name]
        alone["losses"].append(losses)
        alone["gradients"].append(gradients)
        alone["weights"].append({name: param.detach().clone() for name, param in params.items()})
        alone["statistics"].append(moved)
        if update < len(stepped):
            with torch.no_grad():
                for name, param in params.items():
                    param.copy_(stepped[update][name])
    return alone


def planned_batches(rank: int, args: Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw the images and targets of all updates of a trainer, from the seed."""
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    classes = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    shape = (3, args.image_size, args.image_size)
    patterns = torch.randn(args.num_classes, *shape,
                           generator=torch.Generator().manual_seed(args.seed))
    targets = (classes[:, None] == torch.arange(args.num_classes)).to(torch.get_default_dtype())
    return [(torch.randn(args.batch_size, *shape, generator=generator) + patterns[classes], targets)
            for _ in range(args.num_updates)]


# --- what is recorded


class Recording:
    """Keeps what a process sees of a training.

    On a trainer, `forwards`: images, labels, whether in training mode, the running statistics and
    the sums of each parameter that the model has then, when forward began and when backward ended.
    On the server, `steps`: mean gradients, and weights afterwards. `arrivals`: the ranks, in order.
    `locked`: for each addition, whether the lock was held. `final_statistics`, at the end.
    """

    def __init__(self) -> None:
        self.forwards, self.steps, self.arrivals, self.locked = [], [], [], []
        self.final_statistics = None


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    recording = Recording()
    with Recorder() as recorder:
        if rank == 0:
            record_server(recorder, recording)
        else:
            record_trainer(recorder, recording)
        measured = lesson.run_worker(rank, world_size, args)
    return compare(recording, measured, args) if rank == 0 else None


def running_statistics(model: nn.Module) -> torch.Tensor:
    """Copy the running means and variances of BatchNorm, as one vector."""
    return flat([buffer for name, buffer in model.named_buffers()
                 if name.endswith(("running_mean", "running_var"))])


def sums_of(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return, of each parameter, the sum of its numbers and of their absolute values."""
    return torch.tensor([[tensor.detach().sum(), tensor.detach().abs().sum()]
                         for tensor in weights])


def record_trainer(recorder: Recorder, recording: Recording) -> None:
    """Record each forward; what was seen comes back with the result of `run_trainer`."""

    def before_forward(module, inputs):
        if type(module).__name__ == "ResNet":
            if not recording.forwards:  # the gradient of the first parameter is the last one
                next(module.parameters()).register_post_accumulate_grad_hook(after_backward)
            recording.forwards.append({
                "began": time.perf_counter(),
                "images": inputs[0].cpu().clone(), "training": float(module.training),
                "statistics": running_statistics(module), "sums": sums_of(module.parameters())})
        elif isinstance(module, nn.MSELoss):
            recording.forwards[-1]["labels"] = inputs[1].cpu().clone()

    def after_backward(_):
        recording.forwards[-1]["ended"] = time.perf_counter()

    recorder.on_forward(before=before_forward)

    @recorder.around(lesson, "run_trainer")
    def run_trainer(original, *arguments):
        return {**original(*arguments), "forwards": recording.forwards}


def record_server(recorder: Recorder, recording: Recording) -> None:
    """Record each step, and what the trainers call, into which all are let at the same moment."""

    @recorder.around(lesson, "run_ps")
    def run_ps(original, server, args):
        all_are_there = threading.Barrier(args.world_size - 1)

        @recorder.around(server, "update_and_fetch_model")
        def update_and_fetch_model(update, rank, *arguments):
            recording.arrivals.append(rank)
            try:
                all_are_there.wait(MEETING_S)
            except threading.BrokenBarrierError:
                all_are_there.reset()
            return update(rank, *arguments)

        recorder.put(server, "sums", [Watched(total, server.lock, recording.locked)
                                      for total in server.sums])
        recorder.on_step(after=lambda _: recording.steps.append({
            "gradients": named_gradients(server.model), "weights": named_weights(server.model)}))
        trained = original(server, args)
        recording.final_statistics = running_statistics(server.model)
        return trained


class Watched:
    """Acts as a sum, and records with each addition whether the lock was held."""

    def __init__(self, total: torch.Tensor, lock: threading.Lock, locked: list[bool]) -> None:
        self.total, self.lock, self.locked = total, lock, locked

    def __iadd__(self, gradient: torch.Tensor) -> Self:
        self.locked.append(self.lock.locked())
        self.total += gradient
        return self

    add_ = __iadd__  # the same, written in another way

    def __add__(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.total + gradient  # a new tensor: nothing is added to the sum

    def __itruediv__(self, number: int) -> Self:
        self.total /= number
        return self

    def zero_(self) -> None:
        """Set all of it to 0, as the tensor's does."""
        self.total.zero_()


# --- what is held against what


def compare(recording: Recording, measured: dict, args: Namespace) -> dict:
    """Hold every number of the recording against one process; return the findings."""
    findings = Comparison(f"{args.world_size} processes", "one process")
    alone = single_process(args, [step["weights"] for step in recording.steps])
    plans, updates = alone["plans"], range(args.num_updates)
    trainers = dict(zip(plans, measured["trainers"], strict=True))

    def seen(what):
        """By update, what all trainers saw."""
        return [{f"trainer{rank}": trainer["forwards"][update][what]
                 for rank, trainer in trainers.items() if update < len(trainer["forwards"])}
                for update in range(max(len(one["forwards"]) for one in trainers.values()))]

    def of_all(values):
        return [{f"trainer{rank}": value for rank in plans} for value in values]

    for place, what in enumerate(("images", "labels")):
        findings.equal(what, seen(what), [{f"trainer{rank}": plan[update][place]
                                           for rank, plan in plans.items()} for update in updates],
                       "drawn from the seed, others for each trainer", "update")
    findings.equal("training mode", seen("training"), of_all([1.0] * args.num_updates),
                   "BatchNorm uses the batch", "update")
    sums = [sums_of(weights.values()) for weights in alone["weights"]]
    findings.close("weights read", seen("sums"), of_all(sums[:-1]), 1e-9,
                   f"two sums of each parameter, none of them stale; {BECAUSE}", "update")
    running = [flat(buffers.values()) for buffers in alone["statistics"]]
    findings.close("statistics", seen("statistics"), of_all(running[:-1]), 1e-9,
                   f"BatchNorm's, the mean over the trainers; {BECAUSE}", "update")
    n_trainers = len(plans)
    findings.equal("arrivals", [sorted(recording.arrivals[start : start + n_trainers]) for start in
                                range(0, len(recording.arrivals), n_trainers)],
                   [list(plans)] * args.num_updates, "one gradient of each trainer", "update")
    outside = recording.locked.count(False)
    findings.holds("additions", recording.locked and not outside, f"{len(recording.locked)}, while "
                   f"all trainers send at once: {outside} of these without the lock")
    losses = {rank: [step_stats["loss"] for step_stats in trainer["updates"]]
              for rank, trainer in trainers.items()}
    findings.close("losses", [{f"trainer{rank}": losses[rank][update] for rank in plans
                               if update < len(losses[rank])}
                              for update in range(max(map(len, losses.values())))],
                   alone["losses"], 1e-9, BECAUSE, "update")
    findings.close("gradients", [step["gradients"] for step in recording.steps],
                   alone["gradients"], 1e-9, f"the mean over the trainers; {BECAUSE}", "update")
    findings.close("weights", [step["weights"] for step in recording.steps],
                   alone["weights"][1:], 1e-9, f"after the step; {BECAUSE}", "update")
    findings.close("final statistics", [recording.final_statistics], running[-1:], 1e-9, BECAUSE,
                   "model")
    compare_metrics(findings, measured, alone, args)
    return findings.as_dict()


def compare_metrics(findings: Comparison, measured: dict, alone: dict, args: Namespace) -> None:
    """Hold what is written to metrics.json."""
    reported = results.summary(measured, args)
    findings.close("mean losses", reported["loss"],
                   [sum(losses.values()) / len(losses) for losses in alone["losses"]], 1e-9,
                   "of all trainers", "update")
    rows = []
    for waits, *of_update in zip(measured["waits"], *(
            trainer["updates"] for trainer in measured["trainers"]), strict=True):
        spans = [(stats["ended"] - stats["started"], stats["computed"] - stats["started"], wait)
                 for stats, wait in zip(of_update, waits, strict=True)]
        seconds, compute, waiting = (sum(parts) / len(spans) for parts in zip(*spans, strict=True))
        rows.append([max(span[0] for span in spans), compute, seconds - compute - waiting, waiting])
    findings.close("seconds", list(map(list, zip(
        reported["updates"], *(reported[what] for what in ("compute", "transfer", "waiting")),
        strict=True))), rows, 1e-9, "of the slowest trainer; what the mean trainer spent", "update")
    middle = statistics.median(row[0] for row in rows)
    findings.close("median", [reported["median_update_s"]], [middle], 1e-9, "of these", "run")
    compare_moments(findings, measured)
    numbers = sum(tensor.numel() for of_model in (alone["weights"][0], alone["statistics"][0])
                  for tensor in of_model.values())
    findings.equal("bytes per update", [reported["bytes_per_update"]],
                   [2 * (args.world_size - 1) * numbers * torch.get_default_dtype().itemsize],
                   "every number there and back, for each trainer", "run")


def compare_moments(findings: Comparison, measured: dict) -> None:
    """Hold the order of the times of which these seconds are made."""
    early = 0
    for trainer, waits in zip(measured["trainers"], zip(*measured["waits"], strict=True),
                              strict=True):
        for stats, forward, wait in zip(trainer["updates"], trainer["forwards"], waits,
                                        strict=False):
            moments = [stats["started"], forward["began"], forward.get("ended", 0.0),
                       stats["computed"], stats["computed"] + wait, stats["ended"]]
            early += wait < 0 or any(
                after < before for before, after in itertools.pairwise(moments))
    findings.holds("moments", early == 0, "begun, forward, backward, computed, answered: "
                   f"in another order in {early} updates of the trainers")


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Train for a few updates, and hold every number against one process; return the differences.

    Args:
        program: batch_update.py.
        args: the parsed flags.
    """
    args.num_updates = UPDATES
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.image_size = min(args.image_size, IMAGE_SIZE)
    return verdict(launch(record, args, program.role_name))
