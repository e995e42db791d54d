"""`--check` of main.py: a short training run over RPC, compared with a single process.

The run is the lesson's own `run_worker` in three processes. Three things differ from a usual run:

- The images are few and small, and their micro-batches differ in size.
- All numbers are float64, in which no mistake looks like rounding.
- The layers have fewer blocks. In a whole ResNet50, BatchNorm over a few numbers is chaotic, and
  rounding errors grow a hundredfold per step. The layers of the whole model are compared by name.

The single process is another program: it shares only the flags with the lesson. It splits the data,
computes the loss and steps in its own way, on torchvision's ResNet.

One thing is free in the lesson: the order in which a shard computes the micro-batches, because any
thread may get the lock first. BatchNorm's usual running statistics depend on that order. Here, both
programs use plain averages instead, which do not.
"""

import argparse
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from common import report
from common.cli import starts_rank
from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, copies, named_gradients
from common.vision import import_torchvision

import torch
from torch import nn
from torch.distributed import rpc

from model_parallel_resnet import main as lesson

SIDE = 33  # pixels; with 32, the last layers would have a single one
BLOCKS = [1, 2, 2, 1]  # in layer1 to layer4
CALM = 100  # the learning rate is divided by it, so that rounding errors grow less
MOST_ROWS = 3  # the first ones of --num_splits, if the flag is not given
SENT_S = 3.0  # longest time until all micro-batches of a batch have been sent
TOLERANCE = 1e-10
BECAUSE = "the same sums in another order, in float64"
WORST = "the worst number of each tensor, and its largest"


# --- the single process


def single_process(args: argparse.Namespace) -> Iterator[dict]:
    """Train in the same way without RPC and without a second process.

    Yields:
        For each step: its number of micro-batches (`splits`), `data`, and the `train_step`.
    """
    model = whole_resnet(args).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # plain averages over all micro-batches
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.randn(args.batch_size, 3, SIDE, SIDE, generator=generator)
    classes = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    targets = torch.zeros(args.batch_size, args.num_classes)
    targets[range(args.batch_size), classes] = 1
    for _ in range(1 + args.num_batches):
        for number in args.num_splits:
            small, larger = divmod(args.batch_size, number)
            pieces = images.split([small + (i < larger) for i in range(number)])
            yield {"splits": number, "data": {"images": images, "targets": targets},
                   **train_step(model, pieces, targets, args.lr)}


def train_step(model: nn.Module, pieces: Iterable[torch.Tensor], targets: torch.Tensor,
               lr: float) -> dict:
    """Make one step of SGD on micro-batches.

    Returns:
        `outputs`, `loss`, and three dicts `{name: tensor}`: `gradients`, `weights` and BatchNorm's
        running `statistics`. The weights change with the next step.
    """
    weights = dict(model.named_parameters())
    outputs = torch.cat([model(piece) for piece in pieces])
    loss = ((outputs - targets) ** 2).sum() / targets.numel()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    with torch.no_grad():
        for parameter, gradient in zip(weights.values(), gradients, strict=True):
            parameter -= lr * gradient
    return {"outputs": outputs.detach(), "loss": loss.item(), "weights": weights,
            "gradients": dict(zip(weights, gradients, strict=True)),
            "statistics": {name: torch.stack([norm.running_mean, norm.running_var])
                           for name, norm in model.named_modules()
                           if isinstance(norm, nn.BatchNorm2d)}}


def whole_resnet(args: argparse.Namespace) -> nn.Module:
    """Return a `short_resnet` with the initial weights that the two shards must have."""
    whole = short_resnet(args.arch, args.num_classes)
    initialize([whole.conv1, whole.layer1, whole.layer2], 2 * args.seed + 1)
    initialize([whole.layer3, whole.layer4, whole.fc], 2 * args.seed + 2)
    return whole


def initialize(layers: list[nn.Module], seed: int) -> None:
    """Initialize a shard's layers as torch does, then all convolutions as torchvision does."""
    torch.manual_seed(seed)
    with_weights = [layer for layer in nn.ModuleList(layers).modules()
                    if isinstance(layer, (nn.Conv2d, nn.Linear))]
    for layer in with_weights:
        layer.reset_parameters()
    for layer in with_weights:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def short_resnet(arch: str, num_classes: int, width: int = 64) -> nn.Module:
    """Return torchvision's ResNet with fewer blocks.

    Args:
        arch: "resnet18" or "resnet50".
        num_classes: Number of classes.
        width: Channels inside the first blocks; "resnet18" accepts only 64.
    """
    resnet = import_torchvision().models.resnet
    block = {"resnet18": resnet.BasicBlock, "resnet50": resnet.Bottleneck}[arch]
    return resnet.ResNet(block, BLOCKS, num_classes=num_classes, width_per_group=width)


# --- what is recorded


class Steps:
    """The steps of the run (`ours`), and after each of them that of the single process (`theirs`).

    All steps together are too large for the memory: see `furthest`.

    Args:
        single: The steps of the single process.
    """

    def __init__(self, single: Iterator[dict]) -> None:
        self.single, self.ours, self.theirs = single, [], []

    def add(self, ours: dict, layers: tuple[str, ...] = ("",)) -> dict | None:
        """Add a step; return the single process's step, or None if it has no more.

        Args:
            ours: What the run recorded, with the lists of `state`.
            layers: Beginnings of the single process's names for the layers in these lists.
        """
        self.ours.append(ours)
        theirs = next(self.single, None)
        if theirs is not None:
            self.theirs.append(theirs)
            for key in ("gradients", "weights", "statistics"):
                expected = {name: tensor for name, tensor in theirs[key].items()
                            if name.startswith(layers)}
                run = dict(zip(expected, ours[key], strict=True))
                ours[key], theirs[key] = furthest(run, expected)
        return theirs

    def finished(self) -> tuple[list[dict], list[dict]]:
        """Return the steps of both sides, including those that the run left out."""
        return self.ours, [*self.theirs, *self.single]


def furthest(run: dict[str, torch.Tensor], single: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """Keep two numbers of each tensor: the one that differs most, and the largest expected one.

    Returns:
        `{name: [number, largest]}` of the run, and of the single process. If the shapes differ,
        the whole tensors take their place.
    """
    ours, theirs = {}, {}
    for name, numbers in run.items():
        expected = single[name].detach().cpu()
        if numbers.shape != expected.shape:
            ours[name], theirs[name] = numbers, expected
            continue
        at = (numbers - expected).abs_().argmax()  # NaN counts as the largest
        largest = torch.linalg.vector_norm(expected, math.inf).item()
        ours[name] = [numbers.flatten()[at].item(), largest]
        theirs[name] = [expected.flatten()[at].item(), largest]
    return ours, theirs


def state(model: nn.Module, context_id: int | None = None) -> dict[str, list[torch.Tensor]]:
    """Copy a model's gradients, weights and BatchNorm statistics, in the order of its layers."""
    gradients, nothing = named_gradients(model, context_id), torch.zeros(0)
    return {"gradients": [gradients.get(name, nothing) for name, _ in model.named_parameters()],
            "weights": copies(model.parameters()),
            "statistics": copies(torch.stack([norm.running_mean, norm.running_var])
                                 for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))}


def average_plainly(module: nn.Module, inputs: tuple) -> None:
    """Let BatchNorm average in a way that does not depend on the order of the micro-batches."""
    if isinstance(module, nn.BatchNorm2d) and not inputs[0].is_meta:
        module.momentum = None


class OnWorker:
    """Holds back the micro-batches of a step until all have been sent, and records their forwards.

    Args:
        recorder: Active recorder of this process.
        args: Parsed flags.
    """

    def __init__(self, recorder: Recorder, args: argparse.Namespace) -> None:
        self.num_splits, self.changed = args.num_splits, threading.Condition()
        self.steps, self.forwards, self.late, self.owners = 0, 0, None, set()
        self.norm_threads = []  # of each call of a BatchNorm in this step
        recorder.on_forward(before=self.before)
        for shard_class in (lesson.ResNetShard1, lesson.ResNetShard2):
            recorder.around(shard_class, "forward")(self.forward)

    def forward(self, forward: Callable, shard: nn.Module, x_rref: rpc.RRef) -> torch.Tensor:
        """Wait until all micro-batches are here, at most once in vain; then run the forward."""
        shard.seen = self
        with self.changed:
            self.forwards += 1
            if hasattr(x_rref, "owner_name"):
                self.owners.add(x_rref.owner_name())
            splits = self.num_splits[self.steps % len(self.num_splits)]
            self.changed.notify_all()
            if not self.late and not self.changed.wait_for(lambda: self.forwards >= splits, SENT_S):
                self.late = f"only {self.forwards} of {splits}"
        return forward(shard, x_rref)

    def before(self, module: nn.Module, inputs: tuple) -> None:
        """Note the thread that calls a BatchNorm; the pause lets a second one in if it can."""
        if isinstance(module, nn.BatchNorm2d):
            self.norm_threads.append(threading.get_ident())
            time.sleep(0.001)

    def end_step(self, shard: nn.Module) -> dict:
        """Return what happened in this step, and begin the next one."""
        norms = sum(isinstance(module, nn.BatchNorm2d) for module in shard.modules())
        forwards = [self.norm_threads[i : i + norms]
                    for i in range(0, len(self.norm_threads), norms)]
        seen = {"micro-batches": self.forwards, "late": self.late, "owners": sorted(self.owners),
                "one at a time": all(len({*threads}) == 1 for threads in forwards)}
        self.steps, self.forwards, self.norm_threads = self.steps + 1, 0, []
        return seen


def end_step(shard_rref: rpc.RRef, context_id: int) -> dict:
    """Return, on a worker, the `state` of its shard and what `OnWorker` recorded in this step."""
    shard = shard_rref.local_value()
    return state(shard, context_id) | shard.seen.end_step(shard)


def record_master(recorder: Recorder, steps: Steps) -> list[int]:
    """Record each step on the master; return a list that receives the optimizer's steps."""
    now, optimizer_steps = {}, []

    def after_forward(module, inputs, output):
        if isinstance(module, lesson.DistResNet50):
            now.update(images=inputs[0], outputs=output, shards=(module.p1_rref, module.p2_rref))
        elif isinstance(module, nn.MSELoss):
            now.update(targets=inputs[1])

    def after_context(context_id, _):
        shards = now.pop("shards")
        first, second = (rpc.rpc_sync(rref.owner(), end_step, args=(rref, context_id))
                         for rref in shards)
        kept = dict(zip(now, copies(now.values()), strict=True))
        seen = {key: dict(zip(lesson.WORKERS, (first.pop(key), second.pop(key)), strict=True))
                for key in ("micro-batches", "late", "owners", "one at a time")}
        theirs = steps.add({"outputs": kept.pop("outputs"), "data": kept, **seen,
                            **{key: [*first[key], *second[key]] for key in first}})
        if theirs:
            theirs["micro-batches"] = dict.fromkeys(lesson.WORKERS, theirs["splits"])
        now.clear()

    recorder.on_forward(after=after_forward)
    recorder.on_context(after=after_context)

    @recorder.around(lesson.DistributedOptimizer, "step")
    def step(original, optimizer, context_id):
        original(optimizer, context_id)
        optimizer_steps.append(context_id)

    return optimizer_steps


# --- what is compared


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson and record it; rank 0 returns the findings."""
    layers = layers_of_both(args)
    prepare(args)
    steps = Steps(single_process(args))
    with Recorder() as recorder:
        recorder.on_forward(before=average_plainly)
        if rank > 0:
            OnWorker(recorder, args)
            return lesson.run_worker(rank, world_size, args)
        optimizer_steps = record_master(recorder, steps)
        metrics = lesson.run_worker(rank, world_size, args)
    ours, theirs = steps.finished()
    found = Comparison(f"{world_size} processes")
    compare_run(found, metrics["losses"], theirs, lambda key: [
        [step.get(key, {}) for step in side] for side in (ours, theirs)])
    found.equal("steps", [len(optimizer_steps)], [len(theirs)], "of the optimizer", "run")
    found.holds("one micro-batch at a time",
                all(alone for step in ours for alone in step["one at a time"].values()),
                "two forwards of a shard would write to the same running statistics")
    late = next(filter(None, (late for step in ours for late in step["late"].values())), None)
    found.holds("sent at once", late is None, "while each worker holds back the first micro-batch "
                f"of a batch, {late or 'all'} of this batch are sent to it")
    owners = ours[-1]["owners"] if ours else {}
    found.holds("owners", [*owners.values()] == [[lesson.MASTER_NAME], lesson.WORKERS[:1]],
                f"each worker fetches its inputs from {owners}")
    compare_layers(found, *layers)
    return found.as_dict()


def compare_run(found: Comparison, losses: list[float], theirs: list[dict],
                both: Callable[[str], tuple[list, list]]) -> None:
    """Compare all numbers of all steps.

    Args:
        found: Receives the findings.
        losses: Losses in the metrics.
        theirs: Steps of the single process.
        both: Function that returns what both sides recorded under a name, step by step.
    """
    found.equal("micro-batches", *both("micro-batches"), "number of forwards in each shard")
    found.close("outputs", *both("outputs"), TOLERANCE, BECAUSE)
    found.close("losses", losses, [step["loss"] for step in theirs], TOLERANCE, BECAUSE)
    compare_steps(found, both)


def compare_steps(found: Comparison, both: Callable[[str], tuple[list, list]]) -> None:
    """Compare the data of all steps, and what they leave in the model; see `compare_run`."""
    found.equal("data", *both("data"), "generated from the same seed")
    for key in ("gradients", "weights"):
        found.close(key, *both(key), TOLERANCE, f"{BECAUSE}; {WORST}")
    found.close("running statistics", *both("statistics"), TOLERANCE, f"of each BatchNorm; {WORST}")


def layers_of_both(args: argparse.Namespace) -> list[list[str]]:
    """List the layers of the whole model, of the shards and of torchvision, without weights."""
    block, blocks = lesson.ARCHS[args.arch]
    device = torch.device("meta")
    with device:
        shards = nn.ModuleList([
            lesson.ResNetShard1(block, blocks[:2], device, args.seed),
            lesson.ResNetShard2(block, blocks[2:], args.num_classes, device, args.seed)])
        whole = getattr(import_torchvision().models, args.arch)(num_classes=args.num_classes)
    return [[repr(layer) for layer in model.modules() if not list(layer.children())]
            for model in (shards, whole)]


def compare_layers(found: Comparison, ours: list[str], theirs: list[str]) -> None:
    """Compare every layer of the whole model, in order."""
    first = next((f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
                 f"{len(ours)} layers, {len(theirs)} in torchvision's")
    found.holds("layers", ours == theirs, f"of both shards, and of torchvision's model: {first}")


# --- the command


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Run main.py and the single process; return the differences on the master.

    Raises:
        SystemExit: 1 if a comparison does not hold.
    """
    # Micro-batches of 3 and 2 images; `xs.chunk` would make fewer of them.
    shorten(program, args, lambda num_splits: max(5, 2 * num_splits[-1] + 1))
    return verdict(launch(record, args, program.role_name))


def shorten(program: ModuleType, args: argparse.Namespace,
            batch_size: Callable[[list[int]], int]) -> None:
    """Change the flags to those of a short training run, and print them.

    Args:
        program: Program that is checked.
        args: Parsed flags. The last of `--num_splits` takes longest; it is dropped unless given.
        batch_size: Function that returns the batch size for these numbers.
    """
    if args.num_splits == program.build_parser().get_default("num_splits"):
        args.num_splits = args.num_splits[:MOST_ROWS]
    args.batch_size, args.image_size, args.num_batches = batch_size(args.num_splits), SIDE, 1
    args.lr /= CALM
    if starts_rank(args, 0):
        report.log("check", f"{args.arch} on a batch of {args.batch_size} images of {SIDE}x{SIDE}, "
                            "in float64: a warm-up and a timed batch for each of "
                            f"{' '.join(map(str, args.num_splits))} splits, lr {args.lr:g}")


def prepare(args: argparse.Namespace) -> None:
    """Set float64 and the shorter model, in each process of a check."""
    torch.set_default_dtype(torch.float64)
    lesson.ARCHS[args.arch] = lesson.ARCHS[args.arch][0], BLOCKS
