"""The oracle of `main.py`: every step of every demo, compared with one process without DDP.

Each rank records its samples, losses, gradients and weights, and how it writes and reads the
checkpoint. All numbers are float64, in which rounding cannot hide a mistake: DDP sums the ranks'
gradients in another order than one process does.
"""

import argparse
import statistics
import time
from pathlib import Path
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Recorder, copies
from common.session import device_for

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import main as lesson

TOLERANCE = 1e-9
WHY = "float64 sums in another order"
SAMPLES = ("inputs of DDP", "labels")
LATE_S = 0.5  # for so long the checkpoint is missing, then empty, then not yet read


# --- one process


def single_process(args: argparse.Namespace) -> tuple[list[list[dict]], list[list[float]]]:
    """Train on the samples of all ranks in one batch.

    Returns:
        For each rank its steps, as in `record_steps`, and its losses before each step and at last.
    """
    torch.manual_seed(args.seed)
    first, second = nn.Linear(10, 10), nn.Linear(10, 5)
    weights = [first.weight, first.bias, second.weight, second.bias]
    samples = [samples_of(rank, args.seed) for rank in range(args.world_size)]
    inputs, labels = (torch.cat(of_ranks) for of_ranks in zip(*samples, strict=True))

    def losses_of_ranks():
        errors = second(first(inputs).clamp(min=0)) - labels
        return errors.square().mean(dim=1).view(args.world_size, -1).mean(dim=1)

    steps, losses = [[] for _ in samples], [losses_of_ranks()]
    for _ in range(args.steps):
        gradients = torch.autograd.grad(losses[-1].mean(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= args.lr * gradient
        for rank, loss in enumerate(losses[-1].tolist()):
            steps[rank].append({"samples": dict(zip(SAMPLES, samples[rank], strict=True)),
                                "loss": loss, "gradients": gradients, "weights": copies(weights)})
        losses.append(losses_of_ranks())
    return steps, torch.stack(losses).T.tolist()


def samples_of(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the samples that this rank should train on: inputs (20, 10) and labels (20, 5)."""
    def draw(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    inputs = draw(1000 * seed + 1 + rank, 20, 10)
    return inputs, inputs @ draw(seed, 10, 5) / 10**0.5


# --- recorded


def record_steps(recorder: Recorder) -> list[list[dict]]:
    """Return a growing list: for each optimizer of this rank, a list with one dict per step.

    samples: Inputs and labels, by the names of `SAMPLES`.
    loss: Loss on these samples.
    was loaded: Whether the weights of the DDP model came from a state dict.
    gradients, weights: Those of all parameters of the optimizer, after its step.
    """
    trainings, optimizers, loaded, step = [], [], [], {}

    @recorder.around(DDP, "load_state_dict")
    def load_state_dict(load, module, *state, **options):
        loaded.append(module)
        return load(module, *state, **options)

    @recorder.around(DDP, "forward")  # a hook would not see a call of `.forward` itself
    def forward(original, module, *inputs, **options):
        step.update(zip(SAMPLES[:1], copies([*inputs, *options.values()]), strict=False))
        step["was loaded"] = module in loaded
        return original(module, *inputs, **options)

    def measured(module, inputs, output):
        if isinstance(module, nn.MSELoss) and torch.is_grad_enabled():
            step.update(zip(SAMPLES[1:], copies(inputs[1:]), strict=False), loss=output.item())

    def stepped(optimizer):
        if optimizer not in optimizers[-1:]:
            optimizers.append(optimizer)
            trainings.append([])
        [group] = optimizer.param_groups
        samples = {name: step.pop(name) for name in SAMPLES if name in step}
        trainings[-1].append({**step, "samples": samples, "weights": copies(group["params"]),
                              "gradients": copies(p.grad for p in group["params"])})
        step.clear()

    recorder.on_forward(after=measured)
    recorder.on_step(after=stepped)
    return trainings


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0, None elsewhere."""
    torch.set_default_dtype(torch.float64)
    with Recorder() as recorder:
        seen = {"trainings": record_steps(recorder), "saves": 0, "loads": []}
        everyone = recorder.gather_at_end(lambda: seen)

        @recorder.around(torch, "save")
        def late_save(save, state, file, **options):
            """Write late: a rank that does not wait for the file finds none, or an empty one."""
            if isinstance(file, Path):  # tensors are pickled by torch.save, too
                seen["saves"] += 1
                time.sleep(LATE_S)
                file.touch()
                time.sleep(LATE_S)
            save(state, file, **options)

        @recorder.around(torch, "load")
        def late_load(load, file, **options):
            """Read late: if rank 0 does not wait for the other ranks, it has removed the file."""
            if isinstance(file, Path):
                if rank > 0 and file.exists() and file.stat().st_size:
                    time.sleep(LATE_S)
                onto = torch.device(options.get("map_location") or "meta")
                seen["loads"].append([onto == device_for(args.device), options.get("weights_only")])
            return load(file, **options)

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


# --- compared


def compare(metrics: dict, everyone: list[dict], args: argparse.Namespace) -> dict:
    """Return the findings about `everyone`, which is what each rank recorded."""
    findings = Comparison(f"{args.world_size} processes")
    oracle, losses = single_process(args)
    means = [statistics.fmean(of_step) for of_step in zip(*losses, strict=True)]
    for number, demo in enumerate(args.demos):
        recorded = [sum(seen["trainings"][number : number + 1], []) for seen in everyone]
        compare_steps(findings, demo, recorded, oracle)
        reported = metrics[demo]
        findings.close(f"{demo}, reported losses",
                       [*reported["losses_per_rank"], reported["losses"],
                        [reported["loss_before"], reported["loss_after"]]],
                       [*losses, means, [means[0], means[-1]]], TOLERANCE, WHY, unit="row")
        if demo == "checkpoint":
            findings.holds("checkpoint, which model trains",
                           all(step.get("was loaded") for of_rank in recorded for step in of_rank),
                           "on each rank, the one that the checkpoint was loaded into")
            saves, loads = ([seen[key] for seen in everyone] for key in ("saves", "loads"))
            findings.holds("checkpoint, who writes it", saves == [1] + [0] * (len(saves) - 1),
                           f"rank 0 alone, once; by rank, it was written {saves} times")
            findings.holds("checkpoint, how it is read", loads == [[[True, True]]] * len(loads),
                           "each rank reads it once, onto its device and with weights_only; "
                           f"[onto its device, weights_only] were {loads}")
    return findings.as_dict()


def compare_steps(findings: Comparison, name: str, recorded: list[list[dict]],
                  expected: list[list[dict]]) -> None:
    """Compare the steps of each rank with those that one process computed."""
    findings.equal(f"{name}, samples", by_rank(recorded, "samples"), by_rank(expected, "samples"),
                   "each rank has its own samples, drawn from the same seeds")
    for what, key, because in (
            ("losses", "loss", WHY),
            ("gradients", "gradients", f"{WHY}: their average is the gradient of all samples"),
            ("weights", "weights", WHY)):
        findings.close(f"{name}, {what}", by_rank(recorded, key), by_rank(expected, key),
                       TOLERANCE, because)
    findings.equal(f"{name}, weights on all ranks", by_rank(recorded, "weights"),
                   by_rank(recorded[:1] * len(recorded), "weights"), "compared with rank 0")


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print each comparison; return `{what: difference}` on the reporting process, else None."""
    return verdict(launch(record, args, program.role_name))
