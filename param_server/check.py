"""The oracle of the parameter servers of 6_6: one process without RPC makes every update again.

`record` runs the lesson's own loop in its own processes, for two short epochs: on the server it
sees what each forward reads, each gradient, and the weights after each step. Several trainers come
in an order of their own, and dropout draws from one generator for all trainers: both orders are
recorded. `single_process` follows them, and `compare` holds every number against it.

How old the weights of a gradient were is not counted as the server counts it, but taken from the
weights that each forward has read: they are looked up among those after every step.

All is in double precision. In single precision, rounding now and then lets another pixel win in a
max-pooling, and a gradient then differs by more than some mistakes make of it.
"""

import collections
import functools
import importlib
import itertools
import os
import threading
import time
from argparse import Namespace
from types import ModuleType

from common import checkpoint
from common.data import load_data
from common.environment import users_threads
from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, copies, current_context, named_weights

import joblib
import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from param_server import main as lesson
from param_server import results
from param_server.async_server import AsyncParameterServer

EPOCHS, BATCH_SIZE = 2, 8  # images, at most
# Updates of all trainers together in each epoch, about; test images for more than one batch of the
# accuracy.
UPDATES, TEST_IMAGES = 8, 510
# Seconds that one side is held up, so that who does not wait for it shows; REST_STEPS: see `rest`.
FIRST_AT_MOST_S, DECISION_S, MODE_S = 10.0, 0.01, 0.2
REST_STEPS, REST_S, REST_AT_MOST_S = 3, 0.2, 10.0
LAYERS = ("dropout1", "dropout2")
DOUBLE = "double precision"
Draw = tuple[int, int, str]  # rank, step of this trainer, layer
# How many steps old the weights of a gradient may be; None: as old as they become.
BOUND = {"param_server.main": 0, "param_server.async_server": None}


# --- one process, which knows of the lesson only the flags and the initial weights


def single_process(args: Namespace, data: tuple[TensorDataset, TensorDataset],
                   order: list[tuple[int, dict[str, torch.Tensor] | None]], draws: list[Draw],
                   device: torch.device) -> dict:
    """Make the updates of a training again.

    Args:
        args: the flags.
        data: the training images and the test images, each a `TensorDataset`.
        order: for each update the rank of the trainer, and None, or the weights that its forward
            read, where others may have stepped between this and its step.
        draws: the order in which dropout draws: (rank, step of this trainer, layer).
        device: where the server computes.

    Returns:
        `plans`: by rank, the batches of all steps. `masks`: by entry of `draws`. `initial`: the
        weights at the start. `losses`, `gradients`, `weights`: one entry for each update. `test`:
        log-probabilities of the test images at the end. Weights and test are on the CPU.
    """
    torch.manual_seed(args.seed)
    weights, first_epoch = lesson.Net().to(device).state_dict(), 0
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True, map_location=device)
        weights, first_epoch = state["model"], state["epochs"]
        torch.set_rng_state(state["random_numbers"].cpu())
    weights = {name: tensor.double() for name, tensor in weights.items()}
    train_set, test_set = data
    ranks = range(1, args.world_size)
    plans = {rank: planned_batches(train_set, rank, first_epoch, args) for rank in ranks}
    masks = {}
    for rank, step, layer in draws:
        if step < len(plans.get(rank, ())):  # else nobody should have drawn
            masks[rank, step, layer] = draw(layer, len(plans[rank][step][1]), device)
    alone = {"initial": on_cpu(weights), "masks": masks, "plans": plans, "losses": [],
             "gradients": [], "weights": []}
    steps = dict.fromkeys(plans, 0)
    for rank, read in order:
        step, steps[rank] = steps[rank], steps[rank] + 1
        if step >= len(plans[rank]):
            break  # more updates than there should be
        images, labels = (tensor.to(device) for tensor in plans[rank][step])
        leaves = {name: tensor.to(device, copy=True).requires_grad_()
                  for name, tensor in (weights if read is None else read).items()}
        of_step = [masks.get((rank, step, layer), 1.0) for layer in LAYERS]
        output = log_probabilities(leaves, images, of_step)
        loss = -output[torch.arange(len(labels)), labels].sum() / len(labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        gradients = dict(zip(leaves, gradients, strict=True))
        weights = {name: weights[name] - args.lr * gradients[name] for name in weights}
        alone["losses"].append({f"trainer{rank}": loss.item()})
        alone["gradients"].append(gradients)
        alone["weights"].append(on_cpu(weights))
    images, _ = test_set.tensors
    with torch.no_grad():
        alone["test"] = log_probabilities(weights, images.to(device)).cpu()
    return alone


def planned_batches(train_set: TensorDataset, rank: int, first_epoch: int, args: Namespace
                    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw the images and labels of all steps of a trainer, from the seed."""
    images, labels = train_set.tensors
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed)).tolist()
    mine = [image for place, image in enumerate(order) if place % (args.world_size - 1) == rank - 1]
    batches = []
    for epoch in range(first_epoch, args.epochs):
        generator = torch.Generator().manual_seed(10**6 * args.seed + 10**3 * epoch + rank)
        places = torch.randperm(len(mine), generator=generator).tolist()
        shuffled = [mine[place] for place in places]
        for start in range(0, len(shuffled), args.batch_size):
            chosen = shuffled[start : start + args.batch_size]
            batches.append((images[chosen], labels[chosen]))
    return batches


def draw(layer: str, n_images: int, device: torch.device) -> torch.Tensor:
    """Draw a mask of dropout: of whole channels before fc1, of single numbers behind it."""
    if layer == "dropout1":
        return F.dropout2d(torch.ones(n_images, 64, 12, 12, device=device), 0.25, training=True)
    return F.dropout(torch.ones(n_images, 128, device=device), 0.5, training=True)


def log_probabilities(weights: dict[str, torch.Tensor], images: torch.Tensor,
                      masks: tuple | list = (1.0, 1.0)) -> torch.Tensor:
    """Compute the network with functions; `masks` are what dropout multiplies with."""
    hidden = F.relu(F.conv2d(images, weights["conv1.weight"], weights["conv1.bias"]))
    hidden = F.conv2d(hidden, weights["conv2.weight"], weights["conv2.bias"])
    hidden = F.max_pool2d(hidden, 2) * masks[0]
    hidden = F.relu(F.linear(hidden.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    hidden = hidden * masks[1]
    return F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]).log_softmax(dim=1)


def on_cpu(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name, on the CPU."""
    return {name: tensor.cpu() for name, tensor in named.items()}


# --- what is recorded


class Recording:
    """Keeps what the server's process sees of a training.

    `forwards` in a context: context, images, the weights that were read, how many steps had ended
    before it and how many had begun at its end. `steps`: context, gradients, weights afterwards.
    `draws` of dropout, in order: context, what it multiplied with. `evaluations`, the forwards
    outside of a context: images, log-probabilities. `events`: forwards and steps, in order.
    `saved`: the checkpoints. `came`: the ranks of the trainers that came to a meeting; `gathered`:
    when all had met. `rested`: how many steps the others could and did make during the first
    forward of trainer1. `modes`: those that trainers have set; `switching`, the threads that do so
    now. `metrics`: what the first trainer returns.
    """

    def __init__(self) -> None:
        self.forwards, self.steps, self.draws, self.evaluations = [], [], [], []
        self.events, self.saved, self.metrics = [], [], None
        self.came, self.gathered = [], []
        self.rested, self.modes, self.switching = None, set(), set()
        self.begun, self.drawing, self.thread = 0, threading.Lock(), threading.local()

    def in_order(self, ranks: range) -> tuple[dict[int, list[dict]], list[tuple[int, int]],
                                              list[Draw]]:
        """Find out whose each forward, step and draw was.

        Returns:
            The forwards of each rank, in lists; for each step of the optimizer, the trainer and the
            number of its forward, from 0; for each draw, the same and the layer.
        """
        forwards, place_of = {rank: [] for rank in ranks}, {}
        for forward in self.forwards:
            rank = forward["context"] >> 48  # the first 16 bits are the rank that opened it
            place_of[forward["context"]] = rank, len(forwards[rank])
            forwards[rank].append(forward)
        steps = [place_of[step["context"]] for step in self.steps if step["context"] in place_of]
        draws, drawn = [], dict.fromkeys((context for context, _ in self.draws), 0)
        for context, _ in self.draws:
            layer = LAYERS[min(drawn[context], len(LAYERS) - 1)]
            draws.append((*place_of.get(context, (0, 0)), layer))
            drawn[context] += 1
        return forwards, steps, draws


recording = Recording()  # of this process; in a trainer's, it stays empty


def record(program: str, rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run a program on `small_data`, recorded; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    with Recorder() as recorder:
        recorder.put(lesson, "load_data", small_data)
        if rank == 0:
            record_server(recorder, args)
        else:
            record_trainer(recorder)
        importlib.import_module(program).run_worker(rank, world_size, args)
    if rank != 0:
        return None
    torch.set_num_threads(users_threads() or joblib.cpu_count())  # the others have ended
    return compare(recording, args)


def small_data(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Load the first images: a few batches for each trainer, and those for the accuracy."""
    train, test = (half.tensors for half in load_data(args))
    n_trainers = args.world_size - 1
    # Whole batches, a smaller one at the end, and shares that differ by one image.
    whole = batches_of_each(args) - 1
    n_images = n_trainers * (whole * args.batch_size + (args.batch_size + 1) // 2) + 1
    test = [torch.cat([tensor, tensor]) for tensor in test]
    return tuple(TensorDataset(images[:number].double(), labels[:number])
                 for (images, labels), number in ((train, n_images), (test, TEST_IMAGES)))


def batches_of_each(args: Namespace) -> int:
    """Return how many steps each trainer makes in an epoch."""
    return max(2, UPDATES // (args.world_size - 1))


def record_trainer(recorder: Recorder) -> None:
    """Let a trainer train until `last_epoch`, and send the server the metrics."""

    @recorder.around(lesson, "get_next_batch")
    def get_next_batch(original, train_set, rank, epoch, args):
        *batches, last = original(train_set, rank, epoch, args)
        yield from batches
        if rank > 1 and epoch == args.epochs - 1:
            # The first trainer is ready before the others: its accuracy must wait for their steps.
            ends = time.time() + FIRST_AT_MOST_S
            while not rpc.rpc_sync(lesson.SERVER_NAME, first_is_ready) and time.time() < ends:
                time.sleep(0.02)
        yield last

    @recorder.around(lesson.TrainerNet, "train")
    def train(original, net, mode=True):
        returned = original(net, mode)
        if returned is not net or net.training != mode:
            raise RuntimeError(f"train({mode}) has left the wrapper's own `training` at "
                               f"{net.training}, and has returned a {type(returned).__name__}")
        return returned

    @recorder.around(lesson.DistributedOptimizer, "step")
    def step(original, optimizer, context_id):
        """Leave time for another trainer's forward: only the turn keeps it out."""
        time.sleep(DECISION_S)
        original(optimizer, context_id)

    @recorder.around(lesson, "run_training_loop")
    def run_training_loop(original, rank, train_set, test_set, args, *classes):
        args.epochs = rpc.rpc_sync(lesson.SERVER_NAME, last_epoch)
        metrics = original(rank, train_set, test_set, args, *classes)
        if metrics is not None:
            rpc.rpc_sync(lesson.SERVER_NAME, receive, args=(metrics,))
        return metrics


def last_epoch() -> int:
    """Return when a check ends; the server knows from its checkpoint where the training began."""
    return lesson.param_server.first_epoch + EPOCHS


def first_is_ready() -> bool:
    """Decide, on the server, whether the first trainer waits for the others at its end."""
    return recording.came.count(1) == 2  # the other time, it was to begin together


def receive(metrics: dict) -> None:
    """Take the metrics of the first trainer, on the server."""
    recording.metrics = metrics


def record_server(recorder: Recorder, args: Namespace) -> None:
    """Record every call, forward and step of the server, and its checkpoints."""

    @recorder.around(lesson.ParameterServer, "__init__")
    def init(original, server, args):
        original(server, args)
        args.epochs = server.first_epoch + EPOCHS
        record_calls(recorder, server)

    def save(_, state):
        weights = dict(zip(state["model"], copies(state["model"].values()), strict=True))
        recording.saved.append({"epochs": state["epochs"], "weights": weights})

    def before_forward(module, _):
        if is_dropout(module):
            recording.drawing.acquire()  # one draw at a time, so that they have an order
        elif isinstance(module, lesson.Net) and (current_context() or 0) >> 48 == 1:
            rest(args)

    def after_forward(module, inputs, output):
        if is_dropout(module):
            before = inputs[0].detach()  # where it is zero, nobody can see the mask
            factors = torch.where(before != 0, output.detach() / before, torch.nan)
            recording.draws.append((current_context(), factors))
            recording.drawing.release()
        elif isinstance(module, lesson.Net) and current_context() is None:
            recording.evaluations.append({"images": inputs[0].cpu(), "output": output.cpu()})
        elif isinstance(module, lesson.Net):
            recording.forwards.append({
                "context": current_context(), "images": inputs[0].detach().cpu().clone(),
                "weights": named_weights(module), "ended": recording.thread.ended,
                "begun": recording.begun, "began": recording.thread.began})

    def step(original, optimizer, *closure):
        """Look on before the server lets the next one go on: this is what `apply_step` calls."""
        recording.begun += 1
        original(optimizer, *closure)
        context, server = current_context(), lesson.param_server
        recording.events.append(("step", context))
        gradients = server.get_dist_gradients(context)
        recording.steps.append({
            "context": context, "moment": time.time(), "weights": named_weights(server.model),
            "gradients": dict(zip(gradients, copies(gradients.values()), strict=True))})

    recorder.put(checkpoint, "save", save)  # a check writes over no file
    recorder.on_forward(before_forward, after_forward)
    recorder.around(lesson.SGD, "step")(step)

    @recorder.around(AsyncParameterServer, "note_read")
    def note_read(original, server, trainer):
        """Leave time for another step before the weights are copied."""
        original(server, trainer)
        time.sleep(DECISION_S)

    @recorder.around(AsyncParameterServer, "note_step")
    def note_step(original, server, trainer):
        """Leave time for another step before this one is counted."""
        time.sleep(DECISION_S)
        original(server, trainer)


def record_calls(recorder: Recorder, server: lesson.ParameterServer) -> None:
    """Record when trainers call a server."""

    @recorder.around(server, "forward")
    def forward(original, *inputs):
        if recording.switching:
            raise RuntimeError("a forward came before set_mode had ended")
        recording.thread.ended, recording.thread.began = len(recording.steps), time.time()
        recording.events.append(("forward", current_context()))
        return original(*inputs)

    @recorder.around(server, "set_mode")
    def set_mode(original, training):
        recording.modes.add(training)
        if True not in recording.modes:
            raise RuntimeError("set_mode(False) came before any set_mode(True)")
        recording.switching.add(threading.get_ident())
        time.sleep(MODE_S)  # who does not wait for it computes in the mode before
        original(training)
        recording.switching.remove(threading.get_ident())

    @recorder.around(server, "all_gather")
    def all_gather(original, rank, value):
        recording.came.append(rank)
        values = original(rank, value)
        recording.gathered.append(time.time())
        return values


def rest(args: Namespace) -> None:
    """Let the others step, if they may, when the first forward of trainer1 has read the weights."""
    others = args.world_size - 2
    if recording.rested is not None or others == 0:
        return
    before = len(recording.steps)
    may = REST_STEPS if args.bound is None else args.bound
    expected = min(may, others * EPOCHS * batches_of_each(args) - before)
    recording.rested = {"expected": expected, "made": 0}
    ends = time.time() + REST_AT_MOST_S
    while len(recording.steps) < before + expected and time.time() < ends:
        time.sleep(0.01)
    if args.bound is not None:
        time.sleep(REST_S)  # is there one step too many?
    recording.rested["made"] = len(recording.steps) - before


def is_dropout(module: nn.Module) -> bool:
    """Decide whether a module draws a mask now."""
    return "Dropout" in type(module).__name__ and module.training


# --- what is held against what


def compare(recording: Recording, args: Namespace) -> dict:
    """Hold every number of the recording against one process; return the findings."""
    findings = Comparison(f"{args.world_size} processes ({results.CONSISTENCY[args.example]})",
                          "one process")
    ranks = range(1, args.world_size)
    forwards, stepped, draws = recording.in_order(ranks)
    one_at_a_time = len(ranks) == 1 or args.bound == 0
    order = [(rank, None if one_at_a_time else forwards[rank][step]["weights"])
             for rank, step in stepped]
    data = small_data(args)
    alone = single_process(args, data, order, draws, lesson.param_server.input_device)
    plans = alone["plans"]

    findings.equal("training images", *by_step(
        {rank: [forward["images"] for forward in forwards[rank]] for rank in ranks},
        {rank: [images for images, _ in plans[rank]] for rank in ranks}),
        "each trainer's share of them, in a new order in each epoch")
    findings.equal("updates", *by_step(
        {rank: [step for who, step in stepped if who == rank] for rank in ranks},
        {rank: list(range(len(plans[rank]))) for rank in ranks}),
        "each gradient reaches the server's weights once: none is lost, none is doubled")
    if args.bound == 0:
        compare_turns(findings, recording)
    compare_weights_read(findings, recording, alone)
    compare_staleness(findings, recording, args)
    compare_dropout(findings, recording, alone, draws)
    losses = {trainer["rank"]: [step["loss"] for epoch in trainer["steps"] for step in epoch]
              for trainer in recording.metrics["per_trainer"]}
    findings.close("losses", [{f"trainer{rank}": losses[rank][step]} for rank, step in stepped
                              if step < len(losses[rank])], alone["losses"], 1e-9, DOUBLE)
    findings.close("gradients", [step["gradients"] for step in recording.steps],
                   alone["gradients"], 1e-9, DOUBLE)
    findings.close("weights", [step["weights"] for step in recording.steps],
                   alone["weights"], 1e-9, f"{DOUBLE}, after every step")
    compare_accuracy(findings, recording, alone, *data[1].tensors)
    compare_metrics(findings, recording, alone, args)
    compare_moments(findings, recording, forwards, stepped, args)
    if args.checkpoint:
        findings.equal("checkpoints", [saved["epochs"] for saved in recording.saved],
                       range(args.epochs - EPOCHS + 1, args.epochs + 1), "after each epoch", "file")
        if len(ranks) == 1:
            findings.close("last checkpoint", [saved["weights"] for saved in recording.saved[-1:]],
                           alone["weights"][-1:], 1e-9, DOUBLE, "file")
    return findings.as_dict()


def by_step(recorded: dict[int, list], planned: dict[int, list]) -> list[list[dict]]:
    """Turn both, lists by rank, into what all trainers did in each step, as `Comparison` takes."""
    return [[{f"trainer{rank}": values[step] for rank, values in side.items() if step < len(values)}
             for step in range(max(map(len, side.values())))] for side in (recorded, planned)]


def compare_dropout(findings: Comparison, recording: Recording, alone: dict, draws: list[Draw]
                    ) -> None:
    """Hold the masks of dropout against those of one generator that was seeded alike."""
    ours, theirs = [], []
    for place, (_, factors) in zip(draws, recording.draws, strict=True):
        rank, _, layer = place
        mask = alone["masks"].get(place, torch.zeros(0))
        if factors.shape == mask.shape:
            factors = torch.where(factors.isnan(), mask, factors)  # there, nobody can see it
        ours.append({f"trainer{rank} {layer}": factors})
        theirs.append({f"trainer{rank} {layer}": mask})
    findings.close("dropout", ours, theirs, 1e-9, f"{DOUBLE}; seeded alike, in the same order",
                   "mask")
    expected = len(LAYERS) * sum(map(len, alone["plans"].values()))
    findings.holds("dropout masks", len(draws) == expected == len(set(draws)),
                   f"{len(draws)} drawn, {expected} expected: two in each forward of the training")


def compare_accuracy(findings: Comparison, recording: Recording, alone: dict,
                     images: torch.Tensor, labels: torch.Tensor) -> None:
    """Hold the test images, their log-probabilities without dropout, and the accuracy."""
    seen, outputs = (torch.cat([part[what] for part in recording.evaluations] or [torch.zeros(0)])
                     for what in ("images", "output"))
    findings.equal("test images", [seen], [images], "all of the test set, once", "pass")
    findings.close("test log-probabilities", [outputs], [alone["test"]], 1e-9,
                   f"{DOUBLE}; with the final weights, without dropout", "pass")
    best = alone["test"].topk(2, dim=1)
    correct = (best.indices[:, 0] == labels).double().mean().item()
    undecided = (best.values[:, 0] - best.values[:, 1] < 1e-9).double().mean().item()
    accuracy = recording.metrics["test_accuracy"]
    findings.holds("accuracy", abs(accuracy - correct) <= undecided + 1e-12,
                   f"{accuracy:.6f} in {{run}}, {correct:.6f} in {{oracle}}, of {len(labels)} test "
                   f"images ({undecided:.6f} are too close to tell)")


def compare_turns(findings: Comparison, recording: Recording) -> None:
    """Hold that after the forward of a step, that step comes next."""
    events = [(what, context) for what, context in recording.events if context is not None]
    mixed = sum(first != ("forward", second[1]) or second[0] != "step"
                for first, second in zip(events[::2], events[1::2], strict=False))
    findings.holds("turns", mixed == 0, f"{len(recording.steps)} updates: between forward and "
                   f"step, another trainer came {mixed} times")


def compare_weights_read(findings: Comparison, recording: Recording, alone: dict) -> None:
    """Hold that a forward has read the weights after one step, between its beginning and its end.

    Which step that is, is kept in the forward, as "version"; 0 are the initial weights.
    """
    versions = [alone["initial"], *alone["weights"]]
    sizes = [{name: weight.abs().max() for name, weight in version.items()} for version in versions]
    worst, where, count = 0.0, "", 0
    for number, forward in enumerate(recording.forwards, start=1):
        last = min(forward["begun"], len(versions) - 1)
        possible = range(min(forward["ended"], last), last + 1)
        off = {version: {name: (read - versions[version][name]).abs().max() / sizes[version][name]
                         for name, read in forward["weights"].items()} for version in possible}
        forward["version"] = min(possible, key=lambda version: max(off[version].values()))
        name, largest = max(off[forward["version"]].items(), key=lambda pair: pair[1])
        if not largest <= 1e-9 and not where:
            where = (f"first differs at forward {number} (trainer{forward['context'] >> 48}), "
                     f"{name}: by {largest:.1e}; ")
        worst = max(worst, largest)
        count += sum(read.numel() for read in forward["weights"].values())
    findings.holds("weights read", count and not where, f"{where}{count} numbers of "
                   f"{len(recording.forwards)} forwards: differ by {worst:.1e} from those after a "
                   "step, at most 1e-09 of the largest (double precision; others are further off)")


def compare_staleness(findings: Comparison, recording: Recording, args: Namespace) -> None:
    """Hold how old the weights of each gradient were; none too old; others could go on."""
    version = {forward["context"]: forward["version"] for forward in recording.forwards}
    ages = {rank: collections.Counter() for rank in range(1, args.world_size)}
    for number, step in enumerate(recording.steps):
        ages[step["context"] >> 48][number - version.get(step["context"], 0)] += 1
    counted = [sum(ages.values(), collections.Counter()), *ages.values()]
    reported = results.summary(recording.metrics, args)
    if "staleness" in reported:  # the turns of main.py leave nothing to count
        rows = [reported, *reported["per_trainer"]]
        findings.equal("staleness", [row["staleness"]["histogram"] for row in rows],
                       [{str(age): n for age, n in sorted(counts.items())} for counts in counted],
                       "as the weights that each forward read show", "histogram")
        each = [list(counts.elements()) for counts in counted]  # a number for each gradient
        findings.close("staleness, mean and largest",
                       [[row["staleness"][what] or 0 for what in ("mean", "max")] for row in rows],
                       [[sum(of) / max(1, len(of)), max(of, default=0)] for of in each], 1e-9,
                       "of all and of each", "row")
    if args.bound is not None:
        findings.holds("bound", max(counted[0], default=0) <= args.bound, f"weights of a gradient "
                       f"were at most {max(counted[0], default=0)} steps old, {args.bound} allowed")
    if recording.rested:
        expected, made = recording.rested["expected"], recording.rested["made"]
        findings.holds("overlap", made >= expected, "during the first forward of trainer1, "
                       f"others made {made} steps, {expected} expected")


def compare_metrics(findings: Comparison, recording: Recording, alone: dict, args: Namespace
                    ) -> None:
    """Hold what is written to metrics.json."""
    reported, plans = results.summary(recording.metrics, args), alone["plans"]
    losses = {rank: [] for rank in plans}
    for of_update in alone["losses"]:
        for name, loss in of_update.items():
            losses[int(name.removeprefix("trainer"))].append(loss)
    means = []
    for epoch in range(EPOCHS):
        of_epoch = []
        for of_trainer in losses.values():
            n_steps = len(of_trainer)
            of_epoch += of_trainer[epoch * n_steps // EPOCHS : (epoch + 1) * n_steps // EPOCHS]
        means.append(sum(of_epoch) / max(1, len(of_epoch)))
    findings.close("mean losses", [epoch["loss"] for epoch in reported["epochs"]], means, 1e-9,
                   "over the batches of all trainers", "epoch")
    samples = {rank: sum(len(labels) for _, labels in plan) for rank, plan in plans.items()}
    times = [time for trainer in reported["per_trainer"] for time in trainer["times"]]
    started = min(trainer["started"] for trainer in reported["per_trainer"])
    speed = sum(samples.values()) / (max(times) - started)
    findings.close("counts", [[reported["updates"], reported["samples_per_s"]],
                              *([trainer["rank"], trainer["samples"], len(trainer["times"])]
                                for trainer in reported["per_trainer"])],
                   [[sum(map(len, plans.values())), speed],
                    *([rank, samples[rank], len(plan)] for rank, plan in plans.items())],
                   1e-9, "updates and samples of all and of each, samples/s", "row")


def compare_moments(findings: Comparison, recording: Recording, forwards: dict[int, list[dict]],
                    stepped: list[tuple[int, int]], args: Namespace) -> None:
    """Hold the order of the times of which samples/s are made, on the clock of this machine."""
    if os.environ["LOCAL_WORLD_SIZE"] != str(args.world_size):
        return  # several machines have several clocks
    wrong = 0
    for trainer in recording.metrics["per_trainer"]:
        rank = trainer["rank"]
        began = [forward["began"] for forward in forwards[rank]]
        ended = [step["moment"] for place, step in zip(stepped, recording.steps, strict=False)
                 if place[0] == rank]
        times = [step["time"] for epoch in trainer["steps"] for step in epoch]
        met = recording.gathered[0] if recording.gathered else float("inf")
        moments = [met, trainer["started"]]
        for of_step in zip(began, ended, times, strict=False):
            moments += of_step
        wrong += sum(after < before - 1e-3 for before, after in itertools.pairwise(moments))
    findings.holds("moments", wrong == 0, "all met, a trainer started, and each of its steps had "
                   f"its forward, its end on the server, its end: {wrong} in another order")


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Train for a few steps, and hold every number against one process; return the differences.

    Args:
        program: main.py or async_server.py.
        args: the parsed flags.
    """
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.bound = BOUND[program.__name__]
    worker = functools.partial(record, program.__name__)
    return verdict(launch(worker, args, program.role_name))
