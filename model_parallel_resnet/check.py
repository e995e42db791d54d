"""`--check`: a whole training over RPC, held against torchvision's ResNet in one process.

The training is the lesson's own: `run_worker` in the same processes, with the flags that were given
but for these: a few small images, whose micro-batches are not all of one size; float64, where a
mistake cannot be taken for rounding; two rounds over the batch, the first of which is the warm-up.
The layers have fewer blocks: in a whole ResNet50, BatchNorm over a few numbers is chaotic, and
rounding grows a hundredfold in a step. That the whole one has torchvision's layers is held apart.

The other program here has its own data, micro-batches, loss and steps. From the lesson it has the
flags and the initial weights. Both are compared where the master is, after every step: see
recording.py.

What is free in the lesson is the order in which a shard takes the micro-batches: whose thread gets
the lock first. Only the running statistics of BatchNorm depend on it. So the oracle takes the
statistics of each micro-batch, and adds them up in the order that was recorded.

No time is expected to have a certain length. But between the two readings of the clock there must
be one step, that of the row; and from the windows of time, the rows, the printed table and the last
line are computed once more.
"""

import functools
import importlib
import itertools
import math
import re
import statistics

import torch
from common import report
from common.cli import starts_rank
from common.launcher import launch
from common.oracle import Comparison, verdict
from common.vision import import_torchvision

from model_parallel_resnet import main as lesson
from model_parallel_resnet import measuring, results
from model_parallel_resnet.recording import Recorder

SIDE = 33  # pixels; of 32, the last layers leave one
BLOCKS = [1, 2, 2, 1]  # in layer1 to layer4
CALM = 100  # the learning rate is divided by it, so that rounding grows less
MOST_ROWS = 3  # the first ones of --num_splits
TOLERANCE = 1e-10
BECAUSE = "the same sums in another order, in float64"
SIGMAS = 6  # two tensors in a billion would be further from what is expected


# --- one process


def single_process(args):
    """The same training without RPC and without a second process.

    Yields:
        For each step the number of its micro-batches, data, outputs, loss, the weights after it,
        `{name: tensor}`, and for each micro-batch the statistics of each BatchNorm.
    """
    model = whole_resnet(args).train()
    norms = {name: module for name, module in model.named_modules()
             if isinstance(module, torch.nn.BatchNorm2d)}
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


def whole_resnet(args):
    """`short_resnet`, with the initial weights of the two shards."""
    shards = shards_of(args)
    whole = short_resnet(args.arch, args.num_classes)
    initial = [param for shard in shards for param in shard.parameters()]
    with torch.no_grad():
        for param, value in zip(whole.parameters(), initial, strict=True):
            param.copy_(value)
    return whole


def shards_of(args, device="cpu"):
    """Both shards, as `DistResNet50` asks for them."""
    block, blocks = lesson.ARCHS[args.arch]
    return (lesson.ResNetShard1(block, blocks[:2], device, 2 * args.seed + 1),
            lesson.ResNetShard2(block, blocks[2:], args.num_classes, device, 2 * args.seed + 2))


def short_resnet(arch, num_classes):
    """A ResNet of torchvision with the blocks of `arch`, but fewer."""
    resnet = import_torchvision().models.resnet
    block = {"resnet18": resnet.BasicBlock, "resnet50": resnet.Bottleneck}[arch]
    return resnet.ResNet(block, BLOCKS, num_classes=num_classes)


# --- compared


def compare(recorder, metrics, args, name, workers, parts=1):
    """Hold the training that was recorded against the other program, and its times: the findings.

    Args:
        recorder: a `recording.StepByStep`, after the training.
        metrics: of the lesson.
        args: the parsed flags.
        name: of the pipeline.
        workers: the roles that compute.
        parts: of the model that each of them has.
    """
    ours, theirs = recorder.ours, [*recorder.theirs, *recorder.alone]  # also what was left out
    found = Comparison(f"{args.world_size} processes")
    hold_initial_weights(found, args)
    hold_steps(found, ours, theirs, metrics)
    steps = [(step.get("started", 0), step.get("ended", 0)) for step in ours]
    hold_windows(found, steps, metrics, args, workers, parts)
    for times, of_times in (("measured", metrics), ("made-up", made_up(metrics, args, workers))):
        hold_table(found, times, of_times, args, name, workers)
        if parts == 1:
            hold_parts(found, times, of_times, workers)
    return found


def hold_initial_weights(found, args):
    """As in torchvision, the standard deviation of a convolution is sqrt(2 / fan_out)."""
    most = 0.0
    for shard in shards_of(args):
        for module in shard.modules():
            if isinstance(module, torch.nn.Conv2d):
                height, width = module.kernel_size
                expected = math.sqrt(2 / (module.out_channels * height * width))
                standard_error = 1 / math.sqrt(2 * module.weight.numel())
                off = (module.weight.std().item() / expected - 1) / standard_error
                most = max(most, abs(off))
    found.holds("initial weights", most < SIGMAS,
                "the deviations of the convolutions of both shards from torchvision's "
                f"sqrt(2 / fan_out): at most {most:.1f} standard errors, {SIGMAS} allowed")


def hold_steps(found, ours, theirs, metrics):
    """Every number of every step; `ours` and `theirs` are as a `StepByStep` has them."""
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


def layers_of_both(args):
    """Of the whole model: the layers of the shards, and of torchvision; without any numbers."""
    whole = getattr(import_torchvision().models, args.arch)
    with torch.device("meta"):
        shards = shards_of(args, torch.device("meta"))
        models = torch.nn.ModuleList(shards), whole(num_classes=args.num_classes)
    return [[repr(layer) for layer in model.modules() if not list(layer.children())]
            for model in models]


def hold_layers(found, ours, theirs):
    """Every layer of the whole model, in order."""
    first = next((f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
                 f"{len(ours)} layers, {len(theirs)} in torchvision's")
    found.holds("layers", ours == theirs, f"of both shards, against torchvision's: {first}")


# --- times


def hold_windows(found, steps, metrics, args, workers, parts=1):
    """Each timed window has one step, that of its row, and all of its micro-batches.

    Args:
        found: the `Comparison`.
        steps: (start, end) of each step, as the recorder saw it.
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


def made_up(metrics, args, workers):
    """Metrics with other times: of each row three, whose median is no mean, nor the first or last.

    The later a row, the earlier it is on the clock.
    """
    windows = [[(100 * row + 10 * i, 100 * row + 10 * i + (1 + 0.1 * row) * seconds)
                for i, seconds in enumerate((2.0, 7.0, 2.5))]
               for row in reversed(range(len(args.num_splits)))]
    spans = {worker: [{"kind": "forward", "start": start, "labels": {},
                       "end": start + (0.3 + 0.1 * i + 0.2 * j) * (end - start)}
                      for of_row in windows for i, (start, end) in enumerate(of_row)]
             for j, worker in enumerate(workers)}
    return {**metrics, "windows": windows, "spans": spans}


def hold_table(found, times, metrics, args, name, workers):
    """The rows, the printed table and the last line.

    Args:
        found: the `Comparison`.
        times: "measured" or "made-up".
        metrics: of the lesson, or of `made_up`.
        args: the parsed flags.
        name: of the pipeline, for the last line.
        workers: the roles that compute.
    """
    expected = expected_rows(metrics, args, workers)
    rows = results.rows_of(metrics, args, workers)
    found.close(f"rows of {times} times", rows, expected, TOLERANCE, "medians, idle times", "row")

    head, *lines = [line.split() for line in results.table(rows)]
    printed = [dict(zip(head, (float(word.rstrip("%")) for word in line), strict=True))
               for line in lines]
    rounded = [{"splits": row["num_split"], "s/batch": round(row["median_s"], 2),
                "speed-up": round(row["speedup"], 2), "ideal": round(row["ideal"], 2),
                "idle": round(100 * row["idle_share"])} for row in expected]
    found.close(f"table of {times} times", printed, rounded, TOLERANCE, "rounded alike", "row")

    fastest = min(range(len(expected)), key=lambda row: expected[row]["median_s"])
    best, losses = rounded[fastest], metrics["losses"]
    _, words = results.last_line(rows, losses, args, name).split(":", 1)
    said = [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", words)]
    shown = [round(losses[0], 4), round(losses[-1], 4), best["splits"], best["s/batch"],
             best["speed-up"], 1, best["ideal"], best["idle"]]
    found.close(f"last line of {times} times", said, shown, TOLERANCE, "rounded alike", "word")


def hold_parts(found, times, metrics, workers):
    """Where each batch's time has gone: work as often as any is open, and the parts are the whole.

    Args:
        found: the `Comparison`.
        times: "measured" or "made-up".
        metrics: of the lesson, or of `made_up`.
        workers: the roles that compute.
    """
    ours, theirs = [], []
    for of_row in metrics["windows"]:
        for start, end in of_row:
            parts = measuring.parts_of(metrics["spans"], workers, (start, end))
            for worker in workers:
                of_worker = parts[worker]
                work = sum(of_worker[part] for part in ("forward", "backward", "both", "step"))
                ours.append([sum(of_worker.values()), work, min(of_worker.values()) >= 0])
                idle = idle_share(metrics["spans"][worker], start, end)
                theirs.append([end - start, (1 - idle) * (end - start), True])
    found.close(f"parts of {times} times", ours, theirs, TOLERANCE,
                "of each batch on each worker: all parts, those of work, none below 0", "batch")


def expected_rows(metrics, args, workers):
    """What `results.rows_of` should make of the windows and the spans."""
    medians = [statistics.median(end - start for start, end in of_row)
               for of_row in metrics["windows"]]
    rows = []
    for number, median, of_row in zip(args.num_splits, medians, metrics["windows"], strict=True):
        idle = [sum(idle_share(metrics["spans"][worker], *window) for worker in workers)
                / len(workers) for window in of_row]
        rows.append({"num_split": number, "median_s": median, "speedup": medians[0] / median,
                     "ideal": 2 * number / (number + 1), "idle_share": statistics.median(idle)})
    return rows


def idle_share(spans, start, end):
    """The share of the time from `start` to `end` in which none of the spans was open."""
    spans = [span for span in spans if span["start"] < end and span["end"] > start]
    edges = sorted({start, end, *(min(max(span[edge], start), end) for span in spans
                                  for edge in ("start", "end"))})
    idle = sum(b - a for a, b in itertools.pairwise(edges)
               if not any(span["start"] <= a and b <= span["end"] for span in spans))
    return idle / (end - start)


# --- the command


def record(program, rank, world_size, args):
    """Run a program (its module's name) recorded; rank 0 returns what has been found."""
    run_worker = importlib.import_module(program).run_worker
    layers = layers_of_both(args)
    prepare(args)
    if rank > 0:
        return run_worker(rank, world_size, args)
    recorder = Recorder(single_process(args))
    metrics = run_worker(rank, world_size, args)
    found = compare(recorder, metrics, args, "RPC pipeline", lesson.WORKERS)
    made, expected = recorder.optimizer_steps, len(args.num_splits) * (1 + args.num_batches)
    found.holds("steps", made == expected,
                f"the run made {made} optimizer steps, the oracle expects {expected}")
    hold_layers(found, *layers)
    return found.as_dict()


def prepare(args):
    """Set float64 and the shorter model, in each process of a check."""
    torch.set_default_dtype(torch.float64)
    lesson.ARCHS[args.arch] = lesson.ARCHS[args.arch][0], BLOCKS


def check(program, args):
    """Run main.py or early_backward.py, and one process; the differences where it reports.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.num_splits = args.num_splits[:MOST_ROWS]
    # Pieces of 3 and 2 images; `xs.chunk` would make fewer pieces of them.
    smaller(args, batch_size=max(5, 2 * args.num_splits[-1] + 1))
    return verdict(launch(functools.partial(record, program.__name__), args, program.role_name))


def smaller(args, batch_size):
    """Change the flags to those of a short training, and say so."""
    args.batch_size, args.image_size, args.num_batches = batch_size, SIDE, 1
    args.lr /= CALM
    if starts_rank(args, 0):
        report.log("check", f"{args.arch} on a batch of {batch_size} images of {SIDE}x{SIDE}, "
                            "in float64: a warm-up and a timed batch for each of "
                            f"{' '.join(map(str, args.num_splits))} splits, lr {args.lr:g}")
