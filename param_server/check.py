"""The oracle of `main.py`: one process without RPC that makes every update of the training again.

`recording.py` runs the lesson's own loop in its own processes. Here, one process computes the same
updates, in the order in which the trainers came and dropout drew, and every number is compared.

All is in double precision. In single precision, rounding now and then lets another pixel win in a
max-pooling, and a gradient then differs by more than some mistakes make of it.
"""

import joblib
import torch
from common.launcher import launch
from common.oracle import Comparison, verdict
from torch import distributed as dist
from torch.nn import functional as F

from param_server import main as lesson
from param_server.metrics_check import compare_metrics, compare_moments
from param_server.recording import EPOCHS, LAYERS, record_run, small_data, smaller
from param_server.staleness_check import compare_staleness, compare_turns, compare_weights_read

DOUBLE = "double precision"
WAYS = ("async", "bounded", "lock")


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
    findings = Comparison(f"{args.world_size} processes ({args.consistency})", "one process")
    ranks = range(1, args.world_size)
    forwards, stepped, draws = recording.in_order(ranks)
    one_at_a_time = args.consistency == "lock" or len(ranks) == 1 or (
        args.consistency == "bounded" and args.max_staleness == 0)
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
    if args.consistency == "lock":
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


# --- the command


def record(rank, world_size, args):
    """The worker of a check; on rank 0, the findings."""
    torch.set_default_dtype(torch.float64)
    recording = record_run(rank, world_size, args)
    if rank != 0:
        return None
    torch.set_num_threads(joblib.cpu_count())  # the others have ended
    return compare(recording, args)


def check(args):
    """Train for a few steps, and hold every number against one process; the differences.

    In all ways, or in that of `--consistency bounded` or `lock` alone.
    """
    one_launch = dist.is_torchelastic_launched() or args.rank is not None
    ways = [args.consistency] if one_launch or args.consistency != "async" else WAYS
    findings = Comparison(f"{args.world_size} processes ({', '.join(ways)})", "one process")
    for way in ways:
        flags = smaller(args, way, is_first=way == ways[0])
        compared = launch(record, flags, lesson.role_name)
        if compared is None:
            return None
        findings.findings += [{**finding, "what": f"{way}, {finding['what']}"}
                              for finding in compared["findings"]]
        if not all(finding["holds"] for finding in findings.findings):
            break  # what is wrong in one way would only take longer in the others
    return verdict(findings.as_dict())
