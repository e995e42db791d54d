"""The oracle of `train.py`: every step of every rung, held against one process.

That process has the whole batches. Each rung (`--sync`) trains from the start to the end; then one
goes on from the checkpoint that it has written after the first epoch (train_recording.py). Dropout
is on: the oracle draws the masks of each rank from a generator with that rank's seed. All in
float64, in which a mistake cannot be taken for rounding: pieces of a batch are summed in another
order.
"""

import tempfile
from pathlib import Path

import torch
from common import report
from common.launcher import launch
from common.oracle import Comparison, by_rank, fingerprints, flat, load_float64, verdict
from common.session import device_for
from torch import nn
from torch.nn import functional as F

from p2p_collectives import train as lesson
from p2p_collectives.train_recording import RESUMED, RUNGS, record_trainings

EPOCHS = 2
TOLERANCE = 1e-9
WHY = "float64 sums in another order"
COMPARED = (  # of each step: what, the tolerance, and why
    ("images", TOLERANCE, "its part, in another order in each epoch"),
    ("labels", 0.0, "those of these images"),
    ("loss", TOLERANCE, WHY),
    ("gradients", TOLERANCE, f"clipped after the average; {WHY}"),
    ("weights", TOLERANCE, WHY),
    ("settings", 0.0, "learning rate, momentum, Nesterov"),
)


def single_process(args):
    """Train on the samples of all ranks in one batch.

    Returns:
        For each rank its steps, as its recorder would have them, and whether gradients were
        `clipped`; for each epoch what is reported; the number of samples.
    """
    device = device_for(args.device)
    (images, labels), (test_images, test_labels) = (
        [tensor.to(device) for tensor in half.tensors] for half in load_float64(args))
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
    draws, steps, epochs = [Draws(device) for _ in parts], [[] for _ in parts], []
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
            of_all = {"gradients": flat(gradients), "weights": flat(weights),
                      "settings": [lr, args.momentum, args.momentum > 0], "clipped": bool(norm > 1)}
            for rank, (piece, of_samples) in enumerate(zip(pieces, losses, strict=True)):
                steps[rank].append({"images": fingerprints(images[piece]),
                                    "labels": labels[piece].cpu(),
                                    "loss": of_samples.mean().item(), **of_all})
        with torch.no_grad():
            guesses = torch.cat([scores(some, 0.0).argmax(1) for some in test_images.split(300)])
        epochs.append({"loss": sum(of_epoch) / size, "loss_per_rank": of_epoch,
                       "accuracy": (guesses == test_labels).double().mean().item()})
    return steps, epochs, len(images)


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
    """A rank's part, as positions in the dataset, and the slice of its order for each step."""
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


def check(args):
    """Print what was compared; `{what: difference}` where it is reported, None elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        args.epochs, args.checkpoint, args.resume = EPOCHS, Path(folder, "run.pt"), False
        return verdict(launch(record, args, lesson.role_name))


def record(rank, world_size, args):
    """Run the lesson, recorded; rank 0 returns the findings."""
    everyone = record_trainings(rank, world_size, args)
    return compare(everyone, args) if rank == 0 else None


def compare(everyone, args):
    """The findings as a dict, on rank 0; `everyone` has what all ranks recorded."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, epochs, n_samples = single_process(args)
    of_epoch = len(oracle[0]) // args.epochs
    clipped = sum(step["clipped"] for step in oracle[0])
    report.log("check", f"{clipped} of {len(oracle[0])} steps have a clipped gradient")

    def of_ranks(training, name):
        return by_rank([of_rank["steps"][training] for of_rank in everyone], name)

    for training in (*RUNGS, "resumed"):
        epochs_behind = 1 if training == "resumed" else 0
        rank0s, reported = (everyone[0][what][training] for what in ("steps", "reported"))
        for name, tolerance, because in COMPARED:
            findings.close(f"{training}, {name}", of_ranks(training, name),
                           by_rank(oracle, name)[epochs_behind * of_epoch :], tolerance, because)
        findings.equal(f"{training}, weights on all ranks", of_ranks(training, "weights"),
                       by_rank([rank0s] * args.world_size, "weights"),
                       "held against those of rank 0")
        findings.close(f"{training}, reported epochs", reported["epochs"], epochs, TOLERANCE, WHY,
                       unit="epoch")
        findings.close(f"{training}, reported accuracy and samples",
                       [reported["test_accuracy"], reported["samples"]],
                       [epochs[-1]["accuracy"], (args.epochs - epochs_behind) * n_samples],
                       TOLERANCE, "of the test images; each image once in each epoch", "number")
        hold_time(findings, training, rank0s, reported, of_epoch)
    for name in ("loss", "gradients", "weights"):
        findings.equal(f"resumed as if never stopped, {name}", of_ranks("resumed", name),
                       of_ranks(RESUMED, name)[of_epoch:], "nothing may depend on the interruption")
    return findings.as_dict()


def hold_time(findings, training, steps, reported, of_epoch):
    """The seconds by which samples are divided: at least from first to last step of each epoch."""
    of_epochs = [steps[at : at + of_epoch] for at in range(0, len(steps), of_epoch)]
    least = sum(epoch[-1]["time"] - epoch[0]["time"] for epoch in of_epochs if epoch)
    findings.holds(f"{training}, reported time", least <= reported["train_s"] <= reported["took_s"],
                   f"{reported['train_s']:.3f} s of training, at least {least:.3f} s between first "
                   f"and last steps, at most {reported['took_s']:.3f} s in all")
