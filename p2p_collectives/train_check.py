"""The oracle of `train.py`: every step of every rung, held against one process on the whole batches.

Each rung (`--sync`) trains from the start to the end; then one goes on from the checkpoint that it
has written after the first epoch. Dropout is on: the oracle draws the masks of each rank from a
generator with that rank's seed. All in float64, in which a mistake cannot be taken for rounding:
pieces of a batch are summed in another order.
"""

import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from common import checkpoint
from common.data import load_data
from common.launch import launch
from common.oracle import Comparison, verdict
from common.session import device_for
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

from p2p_collectives import train as lesson

EPOCHS = 2
RESUMED = "ddp"  # goes on from its first epoch
TOLERANCE = 1e-9
WHY = "float64 sums in another order"


def check(args):
    """Print what was compared; `{what: difference}` where it is reported, None elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        args.epochs, args.checkpoint, args.resume = EPOCHS, Path(folder, "run.pt"), False
        return verdict(launch(record, args, lesson.role_name))


class Recorder:
    """What one rank does in each step of each training."""

    def __init__(self):
        self.steps, self.step, self.trainings, self.reported = [], {}, {}, {}

    def forward(self, module, inputs, output):
        """After the forward of any module."""
        if isinstance(module, lesson.Net) and module.training and torch.is_grad_enabled():
            self.step["images"] = fingerprints(inputs[0])

    def stepped(self, optimizer, *_):
        """After any optimizer's step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        settings = optimizer.param_groups[0]
        self.step |= {"gradients": flat([p.grad for p in parameters]), "weights": flat(parameters),
                      "settings": [settings[name] for name in ("lr", "momentum", "nesterov")],
                      "time": time.perf_counter()}
        self.steps.append(self.step)
        self.step = {}


def flat(tensors):
    """As one vector, a copy on the CPU."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def fingerprints(images):
    """A number for each image, by which it can be recognized."""
    pixels = images.detach().flatten(1).cpu()
    return pixels @ torch.linspace(1, 2, pixels.shape[1], dtype=pixels.dtype).cos()


def float64(args):
    """The data of the lesson, images in float64."""
    return tuple(TensorDataset(half.tensors[0].double(), half.tensors[1]) for half in load_data(args))


def record(rank, world_size, args):
    """Run the lesson with a recorder, once for each rung; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    recorder, everyone = Recorder(), [None] * world_size
    honest_run, honest_loss, honest_save = lesson.run, F.nll_loss, checkpoint.save
    first_epoch = args.checkpoint.with_name("first_epoch.pt")

    def run_all(rank, size, args):
        for training, flags in (
            *((sync, {"sync": sync}) for sync in ("per_parameter", "flat", RESUMED)),
            ("resumed", {"sync": RESUMED, "resume": True, "checkpoint": first_epoch}),
        ):
            recorder.steps = recorder.trainings[training] = []
            torch.manual_seed(rank)  # nothing may depend on what was drawn before
            began = time.perf_counter()
            metrics = honest_run(rank, size, Namespace(**{**vars(args), **flags}))
            metrics["took_s"] = time.perf_counter() - began
            recorder.reported[training] = metrics
        dist.gather_object([recorder.trainings, recorder.reported], everyone if rank == 0 else None)
        return metrics

    def recorded_loss(output, target, **options):
        loss = honest_loss(output, target, **options)
        recorder.step |= {"labels": target.cpu(), "loss": loss.item()}
        return loss

    def save(args, state):
        honest_save(args, state)
        if len(state["epochs"]) == 1:
            shutil.copy(args.checkpoint, first_epoch)

    hooks = [register_module_forward_hook(recorder.forward),
             register_optimizer_step_post_hook(recorder.stepped)]
    with (mock.patch.object(lesson, "run", run_all), mock.patch.object(F, "nll_loss", recorded_loss),
          mock.patch.object(lesson, "load_data", float64), mock.patch.object(checkpoint, "save", save)):
        lesson.run_worker(rank, world_size, args)
    for hook in hooks:
        hook.remove()
    return compare(everyone, args) if rank == 0 else None


class Draws:
    """The random numbers of one rank: those of the process while this is entered."""

    def __init__(self, device):
        self.device, self.state = device, None

    def seed(self, seed):
        """Begin anew."""
        with self:
            torch.manual_seed(seed)

    def __enter__(self):
        if self.state:
            torch.set_rng_state(self.state[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.state[1], self.device)

    def __exit__(self, *_):
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.state = torch.get_rng_state(), on_gpu


def pieces_of(rank, size, n_samples, n_steps, seed):
    """The positions in the dataset of a rank's part, and which slice of its order each step takes."""
    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed))
    start, end = (int(sum([1.0 / size] * until) * n_samples + 0.5) for until in (rank, rank + 1))
    part = order[start:end]
    shorter, longer = divmod(len(part), n_steps)  # so many slices have one sample more
    slices = []
    for step in range(n_steps):
        index = (step - rank) % n_steps  # on rank r, the first slice is that of step r
        begin = index * shorter + min(index, longer)
        slices.append(slice(begin, begin + shorter + (index < longer)))
    return part, slices


def single_process(args):
    """Train on the samples of all ranks in one batch.

    Returns:
        For each step what the recorders have of it, with an entry for each rank in `images`,
        `labels` and `losses`; for each epoch what is reported; the number of samples.
    """
    device = device_for(args.device)
    (images, labels), (test_images, test_labels) = (
        [tensor.to(device) for tensor in half.tensors] for half in float64(args))
    torch.manual_seed(args.seed)  # the initial weights, in the order in which the layers draw them
    layers = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5), nn.Linear(320, 50), nn.Linear(50, 10)
    weights = [tensor.to(device).detach().requires_grad_()
               for layer in layers for tensor in (layer.weight, layer.bias)]
    velocities = [None] * len(weights)

    def scores(x, rate):
        x = F.max_pool2d(F.conv2d(x, *weights[:2]), 2).clamp(min=0)
        x = F.dropout2d(F.conv2d(x, *weights[2:4]), rate, training=rate > 0)
        x = F.max_pool2d(x, 2).clamp(min=0).flatten(1)
        x = F.dropout((x @ weights[4].T + weights[5]).clamp(min=0), rate, training=rate > 0)
        return (x @ weights[6].T + weights[7]).log_softmax(1)

    size = args.world_size
    n_steps = min(-(-len(images) // args.global_batch_size), len(images) // size)
    parts = [pieces_of(rank, size, len(images), n_steps, args.seed) for rank in range(size)]
    draws, steps, epochs = [Draws(device) for _ in range(size)], [], []
    for epoch in range(args.epochs):
        lr, orders = args.lr * (1 - epoch / args.epochs), []
        for rank, (part, _) in enumerate(parts):
            draws[rank].seed(1_000_000 * args.seed + 1000 * epoch + rank)
            with draws[rank]:
                orders.append(part[torch.randperm(len(part))])
        of_epoch = [0.0] * size
        for step in range(n_steps):
            pieces, losses = [], []
            for rank, (part, slices) in enumerate(parts):
                piece = orders[rank][slices[step]]
                with draws[rank]:
                    of_samples = -scores(images[piece], 0.25)[range(len(piece)), labels[piece]]
                pieces.append(piece)
                losses.append(of_samples)
                of_epoch[rank] += of_samples.sum().item() / len(part)
            gradients = torch.autograd.grad(torch.cat(losses).mean(), weights)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).square().sum().sqrt()
            if norm > 1:
                gradients = [gradient / (norm + 1e-6) for gradient in gradients]
            with torch.no_grad():
                for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                    velocity = velocities[index]
                    velocity = gradient if velocity is None else args.momentum * velocity + gradient
                    velocities[index] = velocity
                    weight -= lr * (gradient + args.momentum * velocity)
            steps.append({"images": [fingerprints(images[piece]) for piece in pieces],
                          "labels": [labels[piece].cpu() for piece in pieces],
                          "losses": [of_samples.mean().item() for of_samples in losses],
                          "gradients": flat(gradients), "weights": flat(weights),
                          "settings": [lr, args.momentum, args.momentum > 0],
                          "clipped": bool(norm > 1)})
        with torch.no_grad():
            guesses = torch.cat([scores(some, 0.0).argmax(1) for some in test_images.split(300)])
        epochs.append({"loss": sum(of_epoch) / size, "loss_per_rank": of_epoch,
                       "accuracy": (guesses == test_labels).double().mean().item()})
    return steps, epochs, len(images)


def compare(everyone, args):
    """The findings as a dict, on rank 0; `everyone` has what all ranks recorded."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, epochs, n_samples = single_process(args)
    first = len(oracle) // args.epochs
    ranks = range(args.world_size)
    clipped = sum(step["clipped"] for step in oracle)
    findings.holds("steps with a clipped gradient", True, f"{clipped} of {len(oracle)} are compared")

    def of_ranks(training, name):
        return [{f"rank {rank}": step.get(name, []) for rank, step in enumerate(of_step)}
                for of_step in zip(*(one[0][training] for one in everyone), strict=False)]

    for training in ("per_parameter", "flat", "ddp", "resumed"):
        steps = oracle[first:] if training == "resumed" else oracle
        for name, key, tolerance, because in (
            ("images", "images", TOLERANCE, "its part, in another order in each epoch"),
            ("labels", "labels", 0.0, "those of these images"),
            ("loss", "losses", TOLERANCE, WHY),
            ("gradients", None, TOLERANCE, f"clipped after the average; {WHY}"),
            ("weights", None, TOLERANCE, WHY),
            ("settings", None, 0.0, "learning rate, momentum, Nesterov"),
        ):
            theirs = [{f"rank {rank}": step[key][rank] if key else step[name] for rank in ranks}
                      for step in steps]
            findings.close(f"{training}, {name}", of_ranks(training, name), theirs, tolerance, because)
        findings.equal(f"{training}, weights on all ranks", of_ranks(training, "weights"),
                       [{f"rank {rank}": step["weights"] for rank in ranks}
                        for step in everyone[0][0][training]], "held against those of rank 0")
        reported = everyone[0][1][training]
        findings.close(f"{training}, reported epochs", reported["epochs"], epochs, TOLERANCE, WHY,
                       unit="epoch")
        findings.close(f"{training}, reported accuracy and samples",
                       [reported["test_accuracy"], reported["samples"]],
                       [epochs[-1]["accuracy"], len(steps) // first * n_samples], TOLERANCE,
                       "of the test images; each image once in each epoch", unit="number")
        compare_time(findings, training, everyone[0][0][training], reported, first)
    for name in ("loss", "gradients", "weights"):
        findings.equal(f"resumed as if never stopped, {name}", of_ranks("resumed", name),
                       of_ranks(RESUMED, name)[first:], "nothing may depend on the interruption")
    return findings.as_dict()


def compare_time(findings, training, steps, reported, first):
    """The seconds by which the samples are divided: from the first step to the last, of each epoch."""
    of_epochs = [steps[at : at + first] for at in range(0, len(steps), first)]
    least = sum(epoch[-1]["time"] - epoch[0]["time"] for epoch in of_epochs if epoch)
    findings.holds(f"{training}, reported time", least <= reported["train_s"] <= reported["took_s"],
                   f"{reported['train_s']:.3f} s of training, at least {least:.3f} s between first "
                   f"and last steps, at most {reported['took_s']:.3f} s in all")
