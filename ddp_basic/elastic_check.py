"""The oracle of `elastic.py`: one process; and an interrupted training against a whole one.

The lesson trains three times in the same processes: one epoch, after which it stops; from that
epoch's checkpoint to the end; and without a stop. All numbers are float64, because training
magnifies rounding: in float32, to 3e-3 within two epochs.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, fingerprints, flat, load_float64, verdict
from common.recorder import Recorder
from common.session import device_for

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import elastic as lesson
from ddp_basic.check import TOLERANCE, WHY

EPOCHS, STOP_AFTER = 2, 1


def single_process(args: Namespace) -> tuple[list[list[dict]], list[dict]]:
    """Train without DDP, on the joined batches of all ranks.

    Returns:
        For each rank its steps, as `record` keeps them; the history of the epochs.
    """
    device = device_for(args.device)
    (images, labels), (test_images, test_labels) = (
        [tensor.to(device) for tensor in half.tensors] for half in load_float64(args))
    # These layers draw the lesson's initial weights, in the same order.
    torch.manual_seed(args.seed)
    layers = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5), nn.Linear(512, 10)
    weights = [tensor.to(device).detach().requires_grad_()
               for layer in layers for tensor in (layer.weight, layer.bias)]
    velocities = [torch.zeros_like(weight) for weight in weights]

    def scores(images):
        x = nn.functional.conv2d(images, *weights[:2], stride=2).clamp(min=0)
        x = nn.functional.conv2d(x, *weights[2:4], stride=2).clamp(min=0)
        return x.flatten(1) @ weights[4].T + weights[5]

    ranks, of_rank = args.world_size, args.global_batch_size // args.world_size
    steps, history = [[] for _ in range(ranks)], []
    for epoch in range(1, args.epochs + 1):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(len(images), generator=generator)
        order = torch.cat([order, order[: -len(order) % ranks]])  # equal shares
        total, seen = 0.0, 0
        for start in range(0, len(order) // ranks, of_rank):
            shares = [order[rank::ranks][start : start + of_rank] for rank in range(ranks)]
            losses = torch.stack([
                scores(images[share]).log_softmax(1)[range(len(share)), labels[share]].mean().neg()
                for share in shares])
            gradients = torch.autograd.grad(losses.mean(), weights)
            with torch.no_grad():
                for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                    velocity.mul_(0.9).add_(gradient)
                    weight -= args.lr * velocity
            total += losses.mean().item() * len(shares[0])
            seen += len(shares[0])
            of_all = {"gradients": flat(gradients), "weights": flat(weights),
                      "settings": [args.lr, 0.9]}
            for rank, share in enumerate(shares):
                steps[rank].append({"images": fingerprints(images[share]),
                                    "labels": labels[share].cpu(),
                                    "loss": losses[rank].item(), **of_all})
        with torch.no_grad():
            correct = (scores(test_images).argmax(1) == test_labels).double().mean().item()
        history.append({"epoch": epoch, "loss": total / seen, "accuracy": correct})
    return steps, history


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0, None elsewhere."""
    torch.set_default_dtype(torch.float64)
    trainings, step, histories = {}, {}, {}  # step: what is known of the present step

    def forward(module, inputs, output):
        if isinstance(module, DDP):
            step["images"] = fingerprints(inputs[0])

    def stepped(optimizer):
        [group] = optimizer.param_groups
        step.update(gradients=flat([p.grad for p in group["params"]]),
                    weights=flat(group["params"]), settings=[group["lr"], group["momentum"]])
        [*trainings.values()][-1].append(step.copy())
        step.clear()

    with Recorder() as recorder:
        recorder.put(lesson, "load_data", load_float64)
        recorder.on_forward(after=forward)
        recorder.on_step(after=stepped)
        everyone = recorder.gather_at_end(lambda: trainings)

        @recorder.around(nn.functional, "cross_entropy")
        def recorded_loss(cross_entropy, scores, labels, **options):
            loss = cross_entropy(scores, labels, **options)
            step.update(labels=labels.cpu(), loss=loss.item())
            return loss

        @recorder.around(lesson, "train")
        def train_and_interrupt(train, rank, world_size, args):
            for training, flags in (("stopped", {"epochs": STOP_AFTER}), ("resumed", {}),
                                    ("whole", {"checkpoint": None})):
                trainings[training] = []
                with_flags = Namespace(**{**vars(args), **flags})
                histories[training] = train(rank, world_size, with_flags)
            return histories["whole"]

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, histories, everyone, args) if rank == 0 else None


def compare(metrics: dict, histories: dict[str, list[dict]], everyone: list[dict[str, list]],
            args: Namespace) -> dict:
    """Return the findings about `everyone`, the training runs of each rank.

    The whole run must match a single process; the resumed run must match the whole one.
    """
    findings = Comparison(f"{args.world_size} processes")
    oracle, history = single_process(args)
    stop, alike = len(oracle[0]) * STOP_AFTER // args.epochs, "nothing depends on the interruption"

    def of_ranks(training, name):
        return by_rank([of_rank[training] for of_rank in everyone], name)

    for name in ("images", "labels", "loss", "gradients", "weights", "settings"):
        findings.close(f"whole, {name}", of_ranks("whole", name), by_rank(oracle, name),
                       TOLERANCE, WHY)
        findings.equal(f"resumed, {name}", of_ranks("resumed", name),
                       of_ranks("whole", name)[stop:], alike)
    findings.equal("weights on all ranks", of_ranks("whole", "weights"),
                   by_rank([everyone[0]["whole"]] * args.world_size, "weights"),
                   "compared with rank 0")
    findings.close("reported history", metrics["history"], history, TOLERANCE, WHY, unit="epoch")
    findings.close("reported loss and accuracy", [metrics["loss"], metrics["test_accuracy"]],
                   [history[-1]["loss"], history[-1]["accuracy"]], TOLERANCE, WHY, unit="number")
    findings.equal("resumed, reported history", histories["resumed"], histories["whole"], alike,
                   unit="epoch")
    return findings.as_dict()


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print each comparison; return `{what: difference}` on the reporting process, else None."""
    with tempfile.TemporaryDirectory() as folder:
        args.epochs, args.checkpoint = EPOCHS, Path(folder, "run.pt")
        return verdict(launch(record, args, program.role_name))
