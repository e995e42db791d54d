"""The oracle of `main.py --check`: the lesson's own training, held against one process.

The lesson trains four short epochs in its own processes, recorded: the trainers keep what each step
reads, computes and changes, the server each step of the table, and `compare` on the master gets all
of it. What it should have computed, `single_process` works out from the flags, with batches,
targets, gradients and steps of its own. Both are in float64, so that a mistake cannot hide behind
rounding. Two halves:

    epochs 1, 2   in lockstep: after each step the trainers wait for each other. All lookups find
                  the same table, and every number follows: one process takes the sum of the
                  trainers' steps of the table.
    epochs 3, 4   free, as in any training: a lookup may find the table before or after another
                  trainer's step. So the oracle takes the looked-up sums as they were; all else
                  follows from them, and each step of the table must have arrived on the server
                  once: the table at the end is that of the start plus all steps.

What is usually over in no time is made to last, so that a mistake in the order of things shows.
"""

import copy
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from statistics import fmean
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, copies, named_gradients, named_weights

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef

from ddp_rpc_hybrid import main as lesson
from ddp_rpc_hybrid import results

EPOCHS, LOCKSTEP_EPOCHS = 4, 2
STEPS = 10  # of a trainer in an epoch
BATCHES_S = 0.5  # added to the making of an epoch's batches: no part of the training's time
STEP_S = 0.002  # added to each step of the table, so that two at a time would overlap
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
Bags = list[list[int]]  # a batch: lists of indices


# --- one process


def single_process(args: Namespace, looked_up: list[list[torch.Tensor]]) -> tuple[
        dict[str, torch.Tensor], torch.Tensor, torch.Tensor, list[list[dict]]]:
    """Train as all trainers together should have done.

    Args:
        args: the flags.
        looked_up: for each step, the sums of the bags that each trainer has got; after the
            lockstep, they are taken instead of those of the table here.

    Returns:
        The first weights of the dense part, the first table, the last one, and for each step and
        trainer what `Trainer` keeps of it.
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


def batches_of(rank: int, epoch: int, args: Namespace) -> Iterator[Bags]:
    """Draw the batches of one trainer in one epoch."""
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


def teacher_of(args: Namespace) -> Callable[[Bags], torch.Tensor]:
    """Return what decides on the targets: a function from bags to their classes."""
    drawn = torch.Generator().manual_seed(10_000 + args.seed)
    table, weight = (torch.randn(rows, args.embedding_dim, generator=drawn, dtype=torch.float32)
                     for rows in (args.num_embeddings, args.num_classes))
    return lambda bags: (sums_of(bags, table) @ weight.T).argmax(dim=1)


def sums_of(bags: Bags, table: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each bag: shape (bags, embedding_dim)."""
    return torch.stack([table[bag].sum(dim=0) for bag in bags])


def forward_and_backward(dense: nn.Linear, bags: Bags, lookup: torch.Tensor, target: torch.Tensor
                         ) -> tuple[dict, dict[str, torch.Tensor]]:
    """Compute a step of one trainer.

    Args:
        dense: the dense part.
        bags: the trainer's batch, lists of indices.
        lookup: the sums of the bags.
        target: the classes of the bags.

    Returns:
        What `Trainer` keeps of a step, as far as it is known before the trainers' gradients come
        together; and this trainer's gradient of the dense part.
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


def step_table(table: torch.Tensor, gradients: list[dict], lr: float) -> dict[str, torch.Tensor]:
    """Make the steps of all trainers, in place; return the new values of changed rows."""
    rows = torch.cat([gradient["rows"] for gradient in gradients]).unique()
    before = table[rows]
    for gradient in gradients:
        table[gradient["rows"]] -= lr * gradient["entries"]
    rows = rows[(table[rows] != before).any(dim=1)]
    return {"rows": rows, "entries": table[rows]}


# --- recorded


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; on the master, return the findings."""
    torch.set_default_dtype(torch.float64)
    role, trainers = lesson.role_name(rank, world_size), []
    with Recorder() as recorder:
        if role == lesson.PS_NAME:
            recorder.on_step(server.before_step, server.after_step)
        elif role == lesson.MASTER_NAME:
            @recorder.around(results, "over_trainers")
            def over_trainers(original, of_trainers):
                trainers.extend(of_trainer.pop("recorded") for of_trainer in of_trainers)
                return original(of_trainers)
        else:
            record_trainer(recorder)
        metrics = lesson.run_worker(rank, world_size, args)
    return None if metrics is None else compare(trainers, metrics, args).as_dict()


class Server:
    """Keeps each step of the table, on the server."""

    def __init__(self) -> None:
        self.updates, self.overlaps = [], 0
        self.under_way, self.table = 0, None

    def before_step(self, optimizer: optim.Optimizer) -> None:
        """Count an overlap, if another step is under way."""
        self.under_way += 1
        self.overlaps += self.under_way > 1
        time.sleep(STEP_S)

    def after_step(self, optimizer: optim.Optimizer) -> None:
        """Keep the gradient of the step."""
        self.under_way -= 1
        self.updates.append(nonzero_rows(optimizer.param_groups[0]["params"][0].grad))


server = Server()  # of this process; elsewhere, it stays empty


def server_updates() -> dict:
    """Return all steps of the table until now, on the server."""
    return {"updates": server.updates, "overlaps": server.overlaps}


def table_gradient(emb_rref: RRef, context_id: int) -> dict[str, torch.Tensor]:
    """Return the gradient of one trainer's step, on the server; empty if there is none."""
    gradient = dist_autograd.get_gradients(context_id).get(emb_rref.local_value().weight)
    return {} if gradient is None else nonzero_rows(gradient)


def table_change(emb_rref: RRef) -> dict[str, torch.Tensor]:
    """Return which rows of the table have changed since the last call, and their new values.

    It runs on the server; the first call returns the whole table.
    """
    [now], before = copies([emb_rref.local_value().weight]), server.table
    server.table = now
    changed = torch.ones(len(now), dtype=bool) if before is None else (now != before).any(dim=1)
    return {"rows": changed.nonzero().flatten(), "entries": now[changed]}


def nonzero_rows(gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return which rows of a gradient, dense or sparse, are not zero, and these rows."""
    rows, entries = torch.arange(len(gradient)), gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, entries = gradient.indices()[0], gradient.values()
    nonzero = entries.any(dim=1)
    return {"rows": rows[nonzero], "entries": entries[nonzero]}


class Trainer:
    """Keeps a dict for each step of this trainer.

    indices, offsets, target: the batch.
    lookup: the sums of the bags, as the server has sent them.
    loss: a number.
    dense gradient, table gradient: those in the step's context, here and on the server.
    dense: the weights of the dense part after the step.
    table: in lockstep, on the first trainer: the rows that all trainers' steps have changed.
    span: when the step's context was entered and left, in seconds.
    """

    def __init__(self, emb_rref: RRef) -> None:
        self.emb_rref, self.dense, self.steps = emb_rref, None, []
        self.first_dense, self.first_table, self.is_over = {}, {}, False

    def after_module(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep what a step computes: first the dense part ends, at last the loss."""
        if self.is_over:
            return
        if isinstance(module, nn.Linear):
            if self.dense is None:
                self.dense = module
                self.first_dense, self.first_table = named_weights(module), self.table_change()
            self.steps.append({"lookup": copies(inputs)[0]})
        elif isinstance(module, lesson.HybridModel):
            self.steps[-1] |= dict(zip(("indices", "offsets"), copies(inputs), strict=True))
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": copies(inputs)[1], "loss": output.item()}

    def after_step(self, context_id: int, span: tuple[float, float]) -> None:
        """Keep the gradients of a step, and what it has changed."""
        if self.is_over:
            return
        step = self.steps[-1]
        step["span"] = span
        step["dense gradient"] = named_gradients(self.dense, context_id)
        step["table gradient"] = rpc.rpc_sync(lesson.PS_NAME, table_gradient,
                                              args=(self.emb_rref, context_id))
        step["dense"] = named_weights(self.dense)
        if len(self.steps) <= LOCKSTEP_EPOCHS * STEPS:
            dist.barrier()  # all have made their step
            step["table"] = self.table_change()
            dist.barrier()  # the first trainer has seen it

    def table_change(self) -> dict[str, torch.Tensor]:
        """Return `table_change` on the first trainer, nothing on the others."""
        if dist.get_rank() > 0:
            return {}
        return rpc.rpc_sync(lesson.PS_NAME, table_change, args=(self.emb_rref,))


def record_trainer(recorder: Recorder) -> None:
    """Record the training of a trainer; what was seen goes to the master with its metrics."""

    @recorder.around(lesson, "_run_trainer")
    def run_trainer(original, emb_rref, rank, args):
        trainer = Trainer(emb_rref)
        recorder.on_forward(after=trainer.after_module)
        recorder.on_context(after=trainer.after_step)

        @recorder.around(results, "table_gradient_bytes")
        def table_gradient_bytes(measure, *arguments):
            trainer.is_over = True  # one more backward pass, which is no step
            return measure(*arguments)

        metrics = original(emb_rref, rank, args)
        dist.barrier()  # no step of the table is on its way any more
        recorded = {"steps": trainer.steps, "first dense": trainer.first_dense,
                    "first table": trainer.first_table, "last change": trainer.table_change()}
        if dist.get_rank() == 0:
            recorded["server"] = rpc.rpc_sync(lesson.PS_NAME, server_updates)
        return {**metrics, "recorded": recorded}

    @recorder.around(lesson, "get_next_batch")
    def get_next_batch(original, *arguments):
        time.sleep(BATCHES_S)
        return original(*arguments)


# --- compared


def compare(trainers: list[dict], metrics: dict, args: Namespace) -> Comparison:
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
                [[first_dense] * len(trainers)], "drawn from the seed", "model")
    found.equal("first weights, table", [trainers[0]["first table"].get("entries", [])],
                [first_table], "drawn from the seed", "model")
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


def hold_updates(found: Comparison, trainers: list[dict]) -> None:
    """Hold that each trainer's step of the table has arrived once, and that nothing else has."""
    def counted(gradients):
        return Counter(tuple(tensor.numpy().tobytes() for tensor in gradient.values())
                       for gradient in gradients)

    on_server = trainers[0]["server"]
    sent = counted(step["table gradient"] for trainer in trainers for step in trainer["steps"])
    made = counted(on_server["updates"])
    hint = "; for optim.SGD itself DistributedOptimizer takes no lock, and updates can be lost"
    found.holds("updates of the table, arrived once", made == sent,
                f"{sent.total()} gradients were sent, {made.total()} steps were made, "
                f"{(made - sent).total()} of them with something else{'' if made else hint}")
    overlaps = on_server["overlaps"]
    found.holds("updates of the table, in turns", overlaps == 0,
                f"{overlaps} of {made.total()} steps began before another one had ended")


def table_at_the_end(first_table: torch.Tensor, trainer: dict) -> torch.Tensor:
    """Return the first table, with all changes of it that the first trainer has seen."""
    table = first_table.clone()
    changes = [step["table"] for step in trainer["steps"] if "table" in step]
    for change in [*changes, trainer["last change"]]:
        table[change["rows"]] = change["entries"]
    return table


def hold_metrics(close: Callable, metrics: dict, alone: list[list[dict]], args: Namespace) -> None:
    """Hold the epochs and the bytes against the steps of one process.

    Args:
        close: `Comparison.close`, with a tolerance.
        metrics: of the run.
        alone: for each step and trainer what one process has computed; see `single_process`.
        args: the parsed flags.
    """
    close("metrics, loss and accuracy", metrics["epochs"], epochs_of(alone), unit="epoch")
    n_trainers, dim = len(alone[0]), args.embedding_dim
    # The request, the sums of the bags, and on the way back their gradient.
    over_rpc = fmean(len(step["indices"]) + len(step["offsets"]) * (1 + 2 * dim)
                     for steps in alone for step in steps)
    all_reduced = 2 * (n_trainers - 1) / n_trainers * args.num_classes * (dim + 1)
    gradient = fmean(len(step["indices"]) * (1 + dim) if args.sparse else args.num_embeddings * dim
                     for step in alone[-1])
    for key, numbers in (("bytes_per_step", over_rpc + all_reduced),
                         ("table_gradient_bytes", gradient)):
        close(f"metrics, {key}", [metrics[key]], [8 * numbers],  # a float64 or an index has 8 bytes
              because="counted from indices and bags", unit="run")


def epochs_of(alone: list[list[dict]]) -> list[dict[str, float]]:
    """Return the loss and accuracy of each epoch, means over the trainers; see `hold_metrics`."""
    epochs = []
    for start in range(0, len(alone), STEPS):
        losses, shares = [], []
        for steps in zip(*alone[start : start + STEPS], strict=True):  # of one trainer
            losses.append(fmean(step["loss"] for step in steps))
            bags = sum(len(step["target"]) for step in steps)
            shares.append(sum(step["correct"] for step in steps) / bags)
        epochs.append({"loss": fmean(losses), "accuracy": fmean(shares)})
    return epochs


def hold_speed(found: Comparison, metrics: dict, trainers: list[dict],
               what: str = "metrics, steps per second") -> None:
    """Hold the steps per second against the times at which the steps began and ended.

    Args:
        found: the `Comparison`.
        metrics: of the run.
        trainers: what each trainer has recorded.
        what: the name of it.
    """
    measured = []
    for trainer in trainers:
        spans = [step["span"] for step in trainer["steps"] if "span" in step]
        if not spans:
            found.holds(what, False, "a trainer has made no step")
            return
        epochs = [spans[start : start + STEPS] for start in range(0, len(spans), STEPS)]
        measured.append(len(spans) / sum(epoch[-1][1] - epoch[0][0] for epoch in epochs))
    ratio = metrics["steps_per_s"] / fmean(measured)
    found.holds(what, 0.6 < ratio < 1.01,
                f"{ratio:.2f} of those between the first and the last step of each epoch, 0.6 to "
                "1.01 expected: no start, no making of batches")


# --- the command


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Hold a short training against one process; return `{what: difference}` where it is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args.epochs = EPOCHS
    return verdict(launch(record, args, program.role_name))
