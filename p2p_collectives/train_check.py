"""The oracle of `train.py` and its variants: every step, held against one process.

That process has the whole batches. The program trains from the start to the end; then it goes on
from the checkpoint that it has written after the first epoch, in its own processes. PyTorch's hooks
see each forward and each step. Dropout is on: the oracle draws the masks of each rank from a
generator with that rank's seed. All in float64, in which a mistake cannot be taken for rounding:
pieces of a batch are summed in another order.
"""

import importlib
import itertools
import shutil
import tempfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

from common import checkpoint, report
from common.launch import launch
from common.oracle import Comparison, Draws, by_rank, fingerprints, flat, load_float64, verdict
from common.recorder import Recorder
from common.session import device_for

import torch
from torch import nn, optim
from torch.nn import functional as F

from p2p_collectives import train as tutorial

EPOCHS = 3  # of two, a schedule could be anything
TRAININGS = {"whole": "", "resumed": "resumed, "}  # what the names of their findings begin with
TOLERANCE = 1e-9
WHY = "float64 sums in another order"
SHARES = (0.7, 0.2, 0.1), *([1 / n] * n for n in (3, 4, 5))  # of parts
LENGTHS = 11, 12, 13, 14  # of datasets; no end of a part is at a half
COMPARED = (  # of each step: what, the tolerance, and why
    ("images", TOLERANCE, "its part, in another order in each epoch"),
    ("labels", 0.0, "those of these images"),
    ("loss", TOLERANCE, WHY),
    ("gradients", TOLERANCE, f"clipped after the average; {WHY}"),
    ("weights", TOLERANCE, WHY),
    ("settings", 0.0, "learning rate, momentum, Nesterov"),
)


def single_process(args: Namespace) -> tuple[list[list[dict]], list[dict], int]:
    """Train on the samples of all ranks in one batch.

    Returns:
        For each rank its steps, as `Seen` would have them, and whether gradients were `clipped`;
        for each epoch what is reported; the number of samples.
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
            with draws[rank].drawing():
                orders.append(part[torch.randperm(len(part))])
        of_epoch = [0.0] * size
        for step in range(n_steps):
            pieces, losses = [], []
            for rank, (part, slices) in enumerate(parts):
                piece = orders[rank][slices[step]]
                with draws[rank].drawing():
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
                    velocity = gradient if velocity is None else 0.9 * velocity + gradient
                    velocities[index] = velocity
                    weight -= lr * (gradient + 0.9 * velocity)
            of_all = {"gradients": flat(gradients), "weights": flat(weights),
                      "settings": [lr, 0.9, True], "clipped": bool(norm > 1)}
            for rank, (piece, of_samples) in enumerate(zip(pieces, losses, strict=True)):
                steps[rank].append({"images": fingerprints(images[piece]),
                                    "labels": labels[piece].cpu(),
                                    "loss": of_samples.mean().item(), **of_all})
        with torch.no_grad():
            guesses = torch.cat([scores(some, 0.0).argmax(1) for some in test_images.split(300)])
        epochs.append({"loss": sum(of_epoch) / size, "loss_per_rank": of_epoch,
                       "accuracy": (guesses == test_labels).double().mean().item()})
    return steps, epochs, len(images)


def pieces_of(rank: int, size: int, n_samples: int, n_steps: int,
              seed: int) -> tuple[torch.Tensor, list[slice]]:
    """Compute a rank's part, as positions in the dataset, and the slice of it for each step."""
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


class Seen:
    """Keeps of one rank the `steps` of each training, what that has `reported`; small `parts`.

    `seconds` is what its clock says: a step takes 1, an evaluation or a checkpoint 1000.
    """

    def __init__(self) -> None:
        self.steps, self.reported, self.parts, self.seconds = {}, {}, [], 0
        self.step = {}  # the one that is being made

    def begin(self, training: str) -> None:
        """Add steps to this training from now on."""
        self.training, self.steps[training] = training, []

    def forward(self, module: nn.Module, inputs: tuple, output: object) -> None:
        """Note the images of a training step, after the forward of any module."""
        if isinstance(module, tutorial.Net) and module.training and torch.is_grad_enabled():
            self.step["images"] = fingerprints(inputs[0])
        elif isinstance(module, tutorial.Net):
            self.seconds += 1000

    def will_step(self, optimizer: optim.Optimizer) -> None:
        """Note the gradients: on a GPU, a step with momentum changes them."""
        self.step["gradients"] = flat([p.grad for p in parameters_of(optimizer)])

    def stepped(self, optimizer: optim.Optimizer) -> None:
        """Add the step that an optimizer has just made."""
        settings = optimizer.param_groups[0]
        self.step |= {"weights": flat(parameters_of(optimizer)),
                      "settings": [settings[name] for name in ("lr", "momentum", "nesterov")]}
        self.steps[self.training].append(self.step)
        self.step, self.seconds = {}, self.seconds + 1


def parameters_of(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters that it steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded, and once more resumed; return the findings on rank 0."""
    torch.set_default_dtype(torch.float64)
    seen = Seen()
    first_epoch = args.checkpoint.with_name("first_epoch.pt")
    resuming = Namespace(**{**vars(args), "resume": True, "checkpoint": first_epoch})
    with Recorder() as recorder:
        recorder.put(tutorial, "load_data", load_float64)
        recorder.put(tutorial.results, "time", SimpleNamespace(perf_counter=lambda: seen.seconds))
        recorder.on_forward(after=seen.forward)
        recorder.on_step(seen.will_step, seen.stepped)
        everyone = recorder.gather_at_end(lambda: seen)

        @recorder.around(tutorial, "run")
        def run_all(original, rank, size, args, *how):
            seen.parts = small_parts(args.seed)
            for training, flags in zip(TRAININGS, (args, resuming), strict=True):
                seen.begin(training)
                torch.manual_seed(rank)  # nothing may depend on what was drawn before
                seen.reported[training] = metrics = original(rank, size, flags, *how)
            return metrics

        @recorder.around(F, "nll_loss")
        def noted_loss(original, output, target, **options):
            loss = original(output, target, **options)
            seen.step |= {"labels": target.cpu(), "loss": loss.item()}
            return loss

        @recorder.around(checkpoint, "save")
        def save_and_keep_the_first(original, args, state):
            original(args, state)
            seen.seconds += 1000
            if len(state["epochs"]) == 1:
                shutil.copy(args.checkpoint, first_epoch)

        importlib.import_module(args.program).run_worker(rank, world_size, args)
    return compare(everyone, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    with tempfile.TemporaryDirectory() as folder:
        args.epochs, args.checkpoint, args.resume = EPOCHS, Path(folder, "run.pt"), False
        args.program = program.__name__
        return verdict(launch(record, args, program.role_name))


def compare(everyone: list[Seen], args: Namespace) -> dict:
    """Hold what all ranks have recorded against one process."""
    findings = Comparison(f"{args.world_size} processes")
    hold_parts(findings, everyone[0].parts, args.seed)
    oracle, epochs, n_samples = single_process(args)
    of_epoch = len(oracle[0]) // args.epochs
    clipped = sum(step["clipped"] for step in oracle[0])
    report.log("check", f"{clipped} of {len(oracle[0])} steps have a clipped gradient")

    def of_ranks(training, name):
        return by_rank([of_rank.steps[training] for of_rank in everyone], name)

    for training, title in TRAININGS.items():
        epochs_behind = 1 if training == "resumed" else 0
        rank0s, reported = everyone[0].steps[training], everyone[0].reported[training]
        for name, tolerance, because in COMPARED:
            findings.close(f"{title}{name}", of_ranks(training, name),
                           by_rank(oracle, name)[epochs_behind * of_epoch :], tolerance, because)
        findings.equal(f"{title}weights on all ranks", of_ranks(training, "weights"),
                       by_rank([rank0s] * args.world_size, "weights"),
                       "held against those of rank 0")
        findings.close(f"{title}reported epochs", reported["epochs"], epochs, TOLERANCE, WHY,
                       unit="epoch")
        made = args.epochs - epochs_behind
        findings.close(f"{title}reported accuracy, samples and seconds",
                       [reported[name] for name in ("test_accuracy", "samples", "train_s")],
                       [epochs[-1]["accuracy"], made * n_samples, made * of_epoch], TOLERANCE,
                       "of the test images; each image once in each epoch; a second each step, on "
                       "the clock of the check", "number")
    for name in ("loss", "gradients", "weights"):
        findings.equal(f"resumed as if never stopped, {name}", of_ranks("resumed", name),
                       of_ranks("whole", name)[of_epoch:], "nothing may depend on the interruption")
    return findings.as_dict()


def small_parts(seed: int) -> list[list]:
    """Cut small datasets, also in other shares than those of the ranks of this run."""
    partitioners = (tutorial.DataPartitioner(range(length), shares, seed)
                    for shares, length in itertools.product(SHARES, LENGTHS))
    return [[torch.as_tensor(part).tolist() for part in one.partitions] for one in partitioners]


def hold_parts(findings: Comparison, cut: list[list], seed: int) -> None:
    """Hold what `small_parts` returned."""
    says = f"{len(SHARES)} lists of shares, of datasets of {LENGTHS} samples"
    for (shares, length), ours in zip(itertools.product(SHARES, LENGTHS), cut, strict=True):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
        ends = [int(sum(shares[:until]) * length + 0.5) for until in range(len(shares) + 1)]
        theirs = [order[start:end].tolist() for start, end in itertools.pairwise(ends)]
        if ours != theirs:
            counts = Counter(sum(ours, []))
            sizes, expected = [[len(part) for part in side] for side in (ours, theirs)]
            expected = "others" if sizes == expected else expected
            says = (f"{length} samples in shares {[round(share, 2) for share in shares]}: "
                    f"{sizes} samples, expected {expected}; {length - len(counts)} lost, "
                    f"{sum(count > 1 for count in counts.values())} used twice")
            break
    findings.holds("parts", ours == theirs, says)
