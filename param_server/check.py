"""`--check` of the parameter servers of 6_6: one process without RPC makes every update again.

`record` runs the program itself in its own processes, for two short epochs. On the server it sees
what each forward reads, each gradient, and the weights after each step. Two things differ from run
to run: which trainer steps next, and in which order dropout draws from the server's generator. The
single process follows the recorded orders, and `compare` compares its numbers with the recorded
ones. It finds the staleness of a gradient by itself: it looks up the weights that each forward has
read among the weights after each step.

All is in double precision. In single precision, rounding sometimes lets another pixel win in a
max-pooling, and the gradient then differs by more than some mistakes would change it.
"""

import copy
import functools
import importlib
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from common import checkpoint
from common.data import load_data
from common.environment import users_threads
from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, current_context, named_weights

import joblib
import torch
from torch.distributed import rpc
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from param_server import main as lesson
from param_server import results
from param_server.async_server import AsyncParameterServer

EPOCHS, BATCHES, BATCH_SIZE = 2, 2, 8  # batches of each trainer in an epoch, of 8 images at most
TEST_IMAGES = 510  # more than one batch of `get_accuracy`
PAUSE_S, HOLD_S = 0.01, 0.5  # in which another trainer acts, unless it has to wait
WAIT_S = 30.0  # longest wait for what other trainers may do
STEPS_BETWEEN = 2  # by other trainers, while trainer1 makes its first forward
DOUBLE = "double precision"
Draw = tuple[int, int, str]  # rank of the trainer, number of its step, dropout layer


# --- the single process, which takes from the lesson only the flags and the initial weights


def single_process(args: Namespace, data: tuple[TensorDataset, TensorDataset],
                   order: list[tuple[int, int]], draws: list[Draw], device: torch.device) -> dict:
    """Make the updates of a training run again.

    Args:
        args: parsed flags.
        data: training images and test images.
        order: for each update, the rank of the trainer and the number of updates in the weights
            that its forward has read.
        draws: order in which dropout draws its masks.
        device: device of the server's network.

    Returns:
        `plans`: by rank, images and labels of each step. `masks`: by entry of `draws`. `weights`:
        initially and after each update. `losses`, `gradients`: one entry for each update. `test`:
        log-probabilities of the test images at the end.
    """
    torch.manual_seed(args.seed)
    initial, first_epoch = lesson.Net().to(device).state_dict(), 0
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True, map_location=device)
        initial, first_epoch = state["model"], state["epochs"]
        torch.set_rng_state(state["random_numbers"].cpu())
    plans = {rank: planned_batches(data[0], rank, first_epoch, args)
             for rank in range(1, args.world_size)}
    masks = {}
    for rank, step, layer in draws:
        if step < len(plans.get(rank, ())):  # otherwise no mask should have been drawn
            masks[rank, step, layer] = draw(layer, len(plans[rank][step][1]), device)
    weights = [{name: tensor.double() for name, tensor in initial.items()}]
    losses, gradients, steps = [], [], dict.fromkeys(plans, 0)
    for rank, version in order:
        step, steps[rank] = steps[rank], steps[rank] + 1
        if step == len(plans[rank]):
            break  # more updates than there should be
        images, labels = (tensor.to(device) for tensor in plans[rank][step])
        leaves = {name: tensor.clone().requires_grad_()
                  for name, tensor in weights[version].items()}
        output = log_probabilities(leaves, images, masks.get((rank, step, "dropout1"), 1.0),
                                   masks.get((rank, step, "dropout2"), 1.0))
        loss = -output[torch.arange(len(labels)), labels].sum() / len(labels)
        of_step = torch.autograd.grad(loss, list(leaves.values()))
        losses.append(loss.item())
        gradients.append(dict(zip(leaves, of_step, strict=True)))
        weights.append({name: weight - args.lr * gradients[-1][name]
                        for name, weight in weights[-1].items()})
    with torch.no_grad():
        test = log_probabilities(weights[-1], data[1].tensors[0].to(device))
    return {"plans": plans, "masks": masks, "weights": weights, "losses": losses,
            "gradients": gradients, "test": test.cpu()}


def planned_batches(train_set: TensorDataset, rank: int, first_epoch: int, args: Namespace
                    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Choose the images and labels of all steps of a trainer, from the seed."""
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
    """Draw a dropout mask: for whole channels before fc1, for single numbers after it."""
    if layer == "dropout1":
        return F.dropout2d(torch.ones(n_images, 64, 12, 12, device=device), 0.25, training=True)
    return F.dropout(torch.ones(n_images, 128, device=device), 0.5, training=True)


def log_probabilities(weights: dict[str, torch.Tensor], images: torch.Tensor,
                      mask1: torch.Tensor | float = 1.0, mask2: torch.Tensor | float = 1.0
                      ) -> torch.Tensor:
    """Compute the network with functions; the dropout layers multiply with the masks."""
    hidden = F.relu(F.conv2d(images, weights["conv1.weight"], weights["conv1.bias"]))
    hidden = F.conv2d(hidden, weights["conv2.weight"], weights["conv2.bias"])
    hidden = F.max_pool2d(hidden, 2) * mask1
    hidden = F.relu(F.linear(hidden.flatten(1), weights["fc1.weight"], weights["fc1.bias"])) * mask2
    return F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"]).log_softmax(dim=1)


# --- what is recorded

recording = SimpleNamespace(  # by the server's process
    versions=[],  # weights: initially and after each step
    begun=0,  # forwards in contexts
    forwards=[],  # those that have ended: context, images, place of the weights in `versions`
    steps=[],  # context, gradients
    draws=[],  # context, dropout layer, mask; NaN where the input was zero and hides it
    evaluations=[],  # forwards outside of contexts: images, log-probabilities
    saved=[],  # checkpoints
    overlap=None,  # steps that other trainers (could make, made) during trainer1's first forward
    first_has_joined=False,
    metrics=None)  # what the first trainer returns
drawing = threading.Lock()


def record(program: str, rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run a program on `small_data`, recorded; on rank 0, return the findings."""
    torch.set_default_dtype(torch.float64)
    program = importlib.import_module(program)
    with Recorder() as recorder:
        if rank == 0:
            record_server(recorder, args)
        else:
            record_trainer(recorder, program)
        program.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    torch.set_num_threads(users_threads() or joblib.cpu_count())  # the trainers have ended
    return compare(args)


def small_data(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Load the first images: a few batches for each trainer, and those for the accuracy."""
    train, test = (half.tensors for half in load_data(args))
    # Full batches, a smaller one at the end, and shares that differ by one image.
    share = (BATCHES - 1) * args.batch_size + (args.batch_size + 1) // 2
    n_images = (args.world_size - 1) * share + 1
    test = [torch.cat([tensor, tensor]) for tensor in test]
    return tuple(TensorDataset(images[:number].double(), labels[:number])
                 for (images, labels), number in ((train, n_images), (test, TEST_IMAGES)))


def record_trainer(recorder: Recorder, program: ModuleType) -> None:
    """Let a trainer train for `EPOCHS` epochs, and send the metrics to the server."""
    recorder.put(program, "load_data", small_data)

    @recorder.around(program, "get_next_batch")
    def get_next_batch(original, train_set, rank, epoch, args):
        *batches, last = original(train_set, rank, epoch, args)
        yield from batches
        if rank > 1 and epoch == args.epochs - 1:
            # The first trainer finishes first, and its accuracy must wait for these last steps.
            wait_until(lambda: rpc.rpc_sync(lesson.SERVER_NAME, first_has_joined), WAIT_S)
        yield last

    @recorder.around(lesson.DistributedOptimizer, "step")
    def step(original, optimizer, context_id):
        time.sleep(PAUSE_S)  # only exclusive access keeps another trainer out
        original(optimizer, context_id)

    @recorder.around(program, "run_training_loop")
    def run_training_loop(original, rank, train_set, test_set, args):
        args.epochs = rpc.rpc_sync(lesson.SERVER_NAME, last_epoch)
        metrics = original(rank, train_set, test_set, args)
        if metrics is not None:
            rpc.rpc_sync(lesson.SERVER_NAME, receive, args=(metrics,))
        return metrics


def last_epoch() -> int:
    """Return the epoch at which a check ends: the server has read its checkpoint."""
    return lesson.param_server.first_epoch + EPOCHS


def first_has_joined() -> bool:
    """Return, on the server, whether the first trainer has made all its steps."""
    return recording.first_has_joined


def receive(metrics: dict) -> None:
    """Take the metrics of the first trainer, on the server."""
    recording.metrics = metrics


def record_server(recorder: Recorder, args: Namespace) -> None:
    """Record each forward, dropout mask, step and checkpoint of the server."""

    @recorder.around(lesson.ParameterServer, "__init__")
    def init(original, server, args):
        original(server, args)
        args.epochs = server.first_epoch + EPOCHS
        recording.versions.append(named_weights(server.model))

    def before_forward(module, _):
        if draws_mask(module):
            drawing.acquire()  # one mask at a time: the masks need an order
        elif isinstance(module, lesson.Net) and current_context() is not None:
            recording.begun += 1
            if results.CONSISTENCY[args.example] == "async" and current_context() >> 48 == 1:
                let_others_step(args)

    def after_forward(module, inputs, output):
        context = current_context()
        if draws_mask(module):
            before = inputs[0].detach()
            mask = torch.where(before != 0, output.detach() / before, torch.nan)
            layer = "dropout1" if before.dim() == 4 else "dropout2"
            recording.draws.append((context, layer, mask))
            drawing.release()
        elif isinstance(module, lesson.Net) and context is None:
            recording.evaluations.append((inputs[0].cpu(), output.cpu()))
        elif isinstance(module, lesson.Net):
            recording.forwards.append({"context": context, "version": version_of(module),
                                       "images": inputs[0].detach().cpu().clone()})

    @recorder.around(lesson.SGD, "step")
    def step(original, optimizer, *closure):
        original(optimizer, *closure)
        context, server = current_context(), lesson.param_server
        recording.steps.append({"context": context,
                                "gradients": server.get_dist_gradients(context)})
        recording.versions.append(named_weights(server.model))

    recorder.on_forward(before_forward, after_forward)
    # A check does not overwrite the file.
    recorder.put(checkpoint, "save", lambda _, state: recording.saved.append(copy.deepcopy(state)))

    @recorder.around(lesson.ParameterServer, "join")
    def join(original, server, rank, result):
        recording.first_has_joined |= rank == 1
        return original(server, rank, result)

    @recorder.around(AsyncParameterServer, "note_read")
    def note_read(original, server, trainer):
        original(server, trainer)
        made = len(recording.steps)
        if trainer == 1:  # only the lock keeps a step away from the copy that follows
            wait_until(lambda: len(recording.steps) > made, HOLD_S)

    @recorder.around(AsyncParameterServer, "note_step")
    def note_step(original, server, trainer):
        begun = recording.begun
        if trainer == 2:  # only the lock keeps a forward from reading before this step is counted
            wait_until(lambda: recording.begun > begun, HOLD_S)
        original(server, trainer)


def wait_until(happens: Callable[[], bool], at_most_s: float) -> None:
    """Wait until something happens, or until the seconds have passed."""
    ends = time.time() + at_most_s
    while not happens() and time.time() < ends:
        time.sleep(0.01)


def version_of(net: torch.nn.Module) -> int:
    """Return which of `recording.versions` a network has now, -1 if it has none of them."""
    weights = named_weights(net)
    return next((version for version, recorded in enumerate(recording.versions)
                 if all(torch.equal(recorded[name], weights[name]) for name in weights)), -1)


def let_others_step(args: Namespace) -> None:
    """Hold trainer1's first forward while other trainers step, until one is in its own forward."""
    if recording.overlap is not None:
        return
    before = len(recording.steps)
    # Their last forwards follow later, and one must be left for the end of this wait.
    of_others = (args.world_size - 2) * (EPOCHS * BATCHES - 1) - 1
    possible = max(0, min(STEPS_BETWEEN, of_others - before))
    if possible:
        wait_until(lambda: before + possible <= len(recording.steps) < recording.begun - 1, WAIT_S)
    recording.overlap = possible, len(recording.steps) - before


def draws_mask(module: torch.nn.Module) -> bool:
    """Return whether this forward of a module draws a dropout mask."""
    return "Dropout" in type(module).__name__ and module.training


# --- what is compared


def compare(args: Namespace) -> dict:
    """Compare every number of the recording with the single process; return the findings."""
    consistency, ranks = results.CONSISTENCY[args.example], range(1, args.world_size)
    findings = Comparison(f"{args.world_size} processes ({consistency})", "one process")
    # The id of a context begins with 16 bits of the rank that opened it.
    forwards = {rank: [seen for seen in recording.forwards if seen["context"] >> 48 == rank]
                for rank in ranks}
    place_of = {seen["context"]: (rank, step) for rank in ranks
                for step, seen in enumerate(forwards[rank])}
    stepped = [place_of[step["context"]] for step in recording.steps if step["context"] in place_of]
    order = [(rank, forwards[rank][step]["version"]) for rank, step in stepped]
    draws = [(*place_of.get(context, (0, 0)), layer) for context, layer, _ in recording.draws]
    data = small_data(args)
    alone = single_process(args, data, order, draws, lesson.param_server.input_device)
    plans = alone["plans"]

    findings.equal("training images",
                   [[forward["images"] for forward in forwards[rank]] for rank in ranks],
                   [[images for images, _ in plans[rank]] for rank in ranks],
                   "each trainer's share of them, in a new order in each epoch", "trainer")
    findings.equal("updates", [[step for of, step in stepped if of == rank] for rank in ranks],
                   [list(range(len(plans[rank]))) for rank in ranks],
                   "each gradient changes the weights once: none is lost or doubled", "trainer")
    unknown = sum(forward["version"] < 0 for forward in recording.forwards)
    findings.holds("weights read", recording.forwards and not unknown, f"{len(recording.forwards)} "
                   f"forwards: {unknown} of them read weights that no step has left")
    ages = {rank: [number - version for number, (of, version) in enumerate(order) if of == rank]
            for rank in ranks}
    if consistency == "lock":
        others = sum(age != 0 for of_trainer in ages.values() for age in of_trainer)
        findings.holds("turns", others == 0, f"{len(order)} updates: between forward and step, "
                       f"another trainer stepped in {others} of them")
    else:
        compare_staleness(findings, ages, args)
    compare_dropout(findings, alone, draws)
    losses = {trainer["rank"]: sum(trainer["losses"], [])
              for trainer in recording.metrics["per_trainer"]}
    findings.close("losses", [losses[rank][step] for rank, step in stepped
                              if step < len(losses.get(rank, ()))], alone["losses"], 1e-9, DOUBLE)
    findings.close("gradients", [step["gradients"] for step in recording.steps],
                   alone["gradients"], 1e-9, DOUBLE)
    findings.close("weights", recording.versions, alone["weights"], 1e-9,
                   f"{DOUBLE}; initially and after every step", "version")
    compare_accuracy(findings, alone["test"], *data[1].tensors)
    compare_metrics(findings, alone, stepped, args)
    if args.checkpoint:
        findings.equal("checkpoints", [saved["epochs"] for saved in recording.saved],
                       range(args.epochs - EPOCHS + 1, args.epochs + 1), "after each epoch", "file")
        if len(ranks) == 1:
            findings.close("last checkpoint", [saved["model"] for saved in recording.saved[-1:]],
                           alone["weights"][-1:], 1e-9, DOUBLE, "file")
    return findings.as_dict()


def compare_staleness(findings: Comparison, ages: dict[int, list[int]], args: Namespace) -> None:
    """Compare the reported staleness of all gradients, and of each trainer's gradients."""
    reported = results.summary(recording.metrics, args)
    rows = [{**row["staleness"], **{what: row["staleness"][what] or 0 for what in ("mean", "max")}}
            for row in (reported, *reported["per_trainer"])]
    expected = [{"histogram": {str(age): of.count(age) for age in sorted(set(of))},
                 "mean": sum(of) / max(1, len(of)), "max": max(of, default=0)}
                for of in (sum(ages.values(), []), *ages.values())]
    findings.close("staleness", rows, expected, 1e-9, "by the weights that each forward has read; "
                   "of all gradients and of each trainer's", "row")
    if recording.overlap:
        possible, made = recording.overlap
        findings.holds("overlap", made >= possible, "during trainer1's first forward, other "
                       f"trainers made {made} steps, {possible} expected")


def compare_dropout(findings: Comparison, alone: dict, draws: list[Draw]) -> None:
    """Compare the masks of dropout with those of one generator with the same seed."""
    ours, theirs = [], []
    for place, (_, _, recorded) in zip(draws, recording.draws, strict=True):
        mask = alone["masks"].get(place, torch.zeros(0))
        if recorded.shape == mask.shape:
            recorded = torch.where(recorded.isnan(), mask, recorded)
        ours.append(recorded)
        theirs.append(mask)
    findings.close("dropout", ours, theirs, 1e-9, f"{DOUBLE}; same seed, same order", "mask")
    expected = 2 * sum(map(len, alone["plans"].values()))
    findings.holds("dropout masks", len(draws) == expected == len(set(draws)),
                   f"{len(draws)} drawn, {expected} expected: two in each forward of the training")


def compare_accuracy(findings: Comparison, test: torch.Tensor, images: torch.Tensor,
                     labels: torch.Tensor) -> None:
    """Compare the test images, their log-probabilities without dropout, and the accuracy."""
    seen, outputs = (torch.cat(tensors) for tensors in
                     zip(*recording.evaluations or [(torch.zeros(0), torch.zeros(0))], strict=True))
    findings.equal("test images", [seen], [images], "all of the test set, once", "pass")
    findings.close("test log-probabilities", [outputs], [test], 1e-9,
                   f"{DOUBLE}; with the final weights, without dropout", "pass")
    correct = sum(int(guess) == int(label) for guess, label
                  in zip(test.argmax(dim=1), labels, strict=True))
    findings.equal("accuracy", [recording.metrics["test_accuracy"]], [correct / len(labels)],
                   f"{correct} of {len(labels)} test images", "pass")


def compare_metrics(findings: Comparison, alone: dict, stepped: list[tuple[int, int]],
                    args: Namespace) -> None:
    """Compare the losses and counts of metrics.json."""
    reported, plans = results.summary(recording.metrics, args), alone["plans"]
    of_epochs = [[] for _ in range(EPOCHS)]
    for (rank, step), loss in zip(stepped, alone["losses"], strict=False):
        of_epochs[min(EPOCHS * step // len(plans[rank]), EPOCHS - 1)].append(loss)
    findings.close("mean losses", [epoch["loss"] for epoch in reported["epochs"]],
                   [sum(losses) / max(1, len(losses)) for losses in of_epochs], 1e-9,
                   "over the batches of all trainers", "epoch")
    findings.equal("counts", [[reported["updates"]],
                              *([row["rank"], len(row["times"]), row["samples"]]
                                for row in reported["per_trainer"])],
                   [[sum(map(len, plans.values()))],
                    *([rank, len(plan), sum(len(labels) for _, labels in plan)]
                      for rank, plan in plans.items())],
                   "updates of all trainers; updates and samples of each", "row")


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process."""
    args.batch_size = min(args.batch_size, BATCH_SIZE)
    worker = functools.partial(record, program.__name__)
    return verdict(launch(worker, args, program.role_name))
