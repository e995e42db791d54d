r"""One model on two devices of one machine, plain and as a pipeline (tutorial 6_2).

A model that does not fit on one device is cut in two; its activations travel from one to the other.
So only one device works at a time. Cut the batch into micro-batches as well, and both can work.

    time            ------------------------------------------------------------------------->
    ModelParallelResNet50: one of the two always waits
      cuda:0        [ seq1: forward ]....................................[ seq1: backward    ]
      cuda:1        .................[ seq2, fc: forward ][ backward    ].....................

    PipelineParallelResNet50: the batch in 4 micro-batches
      cuda:0        [ 1 ][ 2 ][ 3 ][ 4 ]..............[  4   ][  3   ][  2   ][  1   ]
      cuda:1        .....[ 1 ][ 2 ][ 3 ][ 4 ][  4   ][  3   ][  2   ][  1   ].........

There is one process and no `launch`: the kernels of a GPU are only queued by the line of Python
that calls them, so one process keeps two GPUs busy. On one device, or on CPUs, nothing can overlap:
a run shows what the splitting costs, not what it wins, and its first line states that.

    python model_parallel_resnet/single_machine.py                          two GPUs, or one device
    python model_parallel_resnet/single_machine.py --devices cuda:0 cuda:1  these two
    python model_parallel_resnet/single_machine.py --batch_size 120 --image_size 128 \
        --num_repeat 10 --num_batches 3                                     the tutorial's sizes
    python model_parallel_resnet/single_machine.py --check                  as an unsplit ResNet50?

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
    """Has two layers on two devices: all that changes is where the tensors are."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        # Tutorial: "cuda:0" and "cuda:1" in all classes, which do not start on fewer GPUs.
        self.dev0, self.dev1 = devices
        self.net1 = torch.nn.Linear(10, 10).to(self.dev0)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5).to(self.dev1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (samples, 10) on any device into (samples, 5) on the second one."""
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def train_toy(args: argparse.Namespace) -> tuple[float, float]:
    """Make one step of `ToyModel`; return the loss before and after it."""
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
    """Has the halves of a ResNet50 on two devices.

    Args:
        resnet: torchvision's; its layers are moved, not copied.
        devices: of the first half and of the second.
    """

    # Tutorial: a subclass of torchvision's ResNet, whose layers then have two names each.
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
        """Turn images (samples, 3, height, width) into (samples, classes) on the second device."""
        x = self.seq2(self.seq1(x.to(self.dev0)).to(self.dev1))
        return self.fc(x.flatten(1))


def train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
          args: argparse.Namespace) -> list[torch.Tensor]:
    """Train for `--num_batches` steps on one batch; return the loss before each, on its device.

    Args:
        model: its output is (samples, classes), on whatever device.
        inputs, labels: the batch, in main memory.
        args: the parsed flags.
    """
    model.train(True)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for _ in range(args.num_batches):
        # Tutorial: new random images here, while the clock runs; no losses to compare.
        optimizer.zero_grad()
        outputs = model(inputs.to(args.devices[0]))
        loss = loss_fn(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # not .item(), which waits for the GPUs
    return losses


def synchronize(devices: list[torch.device]) -> None:
    """Wait until the devices have done what they were given to do."""
    for of_half in devices:
        if of_half.type == "cuda":
            torch.cuda.synchronize(of_half)


def time_training(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor,
                  args: argparse.Namespace) -> tuple[float, list[float]]:
    """Time `train`; return its seconds, and its losses."""
    synchronize(args.devices)
    start = time.perf_counter()
    losses = train(model, inputs, labels, args)
    synchronize(args.devices)  # Tutorial: the clock was read while kernels were still queued.
    seconds = time.perf_counter() - start
    return seconds, [report.require_finite(loss, f"at step {i + 1}")
                     for i, loss in enumerate(losses)]


class PipelineParallelResNet50(ModelParallelResNet50):
    """Sends micro-batches through, one behind the other.

    Args:
        resnet, devices: as above.
        split_size: samples in each; the last one may have fewer. It is not their number.
    """

    def __init__(self, resnet: nn.Module, devices: list[torch.device],
                 split_size: int = 20) -> None:
        super().__init__(resnet, devices)
        self.split_size = split_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (samples, 3, height, width) into (samples, classes) on the second device."""
        splits = iter(x.to(self.dev0).split(self.split_size, dim=0))
        s_next = next(splits)
        s_prev = self.seq1(s_next).to(self.dev1)
        ret = []
        for s_next in splits:
            # A. s_prev runs on dev1
            s_prev = self.seq2(s_prev)
            ret.append(self.fc(s_prev.flatten(1)))
            # B. s_next runs on dev0, at the same time as A: on GPUs neither line waits.
            s_prev = self.seq1(s_next).to(self.dev1)
        s_prev = self.seq2(s_prev)
        ret.append(self.fc(s_prev.flatten(1)))
        return torch.cat(ret)


def resnet50_and_batch(args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Make an unsplit ResNet50 on the first device; images and one-hot targets in main memory."""
    torch.manual_seed(args.seed)
    models = import_torchvision().models
    resnet = models.resnet50(num_classes=NUM_CLASSES).to(args.devices[0])
    inputs = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    one_hot_indices = torch.randint(NUM_CLASSES, (args.batch_size, 1))
    labels = torch.zeros(args.batch_size, NUM_CLASSES).scatter_(1, one_hot_indices, 1)
    return resnet, inputs, labels


def measure(args: argparse.Namespace) -> list[dict]:
    """Time all models in turns.

    Returns:
        A row for the single device, the model parallel one, and each split size: `{model,
        split_size, micro_batches, times_s, losses}`; `split_size` is None where nothing is split.
    """
    resnet, inputs, labels = resnet50_and_batch(args)
    model_parallel = ModelParallelResNet50(copy.deepcopy(resnet), args.devices)
    # One for all sizes, to save memory.
    pipeline = PipelineParallelResNet50(copy.deepcopy(resnet), args.devices)
    candidates = [("single device", resnet, None), ("model parallel", model_parallel, None)]
    candidates += [("pipeline", pipeline, split_size) for split_size in args.measured_sizes]
    rows = [{"model": name, "split_size": size, "times_s": [], "losses": [],
             "micro_batches": len(inputs.split(size or len(inputs)))}
            for name, _, size in candidates]
    with report.progress(len(rows) * (1 + args.num_repeat), "run", role=ROLE) as bar:
        for repeat in range(1 + args.num_repeat):
            # Tutorial: ten new models of a kind in a row, each timed once. In turns, what else the
            # machine does slows all alike; in another order each time, for a run depends on what
            # the last one has left.
            turns = list(zip(rows, candidates, strict=True))
            random.Random(args.seed + repeat).shuffle(turns)
            for row, (_, model, split_size) in turns:
                pipeline.split_size = split_size
                seconds, losses = time_training(model, inputs, labels, args)
                if repeat > 0:  # Tutorial: from the first on, which allocates and chooses kernels.
                    row["times_s"].append(seconds)
                row["losses"] += losses
                bar.update()
            if bar.disable:  # not a terminal
                report.log(ROLE, f"round {repeat} of {args.num_repeat}" if repeat else "warm-up")
    return rows


def device(text: str) -> torch.device:
    """Convert one of the texts of `--devices`; for argparse."""
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]?)", text):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not accepted; give cpu or cuda:N")
    return torch.device(text)


def choose_devices(args: argparse.Namespace) -> list[torch.device]:
    """Choose the devices of both halves.

    Raises:
        SystemExit: 2 after one line, if they are not here, or cannot be compared with a single one.
    """
    gpus = torch.cuda.device_count()
    if args.devices is None:
        on_cpu = args.device == "cpu" or gpus == 0
        names = ["cpu", "cpu"] if on_cpu else ["cuda:0", f"cuda:{min(gpus, 2) - 1}"]
        return [torch.device(name) for name in names]
    given = " ".join(map(str, args.devices))
    if args.device != "auto":
        refuse(f"--device {args.device} cannot be given with --devices {given}: one is enough")
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
    add("--batch_size", type=count, default=12, metavar="N", help="samples; the tutorial's: 120")
    # Of 32 pixels one is left in the end: for a single image, BatchNorm cannot average over it.
    add("--image_size", type=bounded(int, at_least=33), default=64, metavar="N",
        help="pixels; the tutorial's: 128")
    add("--num_batches", type=count, default=1, metavar="N",
        help="steps that are timed together; the tutorial's: 3")
    add("--num_repeat", type=count, default=3, metavar="N",
        help="times to measure each; the tutorial's: 10")
    add("--split_size", type=count, metavar="N", help="samples in a micro-batch, for the bar in "
        "mp_vs_rn_vs_pp.png (default: half of the batch, at most 20)")
    add("--split_sizes", type=count, nargs="+", metavar="N", help="for split_size_tradeoff.png "
        f"(default: those of {' '.join(map(str, SPLIT_SIZES))} that fit the batch)")
    add("--lr", type=bounded(float, above=0), default=0.1, help="of SGD; the tutorial's: 0.001")
    return parser


def main(argv: list[str] | None = None) -> dict:
    """Measure and draw, or `--check`; return the metrics or the differences."""
    started = time.perf_counter()
    args = build_parser().parse_args(argv)
    reproducible(args)
    args.devices = choose_devices(args)
    left_out = require_split_sizes(args, SPLIT_SIZES, NUM_CLASSES)
    report.log(ROLE, what_it_shows(args.devices))
    if args.check:
        return program.check(program.program_of(measure), args)
    if left_out:
        report.log(ROLE, f"left out: split sizes {left_out}, for the batch has only "
                         f"{args.batch_size} samples")
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
