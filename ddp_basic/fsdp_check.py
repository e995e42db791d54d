"""The oracle of `fsdp.py`: every step of every way, held against one process that has its own Adam.

The lesson trains in all three ways. Then `full` trains with a checkpoint, is interrupted while it
writes the second one, and goes on: on as many ranks and, where this command starts all of them, on
fewer. All in float64, in which a mistake cannot be taken for rounding.
"""

import contextlib
import shutil
import tempfile
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, by_rank, flat, verdict
from common.recorder import Barriers, Recorder, copies
from torch import nn

from ddp_basic import fsdp as lesson
from ddp_basic.check import TOLERANCE, WHY, samples_of

LAYERS, WIDEST = 3, 63  # hidden ones; units in each
EPOCHS, STEPS = 4, 2  # of each training; of an epoch
NOT_USED = 5  # samples, at most, that fill no batch
STOPPED_IN = 2  # the epoch whose checkpoint is not finished
# Of the formula, and bytes on top for each rank: gloo's headers, rows that fill up.
MOST_SENT = 1.5, 5_000


def single_process(args: Namespace) -> tuple[list[dict], list[float]]:
    """Train one network on the batches of all ranks joined, with Adam as its authors write it.

    Returns:
        For each step a dict; lists in it are of the ranks, or of the parameters. And the mean loss
        of each epoch.
    """
    ends = [10] + [args.width] * LAYERS + [5]
    torch.manual_seed(args.seed)
    layers = [nn.Linear(*pair) for pair in pairwise(ends)]  # the lesson's initial weights
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    inputs, labels = samples_of(0, args.seed, args.samples)
    steps, losses_of_epochs = [], []
    for epoch in range(1, args.epochs + 1):
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(args.samples, generator=generator)
        for number in range(STEPS):
            batch = order[number * args.global_batch_size : (number + 1) * args.global_batch_size]
            x = inputs[batch]
            for layer in layers[:-1]:
                x = layer(x).clamp(min=0)
            errors = (layers[-1](x) - labels[batch]).square().mean(dim=1)
            gradients = torch.autograd.grad(errors.mean(), weights)
            t = len(steps) + 1
            with torch.no_grad():
                for w, m, v, g in zip(weights, means, squares, gradients, strict=True):
                    m += 0.1 * (g - m)
                    v += 0.001 * (g * g - v)
                    w -= args.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            shares = [range(rank, len(batch), args.world_size) for rank in range(args.world_size)]
            steps.append({
                "samples": [[inputs[batch[share]], labels[batch[share]]] for share in shares],
                "loss": [errors[share].mean().item() for share in shares],
                "gradients": copies(gradients), "weights": copies(weights),
                "Adam's means": copies(means), "Adam's squares": copies(squares)})
        losses = [sum(step["loss"]) / args.world_size for step in steps[-STEPS:]]
        losses_of_epochs.append(sum(losses) / STEPS)
    return steps, losses_of_epochs


class StoppedError(Exception):
    """Stands for a kill while a checkpoint is written."""


class Seen:
    """Keeps what one rank does in each step of each training."""

    def __init__(self) -> None:
        self.trainings, self.model, self.optimizer = {}, None, None
        self.together = {"removed": [], "counted": []}  # had all ranks come before it?

    def begin(self, training: str) -> None:
        """Record another training from now on."""
        self.training, self.steps = training, self.trainings.setdefault(training, [])
        self.step, self.gathered = {}, 0

    def forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Record the inputs, and how much is no shard, after the forward of any module."""
        if module is self.model:
            self.step["inputs"] = inputs[0].detach().cpu().clone()
        elif isinstance(module, nn.Linear):  # FSDP drops the whole layer after this
            whole = sum(p.numel() for p in self.model.parameters() if not hasattr(p, "to_local"))
            self.gathered = max(self.gathered, whole)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the rest, after the step of any optimizer; what has no state here is empty."""
        # ZeroRedundancyOptimizer steps another one; get_state_dict makes a step of nothing.
        if optimizer is not self.optimizer or "loss" not in self.step:
            return
        parameters = list(self.model.parameters())
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        states = [inner.state.get(parameter, {}) for parameter in parameters]
        self.step |= {"samples": [self.step.pop("inputs", []), self.step.pop("labels")],
                      "gathered": self.gathered,
                      "weights": copies(parameters),
                      "gradients": copies(parameter.grad for parameter in parameters)}
        for name, key in (("Adam's means", "exp_avg"), ("Adam's squares", "exp_avg_sq")):
            self.step[name] = copies(state.get(key, torch.empty(0)) for state in states)
        self.steps.append(self.step)
        self.step, self.gathered = {}, 0


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded, and `full` once more: interrupted, and resumed.

    Args:
        rank: of this process.
        world_size: how many there are.
        args: the parsed flags, with `folder`. With `resumed`, `full` goes on from there, no more.

    Returns:
        The findings on rank 0, else None.
    """
    torch.set_default_dtype(torch.float64)
    seen = Seen()
    with Recorder() as recorder:
        barriers = Barriers(recorder)
        recorder.put(lesson, "SAMPLES", args.samples)
        recorder.put(lesson, "LAYERS", LAYERS)
        recorder.on_forward(after=seen.forward)
        recorder.on_step(after=seen.stepped)
        everyone = recorder.gather_at_end(
            lambda: {"trainings": seen.trainings, "together": seen.together})

        def watched(way):
            def make(*place):
                seen.model, seen.optimizer = way(*place)
                return seen.model, seen.optimizer

            return make

        recorder.enter_context(mock.patch.dict(lesson.WAYS, {
            name: watched(way) for name, way in lesson.WAYS.items()}))

        @recorder.around(nn.functional, "mse_loss")
        def recorded_loss(mse_loss, outputs, labels, **options):
            loss = mse_loss(outputs, labels, **options)
            seen.step |= {"labels": labels.cpu(), "loss": loss.item()}
            return loss

        @recorder.around(lesson.dcp, "save")
        def torn_save(save, state, checkpoint_id, **options):
            """Interrupt the second one when all but one rank have written."""
            seen.together["removed"].append(barriers.all_had_come())
            save(state, checkpoint_id=checkpoint_id, **options)
            if seen.training == "stopped" and len(seen.steps) == STOPPED_IN * STEPS:
                if rank == 0:
                    max(Path(checkpoint_id).glob("*.distcp")).unlink()
                raise StoppedError

        @recorder.around(lesson.memory, "bytes_sent")
        def bytes_sent(count):
            seen.together["counted"].append(barriers.all_had_come())
            return count()

        @recorder.around(lesson, "train")
        def train_and_interrupt(lessons_train, rank, world_size, sharding, args):
            def train(training, **flags):
                seen.begin(training)
                with_flags = Namespace(**{**vars(args), **flags})
                return lessons_train(rank, world_size, sharding, with_flags)

            path = [args.folder]
            dist.broadcast_object_list(path)  # under torchrun, each process has made one up
            again = {} if args.resumed else {"folder": None}
            result = train("resumed" if args.resumed else sharding, **again)
            if sharding == "full" and not args.resumed:
                with contextlib.suppress(StoppedError):
                    train("stopped", folder=path[0])
                dist.barrier()
                if rank == 0:
                    shutil.copytree(path[0], path[0].with_name("torn"))
                train("resumed", folder=path[0], resumed=True)
                args.left = sorted(entry.name for entry in path[0].iterdir())
            return result

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.epochs, args.width = EPOCHS, min(args.width, WIDEST)
    args.samples = STEPS * args.global_batch_size + min(NOT_USED, args.global_batch_size - 1)
    alone = args.rank is None and not dist.is_torchelastic_launched()
    with tempfile.TemporaryDirectory() as folder:
        args.folder, args.resumed = Path(folder, "checkpoints"), False
        compared = launch(record, args, program.role_name)
        half = next((ranks for ranks in range(args.world_size // 2, 1, -1)
                     if args.global_batch_size % ranks == 0), 1)  # or less: pieces are equal
        for ranks in sorted({1, half} - {args.world_size}, reverse=True):
            if compared and alone and args.sharding in ("all", "full"):
                args.world_size, args.sharding, args.resumed = ranks, "full", True
                args.folder = Path(folder, f"of {ranks}")
                shutil.copytree(Path(folder, "torn"), args.folder)
                fewer = launch(record, args, program.role_name)
                compared["findings"] += fewer["findings"]
        return verdict(compared)


def compare(metrics: dict, everyone: list[dict], args: Namespace) -> dict:
    """Return the findings as a dict, on rank 0; `everyone` has what each rank has seen."""
    findings = Comparison(f"{args.world_size} processes")
    steps, losses = single_process(args)
    ranks = f" by {args.world_size}" if args.resumed else ""
    together = [of_rank["together"] for of_rank in everyone]
    everyone = [of_rank["trainings"] for of_rank in everyone]
    for what, words in (("removed", "what was left was removed, a checkpoint was written"),
                        ("counted", "bytes were counted")):
        had_come = [had for of_rank in together for had in of_rank[what]]
        if what == "counted" or args.sharding in ("all", "full"):  # only `full` writes checkpoints
            findings.holds(f"barriers{ranks}, {what}", had_come and all(had_come), "all ranks had "
                           f"come before {words}, {sum(had_come)} of {len(had_come)} times")
    parts = {"stopped": slice(STOPPED_IN * STEPS), "resumed": slice((STOPPED_IN - 1) * STEPS, None)}
    for training in everyone[0]:
        steps_of = [of_rank[training] for of_rank in everyone]
        expected = steps[parts.get(training, slice(None))]
        for name in ("samples", "loss"):
            findings.close(f"{training}{ranks}, {name}", by_rank(steps_of, name),
                           [of_ranks(step[name]) for step in expected], TOLERANCE,
                           "each rank's share of the same global batches")
        for name in ("gradients", "weights", "Adam's means", "Adam's squares"):
            run, oracle = by_rank(steps_of, name), [flat(step[name]) for step in expected]
            if training == "replicas" or (training == "optimizer" and "Adam" not in name):
                run = [{rank: vector(own) for rank, own in of_all.items()} for of_all in run]
                oracle = [of_ranks([step] * args.world_size) for step in oracle]
            else:  # the rows of all ranks; of `optimizer`, one rank has all rows
                run = [vector([torch.cat(rows) for rows in zip(*of_all.values(), strict=False)])
                       for of_all in run]
            findings.close(f"{training}{ranks}, {name}", run, oracle, TOLERANCE, WHY)
        if training == "full":
            sizes = [weight.numel() for weight in steps[0]["weights"]]
            layers = list(map(sum, zip(sizes[::2], sizes[1::2], strict=True)))
            most = max(step["gathered"] for of_rank in steps_of for step in of_rank)
            findings.holds(f"{training}, gathered at a time", most <= max(layers),
                           f"{most} numbers at most in forward; the layers have {layers}")
    if "stopped" in everyone[0]:
        whole, resumed = ([of_rank[training] for of_rank in everyone]
                          for training in ("full", "resumed"))
        for name in ("loss", "weights", "Adam's means", "Adam's squares"):
            again, once = ([{rank: own if name == "loss" else vector(own)
                             for rank, own in of_all.items()} for of_all in by_rank(steps_of, name)]
                           for steps_of in (resumed, whole))
            findings.equal(f"resumed as if never stopped, {name}", again,
                           once[(STOPPED_IN - 1) * STEPS :],
                           "nothing may depend on the interruption")
        findings.holds("checkpoints left", args.left == [f"epoch{EPOCHS:05}"],
                       f"{', '.join(args.left)} of {EPOCHS} epochs")
    for row in metrics["rows"]:
        findings.close(f"{row['sharding']}{ranks}, reported losses", row["losses"], losses,
                       TOLERANCE, WHY, unit="epoch")
        if not args.resumed:
            compare_bytes(findings, row, steps[0]["weights"], everyone, args)
    return findings.as_dict()


def vector(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join all numbers of a list of tensors, also of an empty one: a step that was not recorded."""
    return flat(tensors) if tensors else torch.empty(0)


def of_ranks(values: list) -> dict[str, object]:
    """Name the entries of a list as `by_rank` does."""
    return {f"rank {rank}": value for rank, value in enumerate(values)}


def compare_bytes(findings: Comparison, row: dict, weights: list[torch.Tensor],
                  everyone: list[dict[str, list]], args: Namespace) -> None:
    """Hold the bytes that a way reports against those of what was recorded, and the formulas."""
    way, n, size = row["sharding"], args.world_size, 8 * sum(weight.numel() for weight in weights)
    counted = []
    for of_rank in everyone:
        last = of_rank[way][-1]
        counters = sum(mean.numel() > 0 for mean in last["Adam's means"])  # a number of 8 bytes
        if way == "full":
            counters = len(weights)  # also of what this rank has no rows of
        of_adam = sum(8 * tensor.numel() for name in ("Adam's means", "Adam's squares")
                      for tensor in last[name])
        counted.append([*(sum(8 * tensor.numel() for tensor in last[name])
                          for name in ("weights", "gradients")), of_adam + 8 * counters])
    reported = [row["per_rank"][kind] for kind in ("parameters", "gradients", "optimizer")]
    findings.equal(f"{way}, reported bytes held", list(zip(*reported, strict=True)), counted,
                   "of the tensors after the last step", unit="rank")
    held = {"replicas": 4, "optimizer": 2 + 2 / n, "full": 4 / n}[way]
    sent = {"replicas": 2, "optimizer": 3, "full": 3}[way] * (n - 1) / n
    findings.close(f"{way}, reported formulas", [row["formula_mb"], row["sent_formula_mb"],
                                                 row["held_mb"]],
                   [held * size / 1e6, sent * size / 1e6, max(map(sum, counted)) / 1e6], 1e-12,
                   "sizes of the model; what the fullest rank holds", unit="number")
    if row["sent_mb"] is not None:
        factor, more = MOST_SENT
        most = factor * sent + n * more / size
        findings.holds(f"{way}, reported bytes sent",
                       0.99 * sent <= 1e6 * row["sent_mb"] / size <= most,
                       f"{row['sent_mb']:.4f} MB in a step, by the formula "
                       f"{sent * size / 1e6:.4f} MB, without gloo's headers")
