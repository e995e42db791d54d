"""The oracle of the parameter servers of 6_6: one process without RPC makes every update again.

`recording.py` runs the lesson's own loop in its own processes. Here, one process computes the same
updates, in the order in which the trainers came and dropout drew, and every number is compared.

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

import joblib
import torch
from common.launcher import launch
from common.oracle import Comparison, verdict
from torch.nn import functional as F

from param_server import main as lesson
from param_server import results
from param_server.recording import BATCH_SIZE, EPOCHS, LAYERS, record_run, small_data

DOUBLE = "double precision"
# How many steps old the weights of a gradient may be; None: as old as they become.
BOUND = {"param_server.main": lambda args: 0, "param_server.async_server": lambda args: None,
         "param_server.bounded_server": lambda args: args.max_staleness}


# --- one process, which knows of the lesson only the flags and the initial weights


def single_process(args, data, order, draws, device):
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
        log-probabilities of the test images at the end.
    """
    torch.manual_seed(args.seed)
    weights, first_epoch = lesson.Net().to(device).state_dict(), 0
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True, map_location=device)
        weights, first_epoch = state["model"], state["epochs"]
        if "random_numbers" in state:
            torch.set_rng_state(state["random_numbers"].cpu())
    weights = {name: tensor.double() for name, tensor in weights.items()}
    train_set, test_set = data
    ranks = range(1, args.world_size)
    plans = {rank: planned_batches(train_set, rank, first_epoch, args) for rank in ranks}
    masks = {}
    for rank, step, layer in draws:
        if step < len(plans.get(rank, ())):  # else nobody should have drawn
            masks[rank, step, layer] = draw(layer, len(plans[rank][step][1]), device)
    alone = {"initial": weights, "masks": masks, "plans": plans, "losses": [], "gradients": [],
             "weights": []}
    steps = dict.fromkeys(plans, 0)
    for rank, read in order:
        step, steps[rank] = steps[rank], steps[rank] + 1
        if step >= len(plans[rank]):
            break  # more updates than there should be
        images, labels = (tensor.to(device) for tensor in plans[rank][step])
        leaves = {name: tensor.clone().requires_grad_()
                  for name, tensor in (weights if read is None else read).items()}
        of_step = [masks.get((rank, step, layer), 1.0) for layer in LAYERS]
        output = log_probabilities(leaves, images, of_step)
        loss = -output[torch.arange(len(labels)), labels].sum() / len(labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        gradients = dict(zip(leaves, gradients, strict=True))
        weights = {name: weights[name] - args.lr * gradients[name] for name in weights}
        alone["losses"].append({f"trainer{rank}": loss.item()})
        alone["gradients"].append(gradients)
        alone["weights"].append(weights)
    images, _ = test_set.tensors
    with torch.no_grad():
        alone["test"] = log_probabilities(weights, images.to(device)).cpu()
    return alone


def planned_batches(train_set, rank, first_epoch, args):
    """The images and labels of all steps of a trainer, as the flags say."""
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


def draw(layer, n_images, device):
    """A mask of dropout: of whole channels before fc1, of single numbers behind it."""
    if layer == "dropout1":
        return F.dropout2d(torch.ones(n_images, 64, 12, 12, device=device), 0.25, training=True)
    return F.dropout(torch.ones(n_images, 128, device=device), 0.5, training=True)


def log_probabilities(weights, images, masks=(1.0, 1.0)):
    """The network, with functions; `masks` are what dropout multiplies with."""
    hidden = F.relu(F.conv2d(images, weights["conv1.weight"], weights["conv1.bias"]))
    hidden = F.conv2d(hidden, weights["conv2.weight"], weights["conv2.bias"])
    hidden = F.max_pool2d(hidden, 2) * masks[0]
    hidden = F.relu(F.linear(hidden.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    hidden = hidden * masks[1]
    return F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]).log_softmax(dim=1)


# --- what is held against what


def compare(recording, args):
    """Hold every number of the recording against one process; the findings."""
    findings = Comparison(f"{args.world_size} processes ({results.CONSISTENCY[args.example]})",
                          "one process")
    ranks = range(1, args.world_size)
    forwards, stepped, draws = recording.in_order(ranks)
    one_at_a_time = len(ranks) == 1 or args.bound == 0
    order = [(rank, None if one_at_a_time else forwards[rank][step]["weights"])
             for rank, step in stepped]
    device = recording.steps[0]["weights"]["fc2.bias"].device if recording.steps else "cpu"
    data = small_data(args)
    alone = single_process(args, data, order, draws, device)
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


def by_step(recorded, planned):
    """Two dicts of lists, by rank, as `Comparison` takes them: what all trainers did in a step."""
    return [[{f"trainer{rank}": values[step] for rank, values in side.items() if step < len(values)}
             for step in range(max(map(len, side.values())))] for side in (recorded, planned)]


def compare_dropout(findings, recording, alone, draws):
    """The masks of dropout: as one generator draws them that was seeded alike."""
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


def compare_accuracy(findings, recording, alone, images, labels):
    """The test images, their log-probabilities without dropout, and the accuracy."""
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


def compare_turns(findings, recording):
    """After the forward of a step, that step comes next."""
    events = [(what, context) for what, context in recording.events if context is not None]
    mixed = sum(first != ("forward", second[1]) or second[0] != "step"
                for first, second in zip(events[::2], events[1::2], strict=False))
    findings.holds("turns", mixed == 0, f"{len(recording.steps)} updates: between forward and "
                   f"step, another trainer came {mixed} times")


def compare_weights_read(findings, recording, alone):
    """What a forward has read are the weights after one step, between its beginning and its end.

    Which step that is, is kept in the forward, as "version"; 0 are the initial weights.
    """
    versions = [alone["initial"], *alone["weights"]]
    sizes = {name: weight.abs().max() for name, weight in versions[0].items()}
    worst, where, count = 0.0, "", 0
    for number, forward in enumerate(recording.forwards, start=1):
        last = min(forward["begun"], len(versions) - 1)
        possible = range(min(forward["ended"], last), last + 1)
        off = {version: {name: ((read - versions[version][name]).abs().max() / sizes[name]).item()
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


def compare_staleness(findings, recording, args):
    """How old the weights of each gradient were; none older than K; others could go on."""
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


def compare_metrics(findings, recording, alone, args):
    """What is written to metrics.json."""
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


def compare_moments(findings, recording, forwards, stepped, args):
    """The times of which samples/s are made, on the clock of this machine."""
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


def record(program, rank, world_size, args):
    """Record a program's run in each process; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    recording = record_run(importlib.import_module(program), rank, world_size, args)
    if rank != 0:
        return None
    torch.set_num_threads(joblib.cpu_count())  # the others have ended
    return compare(recording, args)


def check(program, args):
    """Train for a few steps, and hold every number against one process; the differences.

    Args:
        program: the module of main.py, async_server.py or bounded_server.py.
        args: the parsed flags.
    """
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    args.bound = BOUND[program.__name__](args)
    worker = functools.partial(record, program.__name__)
    return verdict(launch(worker, args, program.role_name))
