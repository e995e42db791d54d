"""`--check` of single_machine.py: all of its trainings, held against torchvision's ResNet50.

The lesson's own `train_toy` and `measure` run, on a few small images and in float64, where a
mistake cannot be taken for rounding: a warm-up and one repeat of two steps for each model. Time is
made here: a clock that only the trainings move on, each by another number of seconds. So each
second in the table is known beforehand. The ResNet has fewer and narrower blocks: see check.py.

The other program has its own data, micro-batches, loss, steps, and order of turns. Its ResNet50 is
not cut, and the statistics of BatchNorm are those of each micro-batch, one after the other. It
makes a step after each of the lesson's, and of every tensor two numbers are kept (recording.py).
"""

import argparse
import copy
import functools
import itertools
import math
import random
import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

from common import report
from common.oracle import Comparison, default_dtype, verdict
from common.recorder import Recorder, copies

import torch
from torch import nn

from model_parallel_resnet import single_machine as lesson
from model_parallel_resnet import single_machine_results as results
from model_parallel_resnet.check import BECAUSE, CALM, SIDE, TOLERANCE, short_resnet
from model_parallel_resnet.recording import furthest, state

FLAGS = {"image_size": SIDE, "num_batches": 2, "num_repeat": 1}
SIZES = [3, 5]  # of the splits, where none are given: of a batch of 5, a part and the whole
WIDTH = 16  # channels


# --- one process, one device


def single_process(args: argparse.Namespace) -> Iterator[dict]:
    """Make all trainings with ResNet50s that are not cut.

    Yields:
        For each step: its row, data, loss, and what the model has after it: the weights, and for
        each BatchNorm the running statistics and the number of batches that it has seen.
    """
    torch.manual_seed(args.seed)
    resnet = short_resnet("resnet50", lesson.NUM_CLASSES, WIDTH)
    images = torch.randn(args.batch_size, 3, SIDE, SIDE)
    classes = torch.randint(lesson.NUM_CLASSES, (args.batch_size,))
    targets = nn.functional.one_hot(classes, lesson.NUM_CLASSES).double()
    device = args.devices[0]
    images, targets = images.to(device), targets.to(device)
    models = {"whole": resnet.to(device).train(), "pipeline": copy.deepcopy(resnet).train()}
    # The single device and the model parallel one train alike; so one of both is enough.
    known = {0: [], 1: []}
    for row, _ in turns_of(args):
        model = models["whole" if row < 2 else "pipeline"]
        size = args.split_sizes[row - 2] if row > 1 else args.batch_size
        for _ in range(args.num_batches):
            if row < 2 and known[row]:
                yield {**known[row].pop(0), "row": row}
                continue
            outputs = torch.cat([model(images[start : start + size])
                                 for start in range(0, args.batch_size, size)])
            loss = ((outputs - targets) ** 2).sum() / targets.numel()
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= args.lr * gradient
            weights = {name: param.detach().cpu() for name, param in model.named_parameters()}
            norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
            step = {"row": row, "data": {"images": images.cpu(), "targets": targets.cpu()},
                    "loss": loss.item(), "weights": weights,
                    "statistics": {f"BatchNorm {i}": torch.stack([norm.running_mean.cpu(),
                                                                  norm.running_var.cpu()])
                                   for i, norm in enumerate(norms)},
                    "counts": [norm.num_batches_tracked.item() for norm in norms]}
            if row < 2:
                known[1 - row].append({**step, "weights": copy.deepcopy(weights)})
            yield step


def turns_of(args: argparse.Namespace) -> Iterator[tuple[int, bool]]:
    """Yield the numbers of the rows in the order of their turns, and whether it is a warm-up."""
    for repeat in range(1 + args.num_repeat):
        order = list(range(2 + len(args.split_sizes)))
        random.Random(args.seed + repeat).shuffle(order)
        yield from ((row, repeat == 0) for row in order)


def toy_losses(args: argparse.Namespace) -> list[float]:
    """Compute the loss of two layers before and after one step of SGD."""
    torch.manual_seed(args.seed)
    net1, net2 = nn.Linear(10, 10), nn.Linear(10, 5)
    x, y = torch.randn(20, 10), torch.randn(20, 5)
    parameters = [*net1.parameters(), *net2.parameters()]
    losses = []
    for _ in range(2):
        loss = ((net2(net1(x).clamp(min=0)) - y) ** 2).sum() / 100
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= args.lr * gradient
    return losses


# --- recorded


class Seen:
    """Keeps each step of each training.

    `ours` and `theirs` have a dict for each step: its "data"; the "weights" and the running
    "statistics" after it, see `furthest`; the "counts" of batches that each BatchNorm has seen. In
    `theirs` are also its "row" and its "loss". `events`: when the lesson has trained, waited for
    its devices, once for each, and read the clock.

    Args:
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, alone: Iterator[dict]) -> None:
        self.alone = alone
        self.ours, self.theirs, self.events = [], [], []
        self.now, self.model = {}, None  # the data of the step under way, and what is trained
        self.seconds = 0.0  # by the lesson's clock

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        """Keep the batch that comes to the model, or its targets, which come to the loss."""
        if module is self.model:
            (self.now["images"],) = copies(inputs[:1])
        elif isinstance(module, nn.MSELoss):
            (self.now["targets"],) = copies(inputs[1:])

    def after_step(self) -> None:
        """Let the other program make its step, and compare."""
        ours, self.now = {"data": self.now}, {}
        self.ours.append(ours)
        theirs = next(self.alone, None)
        if theirs is None:  # our step is one too many
            return
        self.theirs.append(theirs)
        model = state(self.model)
        ours["weights"], theirs["weights"] = furthest(
            dict(zip(theirs["weights"], model["weights"], strict=True)), theirs["weights"])
        ours["statistics"], theirs["statistics"] = furthest(
            {f"BatchNorm {i}": norm["running"] for i, norm in enumerate(model["norms"])},
            theirs["statistics"])
        ours["counts"] = [norm["count"] for norm in model["norms"]]


def record(seen: Seen, args: argparse.Namespace) -> list[dict]:
    """Run the lesson's `measure` with a shorter ResNet50 and another clock; return its rows."""
    trainings = itertools.count(1)
    resnet50 = functools.partial(short_resnet, "resnet50", width=WIDTH)
    torchvision = SimpleNamespace(models=SimpleNamespace(resnet50=resnet50))

    def read_clock():
        seen.events.append("clock")
        return seen.seconds

    with Recorder() as recorder:
        recorder.put(lesson, "import_torchvision", lambda: torchvision)
        recorder.put(lesson, "time", SimpleNamespace(perf_counter=read_clock))
        recorder.on_forward(before=seen.before_forward)
        recorder.on_step(after=lambda optimizer: seen.after_step())

        @recorder.around(lesson, "train")
        def recorded_train(train, model, *others):
            seen.model = model
            losses = train(model, *others)
            seen.seconds += next(trainings)  # all trainings take different times
            seen.events.append("train")
            return losses

        @recorder.around(lesson, "synchronize")
        def recorded_synchronize(synchronize, devices):
            seen.events += ["wait"] * len(devices)  # for all, in one call or in several
            synchronize(devices)

        return lesson.measure(args)


# --- compared


def hold_toy(found: Comparison, args: argparse.Namespace) -> None:
    """Hold the toy model's losses."""
    found.close("toy model", lesson.train_toy(args), toy_losses(args), TOLERANCE, BECAUSE, "loss")


def hold_steps(found: Comparison, ours: list[dict], theirs: list[dict]) -> None:
    """Hold every step of every training."""
    def both(key):
        return [[step.get(key, {}) for step in steps] for steps in (ours, theirs)]

    found.equal("data", *both("data"), "drawn from the same seed")
    found.close("weights", *both("weights"), TOLERANCE,
                f"{BECAUSE}; shown are the worst number of each tensor, and its largest")
    found.close("running statistics", *both("statistics"), TOLERANCE, "of each BatchNorm; as above")
    found.equal("batches that BatchNorm has seen", *both("counts"), "each micro-batch counts once")


def hold_rows(found: Comparison, rows: list[dict], seen: Seen, args: argparse.Namespace) -> None:
    """Hold the rows: their names, their losses, and their times."""
    names = ["single device", "model parallel"] + ["pipeline"] * len(args.split_sizes)
    found.holds("names of the rows", [row["model"] for row in rows] == names
                and [row["split_size"] for row in rows] == [None, None, *args.split_sizes],
                f"{', '.join(names[:3])} with split sizes {args.split_sizes}")
    found.equal("micro-batches", [row["micro_batches"] for row in rows], micro_batches_of(args),
                "the batch over the split size, rounded up", "row")
    losses, times = [[] for _ in names], [[] for _ in names]
    for step in seen.theirs:
        losses[step["row"]].append(step["loss"])
    for turn, (row, warm_up) in enumerate(turns_of(args), start=1):
        if not warm_up:
            times[row].append(float(turn))
    found.close("losses", [row["losses"] for row in rows], losses, TOLERANCE, BECAUSE, "row")
    found.equal("times", [row["times_s"] for row in rows], times,
                "seconds of a clock that only the trainings move on; no warm-up", "row")
    wait = f"(wait ){{{len(args.devices)},}}"
    turn = f"({wait}clock train {wait}clock )" + f"{{{len(list(turns_of(args)))}}}"
    in_turn = bool(re.fullmatch(turn, " ".join([*seen.events, ""])))
    begins = f"; it begins: {' '.join(seen.events[: 3 + 2 * len(args.devices)])}"
    found.holds("clock", in_turn, "read before and after each training, when the devices have "
                f"nothing left to do{'' if in_turn else begins}")


def micro_batches_of(args: argparse.Namespace) -> list[int]:
    """Return the number of micro-batches in each row."""
    return [1, 1, *(math.ceil(args.batch_size / size) for size in args.split_sizes)]


# --- the command


@default_dtype(torch.float64)
def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float]:
    """Run single_machine.py, and one process; return the differences.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    vars(args).update(FLAGS, lr=args.lr / CALM)
    # No piece may have a single image: BatchNorm over its last four numbers magnifies rounding.
    args.split_sizes = sorted({size for size in args.split_sizes or [] if size > 1}) or SIZES
    args.measured_sizes = args.split_sizes
    smallest, largest = args.split_sizes[0], args.split_sizes[-1]
    args.batch_size = next(number for number in itertools.count(max(largest, smallest + 2))
                           if all(number % size != 1 for size in args.split_sizes))
    report.log(results.ROLE, f"check: float64, {args.batch_size} images of {SIDE}x{SIDE}, split "
                             f"sizes {args.split_sizes}, 2 rounds of {args.num_batches} steps")
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where the machine is busy
    try:
        found = Comparison("the models on two devices", "an unsplit ResNet50")
        try:
            hold_toy(found, args)
            seen = Seen(single_process(args))
            rows = record(seen, args)
        except Exception as error:
            found.holds("run", False, f"raised {repr(error)[:200]}")
            return verdict(found.as_dict())
        hold_steps(found, seen.ours, [*seen.theirs, *seen.alone])
        hold_rows(found, rows, seen, args)
        return verdict(found.as_dict())
    finally:
        torch.set_num_threads(usual)
