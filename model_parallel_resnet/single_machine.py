r"""One model on two devices of one machine, plain and as a pipeline (tutorial 6_2).

A model that does not fit on one device is cut in two; its activations travel from one device to the other. So only one
device works at a time. Cut the batch into micro-batches as well, and both can work: one on the next, one on the last.

    time            ------------------------------------------------------------------------------------>
    ModelParallelResNet50: one of the two always waits
      cuda:0        [ seq1: forward ]..............................................[ seq1: backward     ]
      cuda:1        .................[ seq2, fc: forward ][ seq2, fc: backward    ]......................

    PipelineParallelResNet50: the batch in 4 micro-batches; a device waits only while the pipeline fills and drains
      cuda:0        [ 1 ][ 2 ][ 3 ][ 4 ]..............[  4   ][  3   ][  2   ][  1   ]
      cuda:1        .....[ 1 ][ 2 ][ 3 ][ 4 ][  4   ][  3   ][  2   ][  1   ].........

There is one process and no `launch`, unlike in the other examples: the kernels of a GPU are only queued by the line of
Python that calls them, so one process keeps two GPUs busy. On one device, or on CPUs, nothing can overlap: a run shows
what the splitting costs, not what it wins, and says so.

    python model_parallel_resnet/single_machine.py                              two GPUs, or else one device twice
    python model_parallel_resnet/single_machine.py --devices cuda:0 cuda:1      these two
    python model_parallel_resnet/single_machine.py --batch_size 120 --image_size 128 --num_repeat 10 --num_batches 3
                                                                                the tutorial's sizes
    python model_parallel_resnet/single_machine.py --check                      the same numbers as an unsplit ResNet50?

Last line, about:
    ResNet50 on one device (cpu): model parallel takes -4% time (tutorial +7%), pipelined -23% speed (+49%), best ...
"""

import argparse
import copy
import random
import re
import statistics
import time

import torch
from common import report
from common.cli import Parser, bounded, refuse, require_memory, shortened
from common.vision import import_torchvision
from torch import nn, optim

ROLE = "main"
NUM_CLASSES = 1000
SPLIT_SIZES = [1, 3, 5, 8, 10, 12, 20, 40, 60]  # the tutorial's
# What the tutorial measured on two GPUs: seconds, and the shares that it works out from them.
TUTORIAL = {"single_s": 3.75, "model_parallel_s": 4.02, "split_size_20_s": 2.51, "split_size_12_s": 2.43,
            "model_parallel_slower": 0.07, "pipeline_faster": 0.49, "best_split_size": 12, "best_split_faster": 0.54}


class ToyModel(nn.Module):
    """Two layers on two devices (tutorial 6_2, "Basic Usage"): all that changes is where the tensors are.

    Args:
        devices: of the first layer and of the second.
    """

    def __init__(self, devices):
        super().__init__()
        self.dev0, self.dev1 = devices
        self.net1 = nn.Linear(10, 10).to(self.dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(self.dev1)

    def forward(self, x):
        """(samples, 10) on any device to (samples, 5) on the second one."""
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


class ModelParallelResNet50(nn.Module):
    """A ResNet50 whose halves are on two devices (tutorial 6_2, "Apply Model Parallel to Existing Modules").

    Args:
        resnet: torchvision's; its layers are moved, not copied.
        devices: of the first half and of the second.
    """

    def __init__(self, resnet, devices):
        super().__init__()
        self.dev0, self.dev1 = devices
        stem = (resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        self.seq1 = nn.Sequential(*stem, resnet.layer1, resnet.layer2).to(self.dev0)
        self.seq2 = nn.Sequential(resnet.layer3, resnet.layer4, resnet.avgpool).to(self.dev1)
        self.fc = resnet.fc.to(self.dev1)

    def first_half(self, x):
        """Images (samples, 3, height, width) to activations, which it sends on to the second device."""
        return self.seq1(x.to(self.dev0)).to(self.dev1)

    def second_half(self, activations):
        """Activations to (samples, classes)."""
        return self.fc(self.seq2(activations).flatten(1))

    def forward(self, x):
        """Images (samples, 3, height, width) on any device to (samples, classes) on the second one."""
        return self.second_half(self.first_half(x))


class PipelineParallelResNet50(ModelParallelResNet50):
    """The same, one micro-batch behind the other (tutorial 6_2, "Speed Up by Pipelining Inputs").

    Args:
        resnet, devices: as above.
        split_size: samples in each micro-batch; the last one may have fewer. It is not the number of micro-batches.
    """

    def __init__(self, resnet, devices, split_size=20):
        super().__init__(resnet, devices)
        self.split_size = split_size

    def forward(self, x):
        """Images (samples, 3, height, width) on any device to (samples, classes) on the second one."""
        splits = iter(x.split(self.split_size))
        s_prev = self.first_half(next(splits))
        ret = []
        for s_next in splits:
            # On GPUs neither line waits for its kernels: the second device has `s_prev` to compute when the first one
            # begins with `s_next`. In backward, autograd has a thread for each GPU, which overlap in the same way.
            ret.append(self.second_half(s_prev))
            s_prev = self.first_half(s_next)
        ret.append(self.second_half(s_prev))
        return torch.cat(ret)


def train(model, inputs, labels, args):
    """Train for `--num_batches` steps on one batch; the loss before each step, still on its device.

    Args:
        model: one whose output is (samples, classes), on whatever device.
        inputs, labels: the batch, in main memory.
        args: the parsed flags.
    """
    model.train()
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for _ in range(args.num_batches):
        optimizer.zero_grad()
        outputs = model(inputs.to(args.devices[0]))
        loss = loss_fn(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # not .item(): it would wait for the GPUs in every step
    return losses


def train_toy(args):
    """One step of `ToyModel`, with inputs and targets in main memory; the loss before and after it."""
    torch.manual_seed(args.seed)
    model, loss_fn = ToyModel(args.devices), nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5).to(args.devices[1])  # labels go where the outputs are
    before = loss_fn(model(inputs), labels)
    before.backward()
    optimizer.step()
    return before.item(), loss_fn(model(inputs), labels).item()


def resnet50_and_batch(args):
    """An unsplit ResNet50 on the first device; a batch in main memory: images, and a one-hot target for each."""
    torch.manual_seed(args.seed)
    resnet = import_torchvision().models.resnet50(num_classes=NUM_CLASSES).to(args.devices[0])
    inputs = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = nn.functional.one_hot(torch.randint(NUM_CLASSES, (args.batch_size,)), NUM_CLASSES).float()
    return resnet, inputs, labels


def synchronize(devices):
    """Wait until the devices have done what they were told: a CUDA call returns before its kernels have run."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def measure(args):
    """Time `train` for all models in turns; a row of numbers for each.

    Returns:
        A list of `{model, split_size, micro_batches, times_s, mean_s, std_s, median_s, losses}`: the single device's,
        the model parallel one's, and one for each split size; `split_size` is None where nothing is split.
    """
    resnet, inputs, labels = resnet50_and_batch(args)
    model_parallel = ModelParallelResNet50(copy.deepcopy(resnet), args.devices)
    pipeline = PipelineParallelResNet50(copy.deepcopy(resnet), args.devices)  # one for all sizes, to save memory
    candidates = [("single device", resnet, None), ("model parallel", model_parallel, None),
                  *(("pipeline", pipeline, size) for size in args.measured_sizes)]
    rows = [{"model": name, "split_size": size, "micro_batches": len(inputs.split(size or len(inputs))),
             "times_s": [], "losses": []} for name, _, size in candidates]
    with report.progress(len(rows) * (1 + args.num_repeat), "run") as bar:
        for repeat in range(1 + args.num_repeat):
            # In turns, for what else the machine does should slow down all alike; each time in another order, for a run
            # also depends on what the one before it has left in caches and free memory.
            turns = list(zip(rows, candidates, strict=True))
            random.Random(args.seed + repeat).shuffle(turns)
            for row, (_, model, size) in turns:
                pipeline.split_size = size
                synchronize(args.devices)
                start = time.perf_counter()
                losses = train(model, inputs, labels, args)
                synchronize(args.devices)
                seconds = time.perf_counter() - start
                if repeat > 0:  # the first one warms up: memory is allocated, kernels are chosen
                    row["times_s"].append(seconds)
                row["losses"] += [loss.item() for loss in losses]
                bar.update()
    for row in rows:
        times = row["times_s"]
        row["mean_s"], row["std_s"] = statistics.fmean(times), statistics.pstdev(times)
        row["median_s"] = statistics.median(times)
    return rows


def compare_times(rows, split_size):
    """The tutorial's four numbers, from our times: shares, 0.07 is 7%.

    From medians, not from the tutorial's means: one repeat that something else has slowed down would decide a mean.
    """
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == split_size)
    best = min(pipelines, key=lambda row: row["median_s"])
    return {"model_parallel_slower": model_parallel["median_s"] / single["median_s"] - 1,
            "pipeline_faster": single["median_s"] / pipeline["median_s"] - 1,
            "best_split_size": best["split_size"],
            "best_split_faster": single["median_s"] / best["median_s"] - 1}


def can_overlap(devices):
    """Whether the two halves can compute at the same time."""
    return devices[0] != devices[1]


def names_of(devices):
    """In words: `cuda:0 and cuda:1`, or `one device (cpu)`."""
    return f"{devices[0]} and {devices[1]}" if can_overlap(devices) else f"one device ({devices[0]})"


def what_it_shows(devices):
    """What a run on these devices can show, and what it cannot."""
    if can_overlap(devices):
        return f"{names_of(devices)}: the halves can compute at the same time; this shows what a pipeline wins"
    return (f"{names_of(devices)}: nothing can overlap; this shows what splitting costs, but not what a pipeline wins "
            "on two GPUs")


def plot(rows, numbers, args):
    """Draw the tutorial's three pictures: mean and standard deviation over `--num_repeat`."""
    single, model_parallel, *pipelines = rows
    pipeline = next(row for row in pipelines if row["split_size"] == args.split_size)
    shown = "the halves can overlap" if can_overlap(args.devices) else "nothing can overlap, only costs show"
    title = (f"{{}} on {names_of(args.devices)}: {shown}\nResNet50, {args.batch_size} images of {args.image_size}x"
             f"{args.image_size}; mean and deviation of {args.num_repeat}")
    steps = f"{args.num_batches} training steps" if args.num_batches > 1 else "a training step"
    seconds = f"seconds for {steps}"

    bars = [(single, "single device", ""),
            (model_parallel, "model parallel", f"{numbers['model_parallel_slower']:+.0%} time (tutorial: +7%)"),
            (pipeline, f"pipelined, split size {args.split_size}",
             f"{numbers['pipeline_faster']:+.0%} speed (tutorial: +49%)")]
    for name, count, subject in (("mp_vs_rn", 2, "Model parallel"), ("mp_vs_rn_vs_pp", 3, "Pipeline")):
        with report.picture(args.output_dir / f"{name}.png", title.format(subject), "", seconds) as axes:
            means, deviations = ([row[key] for row, _, _ in bars[:count]] for key in ("mean_s", "std_s"))
            labels = [f"{label}\n{told}" for _, label, told in bars[:count]]
            colors = ["0.6", "C0", "C1"][:count]
            axes.bar(labels, means, yerr=deviations, width=0.6, color=colors, ecolor="C3", capsize=8)
            medians = [row["median_s"] for row, _, _ in bars[:count]]
            axes.plot(labels, medians, "kD", label="median (compared in percent)")
            axes.set_ylim(bottom=0)
            axes.grid(visible=False, axis="x")

    with report.picture(args.output_dir / "split_size_tradeoff.png", title.format("Split size"),
                        "split size (samples in a micro-batch)", seconds) as axes:
        sizes, means, deviations = ([row[key] for row in pipelines] for key in ("split_size", "mean_s", "std_s"))
        axes.errorbar(sizes, means, deviations, fmt="o-", color="C1", ecolor="C3", capsize=4, label="pipeline, mean")
        axes.plot(sizes, [row["median_s"] for row in pipelines], "kD", markersize=4, zorder=3, label="pipeline, median")
        axes.axhline(single["median_s"], color="0.6", linestyle="--", label="single device, median")
        axes.set_xticks(sizes)
        axes.set_ylim(bottom=0)


def show(rows):
    """Print a line for each row."""
    report.log(ROLE, "model            split size   micro-batches    median      mean   deviation   median / single's")
    for row in rows:
        size, ratio = row["split_size"] or "", row["median_s"] / rows[0]["median_s"]
        report.log(ROLE, f"{row['model']:16} {size:>10} {row['micro_batches']:>15} {row['median_s']:>7.3f} s "
                         f"{row['mean_s']:>7.3f} s {row['std_s']:>9.3f} s {ratio:>18.2f}")


def check(args):
    """Hold both parallel models against torchvision's, with the same weights; the differences.

    In evaluation mode: in training mode, BatchNorm takes the statistics of each micro-batch, which are others.
    """
    # float64: float32 rounds differently for another number of samples, and where that moves a value across the kink of
    # a ReLU, gradients may change by 1%, as much as by a mistake.
    resnet, inputs, labels = (thing.double() for thing in resnet50_and_batch(args))
    for norm in resnet.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None  # take over the statistics of a batch: with the first ones, activations explode
    with torch.no_grad():
        resnet.train()(inputs.to(args.devices[0]))
    pipeline = PipelineParallelResNet50(copy.deepcopy(resnet), args.devices)
    model_parallel = ModelParallelResNet50(copy.deepcopy(resnet), args.devices)

    def evaluate(model):
        model.eval().zero_grad()
        outputs = model(inputs.to(args.devices[0]))
        nn.functional.mse_loss(outputs, labels.to(outputs.device)).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return outputs.detach().cpu(), torch.cat([gradient.flatten().cpu() for gradient in gradients])

    plain, ours, oracle = evaluate(resnet), {}, {}
    for size in (None, *args.measured_sizes):
        name, pipeline.split_size = f"pipeline, split size {size}" if size else "model parallel", size
        results = evaluate(pipeline if size else model_parallel)
        for what, result, expected in zip(("outputs", "gradients"), results, plain, strict=True):
            ours[f"{name}, {what}"], oracle[f"{name}, {what}"] = result, expected
    return report.compare(ours, oracle, dict.fromkeys(ours, 1e-9))


def device(text):
    """An argparse type."""
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]?)", text):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not accepted; give cpu or cuda:N")
    return torch.device(text)


def build_parser():
    """The flags of this example."""
    parser = Parser("model_parallel_resnet/single_machine", __doc__, distributed=False)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--devices", type=device, nargs=2, metavar="D",
        help="two GPUs, or one device twice (default: the first two GPUs, or else one device twice)")
    add("--batch_size", type=count, default=12, metavar="N", help="samples of each step; the tutorial's: 120")
    # Of 32 pixels, one is left in the end: BatchNorm has nothing to average over in a micro-batch of one image.
    add("--image_size", type=bounded(int, at_least=33), default=64, metavar="N", help="pixels; the tutorial's: 128")
    add("--num_batches", type=count, default=1, metavar="N", help="steps that are timed together; the tutorial's: 3")
    add("--num_repeat", type=count, default=3, metavar="N", help="times to measure each; the tutorial's: 10")
    add("--split_size", type=count, metavar="N",
        help="samples in a micro-batch, for the bar in mp_vs_rn_vs_pp.png (default: 20, or half of a smaller batch)")
    add("--split_sizes", type=count, nargs="+", metavar="N", help="for split_size_tradeoff.png "
        f"(default: those of {' '.join(map(str, SPLIT_SIZES))} that are not larger than the batch)")
    add("--lr", type=bounded(float, above=0), default=0.1, help="learning rate of SGD; the tutorial's: 0.001")
    return parser


def choose_devices(args):
    """The devices of the two halves; refuses what is not here, or could not be compared with a single device."""
    gpus = torch.cuda.device_count()
    if args.devices is None:
        names = ["cpu", "cpu"] if args.device == "cpu" or gpus == 0 else ["cuda:0", f"cuda:{min(gpus, 2) - 1}"]
        return [torch.device(name) for name in names]
    given = " ".join(map(str, args.devices))
    if args.device != "auto":
        refuse(f"--device {args.device} cannot be given with --devices {given}: one is enough")
    if any(device.type == "cuda" and device.index >= gpus for device in args.devices):
        refuse(f"--devices {given} must be " + (
            f"of cuda:0 to cuda:{gpus - 1}, or cpu" if gpus else "cpu cpu: torch sees no GPU here"))
    if args.devices[0].type != args.devices[1].type:
        refuse(f"--devices {given} must be two GPUs, or one device twice: a CPU and a GPU differ")
    return args.devices


def settle(args):
    """Refuse what cannot be, and fill in what was left to us; the split sizes that are larger than the batch.

    `args.devices` and `args.split_size` are set afterwards, and `args.measured_sizes`: all split sizes, in order.
    """
    args.devices = choose_devices(args)
    too_large = [size for size in args.split_sizes or SPLIT_SIZES if size > args.batch_size]
    accepted = f"must be at most --batch_size {args.batch_size}: it is the samples of a micro-batch"
    if args.split_sizes and too_large:
        refuse(f"--split_sizes {too_large[0]} {accepted}")
    if args.split_size is None:
        args.split_size = min(20, (args.batch_size + 1) // 2)
    if args.split_size > args.batch_size:
        refuse(f"--split_size {args.split_size} {accepted}")
    # Images and one-hot targets, which were integers; on a CPU also what the first layer and its
    # BatchNorm make of an image, each 64 channels of half the height and width.
    of_image = 3 * (args.image_size**2 + NUM_CLASSES)
    if args.devices[0].type == "cpu":
        of_image += 2 * 64 * (args.image_size // 2) ** 2
    require_memory(args, ["batch_size", "image_size"], 4 * args.batch_size * of_image)
    args.measured_sizes = sorted({args.split_size, *(args.split_sizes or SPLIT_SIZES)} - set(too_large))
    return too_large


def main(argv=None):
    """Measure and draw, or `--check`; the metrics or the differences."""
    started = time.perf_counter()
    args = build_parser().parse_args(argv)
    left_out = settle(args)
    shows = what_it_shows(args.devices)
    report.log(ROLE, shows)
    if left_out:
        report.log(ROLE, f"left out: split sizes {left_out}, for the batch has only {args.batch_size} samples")
    if args.check:
        return check(args)

    toy_before, toy_after = train_toy(args)
    report.log(ROLE, f"ToyModel: loss {toy_before:.3f} -> {toy_after:.3f} in one step")
    rows = measure(args)
    show(rows)
    numbers = compare_times(rows, args.split_size)
    plot(rows, numbers, args)
    losses = rows[0]["losses"]
    names = [torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu" for device in args.devices]
    flags = ("batch_size", "image_size", "num_batches", "num_repeat", "split_size", "lr")
    metrics = {"device": names[0], "devices": list(map(str, args.devices)), "device_names": names,
               "can_overlap": can_overlap(args.devices), "what_it_shows": shows,
               **{flag: getattr(args, flag) for flag in flags}, "left_out": left_out, "rows": rows, **numbers,
               "tutorial": TUTORIAL, "toy_loss_before": toy_before, "toy_loss_after": toy_after,
               "loss_before": losses[0], "loss_after": losses[-1], "wall_s": time.perf_counter() - started}
    metrics = report.save_metrics(args, metrics, backend=None)  # no process group
    print(f"ResNet50 on {names_of(args.devices)}: model parallel takes {numbers['model_parallel_slower']:+.0%} time "
          f"(tutorial +7%), pipelined {numbers['pipeline_faster']:+.0%} speed (+49%), best split size "
          f"{numbers['best_split_size']} with {numbers['best_split_faster']:+.0%} (12 with +54%); "
          f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    return metrics


if __name__ == "__main__":
    main()
