"""`--check`: a whole training over RPC, held against torchvision's ResNet in one process.

The training is the lesson's own: `run_worker` in the same processes, with the flags that were given
but for these: a few small images, whose micro-batches are not all of one size; float64, where a
mistake cannot be taken for rounding; two rounds over the batch, the first of which is the warm-up.
The layers have fewer blocks: in a whole ResNet50, BatchNorm over a few numbers is chaotic, and
rounding grows a hundredfold in a step. That the whole one has torchvision's layers is held apart.

The other program here has its own data, micro-batches, loss and steps. From the lesson it has the
flags and the initial weights. Both are compared where the master is, after every step.

What is free in the lesson is the order in which a shard takes the micro-batches: whose thread gets
the lock first. Only the running statistics of BatchNorm depend on it. So the oracle takes the
statistics of each micro-batch, and adds them up in the order that the timeline has recorded.
"""

import itertools
import math
import re
import statistics
import time

import torch
from common import report, timeline
from common.cli import starts_rank
from common.launch import launch
from common.oracle import Comparison, verdict
from common.vision import import_torchvision
from torch.distributed import rpc

from model_parallel_resnet import main as lesson
from model_parallel_resnet import results

SIDE = 33  # pixels; of 32, the last layers leave one
BLOCKS = [1, 2, 2, 1]  # in layer1 to layer4
CALM = 100  # the learning rate is divided by it, so that rounding grows less
MOST_ROWS = 3  # the first ones of --num_splits
TOLERANCE = 1e-10
BECAUSE = "the same sums in another order, in float64"
SIGMAS = 6  # two tensors in a billion would be further from what is expected


def check(args):
    """Run both programs; the differences in the process that reports, None elsewhere."""
    args.num_splits = args.num_splits[:MOST_ROWS]
    # Pieces of 3 and 2 images; `xs.chunk` would make fewer pieces of them.
    smaller(args, batch_size=max(5, 2 * args.num_splits[-1] + 1))
    layers = layers_of_both(args)
    compared = launch(record, args, lesson.role_name)
    if compared:
        hold_layers(compared, *layers)
    return verdict(compared)


def smaller(args, batch_size):
    """Change the flags to those of a short training, and say so."""
    args.batch_size, args.image_size, args.num_batches = batch_size, SIDE, 1
    args.lr /= CALM
    if starts_rank(args, 0):
        report.log("check", f"{args.arch} on a batch of {batch_size} images of {SIDE}x{SIDE}, "
                            "in float64: a warm-up and a timed batch for each of "
                            f"{' '.join(map(str, args.num_splits))} splits, lr {args.lr:g}")


def record(rank, world_size, args):
    """The worker of a check; rank 0 returns what it has found."""
    prepare(args)
    if rank > 0:
        lesson.run_worker(rank, world_size, args)
        return None
    recorder = Recorder(args, lesson.WORKERS)
    metrics = lesson.run_worker(rank, world_size, args)
    return recorder.findings(metrics, "RPC pipeline").as_dict()


def prepare(args):
    """In each process of a check: float64, and the shorter model."""
    torch.set_default_dtype(torch.float64)
    lesson.ARCHS[args.arch] = lesson.ARCHS[args.arch][0], BLOCKS


# --- one process


def short_resnet(arch, num_classes):
    """A ResNet of torchvision with the blocks of `arch`, but fewer."""
    resnet = import_torchvision().models.resnet
    block = {"resnet18": resnet.BasicBlock, "resnet50": resnet.Bottleneck}[arch]
    return resnet.ResNet(block, BLOCKS, num_classes=num_classes)


def whole_resnet(args):
    """`short_resnet`, with the initial weights of the two shards."""
    shards = lesson.ResNetShard1(args, "cpu"), lesson.ResNetShard2(args, "cpu")
    whole = short_resnet(args.arch, args.num_classes)
    initial = [param for shard in shards for param in shard.parameters()]
    with torch.no_grad():
        for param, value in zip(whole.parameters(), initial, strict=True):
            param.copy_(value)
    return whole


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


# --- the recording


class Recorder:
    """On the master: listens to its model, its loss and its optimizer, and fetches the weights.

    Args:
        args: the parsed flags, after `smaller`.
        workers: the roles whose state is held here.
    """

    def __init__(self, args, workers):
        self.args, self.workers, self.now = args, workers, {}
        self.alone = single_process(args)
        self.ours, self.theirs = [], []  # of each step
        self.running = {}  # statistics of each BatchNorm, as they should be, and how many they are
        self.seen = dict.fromkeys(workers, 0)  # spans
        self.listen()

    def listen(self):
        """Set the hooks."""
        torch.nn.modules.module.register_module_forward_pre_hook(self.before)
        torch.nn.modules.module.register_module_forward_hook(self.after)
        recorder, honest = self, lesson.DistributedOptimizer

        class Recorded(honest):
            def step(self, context_id):
                super().step(context_id)
                recorder.after_step()

        lesson.DistributedOptimizer = Recorded

    def before(self, module, inputs):
        """A batch begins."""
        if isinstance(module, lesson.DistResNet50):
            self.now = {"started": time.time(), "data": {"images": inputs[0]}}

    def after(self, module, inputs, output):
        """The model has its outputs, or the loss is there."""
        if isinstance(module, lesson.DistResNet50):
            self.now |= {"outputs": output.detach(), "rrefs": (module.p1_rref, module.p2_rref)}
        elif isinstance(module, torch.nn.MSELoss):
            self.now.setdefault("data", {})["targets"] = inputs[1]

    def after_step(self):
        """Fetch what the workers have, and hold it against the other program."""
        self.now["ended"] = time.time()
        rrefs = self.now.pop("rrefs", ())
        self.hold([rpc.rpc_sync(rref.owner(), state_of, args=(rref,)) for rref in rrefs])

    def hold(self, states, at_the_end=False):
        """Compare the state of the workers here, and keep the worst number of each tensor.

        Args:
            states: of `self.workers`, from `state`; one after the other they are the model.
            at_the_end: whether they are its last part, not its first.
        """
        ours, self.now = self.now, {}
        expected = next(self.alone, None)
        self.ours.append(ours)
        if expected is None:
            return
        names = list(expected["weights"]), list(expected["statistics"][0])
        starts = [len(of_kind) - sum(len(state[kind]) for state in states) if at_the_end else 0
                  for of_kind, kind in zip(names, ("weights", "norms"), strict=True)]
        theirs = {**expected, "weights": {}, "statistics": {}, "counts": {}, "micro-batches": {}}
        ours |= {"weights": {}, "statistics": {}, "counts": {}, "micro-batches": {}, "alone": True}
        for worker, state in zip(self.workers, states, strict=True):
            weights, norms = (of_kind[start : start + len(state[kind])] for of_kind, start, kind in
                              zip(names, starts, ("weights", "norms"), strict=True))
            starts = [starts[0] + len(weights), starts[1] + len(norms)]
            spans = self.new_spans(worker, state["spans"])
            self.fold(norms, expected, [number for kind, number, *_ in spans if kind == "forward"])
            for kind in ("forward", "backward"):
                ours["micro-batches"][f"{worker} {kind}"] = sorted(
                    number for of_kind, number, *_ in spans if of_kind == kind)
                theirs["micro-batches"][f"{worker} {kind}"] = list(range(expected["splits"]))
            ours["alone"] &= one_at_a_time(spans)
            furthest(ours["weights"], theirs["weights"],
                     dict(zip(weights, state["weights"], strict=True)), expected["weights"])
            furthest(ours["statistics"], theirs["statistics"],
                     {name: norm["running"] for name, norm in
                      zip(norms, state["norms"], strict=True)},
                     {name: running for name, (running, _) in self.running.items()})
            ours["counts"][worker] = [norm["count"] for norm in state["norms"]]
            theirs["counts"][worker] = [self.running[name][1] for name in norms]
        self.theirs.append(theirs)

    def new_spans(self, worker, spans):
        """(kind, micro-batch, start, end) of those since the last step, in order of their start."""
        new, self.seen[worker] = spans[worker][self.seen[worker] :], len(spans[worker])
        return [(span["kind"], span["labels"].get("micro_batch"), span["start"], span["end"])
                for span in sorted(new, key=lambda span: span["start"])]

    def fold(self, norms, expected, order):
        """Add up the statistics of micro-batches as BatchNorm does, in their order."""
        for name in norms:
            like = expected["statistics"][0][name]
            running, count = self.running.get(
                name, (torch.stack([torch.zeros_like(like[0]), torch.ones_like(like[1])]), 0))
            for number in order:
                if number < expected["splits"]:
                    running = 0.9 * running + 0.1 * expected["statistics"][number][name]
                    count += 1
            self.running[name] = running, count

    def findings(self, metrics, name):
        """What the training was, and what it says about itself."""
        self.theirs += self.alone  # what the lesson has left out
        found = Comparison(f"{self.args.world_size} processes")
        hold_initial_weights(found, self.args)
        hold_steps(found, self.ours, self.theirs, metrics)
        steps = [(step.get("started", 0), step.get("ended", 0)) for step in self.ours]
        hold_times(found, steps, metrics, self.args, self.all_workers)
        for times, of_times in (("measured", metrics),
                                ("made-up", made_up(metrics, self.args, self.all_workers))):
            hold_table(found, times, of_times, self.args, name, self.all_workers)
        return found

    all_workers = lesson.WORKERS


def state_of(shard_rref):
    """On a worker: `state` of its shard."""
    return state(shard_rref.local_value())


def state(model):
    """The weights, the running statistics of each BatchNorm, and what the timeline has."""
    norms = [{"running": torch.stack([norm.running_mean, norm.running_var]).cpu(),
              "count": norm.num_batches_tracked.item()}
             for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
    return {"weights": [param.detach().cpu() for param in model.parameters()], "norms": norms,
            "spans": timeline.recorded()}


def furthest(ours, theirs, run, oracle):
    """Of each tensor of `run`, add the number that is furthest off, and the tensor's largest."""
    for name, numbers in run.items():
        expected = oracle[name].detach()
        if numbers.shape != expected.shape:
            ours[name], theirs[name] = numbers, expected
            continue
        at = (numbers - expected).abs_().argmax()  # NaN is the largest
        scale = torch.linalg.vector_norm(expected, math.inf).item()
        ours[name] = [numbers.flatten()[at].item(), scale]
        theirs[name] = [expected.flatten()[at].item(), scale]


def one_at_a_time(spans):
    """Whether no two forwards of a worker overlap."""
    forwards = [span for span in spans if span[0] == "forward"]
    return all(a[-1] <= b[-2] for a, b in itertools.pairwise(forwards))


# --- what is held


def layers_of_both(args):
    """Of the whole model: the layers of the shards, and of torchvision; without any numbers."""
    whole = getattr(import_torchvision().models, args.arch)
    with torch.device("meta"):
        shards = [lesson.ResNetShard1(args, "meta"), lesson.ResNetShard2(args, "meta")]
        models = torch.nn.ModuleList(shards), whole(num_classes=args.num_classes)
    return [[repr(layer) for layer in model.modules() if not list(layer.children())]
            for model in models]


def hold_layers(compared, ours, theirs):
    """Every layer of the whole model, in order."""
    found = Comparison(compared["run"])
    first = next((f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
                 f"{len(ours)} layers, {len(theirs)} in torchvision's")
    found.holds("layers", ours == theirs, f"of both shards, against torchvision's: {first}")
    compared["findings"] += found.findings


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
                off = (module.weight.std().item() / expected - 1) * math.sqrt(
                    2 * module.weight.numel())
                most = max(most, abs(off))
    found.holds("seeds", len(seeds) == 3, "the data and both shards have seeds of their own: "
                f"{sorted(seeds)}")
    found.holds("initial weights", most < SIGMAS,
                "the deviations of the convolutions of both shards from torchvision's "
                f"sqrt(2 / fan_out): at most {most:.1f} standard errors, {SIGMAS} allowed")


def hold_steps(found, ours, theirs, metrics):
    """Every number of every step; `ours` and `theirs` are lists of what was recorded."""
    def side(steps, key):
        return [step.get(key, {}) for step in steps]

    found.equal("data", side(ours, "data"), side(theirs, "data"), "drawn from the same seed")
    found.equal("micro-batches", side(ours, "micro-batches"), side(theirs, "micro-batches"),
                "numbers of the micro-batches that each worker has had")
    found.close("outputs", side(ours, "outputs"), side(theirs, "outputs"), TOLERANCE, BECAUSE)
    found.close("losses", metrics["losses"], [step["loss"] for step in theirs], TOLERANCE, BECAUSE)
    found.close("weights", side(ours, "weights"), side(theirs, "weights"), TOLERANCE,
                f"{BECAUSE}; shown are the worst number of each tensor, and its largest")
    found.close("running statistics", side(ours, "statistics"), side(theirs, "statistics"),
                TOLERANCE, "of each BatchNorm, one micro-batch after the other; as above")
    found.equal("batches that BatchNorm has seen", side(ours, "counts"), side(theirs, "counts"),
                "each micro-batch counts once")
    found.holds("one micro-batch at a time", all(step.get("alone") for step in ours),
                "no two forwards of a shard may overlap on the timeline: they would write into the "
                "same running statistics")


def hold_times(found, steps, metrics, args, workers):
    """Each timed window has exactly the one step that the table says, and its micro-batches.

    Args:
        found: the Comparison.
        steps: when each step has begun and ended, as the recorder saw it.
        metrics: of the lesson.
        args: the parsed flags.
        workers: the roles that compute.
    """
    rows = len(args.num_splits)
    inside, forwards = [], []
    for of_split in metrics["windows"]:
        # -1: a step that only touches a window.
        inside.append([[n if start <= began and ended <= end else -1
                        for n, (began, ended) in enumerate(steps) if began < end and ended > start]
                       for start, end in of_split])
        forwards.append([[sum(span["kind"] == "forward" and start < span["end"] <= end
                              for span in metrics["spans"][worker]) for worker in workers]
                         for start, end in of_split])
    expected = [[[n + rows * (1 + batch)] for batch in range(args.num_batches)]
                for n in range(rows)]
    found.equal("timed steps", inside, expected, "the steps between the two readings of the clock; "
                "none of a warm-up, none of another number of splits", unit="row")
    found.equal("timed micro-batches", forwards,
                [[[number] * len(workers)] * args.num_batches for number in args.num_splits],
                "of each worker between the two readings", unit="row")


def made_up(metrics, args, workers):
    """Three windows for each row, whose median is neither their mean nor their first or last."""
    windows = [[(100 * row + 10 * i, 100 * row + 10 * i + (1 + 0.1 * row) * seconds)
                for i, seconds in enumerate((2.0, 7.0, 2.5))]
               for row in range(len(args.num_splits))][::-1]
    spans = {worker: [{"kind": "forward", "start": start, "labels": {},
                       "end": start + (0.3 + 0.1 * i + 0.2 * j) * (end - start)}
                      for of_row in windows for i, (start, end) in enumerate(of_row)]
             for j, worker in enumerate(workers)}
    return {**metrics, "windows": windows, "spans": spans}


def hold_table(found, times, metrics, args, name, workers):
    """The rows, the printed table and the last line, computed once more from the windows."""
    seconds = [statistics.median(end - start for start, end in of_split)
               for of_split in metrics["windows"]]
    expected = []
    for number, median, of_split in zip(args.num_splits, seconds, metrics["windows"], strict=True):
        idle = [sum(idle_share(metrics["spans"][worker], *window) for worker in workers)
                / len(workers) for window in of_split]
        expected.append({"num_split": number, "median_s": median, "speedup": seconds[0] / median,
                         "ideal": 2 * number / (number + 1),
                         "idle_share": statistics.median(idle)})
    rows = results.rows_of(metrics, args, workers)
    found.close(f"rows of {times} times", rows, expected, TOLERANCE, "medians, idle times", "row")
    columns = ["splits", "s/batch", "speed-up", "ideal", "idle"]
    head, *lines = [line.split() for line in results.table(rows)]
    printed = [dict(zip(head, (float(word.rstrip("%")) for word in line), strict=True))
               for line in lines]
    rounded = [dict(zip(columns, (row["num_split"], round(row["median_s"], 2),
                                  round(row["speedup"], 2), round(row["ideal"], 2),
                                  round(100 * row["idle_share"])), strict=True))
               for row in expected]
    found.close(f"table of {times} times", printed, rounded, TOLERANCE, "rounded alike", "row")
    best = min(expected, key=lambda row: row["median_s"])
    words = results.last_line(rows, metrics["losses"], args, name)
    said = [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", words.split(":", 1)[1])]
    shown = [round(metrics["losses"][0], 4), round(metrics["losses"][-1], 4), best["num_split"],
             round(best["median_s"], 2), round(best["speedup"], 2), 1, round(best["ideal"], 2),
             round(100 * best["idle_share"])]
    found.close(f"last line of {times} times", said, shown, TOLERANCE, "rounded alike", "word")


def idle_share(spans, start, end):
    """The share of the time from `start` to `end` in which none of the spans was open."""
    spans = [span for span in spans if span["start"] < end and span["end"] > start]
    edges = sorted({start, end, *(min(max(span[edge], start), end) for span in spans
                                  for edge in ("start", "end"))})
    idle = sum(b - a for a, b in itertools.pairwise(edges)
               if not any(span["start"] <= a and b <= span["end"] for span in spans))
    return idle / (end - start)
