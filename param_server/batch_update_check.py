"""The oracle of `batch_update.py`: one process without RPC that steps with the mean gradients.

The lesson's own training runs in its own processes, in double precision: fifty BatchNorms in
training mode magnify the rounding of single precision beyond any tolerance that could tell it from
a mistake. The sizes of batches and images are cut, so that all numbers fit into one process.
"""

import itertools
import statistics
import threading
import time

import torch
from common.launch import launch
from common.oracle import Comparison, verdict
from common.vision import import_torchvision
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

from param_server import batch_update as lesson
from param_server import batch_update_results as results

# ResNet50 magnifies rounding with each update, the more the fewer numbers a BatchNorm sees: with 4
# images of 32 pixels beyond 1e-9 after 3 updates.
UPDATES, BATCH_SIZE, IMAGE_SIZE = {"resnet18": 3, "resnet50": 2}, 20, 40  # at most
BECAUSE = "double precision; only the order of sums may differ"
MEETING_S = 10  # that the server waits for the gradients of all trainers, to add them at once


class Recording:
    """What a process sees of a training.

    On a trainer, `forwards`: images, labels, whether in training mode, the running statistics and
    the sums of each parameter that the model has then, and when forward began and backward ended.
    On the server, `steps`: mean gradients, and
    weights afterwards. `arrivals`: the ranks, in order, and for each addition whether the lock was
    held. `evaluation`: the statistics at the end.
    """

    def __init__(self):
        self.forwards, self.steps, self.arrivals, self.locked = [], [], [], []
        self.server = None


recording = None


def record(rank, world_size, args):
    """The worker of a check: the lesson's own, recorded; on rank 0, the findings."""
    global recording
    torch.set_default_dtype(torch.float64)
    recording = Recording()
    if rank == 0:
        record_server()
    else:
        record_trainer()
    measured = lesson.run_worker(rank, world_size, args)
    return compare(recording, measured, args) if rank == 0 else None


def record_trainer():
    """Hooks on model and loss; what they saw comes back with the result of `run_trainer`."""
    honest = lesson.run_trainer

    def before_forward(module, inputs):
        if type(module).__name__ == "ResNet":
            if not recording.forwards:  # the gradient of the first parameter is the last one
                next(module.parameters()).register_post_accumulate_grad_hook(after_backward)
            recording.forwards.append({
                "began": time.perf_counter(),
                "images": inputs[0].cpu().clone(), "training": float(module.training),
                "statistics": flat_statistics(module),
                "sums": sums_of(dict(module.named_parameters()))})
        elif type(module).__name__ == "MSELoss":
            recording.forwards[-1]["labels"] = inputs[1].cpu().clone()

    def after_backward(_):
        recording.forwards[-1]["ended"] = time.perf_counter()

    def run_trainer(ps_rref, args):
        return {**honest(ps_rref, args), "forwards": recording.forwards}

    every_module.register_module_forward_pre_hook(before_forward)
    lesson.run_trainer = run_trainer


def record_server():
    """A hook on the optimizer, and a wrapper around what the trainers call."""
    honest = lesson.run_ps

    def after_step(optimizer, *_):
        names = [name for name, _ in recording.server.model.named_parameters()]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        recording.steps.append({
            "gradients": {name: param.grad.clone()
                          for name, param in zip(names, params, strict=True)},
            "weights": {name: param.detach().clone()
                        for name, param in recording.server.model.named_parameters()}})

    def run_ps(server, args):
        recording.server = server
        server.update_and_fetch_model = meeting(server, args.world_size - 1)
        server.sums = [Watched(total, server.lock) for total in server.sums]
        return honest(server, args)

    every_optimizer.register_optimizer_step_post_hook(after_step)
    lesson.run_ps = run_ps


def meeting(server, n_trainers):
    """The server's `update_and_fetch_model`, but all trainers get there at the same moment."""
    honest, barrier = server.update_and_fetch_model, threading.Barrier(n_trainers)

    def update_and_fetch_model(rank, *arguments):
        recording.arrivals.append(rank)
        try:
            barrier.wait(MEETING_S)
        except threading.BrokenBarrierError:
            barrier.reset()
        return honest(rank, *arguments)

    return update_and_fetch_model


class Watched:
    """A sum, which records with each addition whether the lock was held."""

    def __init__(self, total, lock):
        self.total, self.lock = total, lock

    def __iadd__(self, gradient):
        recording.locked.append(self.lock.locked())
        self.total += gradient
        return self

    def __itruediv__(self, number):
        self.total /= number
        return self

    def zero_(self):
        """As of the tensor."""
        self.total.zero_()


def flat_statistics(model):
    """All running means and variances, on the CPU."""
    return torch.cat([buffer.detach().flatten().cpu() for name, buffer in model.named_buffers()
                      if name.endswith(("running_mean", "running_var"))])


def sums_of(weights):
    """Of each parameter, the sum of its numbers and of their absolute values."""
    return torch.tensor([[tensor.detach().sum(), tensor.detach().abs().sum()]
                         for tensor in weights.values()])


# --- one process, which knows of the lesson only the flags


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


def single_process(args):
    """Step with the mean of all trainers' gradients, by SGD with momentum.

    Args:
        args: the flags.

    Returns:
        `plans`: by rank, the batches. One entry for each update: `losses` of the trainers;
        `statistics` and `sums` before it; `gradients`, their mean; `weights` after it.
        `evaluation`: the running statistics at the end.
    """
    torch.manual_seed(args.seed)
    model = import_torchvision().models.get_model(args.arch, num_classes=args.num_classes)
    params = dict(model.named_parameters())
    plans = {rank: planned_batches(rank, args) for rank in range(1, args.world_size)}
    buffers = {name: buffer for name, buffer in model.named_buffers()
               if name.endswith(("running_mean", "running_var"))}
    velocity = {name: torch.zeros_like(param) for name, param in params.items()}
    alone = {"plans": plans, "losses": [], "statistics": [], "sums": [], "gradients": [],
             "weights": []}
    for update in range(args.num_updates):
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        alone["statistics"].append(flat_statistics(model))
        alone["sums"].append(sums_of(params))
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
            for name, buffer in buffers.items():
                buffer.copy_(moved[name])
        alone["losses"].append(losses)
        alone["gradients"].append(gradients)
        alone["weights"].append({name: param.detach().clone() for name, param in params.items()})
    alone["evaluation"] = flat_statistics(model)
    return alone


# --- what is held against what


def compare(recording, measured, args):
    """Hold every number of the recording against one process; the findings."""
    findings = Comparison(f"{args.world_size} processes ({args.send})", "one process")
    alone = single_process(args)
    ranks, plans = range(1, args.world_size), alone["plans"]
    trainers = dict(zip(ranks, measured["trainers"], strict=True))

    def seen(what):
        """By update, what all trainers saw."""
        return [{f"trainer{rank}": trainer["forwards"][update][what]
                 for rank, trainer in trainers.items() if update < len(trainer["forwards"])}
                for update in range(max(len(one["forwards"]) for one in trainers.values()))]

    def of_all(values):
        return [{f"trainer{rank}": value for rank in ranks} for value in values]

    updates = range(args.num_updates)
    for what, place in (("images", 0), ("labels", 1)):
        findings.equal(what, seen(what), [{f"trainer{rank}": plans[rank][update][place]
                                           for rank in ranks} for update in updates],
                       "drawn from the seed, others for each trainer", "update")
    findings.equal("training mode", seen("training"), of_all([1.0] * args.num_updates),
                   "BatchNorm uses the batch", "update")
    findings.close("weights read", seen("sums"), of_all(alone["sums"]), 1e-9,
                   f"two sums of each parameter, none of them stale; {BECAUSE}", "update")
    findings.close("statistics", seen("statistics"), of_all(alone["statistics"]), 1e-9,
                   f"BatchNorm's, the mean over the trainers; {BECAUSE}", "update")
    n_trainers = len(ranks)
    findings.equal("arrivals", [sorted(recording.arrivals[start : start + n_trainers]) for start in
                                range(0, len(recording.arrivals), n_trainers)],
                   [list(ranks)] * args.num_updates, "one gradient of each trainer", "update")
    outside = recording.locked.count(False)
    findings.holds("additions", recording.locked and not outside, f"{len(recording.locked)}, while "
                   f"all trainers send at once: {outside} of these without the lock")
    losses = {rank: [step_stats["loss"] for step_stats in trainer["updates"]]
              for rank, trainer in trainers.items()}
    findings.close("losses", [{f"trainer{rank}": losses[rank][update] for rank in ranks
                               if update < len(losses[rank])}
                              for update in range(max(map(len, losses.values())))],
                   alone["losses"], 1e-9, BECAUSE, "update")
    for what, words in (("gradients", "the mean over the trainers"), ("weights", "after the step")):
        findings.close(what, [step[what] for step in recording.steps], alone[what], 1e-9,
                       f"{words}; {BECAUSE}", "update")
    findings.close("final statistics", [flat_statistics(recording.server.model)],
                   [alone["evaluation"]], 1e-9, BECAUSE, "model")
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
    early = 0
    for trainer in measured["trainers"]:
        for stats, forward in zip(trainer["updates"], trainer["forwards"], strict=False):
            moments = [stats["started"], forward["began"], forward.get("ended", 0.0),
                       stats["computed"], stats["computed"] + stats["waiting"], stats["ended"]]
            early += stats["waiting"] < 0 or any(
                after < before for before, after in itertools.pairwise(moments))
    findings.holds("moments", early == 0, "begun, forward, backward, computed, answered: "
                   f"in another order in {early} updates of the trainers")
    numbers = sum(weight.numel() for weight in alone["weights"][0].values())
    numbers += alone["evaluation"].numel()
    findings.equal("bytes per update", [reported["bytes_per_update"]],
                   [2 * (args.world_size - 1) * numbers * torch.get_default_dtype().itemsize],
                   "every number there and back, for each trainer", "run")


def check(args):
    """Train for a few updates, and hold every number against one process; the differences."""
    args.num_updates = UPDATES[args.arch]
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.image_size = min(args.image_size, IMAGE_SIZE)
    return verdict(launch(record, args, lesson.role_name))
