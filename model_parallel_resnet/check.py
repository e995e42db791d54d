"""`--check`: a whole training over RPC, held against torchvision's ResNet in one process.

The training is the lesson's own: `run_worker` in the same processes, with the flags that were given
but for these: a few small images, whose micro-batches are not all of one size; float64, where a
mistake cannot be taken for rounding; two rounds over the batch, the first of which is the warm-up.
The layers have fewer blocks: in a whole ResNet50, BatchNorm over a few numbers is chaotic, and
rounding grows a hundredfold in a step. That the whole one has torchvision's layers is held apart.

The other program here has its own data, first weights, micro-batches, loss and steps; from the
lesson it has the flags alone. Both are compared where the master is, after every step
(recording.py).

What is free in the lesson is the order in which a shard takes the micro-batches: whose thread gets
the lock first. Only the running statistics of BatchNorm depend on it. So the oracle takes the
statistics of each micro-batch, and adds them up in the order that was recorded.

No time is expected to have a certain length. But between the two readings of the clock there must
be one step, that of the row. (tests/test_reports.py holds the table that is printed.)
"""

import argparse
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from types import ModuleType

from common import report
from common.cli import starts_rank
from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, copies
from common.vision import import_torchvision

import torch
from torch import nn
from torch.distributed import rpc

from model_parallel_resnet import main as lesson
from model_parallel_resnet.measuring import Window
from model_parallel_resnet.recording import StepByStep, state

SIDE = 33  # pixels; of 32, the last layers leave one
BLOCKS = [1, 2, 2, 1]  # in layer1 to layer4
CALM = 100  # the learning rate is divided by it, so that rounding grows less
MOST_ROWS = 3  # the first ones of --num_splits, where none was given
SENT_S = 3.0  # at most, until all micro-batches of a batch have been sent
TOLERANCE = 1e-10
BECAUSE = "the same sums in another order, in float64"


# --- one process


def single_process(args: argparse.Namespace) -> Iterator[dict]:
    """Make the same training without RPC and without a second process.

    Yields:
        For each step the number of its micro-batches, data, outputs, loss, the weights after it,
        `{name: tensor}`, and for each micro-batch the statistics of each BatchNorm.
    """
    model = whole_resnet(args).train()
    norms = {name: module for name, module in model.named_modules()
             if isinstance(module, nn.BatchNorm2d)}
    for norm in norms.values():
        norm.momentum = 1.0  # so its running statistics are those of the last micro-batch
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.randn(args.batch_size, 3, SIDE, SIDE, generator=generator)
    classes = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    targets = torch.zeros(args.batch_size, args.num_classes)
    targets[range(args.batch_size), classes] = 1
    weights = dict(model.named_parameters())
    for _ in range(1 + args.num_batches):
        for number in args.num_splits:
            small, larger = divmod(args.batch_size, number)
            pieces = images.split([small + (i < larger) for i in range(number)])
            outputs, of_pieces = [], []
            for piece in pieces:
                outputs.append(model(piece))
                of_pieces.append({name: torch.stack([norm.running_mean, norm.running_var])
                                  for name, norm in norms.items()})
            outputs = torch.cat(outputs)
            loss = ((outputs - targets) ** 2).sum() / targets.numel()
            gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for param, gradient in zip(weights.values(), gradients, strict=True):
                    param -= args.lr * gradient
            yield {"splits": number, "data": {"images": images, "targets": targets},
                   "outputs": outputs.detach(), "loss": loss.item(), "weights": weights,
                   "statistics": of_pieces}


def whole_resnet(args: argparse.Namespace) -> nn.Module:
    """Make a `short_resnet` with the first weights that the two shards must have."""
    whole = short_resnet(args.arch, args.num_classes)
    draw([whole.conv1, whole.layer1, whole.layer2], 2 * args.seed + 1)
    draw([whole.layer3, whole.layer4, whole.fc], 2 * args.seed + 2)
    return whole


def draw(layers: list[nn.Module], seed: int) -> None:
    """Draw the weights of a shard: as torch makes its layers, then those of convolutions anew."""
    torch.manual_seed(seed)
    drawn = [layer for layer in nn.ModuleList(layers).modules()
             if isinstance(layer, (nn.Conv2d, nn.Linear))]
    for layer in drawn:
        layer.reset_parameters()
    for layer in drawn:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def shards_of(args: argparse.Namespace,
              device: str | torch.device = "cpu") -> tuple[nn.Module, nn.Module]:
    """Make both shards, as `DistResNet50` asks for them."""
    block, blocks = lesson.ARCHS[args.arch]
    return (lesson.ResNetShard1(block, blocks[:2], device, 2 * args.seed + 1),
            lesson.ResNetShard2(block, blocks[2:], args.num_classes, device, 2 * args.seed + 2))


def short_resnet(arch: str, num_classes: int, width: int = 64) -> nn.Module:
    """Make a ResNet of torchvision with the blocks of `arch`, but fewer, and maybe narrower ones.

    Args:
        arch: which.
        num_classes: outputs.
        width: channels inside of the first blocks; only those of "resnet50" have another than 64.
    """
    resnet = import_torchvision().models.resnet
    block = {"resnet18": resnet.BasicBlock, "resnet50": resnet.Bottleneck}[arch]
    return resnet.ResNet(block, BLOCKS, num_classes=num_classes, width_per_group=width)


# --- compared


def compare(seen: StepByStep, metrics: dict, args: argparse.Namespace, workers: Sequence[str],
            parts: int = 1) -> Comparison:
    """Hold the training that was recorded against the other program; return the findings.

    Args:
        seen: what was recorded.
        metrics: of the lesson.
        args: the parsed flags.
        workers: the roles that compute.
        parts: of the model that each of them has.
    """
    ours, theirs = seen.ours, [*seen.theirs, *seen.alone]  # also what was left out
    found = Comparison(f"{args.world_size} processes")
    hold_steps(found, ours, theirs, metrics)
    steps = [(step.get("started", 0), step.get("ended", 0)) for step in ours]
    hold_windows(found, steps, metrics, args, workers, parts)
    return found


def hold_steps(found: Comparison, ours: list[dict], theirs: list[dict], metrics: dict) -> None:
    """Hold every number of every step; `ours` and `theirs` are as a `StepByStep` has them."""
    def both(key):
        return [[step.get(key, {}) for step in steps] for steps in (ours, theirs)]

    found.equal("data", *both("data"), "drawn from the same seed")
    found.equal("micro-batches", *both("micro-batches"),
                "numbers of the micro-batches that each worker has had")
    found.close("outputs", *both("outputs"), TOLERANCE, BECAUSE)
    found.close("losses", metrics["losses"], [step["loss"] for step in theirs], TOLERANCE, BECAUSE)
    found.close("weights", *both("weights"), TOLERANCE,
                f"{BECAUSE}; shown are the worst number of each tensor, and its largest")
    found.close("running statistics", *both("statistics"), TOLERANCE,
                "of each BatchNorm, one micro-batch after the other; as above")
    found.equal("batches that BatchNorm has seen", *both("counts"), "each micro-batch counts once")
    found.holds("one micro-batch at a time", all(step.get("one at a time") for step in ours),
                "no two forwards of a shard may overlap on the timeline: they would write into the "
                "same running statistics")


def layers_of_both(args: argparse.Namespace) -> list[list[str]]:
    """List the layers of the whole model, of the shards and of torchvision, without numbers."""
    whole = getattr(import_torchvision().models, args.arch)
    with torch.device("meta"):
        shards = shards_of(args, torch.device("meta"))
        models = nn.ModuleList(shards), whole(num_classes=args.num_classes)
    return [[repr(layer) for layer in model.modules() if not list(layer.children())]
            for model in models]


def hold_layers(found: Comparison, ours: list[str], theirs: list[str]) -> None:
    """Hold every layer of the whole model, in order."""
    first = next((f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
                 f"{len(ours)} layers, {len(theirs)} in torchvision's")
    found.holds("layers", ours == theirs, f"of both shards, against torchvision's: {first}")


# --- times


def hold_windows(found: Comparison, steps: list[Window], metrics: dict, args: argparse.Namespace,
                 workers: Sequence[str], parts: int = 1) -> None:
    """Hold that each timed window has one step, that of its row, and all of its micro-batches.

    Args:
        found: the `Comparison`.
        steps: (start, end) of each step, as it was recorded.
        metrics: of the lesson.
        args: the parsed flags.
        workers: the roles that compute.
        parts: of the model that each of them has.
    """
    rows = len(args.num_splits)
    inside, forwards = [], []
    for of_row in metrics["windows"]:
        # -1: a step that only touches a window.
        inside.append([[n if start <= began and ended <= end else -1
                        for n, (began, ended) in enumerate(steps) if began < end and ended > start]
                       for start, end in of_row])
        forwards.append([[sum(span["kind"] == "forward" and start < span["end"] <= end
                              for span in metrics["spans"][worker]) for worker in workers]
                         for start, end in of_row])
    expected = [[[row + rows * (1 + batch)] for batch in range(args.num_batches)]
                for row in range(rows)]
    found.equal("timed steps", inside, expected, "the steps between the two readings of the clock; "
                "none of a warm-up, none of another number of splits", unit="row")
    found.equal("timed micro-batches", forwards,
                [[[number * parts] * len(workers)] * args.num_batches
                 for number in args.num_splits],
                "of each worker between the two readings", unit="row")


# --- recorded


class OnMaster(StepByStep):
    """Keeps, on the master, what its model, its loss and its optimizer do, and asks the workers.

    Args:
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, alone: Iterator[dict]) -> None:
        super().__init__(lesson.WORKERS, alone)
        self.optimizer_steps, self.sent = 0, {}

    def before(self, module: nn.Module, inputs: tuple) -> None:
        """Begin a batch."""
        if isinstance(module, lesson.DistResNet50):
            self.now.setdefault("started", time.time())
            self.now["images"] = inputs[0]

    def after(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep the outputs of the model, or the targets of the loss."""
        if isinstance(module, lesson.DistResNet50):
            self.now["outputs"] = output
            self.now["rrefs"] = module.p1_rref, module.p2_rref
        elif isinstance(module, nn.MSELoss):
            self.now["targets"] = inputs[1]

    def after_step(self) -> None:
        """Fetch what the workers have; a second step of the same batch is only counted."""
        self.optimizer_steps += 1
        if self.now:
            self.now["ended"] = time.time()
            kept = {name: copies([self.now.pop(name)])[0]
                    for name in ("images", "targets", "outputs") if name in self.now}
            self.now |= {"outputs": kept.pop("outputs"), "data": kept}
            rrefs = self.now.pop("rrefs")
            states = [rpc.rpc_sync(rref.owner(), state_of, args=(rref,)) for rref in rrefs]
            self.sent = {worker: state["sent"]
                         for worker, state in zip(self.workers, states, strict=True)}
            self.add_step(states)


def state_of(shard_rref: rpc.RRef) -> dict:
    """Return, on a worker, the `state` of its shard, and what was `sent` to it."""
    shard = shard_rref.local_value()
    return state(shard) | {"sent": shard.sent}


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson recorded; rank 0 returns what has been found."""
    layers = layers_of_both(args)
    prepare(args)
    if rank > 0:
        with Recorder() as recorder:
            wait_for_all(recorder, args)
            return lesson.run_worker(rank, world_size, args)
    seen = OnMaster(single_process(args))
    with Recorder() as recorder:
        recorder.on_forward(seen.before, seen.after)

        @recorder.around(lesson.DistributedOptimizer, "step")
        def recorded_step(step, optimizer, context_id):
            step(optimizer, context_id)
            seen.after_step()

        metrics = lesson.run_worker(rank, world_size, args)
    found = compare(seen, metrics, args, lesson.WORKERS)
    made, expected = seen.optimizer_steps, len(args.num_splits) * (1 + args.num_batches)
    found.holds("steps", made == expected,
                f"the run made {made} optimizer steps, the oracle expects {expected}")
    hold_sent(found, seen.sent)
    hold_layers(found, *layers)
    return found.as_dict()


def hold_sent(found: Comparison, sent: dict[str, dict]) -> None:
    """Hold what `wait_for_all` has seen: nothing on the master waits, features come directly."""
    late = [number for of_worker in sent.values() for number in of_worker["late"]]
    came = "only {} of {}".format(*late[0]) if late else "all"
    found.holds("sent at once", not late, "while each worker holds back the first micro-batch of a "
                f"batch, {came} of this batch are sent to it")
    sources = {worker: sorted(of_worker["by"]) for worker, of_worker in sent.items()}
    found.holds("owners", [*sources.values()] == [[lesson.MASTER_NAME], lesson.WORKERS[:1]],
                f"each worker fetches its inputs from {sources}")


def wait_for_all(recorder: Recorder, args: argparse.Namespace) -> None:
    """Let each worker begin with a batch when all its micro-batches have been sent to it.

    A shard gets `sent`: where not all had come in time, how many of how many; the owners `by` name.
    """
    changed = threading.Condition()
    for shard_class in (lesson.ResNetShard1, lesson.ResNetShard2):
        @recorder.around(shard_class, "forward")
        def forward(original, shard, x_rref, i):
            with changed:
                if not hasattr(shard, "sent"):
                    shard.sent = {"number": 0, "late": [], "by": set()}
                sent = shard.sent
                sent["number"] += 1
                if hasattr(x_rref, "owner_name"):
                    sent["by"].add(x_rref.owner_name())
                begin, end = batch_of(sent["number"], args)
                changed.notify_all()
                if not sent["late"] and not changed.wait_for(lambda: sent["number"] >= end, SENT_S):
                    sent["late"].append((sent["number"] - begin, end - begin))
            return original(shard, x_rref, i)


def batch_of(number: int, args: argparse.Namespace) -> tuple[int, int]:
    """Return how many micro-batches have come before, and at the end, of the batch of `number`."""
    ends = itertools.accumulate(args.num_splits * (1 + args.num_batches), initial=0)
    return next((pair for pair in itertools.pairwise(ends) if pair[1] >= number), (0, 0))


def prepare(args: argparse.Namespace) -> None:
    """Set float64 and the shorter model, in each process of a check."""
    torch.set_default_dtype(torch.float64)
    lesson.ARCHS[args.arch] = lesson.ARCHS[args.arch][0], BLOCKS


# --- the command


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Run main.py, and one process; return the differences on the master.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    leave_rows_out(program, args)
    # Pieces of 3 and 2 images; `xs.chunk` would make fewer pieces of them.
    smaller(args, batch_size=max(5, 2 * args.num_splits[-1] + 1))
    return verdict(launch(record, args, program.role_name))


def leave_rows_out(program: ModuleType, args: argparse.Namespace) -> None:
    """Drop the last of the default's `--num_splits`, which takes the longest; obey those given."""
    if args.num_splits == program.build_parser().get_default("num_splits"):
        args.num_splits = args.num_splits[:MOST_ROWS]


def smaller(args: argparse.Namespace, batch_size: int) -> None:
    """Change the flags to those of a short training, and print them."""
    args.batch_size, args.image_size, args.num_batches = batch_size, SIDE, 1
    args.lr /= CALM
    if starts_rank(args, 0):
        report.log("check", f"{args.arch} on a batch of {batch_size} images of {SIDE}x{SIDE}, "
                            "in float64: a warm-up and a timed batch for each of "
                            f"{' '.join(map(str, args.num_splits))} splits, lr {args.lr:g}")
