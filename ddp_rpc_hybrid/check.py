"""The oracle of `main.py`: every step of a short training, compared with one process.

The lesson trains two epochs in its own processes, recorded. After each step, the trainers wait for
each other (in lockstep). So every lookup finds the table after all steps before it, and every
number follows from the flags. `single_process` has its own batches, targets, loss and steps. All
numbers are float64, in which rounding cannot hide a mistake.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import accumulate
from statistics import fmean
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Recorder, copies, named_gradients, named_weights

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import RRef

from ddp_rpc_hybrid import main as lesson
from ddp_rpc_hybrid import results

EPOCHS, STEPS = 2, 10  # STEPS of a trainer in an epoch
MOST_ROWS = 1000  # in the table of a check, which is copied after each step
TOLERANCE = 1e-9
WHY = "float64, whose sums may come in another order"
Bags = list[list[int]]  # a batch: lists of indices


# --- one process


def single_process(args: Namespace, n_trainers: int) -> tuple[dict, list[list[dict]]]:
    """Train as all trainers together should.

    Returns:
        The first weights, "table" and "dense"; for each trainer its steps, dicts like those of
        `Trainer`, and "correct": the number of right guesses.
    """
    torch.manual_seed(args.seed)
    table = nn.init.normal_(torch.empty(args.num_embeddings, args.embedding_dim))
    torch.manual_seed(args.seed)
    dense = nn.Linear(args.embedding_dim, args.num_classes)
    first = {"table": table.clone(), "dense": named_weights(dense)}
    classes_of, steps = teacher_of(args), [[] for _ in range(n_trainers)]
    for epoch in range(args.epochs):
        of_trainers = (batches_of(rank, epoch, args) for rank in range(n_trainers))
        for batches in zip(*of_trainers, strict=True):
            made, gradients = zip(*(forward_and_backward(table, dense, bags, classes_of(bags))
                                    for bags in batches), strict=True)
            # DDP averages the gradients of the dense part; the steps of the table add up.
            average = {name: sum(of_one[name] for of_one in gradients) / n_trainers
                       for name in gradients[0]}
            table = table - args.lr * sum(step["table gradient"] for step in made)
            with torch.no_grad():
                for name, param in dense.named_parameters():
                    param -= args.lr * average[name]
            after = {"dense gradient": average, "dense": named_weights(dense), "table": table}
            for rank, step in enumerate(made):
                steps[rank].append({**step, **after})
    return first, steps


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
    """Return the function from bags to their classes."""
    drawn = torch.Generator().manual_seed(10_000 + args.seed)
    table, weight = (torch.randn(rows, args.embedding_dim, generator=drawn, dtype=torch.float32)
                     for rows in (args.num_embeddings, args.num_classes))
    return lambda bags: (sums_of(bags, table) @ weight.T).argmax(dim=1)


def sums_of(bags: Bags, table: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each bag, shape (bags, embedding_dim)."""
    return torch.stack([table[bag].sum(dim=0) for bag in bags])


def forward_and_backward(table: torch.Tensor, dense: nn.Linear, bags: Bags, target: torch.Tensor
                         ) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return a step of one trainer, and its own gradient of the dense part."""
    table = table.clone().requires_grad_()
    lookup = sums_of(bags, table)
    scores = dense(lookup)
    loss = -torch.log_softmax(scores, dim=1)[range(len(bags)), target].mean()
    of_table, *of_dense = torch.autograd.grad(loss, [table, dense.weight, dense.bias])
    step = {"indices": torch.tensor([index for bag in bags for index in bag]),
            "offsets": torch.tensor([0, *accumulate(map(len, bags))][:-1]),
            "target": target, "lookup": lookup.detach(), "loss": loss.item(),
            "correct": (scores.argmax(dim=1) == target).sum().item(), "table gradient": of_table}
    return step, dict(zip(("weight", "bias"), of_dense, strict=True))


# --- recorded


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on the master, None elsewhere."""
    torch.set_default_dtype(torch.float64)
    role, trainers = lesson.role_name(rank, world_size), []
    with Recorder() as recorder:
        if role == lesson.PS_NAME:
            recorder.on_step(after=steps_of_table.append)
        elif role == lesson.MASTER_NAME:
            @recorder.around(results, "over_trainers")
            def over_trainers(original, of_trainers):
                trainers.extend(of_trainer.pop("recorded") for of_trainer in of_trainers)
                return original(of_trainers)
        else:
            record_trainer(recorder)
        metrics = lesson.run_worker(rank, world_size, args)
    return None if metrics is None else compare(trainers, metrics, args)


steps_of_table = []  # on the server, an entry for each step


def count_steps() -> int:
    """Return the number of steps of the table; runs on the server."""
    return len(steps_of_table)


def table_now(emb_rref: RRef) -> torch.Tensor:
    """Return the table; runs on the server."""
    return emb_rref.local_value().weight.detach()


def table_gradient(emb_rref: RRef, context_id: int) -> torch.Tensor | list:
    """Return the gradient of one trainer's step, empty if there is none; runs on the server."""
    gradient = dist_autograd.get_gradients(context_id).get(emb_rref.local_value().weight)
    return [] if gradient is None else gradient.to_dense()


class Trainer:
    """Steps of this trainer, a dict for each.

    indices, offsets, target: Batch.
    lookup: Sums of the bags, as the server has sent them.
    loss: Loss before the step.
    dense gradient, table gradient: Gradients in the step's context, here and on the server.
    dense: Weights of the dense part after the step.
    table: On the first trainer, the table after the step of every trainer.
    """

    def __init__(self, emb_rref: RRef) -> None:
        self.emb_rref, self.dense, self.steps, self.first = emb_rref, None, [], {}

    def after_module(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Record what a step computes: the dense part ends first, the loss last."""
        if isinstance(module, nn.Linear):
            if self.dense is None:
                self.dense = module
                self.first = {"dense": named_weights(module), **self.table()}
            self.steps.append({"lookup": copies(inputs)[0]})
        elif isinstance(module, lesson.HybridModel):
            self.steps[-1] |= dict(zip(("indices", "offsets"), copies(inputs), strict=True))
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": copies(inputs)[1], "loss": output.item()}

    def after_step(self, context_id: int, _: tuple[float, float]) -> None:
        """Record the gradients of a step, and the weights after it."""
        gradient = rpc.rpc_sync(lesson.PS_NAME, table_gradient, args=(self.emb_rref, context_id))
        self.steps[-1] |= {"dense gradient": named_gradients(self.dense, context_id),
                           "table gradient": gradient, "dense": named_weights(self.dense)}
        dist.barrier()  # all trainers have made their step
        self.steps[-1] |= self.table()
        dist.barrier()  # the first trainer has read the table

    def table(self) -> dict[str, torch.Tensor]:
        """Return the table on the first trainer, nothing on the others."""
        if dist.get_rank() > 0:
            return {}
        return {"table": rpc.rpc_sync(lesson.PS_NAME, table_now, args=(self.emb_rref,))}


def record_trainer(recorder: Recorder) -> None:
    """Record a trainer; its record travels to the master with its metrics."""

    @recorder.around(lesson, "_run_trainer")
    def run_trainer(original, emb_rref, rank, args):
        trainer = Trainer(emb_rref)
        recorder.on_forward(after=trainer.after_module)
        recorder.on_context(after=trainer.after_step)
        metrics = original(emb_rref, rank, args)
        trainer.steps.pop()  # the last backward makes no step; it measures the table's gradient
        made = rpc.rpc_sync(lesson.PS_NAME, count_steps)
        return {**metrics, "recorded": {"first": trainer.first, "steps": trainer.steps,
                                        "made": made}}


# --- compared


def compare(trainers: list[dict], metrics: dict, args: Namespace) -> dict:
    """Return the findings about `trainers`, the records of all trainers, and about the metrics."""
    findings, n = Comparison(f"{args.world_size} processes"), len(trainers)
    ours = [trainer["steps"] for trainer in trainers]
    first, steps = single_process(args, n)
    findings.equal("first weights, dense part", [trainer["first"]["dense"] for trainer in trainers],
                   [first["dense"]] * n, "drawn from the seed", "rank")
    findings.equal("first weights, table", [trainers[0]["first"]["table"]], [first["table"]],
                   "drawn from the seed", "rank")
    for what, key, tolerance, because in (
            ("data, indices", "indices", 0.0, "each trainer and epoch has its own batches"),
            ("data, offsets", "offsets", 0.0, "where the bags begin"),
            ("data, targets", "target", 0.0, "the teacher's classes"),
            ("lockstep, looked-up sums", "lookup", TOLERANCE, WHY),
            ("loss", "loss", TOLERANCE, WHY),
            ("dense part, gradients in the context", "dense gradient", TOLERANCE,
             "float64; DDP averages over the trainers"),
            ("dense part, weights after each step", "dense", TOLERANCE, WHY),
            ("table, gradients in the context", "table gradient", TOLERANCE, WHY)):
        findings.close(what, by_rank(ours, key), by_rank(steps, key), tolerance, because)
    findings.equal("dense part, replicas", by_rank(ours, "dense"), by_rank(ours[:1] * n, "dense"),
                   "DDP gives the same gradients to all trainers")
    findings.close("lockstep, table after each step", [step["table"] for step in ours[0]],
                   [step["table"] for step in steps[0]], TOLERANCE,
                   "float64; the steps of all trainers add up")
    made = trainers[0]["made"]
    findings.holds("updates of the table, arrived once", made == n * len(steps[0]),
                   f"{made} steps were made of {n * len(steps[0])}"
                   f"{'' if made else '; the steps of a functional optimizer take no lock'}")
    findings.close("metrics, loss and accuracy", metrics["epochs"], epochs_of(steps), TOLERANCE,
                   WHY, "epoch")
    dim = args.embedding_dim
    # The request, the sums of the bags and, on the way back, their gradients.
    over_rpc = fmean(len(step["indices"]) + len(step["offsets"]) * (1 + 2 * dim)
                     for of_rank in steps for step in of_rank)
    all_reduced = 2 * (n - 1) / n * args.num_classes * (dim + 1)
    gradient = fmean(len(of_rank[-1]["indices"]) * (1 + dim) if args.sparse
                     else args.num_embeddings * dim for of_rank in steps)
    for key, numbers in (("bytes_per_step", over_rpc + all_reduced),
                         ("table_gradient_bytes", gradient)):
        findings.close(f"metrics, {key}", [metrics[key]], [8 * numbers], TOLERANCE,
                       "8 bytes for each index and float64", "run")
    return findings.as_dict()


def epochs_of(steps: list[list[dict]]) -> list[dict[str, float]]:
    """Return the loss and accuracy of each epoch, means over the trainers."""
    epochs = []
    for start in range(0, len(steps[0]), STEPS):
        parts = [of_rank[start : start + STEPS] for of_rank in steps]
        epochs.append({
            "loss": fmean(fmean(step["loss"] for step in part) for part in parts),
            "accuracy": fmean(sum(step["correct"] for step in part)
                              / sum(len(step["target"]) for step in part) for part in parts)})
    return epochs


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Check a short run; return `{name: difference}` on the reporting process."""
    args.epochs, args.num_embeddings = EPOCHS, min(args.num_embeddings, MOST_ROWS)
    return verdict(launch(record, args, program.role_name))
