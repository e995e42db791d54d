r"""One model on two devices of one machine, plain and as a pipeline (tutorial 6_2).

A model that does not fit on one device is split over two, and its activations travel between them.
Then only one device works at a time. Micro-batches let both devices work at the same time.

    time            ------------------------------------------------------------------------->
    ModelParallelResNet50: one of the two devices always waits
      cuda:0        [ seq1: forward ]....................................[ seq1: backward    ]
      cuda:1        .................[ seq2, fc: forward ][ backward    ].....................

    PipelineParallelResNet50: a batch of 4 micro-batches
      cuda:0        [ 1 ][ 2 ][ 3 ][ 4 ]..............[  4   ][  3   ][  2   ][  1   ]
      cuda:1        .....[ 1 ][ 2 ][ 3 ][ 4 ][  4   ][  3   ][  2   ][  1   ].........

There is one process and no `launch`. A line of Python only queues a GPU's kernels, so one process
keeps two GPUs busy. On one device or on CPUs, nothing can overlap. Such a run shows the cost of
splitting, but not its gain; its first line says so.

    python model_parallel_resnet/single_machine.py                          two GPUs, or one device
    python model_parallel_resnet/single_machine.py --devices cuda:0 cuda:1  these two
    python model_parallel_resnet/single_machine.py --batch_size 120 --image_size 128 \
        --num_repeat 10 --num_batches 3                                     the tutorial's sizes
    python model_parallel_resnet/single_machine.py --check                  compare with ResNet50

It ends with, about:
    ResNet50 on one device (cpu): model parallel takes ...% time (tutorial +7%), pipelined ...%
"""

import argparse
import copy
import random
import re
import sys
import time

from common import program, report
from common.cli import Parser, bounded, refuse, shortened
from common.environment import reproducible
from common.vision import import_torchvision

import torch
from torch import nn, optim

from model_parallel_resnet.data import require_split_sizes
from model_parallel_resnet.single_machine_results import ROLE, finish, what_it_shows

NUM_CLASSES = 1000
SPLIT_SIZES = [1, 3, 5, 8, 10, 12, 20, 40, 60]


class ToyModel(nn.Module):
    """Two layers on two devices: only the places of the tensors differ from an ordinary model."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        # Tutorial: all classes name "cuda:0" and "cuda:1", so fewer than two GPUs are an error.
        self.dev0, self.dev1 = devices
        self.net1 = torch.nn.Linear(10, 10).to(self.dev0)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5).to(self.dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (samples, 5) on the second device from (samples, 10) on any device."""
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def train_toy(args: argparse.Namespace) -> tuple[float, float]:
    """Train `ToyModel` for one step; return the loss before and after it."""
    torch.manual_seed(args.seed)
    model = ToyModel(args.devices)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5).to(args.devices[1])

    optimizer.zero_grad()
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item(), loss_fn(model(inputs), labels).item()


class ModelParallelResNet50(nn.Module):
    """A ResNet50 whose halves are on two devices.

    Args:
        resnet: Torchvision's ResNet50; its layers are moved, not copied.
        devices: Device of the first half, and device of the second half.
    """

    # Tutorial: subclasses torchvision's ResNet, so each layer has two names.
    def __init__(self, resnet: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.dev0, self.dev1 = devices
        self.seq1 = nn.Sequential(
            resnet.conv1,
            resnet.bn1,
            resnet.relu,
            resnet.maxpool,
            resnet.layer1,
            resnet.layer2).to(self.dev0)
        self.seq2 = nn.Sequential(
            resnet.layer3,
            resnet.layer4,
            resnet.avgpool).to(self.dev1)
        self.fc = resnet.fc.to(self.dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits (N, classes) on the second device from images (N, 3, H, W)."""
        x = self.seq2(self.seq1(x.to(self.dev0)).to(self.dev1))
        return self.fc(x.flatten(1))


def train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
          args: argparse.Namespace) -> list[torch.Tensor]:
    """Train for `--num_batches` steps on one batch.

    Args:
        model: Model whose output is (N, classes), on any device.
        inputs: Images (N, 3, H, W) in main memory.
        labels: One-hot targets (N, classes) in main memory.
        args: Parsed flags.

    Returns:
        The loss of each step, a tensor on the output's device.
    """
    model.train(True)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for _ in range(args.num_batches):
        # Tutorial: draws new random images here, while the clock runs; losses don't compare.
        optimizer.zero_grad()
        outputs = model(inputs.to(args.devices[0]))
        loss = loss_fn(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # not .item(), which would wait for the GPUs
    return losses


def synchronize(devices: list[torch.device]) -> None:
    """Wait until the devices have finished all queued work."""
    for of_half in devices:
        if of_half.type == "cuda":
            torch.cuda.synchronize(of_half)


def time_training(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
                  args: argparse.Namespace) -> tuple[float, list[float]]:
    """Time `train`; return its duration in seconds, and its losses.

    Raises:
        NotFiniteError: If a loss is not finite.
    """
    synchronize(args.devices)
    start = time.perf_counter()
    losses = train(model, inputs, labels, args)
    synchronize(args.devices)  # Tutorial: the clock was read while kernels were still queued.
    seconds = time.perf_counter() - start
    return seconds, [report.require_finite(loss, f"at step {i + 1}")
                     for i, loss in enumerate(losses)]


class PipelineParallelResNet50(ModelParallelResNet50):
    """A ResNet50 on two devices that computes one micro-batch after another.

    Args:
        resnet: Torchvision's ResNet50; its layers are moved, not copied.
        devices: Device of the first half, and device of the second half.
        split_size: Number of samples in a micro-batch (not the number of micro-batches). The last
            micro-batch may be smaller.
    """

    def __init__(self, resnet: nn.Module, devices: list[torch.device],
                 split_size: int = 20) -> None:
        super().__init__(resnet, devices)
        self.split_size = split_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits (N, classes) on the second device from images (N, 3, H, W)."""
        splits = iter(x.to(self.dev0).split(self.split_size, dim=0))
        s_next = next(splits)
        s_prev = self.seq1(s_next).to(self.dev1)
        ret = []
        for s_next in splits:
            # A. s_prev runs on dev1
            s_prev = self.seq2(s_prev)
            ret.append(self.fc(s_prev.flatten(1)))
            # B. s_next runs on dev0, at the same time as A, because on GPUs neither line waits.
            s_prev = self.seq1(s_next).to(self.dev1)
        s_prev = self.seq2(s_prev)
        ret.append(self.fc(s_prev.flatten(1)))
        return torch.cat(ret)


def resnet50_and_batch(args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return an unsplit ResNet50 on the first device, and a batch in main memory.

    The batch is images (N, 3, H, W) and one-hot targets (N, classes).
    """
    torch.manual_seed(args.seed)
    models = import_torchvision().models
    resnet = models.resnet50(num_classes=NUM_CLASSES).to(args.devices[0])
    inputs = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    one_hot_indices = torch.randint(NUM_CLASSES, (args.batch_size, 1))
    labels = torch.zeros(args.batch_size, NUM_CLASSES).scatter_(1, one_hot_indices, 1)
    return resnet, inputs, labels


def measure(args: argparse.Namespace) -> list[dict]:
    """Time all models alternately.

    Returns:
        A row for the single device, one for model parallel, and one for each split size:
        `{model, split_size, micro_batches, times_s, losses}`. `split_size` is None if the batch is
        not split.
    """
    resnet, inputs, labels = resnet50_and_batch(args)
    model_parallel = ModelParallelResNet50(copy.deepcopy(resnet), args.devices)
    # All split sizes share one model, to save memory.
    pipeline = PipelineParallelResNet50(copy.deepcopy(resnet), args.devices)
    candidates = [("single device", resnet, None), ("model parallel", model_parallel, None)]
    candidates += [("pipeline", pipeline, split_size) for split_size in args.measured_sizes]
    rows = [{"model": name, "split_size": size, "times_s": [], "losses": [],
             "micro_batches": len(inputs.split(size or len(inputs)))}
            for name, _, size in candidates]
    with report.progress(len(rows) * (1 + args.num_repeat), "run", role=ROLE) as bar:
        for repeat in range(1 + args.num_repeat):
            # Tutorial: times ten new models of one kind, then ten of the next. Here the kinds take
            # turns, so that a slow moment of the machine slows all of them. The order changes,
            # because a run depends on the state in which the previous run left the machine.
            turns = list(zip(rows, candidates, strict=True))
            random.Random(args.seed + repeat).shuffle(turns)
            for row, (_, model, split_size) in turns:
                pipeline.split_size = split_size
                seconds, losses = time_training(model, inputs, labels, args)
                # Tutorial: times the first run, too, which allocates and chooses kernels.
                if repeat > 0:
                    row["times_s"].append(seconds)
                row["losses"] += losses
                bar.update()
            if bar.disable:  # not a terminal
                report.log(ROLE, f"round {repeat} of {args.num_repeat}" if repeat else "warm-up")
    return rows


def device(text: str) -> torch.device:
    """Convert a value of `--devices`, for argparse."""
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]?)", text):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not accepted; give cpu or cuda:N")
    return torch.device(text)


def choose_devices(args: argparse.Namespace) -> list[torch.device]:
    """Return the devices of both halves.

    Raises:
        SystemExit: 2 after one line, if a device does not exist, or the two cannot be compared with
            a single one.
    """
    gpus = torch.cuda.device_count()
    if args.devices is None:
        on_cpu = args.device == "cpu" or gpus == 0
        names = ["cpu", "cpu"] if on_cpu else ["cuda:0", f"cuda:{min(gpus, 2) - 1}"]
        return [torch.device(name) for name in names]
    given = " ".join(map(str, args.devices))
    if args.device != "auto":
        refuse(f"--device {args.device} cannot be given with --devices {given}: the devices are "
               "already chosen")
    if any(of_half.type == "cuda" and of_half.index >= gpus for of_half in args.devices):
        refuse(f"--devices {given} must be " + (
            f"of cuda:0 to cuda:{gpus - 1}, or cpu" if gpus else "cpu cpu: torch sees no GPU here"))
    if args.devices[0].type != args.devices[1].type:
        refuse(f"--devices {given} must be two GPUs, or one device twice: a CPU and a GPU differ")
    return args.devices


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("model_parallel_resnet/single_machine", __doc__, distributed=False)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--devices", type=device, nargs=2, metavar="D",
        help="two GPUs, or one device twice (default: the first two GPUs, or one device twice)")
    add("--batch_size", type=count, default=12, metavar="N",
        help="images per batch (tutorial: 120)")
    # 32 pixels leave a single one in the last layers. BatchNorm cannot average one pixel of one
    # image.
    add("--image_size", type=bounded(int, at_least=33), default=64, metavar="N",
        help="height and width of an image in pixels (tutorial: 128)")
    add("--num_batches", type=count, default=1, metavar="N",
        help="training steps that are timed together (tutorial: 3)")
    add("--num_repeat", type=count, default=3, metavar="N",
        help="measurements of each model (tutorial: 10)")
    add("--split_size", type=count, metavar="N", help="images in a micro-batch of the pipeline in "
        "the summary line (default: half of the batch, at most 20)")
    add("--split_sizes", type=count, nargs="+", metavar="N", help="all split sizes to measure "
        f"(default: those of {' '.join(map(str, SPLIT_SIZES))} that fit the batch)")
    add("--lr", type=bounded(float, above=0), default=0.1,
        help="learning rate of SGD (tutorial: 0.001)")
    return parser


def main(argv: list[str] | None = None) -> dict:
    """Measure and plot, or run `--check`; return the metrics or the differences.

    Args:
        argv: Command-line flags, `sys.argv` by default.

    Raises:
        SystemExit: 1 if training diverges or a comparison does not hold, 2 if a flag is refused.
    """
    started = time.perf_counter()
    args = build_parser().parse_args(argv)
    reproducible(args)
    args.devices = choose_devices(args)
    left_out = require_split_sizes(args, SPLIT_SIZES, NUM_CLASSES)
    report.log(ROLE, what_it_shows(args.devices))
    if args.check:
        return program.check(program.program_of(measure), args)
    if left_out:
        report.log(ROLE, f"left out: split sizes {left_out}, because the batch has only "
                         f"{args.batch_size} images")
    try:
        toy_losses = train_toy(args)
        rows = measure(args)
    except report.NotFiniteError as error:
        print(f"error: a model {error}", file=sys.stderr)
        raise SystemExit(1) from None
    metrics = finish(rows, toy_losses, left_out, time.perf_counter() - started, args)
    print(f"results: {args.output_dir}")
    return metrics


if __name__ == "__main__":
    main()
