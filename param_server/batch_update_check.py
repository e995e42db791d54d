"""The oracle of the batched updates: one process without RPC that steps with the mean gradients.

`batch_update_recording.py` runs the lesson's own training in its own processes. All is in double
precision: fifty BatchNorms in training mode magnify the rounding of single precision beyond any
tolerance that could tell it from a mistake. The sizes of batches and images are cut, so that all
numbers fit into one process.
"""

import functools
import importlib
import itertools
import statistics

import torch
from common.launcher import launch
from common.oracle import Comparison, verdict
from common.vision import import_torchvision

from param_server import batch_update_results as results
from param_server.batch_update_recording import flat, record_run, sums_of

# ResNet50 magnifies rounding with each update, the more the fewer numbers a BatchNorm sees: with 4
# images of 32 pixels, of which the last layers leave 1, beyond 1e-9 after 3 updates. Of 40 pixels
# they leave 2 x 2: about 3e-13 after 2 updates.
UPDATES, BATCH_SIZE, IMAGE_SIZE = {"resnet18": 3, "resnet50": 2}, 4, 40  # at most
BECAUSE = "double precision; only the order of sums may differ"


# --- one process, which knows of the lesson only the flags


def single_process(args):
    """Step with the mean of all trainers' gradients, by SGD with momentum.

    Args:
        args: the flags.

    Returns:
        `plans`: by rank, the batches. One entry for each update: `losses` of the trainers, and
        `gradients`, their mean. `weights`, `statistics`: of BatchNorm, the running ones; at the
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
    return alone


def planned_batches(rank, args):
    """The images and targets of all updates of a trainer, as the flags say."""
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    classes = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    shape = (3, args.image_size, args.image_size)
    patterns = torch.randn(args.num_classes, *shape,
                           generator=torch.Generator().manual_seed(args.seed))
    targets = (classes[:, None] == torch.arange(args.num_classes)).to(torch.get_default_dtype())
    return [(torch.randn(args.batch_size, *shape, generator=generator) + patterns[classes], targets)
            for _ in range(args.num_updates)]


# --- what is held against what


def compare(recording, measured, args):
    """Hold every number of the recording against one process; the findings."""
    findings = Comparison(f"{args.world_size} processes", "one process")
    alone = single_process(args)
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
    findings.close("weights read", seen("sums"), of_all(map(sums_of, alone["weights"][:-1])), 1e-9,
                   f"two sums of each parameter, none of them stale; {BECAUSE}", "update")
    findings.close("statistics", seen("statistics"), of_all(map(flat, alone["statistics"][:-1])),
                   1e-9, f"BatchNorm's, the mean over the trainers; {BECAUSE}", "update")
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
    findings.close("final statistics", [recording.final_statistics],
                   [flat(alone["statistics"][-1])], 1e-9, BECAUSE, "model")
    compare_metrics(findings, measured, alone, args)
    return findings.as_dict()


def compare_metrics(findings, measured, alone, args):
    """What is written to metrics.json."""
    reported = results.summary(measured, args)
    findings.close("mean losses", reported["loss"],
                   [sum(losses.values()) / len(losses) for losses in alone["losses"]], 1e-9,
                   "of all trainers", "update")
    rows = []
    for of_update in zip(*(trainer["updates"] for trainer in measured["trainers"]), strict=True):
        spans = [(stats["ended"] - stats["started"], stats["computed"] - stats["started"],
                  stats["waiting"]) for stats in of_update]
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


def compare_moments(findings, measured):
    """The times of which these seconds are made."""
    early = 0
    for trainer in measured["trainers"]:
        for stats, forward in zip(trainer["updates"], trainer["forwards"], strict=False):
            moments = [stats["started"], forward["began"], forward.get("ended", 0.0),
                       stats["computed"], stats["computed"] + stats["waiting"], stats["ended"]]
            early += stats["waiting"] < 0 or any(
                after < before for before, after in itertools.pairwise(moments))
    findings.holds("moments", early == 0, "begun, forward, backward, computed, answered: "
                   f"in another order in {early} updates of the trainers")


# --- the command


def record(program, rank, world_size, args):
    """Record a program's run in each process; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    measured, recording = record_run(importlib.import_module(program), rank, world_size, args)
    return compare(recording, measured, args) if rank == 0 else None


def check(program, args):
    """Train for a few updates, and hold every number against one process; the differences.

    Args:
        program: the module of batch_update.py or flat_update.py.
        args: the parsed flags.
    """
    args.num_updates = UPDATES[args.arch]
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.image_size = min(args.image_size, IMAGE_SIZE)
    worker = functools.partial(record, program.__name__)
    return verdict(launch(worker, args, program.role_name))
