"""The oracle of `main.py --check`: the lesson's own training, held against one process.

The lesson trains four short epochs in its own processes, recorded (see recording.py). What it
should have computed, `single_process` works out from the flags, with batches, targets, gradients
and steps of its own. Both in float64, so that a mistake cannot hide behind rounding. Two halves:

    epochs 1, 2   in lockstep: after each step the trainers wait for each other. All lookups find
                  the same table, and every number follows: one process takes the sum of the
                  trainers' steps of the table.
    epochs 3, 4   free, as in any training: a lookup may find the table before or after another
                  trainer's step. So the oracle takes the looked-up sums as they were; all else
                  follows from them, and each step of the table must have arrived on the server
                  once: the table at the end is that of the start plus all of them.
"""

import copy
import random
from collections import Counter
from functools import partial
from itertools import accumulate

import torch
from common.launcher import launch
from common.oracle import Comparison, verdict
from torch import nn

from ddp_rpc_hybrid import recording
from ddp_rpc_hybrid.check_metrics import hold_metrics, hold_speed
from ddp_rpc_hybrid.recording import LOCKSTEP_EPOCHS, STEPS

EPOCHS = 4
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"


# --- one process


def single_process(args, looked_up):
    """Train as all trainers together should have done.

    Args:
        args: the flags.
        looked_up: for each step, the sums of the bags that each trainer has got; after the
            lockstep, they are taken instead of those of the table here.

    Returns:
        The first weights of the dense part, the first table, the last one, and for each step and
        trainer what recording.py keeps of it.
    """
    torch.manual_seed(args.seed)
    table = nn.init.normal_(torch.empty(args.num_embeddings, args.embedding_dim))
    torch.manual_seed(args.seed)
    dense = nn.Linear(args.embedding_dim, args.num_classes)
    first_dense, first_table, steps = copy.deepcopy(dense.state_dict()), table.clone(), []
    n_trainers, classes_of = args.world_size - 2, teacher_of(args)
    for epoch in range(args.epochs):
        of_trainers = (batches_of(rank, epoch, args) for rank in range(n_trainers))
        for batches in zip(*of_trainers, strict=True):
            lookups = [sums_of(bags, table) for bags in batches]
            if epoch >= LOCKSTEP_EPOCHS and len(steps) < len(looked_up):
                lookups = [theirs if theirs.shape == ours.shape else ours
                           for ours, theirs in zip(lookups, looked_up[len(steps)], strict=True)]
            step, gradients = zip(*(
                forward_and_backward(dense, bags, lookup, classes_of(bags))
                for bags, lookup in zip(batches, lookups, strict=True)), strict=True)
            # DDP: each replica of the dense part makes a step with the average of the gradients.
            average = {name: sum(gradient[name] for gradient in gradients) / n_trainers
                       for name in first_dense}
            with torch.no_grad():
                for name, param in dense.named_parameters():
                    param -= args.lr * average[name]
            for of_trainer in step:
                of_trainer["dense gradient"] = average
                of_trainer["dense"] = copy.deepcopy(dense.state_dict())
            step[0]["table"] = step_table(
                table, [of_trainer["table gradient"] for of_trainer in step], args.lr)
            steps.append(step)
    return first_dense, first_table, table, steps


def batches_of(rank, epoch, args):
    """The batches of one trainer in one epoch: lists of bags, each a list of indices."""
    seed = 1_000_000 * args.seed + 1000 * epoch + rank
    lengths, drawn = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        n = lengths.randint(20, 50)
        left = torch.randint(args.num_embeddings, (n,), generator=drawn).tolist()
        bags = []
        while left:
            size = lengths.randint(1, 10)
            bags.append(left[:size])
            left = left[size:]
        yield bags


def teacher_of(args):
    """What decides on the targets: a function from bags to their classes."""
    drawn = torch.Generator().manual_seed(10_000 + args.seed)
    table, weight = (torch.randn(rows, args.embedding_dim, generator=drawn, dtype=torch.float32)
                     for rows in (args.num_embeddings, args.num_classes))
    return lambda bags: (sums_of(bags, table) @ weight.T).argmax(dim=1)


def sums_of(bags, table):
    """The sum of the rows of each bag: shape (bags, embedding_dim)."""
    return torch.stack([table[bag].sum(dim=0) for bag in bags])


def forward_and_backward(dense, bags, lookup, target):
    """What a trainer computes in a step.

    Args:
        dense: the dense part.
        bags: the trainer's batch, lists of indices.
        lookup: the sums of the bags.
        target: the classes of the bags.

    Returns:
        What recording.py keeps of a step, as far as it is known before the trainers' gradients
        come together; and this trainer's gradient of the dense part.
    """
    lookup = lookup.clone().requires_grad_()
    scores = dense(lookup)
    loss = -torch.log_softmax(scores, dim=1)[range(len(bags)), target].mean()
    of_lookup, *of_dense = torch.autograd.grad(loss, [lookup, dense.weight, dense.bias])
    # A row of the table gets the gradient of a sum as often as it is in it.
    sizes = list(map(len, bags))
    indices = torch.tensor([index for bag in bags for index in bag])
    of_indices = of_lookup.repeat_interleave(torch.tensor(sizes), dim=0)
    rows, place = indices.unique(return_inverse=True)
    entries = torch.zeros(len(rows), of_lookup.shape[1]).index_add_(0, place, of_indices)
    nonzero = entries.any(dim=1)
    step = {"indices": indices, "offsets": torch.tensor([0, *accumulate(sizes)][:-1]),
            "target": target, "lookup": lookup.detach(), "loss": loss.item(),
            "correct": (scores.argmax(dim=1) == target).sum().item(),
            "table gradient": {"rows": rows[nonzero], "entries": entries[nonzero]}}
    return step, dict(zip(("weight", "bias"), of_dense, strict=True))


def step_table(table, gradients, lr):
    """Make the steps of all trainers, in place; the rows that have changed, as they are now."""
    rows = torch.cat([gradient["rows"] for gradient in gradients]).unique()
    before = table[rows]
    for gradient in gradients:
        table[gradient["rows"]] -= lr * gradient["entries"]
    rows = rows[(table[rows] != before).any(dim=1)]
    return {"rows": rows, "entries": table[rows]}


# --- compared


def compare(trainers, metrics, args):
    """Hold what the trainers and the server have recorded against `single_process`."""
    found = Comparison(f"{args.world_size} processes")
    close = partial(found.close, tolerance=TOLERANCE, because=BECAUSE)
    recorded = list(zip(*(trainer["steps"] for trainer in trainers), strict=False))
    first_dense, first_table, last_table, alone = single_process(
        args, [[of_trainer["lookup"] for of_trainer in step] for step in recorded])
    lockstep = slice(LOCKSTEP_EPOCHS * STEPS)

    def both(key, part=slice(None)):
        return [[[of_trainer.get(key, {}) for of_trainer in step] for step in steps[part]]
                for steps in (recorded, alone)]

    found.equal("first weights, dense part", [[trainer["first dense"] for trainer in trainers]],
                [[first_dense] * len(trainers)], "the seed says them", "model")
    found.equal("first weights, table", [trainers[0]["first table"].get("entries", [])],
                [first_table], "the seed says them", "model")
    found.equal("data, indices", *both("indices"), "batches of its own for each trainer and epoch")
    found.equal("data, offsets", *both("offsets"), "where the bags begin")
    found.equal("data, targets", *both("target"), "the teacher's classes")
    close("lockstep, looked-up sums", *both("lookup", lockstep))
    close("loss", *both("loss"))
    close("dense part, gradients in the context", *both("dense gradient"),
          because="float64; DDP averages over the trainers")
    close("dense part, weights after each step", *both("dense"))
    if len(trainers) > 1:
        replicas, _ = both("dense")
        found.equal("dense part, replicas", [step[1:] for step in replicas],
                    [[step[0]] * (len(step) - 1) for step in replicas],
                    "DDP gives the same gradients to all")
    close("table, gradients in the context", *both("table gradient"))
    close("lockstep, table after each step",
          *([step[0] for step in steps] for steps in both("table", lockstep)),
          because="float64; as far as the sum of the trainers' gradients, and no other row")
    hold_updates(found, trainers)
    close("free, table at the end", [table_at_the_end(first_table, trainers[0])], [last_table],
          because="float64; the first one and the sum of all updates", unit="run")
    hold_metrics(close, metrics, alone, args)
    hold_speed(found, metrics, trainers)
    return found


def hold_updates(found, trainers):
    """Each trainer's step of the table has arrived on the server once, and nothing else has."""
    def counted(gradients):
        return Counter(tuple(tensor.numpy().tobytes() for tensor in gradient.values())
                       for gradient in gradients)

    server = trainers[0]["server"]
    sent = counted(step["table gradient"] for trainer in trainers for step in trainer["steps"])
    made = counted(server["updates"])
    hint = "; what DistributedOptimizer compiles takes no lock, and updates can be lost"
    found.holds("updates of the table, arrived once", made == sent,
                f"{sent.total()} gradients were sent, {made.total()} steps were made, "
                f"{(made - sent).total()} of them with something else{'' if made else hint}")
    found.holds("updates of the table, in turns", server["overlaps"] == 0,
                f"{server['overlaps']} of {made.total()} steps began before another one had ended")


def table_at_the_end(first_table, trainer):
    """The first table, with all changes of it that the first trainer has seen."""
    table = first_table.clone()
    changes = [step["table"] for step in trainer["steps"] if "table" in step]
    for change in [*changes, trainer["last change"]]:
        table[change["rows"]] = change["entries"]
    return table


# --- the command


def record(rank, world_size, args):
    """The worker of a check: the master returns the findings, the others None."""
    torch.set_default_dtype(torch.float64)
    metrics, trainers = recording.run_worker(rank, world_size, args)
    return None if metrics is None else compare(trainers, metrics, args).as_dict()


def check(program, args):
    """Hold a short training against one process; `{what: difference}` where it is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.epochs = EPOCHS
    return verdict(launch(record, args, program.role_name))
