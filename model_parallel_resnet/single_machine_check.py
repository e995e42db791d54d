"""`--check` of single_machine.py: all of its training runs, compared with an unsplit ResNet50.

The lesson's own `train_toy` and `measure` run on a few small images, in float64: a warm-up and one
repeat of two steps for each model. The ResNet has fewer and narrower blocks: see check.py.

The single process has its own data, micro-batches, loss, steps and order of turns. It makes a step
after each of the lesson's.
"""

import argparse
import copy
import functools
import itertools
import random
import re
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

from common import report
from common.oracle import Comparison, default_dtype, verdict
from common.recorder import Recorder, copies

import torch
from torch import nn

from model_parallel_resnet import single_machine as lesson
from model_parallel_resnet.check import (
    BECAUSE,
    CALM,
    SIDE,
    TOLERANCE,
    Steps,
    compare_steps,
    short_resnet,
    state,
    train_step,
)

FLAGS = {"image_size": SIDE, "num_batches": 2, "num_repeat": 1}
SIZES = [3, 5]  # default split sizes; of a batch of 5, these are a part and the whole
WIDTH = 16  # channels


# --- the single process, with one device


def single_process(args: argparse.Namespace) -> Iterator[dict]:
    """Train three unsplit ResNet50s in the order of the lesson's rows.

    Yields:
        For each step: the number of its `row`, `data`, and what `train_step` returns.
    """
    torch.manual_seed(args.seed)
    resnet = short_resnet("resnet50", lesson.NUM_CLASSES, WIDTH).to(args.devices[0]).train()
    images = torch.randn(args.batch_size, 3, SIDE, SIDE)
    classes = torch.randint(lesson.NUM_CLASSES, (args.batch_size,))
    targets = nn.functional.one_hot(classes, lesson.NUM_CLASSES).double()
    data = {"images": images, "targets": targets}
    images, targets = images.to(args.devices[0]), targets.to(args.devices[0])
    models = resnet, copy.deepcopy(resnet), copy.deepcopy(resnet)  # one for all split sizes
    for row in turns_of(args):
        size = args.split_sizes[row - 2] if row > 1 else args.batch_size
        for _ in range(args.num_batches):
            pieces = (images[start : start + size] for start in range(0, args.batch_size, size))
            yield {"row": row, "data": data,
                   **train_step(models[min(row, 2)], pieces, targets, args.lr)}


def turns_of(args: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of the rows in the order of their turns."""
    for repeat in range(1 + args.num_repeat):
        order = list(range(2 + len(args.split_sizes)))
        random.Random(args.seed + repeat).shuffle(order)
        yield from order


def toy_losses(args: argparse.Namespace) -> list[float]:
    """Compute the loss of two layers before and after one step of SGD."""
    torch.manual_seed(args.seed)
    toy = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    x, y = torch.randn(20, 10), torch.randn(20, 5)
    return [train_step(toy, [x], y, args.lr)["loss"] for _ in range(2)]


# --- what is recorded


def record(steps: Steps, args: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Run the lesson's `measure` with a shorter ResNet50.

    Returns:
        Its rows, and its events: "train", "wait" for each device, and "clock" for each reading.
    """
    events, model, now = [], None, {}
    resnet50 = functools.partial(short_resnet, "resnet50", width=WIDTH)
    torchvision = SimpleNamespace(models=SimpleNamespace(resnet50=resnet50))

    def read_clock():
        events.append("clock")
        return time.perf_counter()

    def before_forward(module, inputs):
        if module is model:
            (now["images"],) = copies(inputs[:1])
        elif isinstance(module, nn.MSELoss):
            (now["targets"],) = copies(inputs[1:])

    def after_step(optimizer):
        steps.add({"data": {**now}, **state(model)})
        now.clear()

    with Recorder() as recorder:
        recorder.put(lesson, "import_torchvision", lambda: torchvision)
        recorder.put(lesson, "time", SimpleNamespace(perf_counter=read_clock))
        recorder.on_forward(before=before_forward)
        recorder.on_step(after=after_step)

        @recorder.around(lesson, "train")
        def recorded_train(train, trained, *others):
            nonlocal model
            model = trained
            losses = train(trained, *others)
            events.append("train")
            return losses

        @recorder.around(lesson, "synchronize")
        def recorded_synchronize(synchronize, devices):
            events.extend(["wait"] * len(devices))  # for all, in one call or in several
            synchronize(devices)

        return lesson.measure(args), events


# --- what is compared


def compare(found: Comparison, args: argparse.Namespace) -> None:
    """Run the lesson and the single process, and compare every step of every training run."""
    found.close("toy model", lesson.train_toy(args), toy_losses(args), TOLERANCE, BECAUSE, "loss")
    steps = Steps(single_process(args))
    rows, events = record(steps, args)
    ours, theirs = steps.finished()

    compare_steps(found, lambda key: [[step.get(key, {}) for step in side]
                                      for side in (ours, theirs)])
    losses = [[step["loss"] for step in theirs if step["row"] == row] for row in range(len(rows))]
    found.close("losses", [row["losses"] for row in rows], losses, TOLERANCE, BECAUSE, "row")
    wait = f"(wait ){{{len(args.devices)},}}"
    turn = f"({wait}clock train {wait}clock )" + f"{{{len(list(turns_of(args)))}}}"
    in_turn = bool(re.fullmatch(turn, " ".join([*events, ""])))
    begins = f"; it begins: {' '.join(events[: 3 + 2 * len(args.devices)])}"
    found.holds("clock", in_turn, "read before and after each training run, when the devices have "
                f"nothing left to do{'' if in_turn else begins}")


# --- the command


@default_dtype(torch.float64)
def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float]:
    """Run single_machine.py and the single process; return the differences.

    Raises:
        SystemExit: 1 if a comparison does not hold.
    """
    vars(args).update(FLAGS, lr=args.lr / CALM)
    # A micro-batch of one image leaves BatchNorm four numbers at the end, which magnifies rounding.
    args.split_sizes = sorted({size for size in args.split_sizes or [] if size > 1}) or SIZES
    args.measured_sizes = args.split_sizes
    smallest, largest = args.split_sizes[0], args.split_sizes[-1]
    args.batch_size = next(number for number in itertools.count(max(largest, smallest + 2))
                           if all(number % size != 1 for size in args.split_sizes))
    report.log(lesson.ROLE, f"check: float64, {args.batch_size} images of {SIDE}x{SIDE}, split "
                            f"sizes {args.split_sizes}, 2 rounds of {args.num_batches} steps")
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, several would wait for each other
    found = Comparison("the models on two devices", "an unsplit ResNet50")
    try:
        compare(found, args)
    finally:
        torch.set_num_threads(usual)
    return verdict(found.as_dict())
