"""The oracle of `main.py`: one process without RPC that makes every update of the training again.

The lesson's own loop runs in its own processes for two epochs, while PyTorch's hooks on the server
record what each forward read, each gradient, and the weights after each step. Several trainers come
in an order of their own: the server records it, and one process computes the updates in that order.
Dropout draws from one seeded generator; the order of the draws is recorded too.

All is in double precision. In single precision, rounding now and then lets another pixel win in a
max-pooling, and a gradient then differs by more than some mistakes make of it.
"""

import itertools
import os
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from common import checkpoint
from common.data import load_data
from common.launch import launch
from common.oracle import Comparison, verdict
from torch.distributed import rpc
from torch.nn import functional as F
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer
from torch.utils.data import TensorDataset

from param_server import main as lesson
from param_server import results

EPOCHS, UPDATES, TEST_IMAGES = 2, 8, 510  # updates of all trainers together in each epoch, about
DOUBLE = "double precision"
HEAD_START_S = 0.3
LAYERS = ("dropout1", "dropout2")


class Recording:
    """What the server's process sees of a training.

    `forwards` in a context: context, images, the weights that were read, how many steps had ended
    before it and how many had begun at its end. `steps`: context, gradients, weights afterwards.
    `draws` of dropout, in order: context, what it multiplied with. `evaluations`, the forwards
    outside of a context: images, log-probabilities. `events`: forwards and steps, in order.
    `saved`: the checkpoints. `gathered`: when all trainers had met. `metrics`: what the first
    trainer returns.
    """

    def __init__(self):
        self.forwards, self.steps, self.draws, self.evaluations = [], [], [], []
        self.events, self.saved, self.metrics, self.begun = [], [], None, 0
        self.gathered = []
        self.drawing, self.thread = threading.Lock(), threading.local()


recording = None


def receive(metrics):
    """On the server: the metrics of the first trainer."""
    recording.metrics = metrics


def last_epoch():
    """On the server, which alone has the checkpoint: when a check ends."""
    return lesson.param_server.first_epoch + EPOCHS


def record(rank, world_size, args):
    """The worker of a check: the lesson's own, recorded; on rank 0, the findings."""
    global recording
    n_steps = 0
    torch.set_default_dtype(torch.float64)
    lesson.load_data = small_data
    if rank == 0:
        recording = Recording()
        server = lesson.get_parameter_server(args)
        args.epochs = last_epoch()
        record_server(server)
    honest, honest_step, calls = lesson.run_training_loop, lesson.train_step, itertools.count(1)

    def train_step(*arguments):
        # The first trainer is ready before the others, and must wait for them with the accuracy.
        if rank > 1 and next(calls) == n_steps:
            time.sleep(HEAD_START_S)
        return honest_step(*arguments)

    def run_training_loop(rank, train_set, test_set, args):
        nonlocal n_steps
        args.epochs = rpc.rpc_sync(lesson.SERVER_NAME, last_epoch)
        n_steps = len(planned_batches(rank, args.epochs - EPOCHS, args))
        metrics = honest(rank, train_set, test_set, args)
        if metrics is not None:
            rpc.rpc_sync(lesson.SERVER_NAME, receive, args=(metrics,))
        return metrics

    lesson.run_training_loop, lesson.train_step = run_training_loop, train_step
    lesson.run_worker(rank, world_size, args)
    return compare(recording, args) if rank == 0 else None


def record_server(server):
    """Set PyTorch's hooks, which see every forward and every step of this process."""
    honest, honest_gather = server.forward, server.all_gather

    def forward(inp):
        recording.thread.ended, recording.thread.began = len(recording.steps), time.time()
        recording.events.append(("forward", context()))
        return honest(inp)

    def before_forward(module, _):
        if is_dropout(module):
            recording.drawing.acquire()  # one draw at a time, so that there is an order of them

    def after_forward(module, inputs, output):
        if is_dropout(module):
            before = inputs[0].detach()  # where it is zero, nobody can see the mask
            factors = torch.where(before != 0, output.detach() / before, torch.nan)
            recording.draws.append((context(), factors))
            recording.drawing.release()
        elif type(module).__name__ == "Net" and context() is None:
            recording.evaluations.append({"images": inputs[0].cpu(), "output": output.cpu()})
        elif type(module).__name__ == "Net":
            recording.forwards.append({
                "context": context(), "images": inputs[0].detach().cpu().clone(),
                "weights": copied(module.named_parameters()),
                "ended": recording.thread.ended, "begun": recording.begun,
                "began": recording.thread.began})

    def before_step(*_):
        recording.begun += 1

    def after_step(*_):
        recording.events.append(("step", context()))
        recording.steps.append({"context": context(), "moment": time.time(),
                                "gradients": copied(server.get_dist_gradients(context()).items()),
                                "weights": copied(server.model.named_parameters())})

    def all_gather(rank, value):
        future_values = honest_gather(rank, value)
        if future_values.done():
            recording.gathered.append(time.time())
        return future_values

    def save(_, state):
        recording.saved.append({"epochs": state["epochs"],
                                "weights": copied(state["model"].items())})

    server.forward, server.all_gather = forward, all_gather
    every_module.register_module_forward_pre_hook(before_forward)
    every_module.register_module_forward_hook(after_forward)
    every_optimizer.register_optimizer_step_pre_hook(before_step)
    every_optimizer.register_optimizer_step_post_hook(after_step)
    checkpoint.save = save  # a check writes over no file


def context():
    """The distributed autograd context of this thread, or None."""
    try:
        return dist_autograd._current_context()._context_id()
    except RuntimeError:
        return None


def is_dropout(module):
    """Whether a module draws a mask now."""
    return "Dropout" in type(module).__name__ and module.training


def copied(named_tensors):
    """The tensors as they are now, by name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors}


def small_data(args):
    """The first images: a few batches for each trainer, and those for the accuracy."""
    train, test = (half.tensors for half in load_data(args))
    n_trainers = args.world_size - 1
    # Whole batches, a smaller one at the end, and shares that differ by one image.
    whole = max(2, UPDATES // n_trainers) - 1
    n_images = n_trainers * (whole * args.batch_size + (args.batch_size + 1) // 2) + 1
    test = [torch.cat([tensor, tensor]) for tensor in test]  # more than one batch of the accuracy
    return tuple(TensorDataset(images[:number].double(), labels[:number])
                 for (images, labels), number in ((train, n_images), (test, TEST_IMAGES)))


# --- one process, which knows of the lesson only the flags and the initial weights


def log_probabilities(weights, images, masks=None):
    """The network, with functions; `masks` are what dropout multiplies with, None without."""
    first, second = masks or (1.0, 1.0)
    hidden = F.relu(F.conv2d(images, weights["conv1.weight"], weights["conv1.bias"]))
    hidden = F.conv2d(hidden, weights["conv2.weight"], weights["conv2.bias"])
    hidden = F.max_pool2d(hidden, 2) * first
    hidden = F.relu(F.linear(hidden.flatten(1), weights["fc1.weight"], weights["fc1.bias"]))
    return F.linear(hidden * second, weights["fc2.weight"], weights["fc2.bias"]).log_softmax(dim=1)


def planned_batches(rank, first_epoch, args):
    """The images and labels of all steps of a trainer, as the flags say."""
    images, labels = small_data(args)[0].tensors
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


def single_process(args, order, draws, device):
    """Make the updates of a training again.

    Args:
        args: the flags.
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
    weights = {name: tensor.double() for name, tensor in copied(weights.items()).items()}
    plans = {rank: planned_batches(rank, first_epoch, args) for rank in range(1, args.world_size)}
    masks = {}
    for rank, step, layer in draws:
        if step < len(plans.get(rank, ())):  # else nobody should have drawn
            masks[rank, step, layer] = draw(layer, len(plans[rank][step][1]), device)
    alone = {"initial": copied(weights.items()), "masks": masks, "plans": plans, "losses": [],
             "gradients": [], "weights": []}
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
        for name, gradient in gradients.items():
            weights[name] -= args.lr * gradient
        alone["losses"].append({f"trainer{rank}": loss.item()})
        alone["gradients"].append(gradients)
        alone["weights"].append(copied(weights.items()))
    images = small_data(args)[1].tensors[0]
    with torch.no_grad():
        alone["test"] = log_probabilities(weights, images.to(device)).cpu()
    return alone


# --- what is held against what


def compare(recording, args):
    """Hold every number of the recording against one process; the findings."""
    ranks = range(1, args.world_size)
    findings = Comparison(f"{args.world_size} processes ({args.consistency})", "one process")
    device = recording.steps[0]["weights"]["fc2.bias"].device if recording.steps else "cpu"
    # The first 16 bits of a context are the rank that opened it: each forward is a trainer's next.
    forwards, place_of = {rank: [] for rank in ranks}, {}
    for forward in recording.forwards:
        rank = forward["context"] >> 48
        place_of[forward["context"]] = rank, len(forwards[rank])
        forwards[rank].append(forward)
    stepped = [place_of[step["context"]] for step in recording.steps if step["context"] in place_of]
    draws, layers = [], {}
    for drawn, _ in recording.draws:
        layers[drawn] = layers.get(drawn, -1) + 1
        draws.append((*place_of.get(drawn, (0, 0)), LAYERS[min(layers[drawn], 1)]))
    alone_at_a_time = args.consistency == "lock" or len(ranks) == 1
    order = [(rank, None if alone_at_a_time else forwards[rank][step]["weights"])
             for rank, step in stepped]
    alone = single_process(args, order, draws, device)
    plans = alone["plans"]

    findings.equal("training images", *by_step(
        {rank: [forward["images"] for forward in forwards[rank]] for rank in ranks},
        {rank: [images for images, _ in plans[rank]] for rank in ranks}),
        "each trainer's share of them, in a new order in each epoch")
    findings.equal("updates", *by_step(
        {rank: [step for who, step in stepped if who == rank] for rank in ranks},
        {rank: list(range(len(plans[rank]))) for rank in ranks}),
        "each gradient reaches the server's weights once: none is lost, none is doubled")
    if args.consistency == "lock":
        events = [event for event in recording.events if event[1] is not None]
        mixed = sum(first != ("forward", second[1]) or second[0] != "step"
                    for first, second in zip(events[::2], events[1::2], strict=False))
        findings.holds("turns", mixed == 0, f"{len(recording.steps)} updates: between forward and "
                       f"step, another trainer came {mixed} times")
    compare_weights_read(findings, recording, alone)
    compare_dropout(findings, recording, alone, draws)
    losses = {trainer["rank"]: [step["loss"] for epoch in trainer["steps"] for step in epoch]
              for trainer in recording.metrics["per_trainer"]}
    findings.close("losses", [{f"trainer{rank}": losses[rank][step]} for rank, step in stepped
                              if step < len(losses[rank])], alone["losses"], 1e-9, DOUBLE)
    findings.close("gradients", [step["gradients"] for step in recording.steps],
                   alone["gradients"], 1e-9, DOUBLE)
    findings.close("weights", [step["weights"] for step in recording.steps],
                   alone["weights"], 1e-9, f"{DOUBLE}, after every step")
    compare_accuracy(findings, recording, alone, args)
    compare_metrics(findings, recording, alone, args)
    if os.environ["LOCAL_WORLD_SIZE"] == str(args.world_size):  # one machine: the same clock
        compare_moments(findings, recording, forwards, stepped)
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


def compare_weights_read(findings, recording, alone):
    """Every number that a forward has read is from a moment between its beginning and its end."""
    versions = [alone["initial"], *alone["weights"]]
    worst, where, count = 0.0, "", 0
    for number, forward in enumerate(recording.forwards, start=1):
        last = min(forward["begun"], len(versions) - 1)
        possible = versions[min(forward["ended"], last) : last + 1]
        for name, read in forward["weights"].items():
            # Another trainer's step may be half done: each number is the old one or the new one.
            nearest = torch.stack([(read - version[name]).abs() for version in possible]).amin(0)
            off = (nearest.max() / versions[0][name].abs().max()).item()
            if not off <= 1e-9 and not where:
                where = (f"first differs at forward {number} (trainer{forward['context'] >> 48}), "
                         f"{name}: by {off:.1e}; ")
            worst, count = max(worst, off), count + read.numel()
    findings.holds("weights read", count and not where, f"{where}{count} numbers of "
                   f"{len(recording.forwards)} forwards: differ by {worst:.1e} from those of that "
                   f"moment, at most 1e-09 of the largest ({DOUBLE}; stale ones are further off)")


def compare_dropout(findings, recording, alone, draws):
    """The masks of dropout: as one generator draws them that was seeded alike."""
    def named(factors, place):
        return {f"trainer{place[0]} {place[2]}": factors}

    ours, theirs = [], []
    for place, (_, factors) in zip(draws, recording.draws, strict=True):
        mask = alone["masks"].get(place, torch.zeros(0))
        unseen = factors.isnan() if factors.shape == mask.shape else False
        ours.append(named(torch.where(unseen, mask, factors) if unseen is not False else factors,
                          place))
        theirs.append(named(mask, place))
    expected = len(LAYERS) * sum(map(len, alone["plans"].values()))
    findings.close("dropout", ours, theirs, 1e-9, f"{DOUBLE}; seeded alike, in the same order",
                   "mask")
    findings.holds("dropout masks", len(draws) == expected == len(set(draws)),
                   f"{len(draws)} drawn, {expected} expected: two in each forward of the training")


def compare_accuracy(findings, recording, alone, args):
    """The test images, their log-probabilities without dropout, and the accuracy."""
    images, labels = small_data(args)[1].tensors
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


def compare_metrics(findings, recording, alone, args):
    """What is written to metrics.json."""
    reported, plans = results.summary(recording.metrics, args), alone["plans"]
    of_trainer = {rank: [] for rank in plans}
    for loss in alone["losses"]:
        for name, value in loss.items():
            of_trainer[int(name.removeprefix("trainer"))].append(value)
    means = []
    for epoch in range(EPOCHS):
        parts = [losses[epoch * len(losses) // EPOCHS : (epoch + 1) * len(losses) // EPOCHS]
                 for losses in of_trainer.values()]
        means.append(sum(map(sum, parts)) / max(1, sum(map(len, parts))))
    findings.close("mean losses", [epoch["loss"] for epoch in reported["epochs"]], means, 1e-9,
                   "over the batches of all trainers", "epoch")
    samples = {rank: sum(len(labels) for _, labels in plan) for rank, plan in plans.items()}
    times = [time for trainer in reported["per_trainer"] for time in trainer["times"]]
    started = min(trainer["started"] for trainer in reported["per_trainer"])
    speed = sum(samples.values()) / (max(times) - started)
    same = float(reported["consistency"] == args.consistency)
    findings.close("counts", [[reported["updates"], reported["samples_per_s"], same],
                              *([trainer["rank"], trainer["samples"], len(trainer["times"])]
                                for trainer in reported["per_trainer"])],
                   [[sum(map(len, plans.values())), speed, 1.0],
                    *([rank, samples[rank], len(plan)] for rank, plan in plans.items())],
                   1e-9, "updates and samples of all and of each, samples/s", "row")


def compare_moments(findings, recording, forwards, stepped):
    """The times of which samples/s are made, on the clock of this machine."""
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


def check(args):
    """Train for a few steps, and hold every number against one process; the differences."""
    return verdict(launch(record, args, lesson.role_name))
