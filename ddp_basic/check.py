"""The oracle of `main.py`: every step of every demo, held against one process without DDP.

Compared are the samples, losses, gradients, weights and learning rates of each step on each rank,
what the run reports, and how the checkpoint is written and read. All in float64, in which a mistake
cannot be taken for rounding: averages of several ranks are summed in another order.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Barriers, Recorder, copies
from common.session import device_for

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import main as lesson

TOLERANCE = 1e-9
WHY = "float64 sums in another order"
LATEST_S = 3.0  # that a rank delays its checkpoint for those who should wait for it
EMPTY_S = 0.5  # that the file is there and empty: who looks whether it exists comes too early


def single_process(args: argparse.Namespace) -> tuple[list[list[dict]], list[float]]:
    """Train on the samples of all ranks in one batch.

    Returns:
        For each rank its steps, as `Seen` would have them; and the losses of the ranks after
        the last step.
    """
    torch.manual_seed(args.seed)
    first, second = nn.Linear(10, 10), nn.Linear(10, 5)
    weights = [first.weight, first.bias, second.weight, second.bias]
    samples = [samples_of(rank, args.seed) for rank in range(args.world_size)]
    inputs, labels = (torch.cat(of_ranks) for of_ranks in zip(*samples, strict=True))

    def losses_of_ranks():
        errors = second(first(inputs).clamp(min=0)) - labels
        return errors.square().mean(dim=1).view(args.world_size, -1).mean(dim=1)

    steps = [[] for _ in samples]
    for _ in range(args.steps):
        losses = losses_of_ranks()
        gradients = torch.autograd.grad(losses.mean(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= args.lr * gradient
        of_all = {"gradients": gradients, "learning rate": [args.lr],
                  "weights": [weight.detach().clone() for weight in weights]}
        for rank, loss in enumerate(losses.tolist()):
            steps[rank].append({"samples": samples[rank], "loss": loss, **of_all})
    return steps, losses_of_ranks().tolist()


def samples_of(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what this rank should train on: inputs (20, 10) and labels (20, 5)."""
    def draw(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    inputs = draw(1000 * seed + 1 + rank, 20, 10)
    return inputs, inputs @ draw(seed, 10, 5) / 10**0.5


class Seen:
    """Keeps what one rank does in each step, by demo."""

    def __init__(self, recorder: Recorder) -> None:
        self.demo, self.steps, self.step, self.loads, self.saves = None, {}, {}, [], 0
        recorder.on_forward(after=self.forward)
        recorder.on_step(after=self.stepped)

    def begin(self, demo: str) -> None:
        """Record another demo from now on."""
        self.demo, self.steps[demo] = demo, []

    def forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Record inputs, labels and loss, after the forward of any module."""
        if isinstance(module, DDP):
            self.step["inputs"] = inputs[0].detach().cpu()
        elif isinstance(module, nn.MSELoss) and torch.is_grad_enabled():
            self.step["labels"] = inputs[1].detach().cpu()
            self.step["loss"] = output.item()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record gradients, weights and learning rates, after the step of any optimizer."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.step["gradients"] = copies(p.grad for p in parameters)
        self.step["weights"] = copies(parameters)
        self.step["learning rate"] = [group["lr"] for group in optimizer.param_groups]
        self.step["samples"] = [self.step.pop(half, []) for half in ("inputs", "labels")]
        self.steps[self.demo].append(self.step)
        self.step = {}


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson, recorded; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    with Recorder() as recorder:
        seen, barriers = Seen(recorder), Barriers(recorder)
        everyone = recorder.gather_at_end(lambda: seen)

        @recorder.around(torch, "save")
        def latest_save(save, state, file, **options):
            """Who does not wait for the file finds none: the others come first."""
            if isinstance(file, Path):  # tensors are pickled this way, too
                next_one = barriers.passed + 1
                wait_until(lambda: all(barriers.has(other, next_one)
                                       for other in range(1, world_size)))
                seen.saves += 1
                file.touch()
                time.sleep(EMPTY_S)
            save(state, file, **options)

        @recorder.around(torch, "load")
        def latest_load(load, file, **options):
            """Where rank 0 does not wait for the others, it removes the file before they read."""
            if not isinstance(file, Path):
                return load(file, **options)
            if rank > 0 and file.exists() and file.stat().st_size:
                wait_until(lambda: barriers.has(0, barriers.passed + 1) or not file.exists())
            device = torch.device(options.get("map_location") or "meta")
            seen.loads.append([device == device_for(args.device), options.get("weights_only")])
            return load(file, **options)

        def recorded(demo, run):
            def begin_and_run(*place):
                seen.begin(demo)
                return run(*place)

            return begin_and_run

        recorder.enter_context(mock.patch.dict(lesson.DEMOS, {
            demo: recorded(demo, lesson.DEMOS[demo]) for demo in args.demos}))
        metrics = lesson.run_worker(rank, world_size, args)
    left_behind = any(args.output_dir.glob(".model.*"))
    return compare(metrics, everyone, left_behind, args) if rank == 0 else None


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, but not for longer than `LATEST_S`."""
    deadline = time.monotonic() + LATEST_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    return verdict(launch(record, args, program.role_name))


def compare(metrics: dict, everyone: list[Seen], left_behind: bool,
            args: argparse.Namespace) -> dict:
    """Return the findings as a dict, on rank 0; `everyone` has what each rank has seen."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, last = single_process(args)
    for demo in args.demos:
        compare_steps(findings, demo, [of_rank.steps[demo] for of_rank in everyone], oracle)
        compare_report(findings, demo, metrics[demo], [*losses_of(oracle), last])
    if "checkpoint" in args.demos:
        saves = [one.saves for one in everyone]
        findings.holds("checkpoint, who writes it", saves == [1] + [0] * (args.world_size - 1),
                       f"rank 0 alone, once; by rank, it was written {saves} times")
        loads = [one.loads for one in everyone]
        findings.holds("checkpoint, how it is read", loads == [[[True, True]]] * args.world_size,
                       "each rank reads it once, onto its device and with weights_only; "
                       f"[onto its device, weights_only] were {loads}")
        findings.holds("checkpoint, what is left", not left_behind,
                       "the file is removed when all have read it")
    return findings.as_dict()


def compare_steps(findings: Comparison, name: str, recorded: list[list[dict]],
                  expected: list[list[dict]]) -> None:
    """Hold a training's steps against those of one process; both are lists of the ranks."""
    findings.equal(f"{name}, samples", by_rank(recorded, "samples"), by_rank(expected, "samples"),
                   "each rank has samples of its own, from the same seeds")
    findings.close(f"{name}, losses", losses_of(recorded), losses_of(expected), TOLERANCE, WHY)
    findings.close(f"{name}, gradients", by_rank(recorded, "gradients"),
                   by_rank(expected, "gradients"), TOLERANCE,
                   WHY + ": the average of the ranks is the gradient of all samples")
    findings.close(f"{name}, weights", by_rank(recorded, "weights"), by_rank(expected, "weights"),
                   TOLERANCE, WHY)
    findings.equal(f"{name}, weights on all ranks", by_rank(recorded, "weights"),
                   by_rank(recorded[:1] * len(recorded), "weights"),
                   "held against those of rank 0")
    findings.equal(f"{name}, learning rates", by_rank(recorded, "learning rate"),
                   by_rank(expected, "learning rate"), "--lr")


def losses_of(recorded: list[list[dict]]) -> list[list[float]]:
    """Return the losses of all ranks, step by step."""
    return [list(of_all.values()) for of_all in by_rank(recorded, "loss")]


def compare_report(findings: Comparison, demo: str, reported: dict,
                   losses: list[list[float]]) -> None:
    """Hold a demo's report against the `losses` of all ranks before each step and at the end."""
    means = [statistics.fmean(of_all) for of_all in losses]
    before_and_after = [reported["loss_before"], reported["loss_after"]]
    rows = [list(of_all) for of_all in zip(*reported["losses_per_rank"], strict=True)]
    findings.close(f"{demo}, reported losses", [*rows, reported["losses"], before_and_after],
                   [*losses, means, [means[0], means[-1]]], TOLERANCE, WHY, unit="row")
