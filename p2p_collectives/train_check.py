"""The check of `train.py` and its variants: every step, compared with a single process.

The single process has the whole batches. The program trains from start to end; then it continues
from the checkpoint that it has written after the first epoch. Dropout is on: the single process
draws the masks of each rank from a generator with that rank's seed. All numbers are float64, so
that a mistake cannot pass for rounding.
"""

import importlib
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import checkpoint
from common.launch import launch
from common.oracle import Comparison, Draws, by_rank, fingerprints, flat, load_float64, verdict
from common.recorder import Recorder
from common.session import device_for

import torch
from torch import nn
from torch.nn import functional as F

from p2p_collectives import train as tutorial

EPOCHS = 3
TOLERANCE = 1e-9
WHY = "float64 sums in another order"
COMPARED = (  # in each step: what, the tolerance, and why
    ("images", TOLERANCE, "its part, in another order in each epoch"),
    ("labels", 0.0, "labels of these images"),
    ("loss", TOLERANCE, WHY),
    ("gradients", TOLERANCE, WHY),
    ("weights", TOLERANCE, WHY),
)


def single_process(args: Namespace) -> tuple[list[list[dict]], list[dict]]:
    """Train on the samples of all ranks in one batch.

    Returns:
        For each rank its steps, with the names of `COMPARED`; for each epoch what is reported.
    """
    device = device_for(args.device)
    (images, labels), (test_images, test_labels) = (
        [tensor.to(device) for tensor in half.tensors] for half in load_float64(args))
    torch.manual_seed(args.seed)  # the initial weights, in the order of the layers
    layers = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5), nn.Linear(320, 50), nn.Linear(50, 10)
    weights = [tensor.to(device).detach().requires_grad_()
               for layer in layers for tensor in (layer.weight, layer.bias)]
    velocities = [torch.zeros_like(weight) for weight in weights]

    def scores(x, rate):
        x = F.max_pool2d(F.conv2d(x, *weights[:2]), 2).clamp(min=0)
        x = F.dropout2d(F.conv2d(x, *weights[2:4]), rate, training=rate > 0)
        x = F.max_pool2d(x, 2).clamp(min=0).flatten(1)
        x = F.dropout((x @ weights[4].T + weights[5]).clamp(min=0), rate, training=rate > 0)
        return (x @ weights[6].T + weights[7]).log_softmax(1)

    size = args.world_size
    n_steps = min(-(-len(images) // args.global_batch_size), len(images) // size)
    parts = [pieces_of(rank, size, len(images), n_steps, args.seed) for rank in range(size)]
    draws, steps, epochs = [Draws(device) for _ in parts], [[] for _ in parts], []
    for epoch in range(args.epochs):
        orders, of_epoch = [], [0.0] * size
        for rank, (part, _) in enumerate(parts):
            draws[rank].seed(1_000_000 * args.seed + 1000 * epoch + rank)
            with draws[rank].drawing():
                orders.append(part[torch.randperm(len(part))])
        for step in range(n_steps):
            losses = []
            for rank, (part, slices) in enumerate(parts):
                piece = orders[rank][slices[step]]
                with draws[rank].drawing():
                    of_samples = -scores(images[piece], 0.5)[range(len(piece)), labels[piece]]
                losses.append(of_samples)
                of_epoch[rank] += of_samples.sum().item() / len(part)
                steps[rank].append({"images": fingerprints(images[piece]),
                                    "labels": labels[piece].cpu(),
                                    "loss": of_samples.mean().item()})
            gradients = torch.autograd.grad(torch.cat(losses).mean(), weights)
            with torch.no_grad():
                for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                    velocity.mul_(0.9).add_(gradient)
                    weight -= args.lr * velocity
            for of_rank in steps:
                of_rank[-1].update(gradients=flat(gradients), weights=flat(weights))
        with torch.no_grad():
            guesses = torch.cat([scores(some, 0.0).argmax(1) for some in test_images.split(300)])
        epochs.append({"loss": sum(of_epoch) / size, "loss_per_rank": of_epoch,
                       "accuracy": (guesses == test_labels).double().mean().item()})
    return steps, epochs


def pieces_of(rank: int, size: int, n_samples: int, n_steps: int,
              seed: int) -> tuple[torch.Tensor, list[slice]]:
    """Compute a rank's part, as positions in the dataset, and the slice of it for each step."""
    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed))
    start, end = (int(sum([1.0 / size] * until) * n_samples + 0.5) for until in (rank, rank + 1))
    part = order[start:end]
    shorter, longer = divmod(len(part), n_steps)  # `longer` slices have one sample more
    slices = []
    for step in range(n_steps):
        index = (step - rank) % n_steps  # on rank r, the first slice is for step r
        begin = index * shorter + min(index, longer)
        slices.append(slice(begin, begin + shorter + (index < longer)))
    return part, slices


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        args.epochs, args.checkpoint, args.resume = EPOCHS, Path(folder, "run.pt"), False
        args.program = program.__name__
        return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded, and once more resumed; return the findings on rank 0."""
    torch.set_default_dtype(torch.float64)
    program = importlib.import_module(args.program)
    first_epoch = args.checkpoint.with_name("first_epoch.pt")
    resuming = Namespace(**{**vars(args), "resume": True, "checkpoint": first_epoch})
    steps, reported, step = {}, {}, {}  # of both runs; the step that is being made
    with Recorder() as recorder:
        recorder.put(tutorial, "load_data", load_float64)
        everyone = recorder.gather_at_end(lambda: steps)

        @recorder.around(program, "run")
        def run_twice(original, rank, size, args):
            for name, flags in (("whole", args), ("resumed", resuming)):
                steps[name] = []
                torch.manual_seed(rank)  # nothing may depend on earlier random numbers
                reported[name] = original(rank, size, flags)
            return reported["whole"]

        @recorder.around(F, "nll_loss")
        def noted_loss(original, output, target, **options):
            loss = original(output, target, **options)
            step.update(labels=target.cpu(), loss=loss.item())
            return loss

        def forward(module, inputs, output):
            if isinstance(module, tutorial.Net) and module.training and torch.is_grad_enabled():
                step["images"] = fingerprints(inputs[0])

        def will_step(optimizer):  # before it: on a GPU, a step with momentum changes gradients
            step["gradients"] = flat(param.grad for param in optimizer.param_groups[0]["params"])

        def stepped(optimizer):
            weights = flat(optimizer.param_groups[0]["params"])
            steps[[*steps][-1]].append({**step, "weights": weights})
            step.clear()

        @recorder.around(checkpoint, "save")
        def save_and_keep_the_first(original, args, state):
            original(args, state)
            if len(state["epochs"]) == 1:
                shutil.copy(args.checkpoint, first_epoch)

        recorder.on_forward(after=forward)
        recorder.on_step(will_step, stepped)
        program.run_worker(rank, world_size, args)
    return compare(everyone, reported, args) if rank == 0 else None


def compare(everyone: list[dict[str, list]], reported: dict[str, dict], args: Namespace) -> dict:
    """Compare the steps of all ranks, and what rank 0 has reported.

    The whole run must match a single process; the resumed run must match the whole one.
    """
    findings = Comparison(f"{args.world_size} processes")
    oracle, epochs = single_process(args)
    of_epoch, alike = len(oracle[0]) // args.epochs, "nothing may depend on the interruption"

    def of_ranks(run, name):
        return by_rank([steps[run] for steps in everyone], name)

    for name, tolerance, because in COMPARED:
        findings.close(name, of_ranks("whole", name), by_rank(oracle, name), tolerance, because)
        findings.equal(f"resumed, {name}", of_ranks("resumed", name),
                       of_ranks("whole", name)[of_epoch:], alike)
    findings.equal("weights on all ranks", of_ranks("whole", "weights"),
                   by_rank([everyone[0]["whole"]] * args.world_size, "weights"),
                   "compared with those of rank 0")
    for run, first in (("whole", 0), ("resumed", of_epoch)):
        samples = sum(len(step["images"]) for of_rank in oracle for step in of_rank[first:])
        findings.close(f"{run}, reported accuracy and samples",
                       [reported[run]["test_accuracy"], reported[run]["samples"]],
                       [epochs[-1]["accuracy"], samples], TOLERANCE, WHY, unit="number")
    whole, resumed = reported["whole"]["epochs"], reported["resumed"]["epochs"]
    findings.close("reported epochs", whole, epochs, TOLERANCE, WHY, unit="epoch")
    findings.equal("resumed, reported epochs", resumed, whole, alike, unit="epoch")
    return findings.as_dict()
