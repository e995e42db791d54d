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
statistics of each micro-batch, and adds them up in the order that the timeline has recorded.
"""

import math

import torch
from common import report
from common.cli import starts_rank
from common.launcher import launch
from common.oracle import Comparison, verdict
from common.vision import import_torchvision

from model_parallel_resnet import main as lesson
from model_parallel_resnet.check_times import hold_parts, hold_table, hold_windows, made_up
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
    shards = lesson.ResNetShard1(args, "cpu"), lesson.ResNetShard2(args, "cpu")
    whole = short_resnet(args.arch, args.num_classes)
    initial = [param for shard in shards for param in shard.parameters()]
    with torch.no_grad():
        for param, value in zip(whole.parameters(), initial, strict=True):
            param.copy_(value)
    return whole


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
    most, seeds = 0.0, {args.seed}  # that is the data's
    for shard_class in (lesson.ResNetShard1, lesson.ResNetShard2):
        shard = shard_class(args, "cpu")
        seeds.add(torch.initial_seed())
        for module in shard.modules():
            if isinstance(module, torch.nn.Conv2d):
                height, width = module.kernel_size
                expected = math.sqrt(2 / (module.out_channels * height * width))
                standard_error = 1 / math.sqrt(2 * module.weight.numel())
                off = (module.weight.std().item() / expected - 1) / standard_error
                most = max(most, abs(off))
    found.holds("seeds", len(seeds) == 3, "the data and both shards have seeds of their own: "
                f"{sorted(seeds)}")
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
        shards = [lesson.ResNetShard1(args, "meta"), lesson.ResNetShard2(args, "meta")]
        models = torch.nn.ModuleList(shards), whole(num_classes=args.num_classes)
    return [[repr(layer) for layer in model.modules() if not list(layer.children())]
            for model in models]


def hold_layers(found, ours, theirs):
    """Every layer of the whole model, in order."""
    first = next((f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
                 f"{len(ours)} layers, {len(theirs)} in torchvision's")
    found.holds("layers", ours == theirs, f"of both shards, against torchvision's: {first}")


# --- the command


def record(rank, world_size, args):
    """The worker of a check; rank 0 returns what it has found."""
    layers = layers_of_both(args)
    prepare(args)
    if rank > 0:
        return lesson.run_worker(rank, world_size, args)
    recorder = Recorder(single_process(args))
    metrics = lesson.run_worker(rank, world_size, args)
    found = compare(recorder, metrics, args, "RPC pipeline", lesson.WORKERS)
    made, expected = recorder.optimizer_steps, len(args.num_splits) * (1 + args.num_batches)
    found.holds("steps", made == expected,
                f"the run made {made} optimizer steps, the oracle expects {expected}")
    hold_layers(found, *layers)
    return found.as_dict()


def prepare(args):
    """In each process of a check: float64, and the shorter model."""
    torch.set_default_dtype(torch.float64)
    lesson.ARCHS[args.arch] = lesson.ARCHS[args.arch][0], BLOCKS


def check(args):
    """Run both programs; the differences in the process that reports, None elsewhere.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.num_splits = args.num_splits[:MOST_ROWS]
    # Pieces of 3 and 2 images; `xs.chunk` would make fewer pieces of them.
    smaller(args, batch_size=max(5, 2 * args.num_splits[-1] + 1))
    return verdict(launch(record, args, lesson.role_name))


def smaller(args, batch_size):
    """Change the flags to those of a short training, and say so."""
    args.batch_size, args.image_size, args.num_batches = batch_size, SIDE, 1
    args.lr /= CALM
    if starts_rank(args, 0):
        report.log("check", f"{args.arch} on a batch of {batch_size} images of {SIDE}x{SIDE}, "
                            "in float64: a warm-up and a timed batch for each of "
                            f"{' '.join(map(str, args.num_splits))} splits, lr {args.lr:g}")
