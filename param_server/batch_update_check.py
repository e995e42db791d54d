"""`--check` of the batched updates: one process without RPC steps with the mean gradients.

`record` runs the program itself in its own processes. It sees what the trainers compute with and,
on the server, the gradients and weights of each step.

All is in double precision: fifty BatchNorms in training mode magnify the rounding of single
precision until no tolerance tells it from a mistake. If a BatchNorm sees two nearly equal numbers,
even the rounding of double precision grows from update to update. So the single process begins each
update with the server's weights, after it has compared them with its own.
"""

import threading
from argparse import Namespace
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace

from common.launch import launch
from common.oracle import Comparison, flat, verdict
from common.recorder import Recorder, named_gradients, named_weights
from common.vision import import_torchvision

import torch
from torch import nn

from param_server import batch_update as lesson
from param_server import batch_update_results as results

UPDATES, BATCH_SIZE, IMAGE_SIZE = 2, 4, 40  # at most: all numbers must fit into one process
BECAUSE = "double precision; only the order of sums may differ"


# --- the single process, which takes from the lesson only the flags


def single_process(args: Namespace, stepped: Sequence[dict]) -> dict:
    """Step with the mean of all trainers' gradients, by SGD with momentum.

    Args:
        args: parsed flags.
        stepped: weights of the server after each update; the next update begins with them.

    Returns:
        `plans`: by rank, images and targets of each update. `losses`: for each update, a list with
        one loss for each trainer. `gradients`: their mean in each update. `weights`, and
        `statistics`, the running ones of BatchNorm: initially and after each update.
    """
    torch.manual_seed(args.seed)
    model = import_torchvision().models.get_model(args.arch, num_classes=args.num_classes)
    params = dict(model.named_parameters())
    plans = {rank: planned_batches(rank, args) for rank in range(1, args.world_size)}
    buffers = {name: buffer for name, buffer in model.named_buffers()
               if name.endswith(("running_mean", "running_var"))}
    velocity = {name: torch.zeros_like(param) for name, param in params.items()}
    alone = {"plans": plans, "losses": [], "gradients": [], "weights": [named_weights(model)],
             "statistics": [{name: buffer.clone() for name, buffer in buffers.items()}]}
    for update in range(args.num_updates):
        before = alone["statistics"][-1]
        gradients = {name: torch.zeros_like(param) for name, param in params.items()}
        moved = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        losses = []
        for plan in plans.values():
            images, targets = plan[update]
            for name, buffer in buffers.items():
                buffer.copy_(before[name])  # every trainer begins with the same statistics
            loss = ((model(images) - targets) ** 2).sum() / targets.numel()
            of_trainer = torch.autograd.grad(loss, list(params.values()))
            for name, gradient in zip(params, of_trainer, strict=True):
                gradients[name] += gradient / len(plans)
            for name, buffer in buffers.items():
                moved[name] += buffer / len(plans)
            losses.append(loss.item())
        with torch.no_grad():
            for name, param in params.items():
                velocity[name] = 0.9 * velocity[name] + gradients[name]
                param -= args.lr * velocity[name]
        alone["losses"].append(losses)
        alone["gradients"].append(gradients)
        alone["weights"].append(named_weights(model))
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


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    # steps: mean gradients, weights afterwards. locked: for each addition, whether the lock was
    # held. statistics: those of BatchNorm at the end.
    recording = SimpleNamespace(steps=[], locked=[], statistics=None)
    with Recorder() as recorder:
        if rank == 0:
            record_server(recorder, recording)
        else:
            record_trainer(recorder)
        measured = lesson.run_worker(rank, world_size, args)
    return compare(recording, measured, args) if rank == 0 else None


def running_statistics(model: nn.Module) -> torch.Tensor:
    """Copy the running means and variances of BatchNorm, as one vector."""
    return flat([buffer for name, buffer in model.named_buffers()
                 if name.endswith(("running_mean", "running_var"))])


def sums_of(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the numbers and the sum of their absolute values, for each parameter."""
    return torch.tensor([[tensor.detach().sum(), tensor.detach().abs().sum()]
                         for tensor in weights])


def record_trainer(recorder: Recorder) -> None:
    """Record each forward of a trainer, and send them with the result of `run_trainer`."""
    forwards = []

    def before_forward(module, inputs):
        if type(module).__name__ == "ResNet":
            forwards.append({
                "images": inputs[0].cpu().clone(), "training": float(module.training),
                "statistics": running_statistics(module), "sums": sums_of(module.parameters())})
        elif isinstance(module, nn.MSELoss):
            forwards[-1]["labels"] = inputs[1].cpu().clone()

    recorder.on_forward(before=before_forward)

    @recorder.around(lesson, "run_trainer")
    def run_trainer(original, *arguments):
        return {**original(*arguments), "forwards": forwards}


def record_server(recorder: Recorder, recording: SimpleNamespace) -> None:
    """Record each addition and each step; let all trainers into the server at the same time."""
    recorder.guard(lesson.BatchUpdateParameterServer, "arrived")

    @recorder.around(lesson, "run_ps")
    def run_ps(original, server, args):
        all_are_here = threading.Barrier(args.world_size - 1)

        @recorder.around(server, "update_and_fetch_model")
        def update_and_fetch_model(update, *arguments):
            all_are_here.wait(args.timeout)
            return update(*arguments)

        def add(original, total, *others, **options):
            if any(total is of_server for of_server in server.sums):
                recording.locked.append(server.lock.locked())
            return original(total, *others, **options)

        for name in ("__iadd__", "add_"):
            recorder.around(torch.Tensor, name)(add)
        recorder.on_step(after=lambda _: recording.steps.append({
            "gradients": named_gradients(server.model), "weights": named_weights(server.model)}))
        results_of_trainers = original(server, args)
        recording.statistics = running_statistics(server.model)
        return results_of_trainers


# --- what is compared


def compare(recording: SimpleNamespace, measured: dict, args: Namespace) -> dict:
    """Compare every number of the recording with the single process; return the findings."""
    findings = Comparison(f"{args.world_size} processes", "one process")
    alone = single_process(args, [step["weights"] for step in recording.steps])
    plans, trainers = alone["plans"].values(), measured["trainers"]

    def seen(what):
        return [[forward[what] for forward in trainer["forwards"]] for trainer in trainers]

    for place, what in enumerate(("images", "labels")):
        findings.equal(what, seen(what), [[batch[place] for batch in plan] for plan in plans],
                       "drawn from the seed and the rank", "trainer")
    findings.equal("training mode", seen("training"), [[1.0] * args.num_updates for _ in plans],
                   "BatchNorm uses the batch", "trainer")
    sums = [sums_of(weights.values()) for weights in alone["weights"]]
    findings.close("weights read", seen("sums"), [sums[:-1] for _ in plans], 1e-9,
                   f"two sums of each parameter, none of them stale; {BECAUSE}", "trainer")
    running = [flat(buffers.values()) for buffers in alone["statistics"]]
    findings.close("statistics", seen("statistics"), [running[:-1] for _ in plans], 1e-9,
                   f"BatchNorm's, the mean over the trainers; {BECAUSE}", "trainer")
    outside = recording.locked.count(False)
    findings.holds("additions", recording.locked and not outside,
                   f"{len(recording.locked)} additions to self.sums were seen, {outside} of them "
                   "without self.lock; all trainers send at once")
    losses = [[of_update["loss"] for of_update in trainer["updates"]] for trainer in trainers]
    findings.close("losses", losses, list(zip(*alone["losses"], strict=True)), 1e-9, BECAUSE,
                   "trainer")
    findings.close("gradients", [step["gradients"] for step in recording.steps],
                   alone["gradients"], 1e-9, f"the mean over the trainers; {BECAUSE}", "update")
    findings.close("weights", [step["weights"] for step in recording.steps],
                   alone["weights"][1:], 1e-9, f"after the step; {BECAUSE}", "update")
    findings.close("final statistics", [recording.statistics], running[-1:], 1e-9, BECAUSE, "model")
    reported = results.summary(measured, args)
    findings.close("mean losses", reported["loss"],
                   [sum(losses) / len(losses) for losses in alone["losses"]], 1e-9,
                   "of all trainers", "update")
    numbers = sum(tensor.numel() for of_model in (alone["weights"][0], alone["statistics"][0])
                  for tensor in of_model.values())
    findings.equal("bytes per update", [reported["bytes_per_update"]],
                   [2 * len(plans) * numbers * torch.get_default_dtype().itemsize],
                   "every number to the server and back, for each trainer", "run")
    return findings.as_dict()


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process."""
    args.num_updates = UPDATES
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.image_size = min(args.image_size, IMAGE_SIZE)
    return verdict(launch(record, args, program.role_name))
