"""`--check` of schedules.py: a whole training of two stages, held against one process.

The training is the lesson's own `run_worker`, on a few small images, in float64. After each of its
steps a rank makes that of the whole program of check.py, too, and compares its weights where they
are. A rank with two quarters of the model has them compared one by one.
"""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Iterator
from types import ModuleType

from common.launch import launch
from common.oracle import verdict
from common.recorder import Recorder, copies

import torch
import torch.distributed as dist
from torch import nn

from model_parallel_resnet import check as oracle
from model_parallel_resnet import schedules as lesson
from model_parallel_resnet.recording import StepByStep, state
from tracing import timeline

LATE = 0.2  # s, in which another rank begins its first forward
STEP_LATE = 1.0  # s, longer than the comparison of a step
# What the names of the other program's layers begin with, for each stage; the stages of each rank.
HALVES = [("conv1", "bn1", "layer1", "layer2"), ("layer3", "layer4", "fc")]
QUARTERS = [("conv1", "bn1", "layer1"), ("layer2",), ("layer3",), ("layer4", "fc")]
PLACES = {"gpipe": [[0], [1]], "1f1b": [[0], [1]], "interleaved": [[0, 2], [1, 3]],
          "zero_bubble": [[0, 2], [1, 3]], "zero_bubble_v": [[0, 3], [1, 2]]}


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Run schedules.py, and one process; return the differences where it reports."""
    oracle.leave_rows_out(program, args)
    oracle.smaller(args, batch_size=3 * math.lcm(*args.num_splits))
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson recorded; the rank with the last stage returns what has been found."""
    layers = oracle.layers_of_both(args)
    oracle.prepare(args)
    places = PLACES[args.schedule]
    seen = OnRank(rank, places[rank], HALVES if len(places[0]) == 1 else QUARTERS,
                  oracle.single_process(args))
    with Recorder() as recorder:
        recorder.on_forward(seen.before, seen.after)
        # Who does not have the loss steps late: the clock could be read before that.
        recorder.on_step(before=lambda _: time.sleep(STEP_LATE * (seen.last not in seen.stages)),
                         after=lambda _: seen.after_step())

        @recorder.around(lesson.PipelineStage, "__init__")
        def make(init, stage, model, number, *others):
            init(stage, model, number, *others)
            seen.models[number] = model

        @recorder.around(dist, "barrier")
        def leave_late(barrier):
            """Delay the rank whose clock is read: the other one could begin before that."""
            barrier()
            time.sleep(LATE * (seen.last in seen.stages))

        of_ranks = recorder.gather_at_end(lambda: (seen.ours, seen.theirs))
        metrics = lesson.run_worker(rank, world_size, args)
    if metrics is None:
        return None
    made, expected = seen.join(of_ranks), len(args.num_splits) * (1 + args.num_batches)
    found = oracle.compare(seen, metrics, args, lesson.STAGES, len(places[0]))
    found.equal("steps", made, [expected] * 2, "that the optimizer has made", "stage")
    found.equal("schedule", [metrics["schedule"] == args.schedule], [True], "in the metrics", "run")
    found.equal("in flight", [step.get("in flight") for step in seen.ours],
                [{role: most_in_flight(args.schedule, rank, step["splits"])
                  for rank, role in enumerate(lesson.STAGES)} for step in seen.theirs],
                "micro-batches of which a rank kept the activations at a time, at most", "step")
    oracle.hold_layers(found, *layers)
    return found.as_dict()


def most_in_flight(schedule: str, rank: int, splits: int) -> int:
    """Return of how many micro-batches a rank keeps the activations at a time, at most.

    A schedule is known by it: the gradients are the same with each.

    Args:
        schedule: of `--schedule`.
        rank: which.
        splits: micro-batches of a step.
    """
    if schedule == "gpipe" or schedule == "1f1b" and splits == 1:
        return splits  # all of them: nobody goes back before the last one has come
    behind = len(lesson.STAGES) - 1 - rank  # ranks; each lets one more come in
    if schedule == "1f1b":
        return min(splits, behind + 1)
    if schedule == "zero_bubble_v":  # with two, the first is back before the second is at the end
        return 3 if splits == 2 and behind else min(2 * splits, 4)
    at_a_time = splits // max(1, splits // 2)  # go through the first quarter, then the other one
    steps = {"interleaved": 2, "zero_bubble": 1}[schedule]
    return min(2 * splits, at_a_time + steps * behind + 1)


class OnRank(StepByStep):
    """Keeps, on each rank, what its stages, its loss and its optimizer do.

    Args:
        rank: of this process.
        stages: the numbers of those it should have.
        layers: of each stage of the model, how the names of its layers begin.
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, rank: int, stages: list[int], layers: list[tuple[str, ...]],
                 alone: Iterator[dict]) -> None:
        super().__init__([f"{lesson.STAGES[rank]} part {stage}" for stage in stages], alone)
        self.role, self.stages, self.last = lesson.STAGES[rank], stages, len(layers) - 1
        self.layers = [name for stage in stages for name in layers[stage]]
        self.read = 0  # spans
        self.models = {stage: nn.Module() for stage in stages}  # until they are made

    def before(self, module: nn.Module, inputs: tuple) -> None:
        """Begin a step, where its first micro-batch comes to a stage."""
        if module in self.models.values():
            self.now.setdefault("started", time.time())

    def after(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep the images and outputs of a micro-batch, or the targets of its loss."""
        pieces = {}
        if module in self.models.values():
            pieces = {"images": inputs[0]} if module is self.models.get(0) else {}
            pieces |= {"outputs": output} if module is self.models.get(self.last) else {}
        elif isinstance(module, nn.MSELoss):
            pieces = {"targets": inputs[1]}
        for name, tensor in pieces.items():
            self.now.setdefault(name, []).extend(copies([tensor]))

    def after_step(self) -> None:
        """Hold these stages against their parts of the other program."""
        self.now["ended"] = time.time()
        self.now["data"] = {name: torch.cat(self.now.pop(name)) for name in ("images", "targets")
                            if name in self.now}
        if "outputs" in self.now:
            self.now["outputs"] = torch.cat(self.now["outputs"])
        self.now["in flight"] = {self.role: self.most_in_flight()}
        states = [state(self.models[stage]) for stage in self.stages]
        for name, stage, of_stage in zip(self.workers, self.stages, states, strict=True):
            of_stage["spans"] = {name: [span for span in of_stage["spans"][self.role]
                                        if span["labels"].get("stage") == stage]}
        self.add_step(states, self.layers)

    def most_in_flight(self) -> int:
        """Return of how many micro-batches this rank has kept the activations, in this step."""
        new = timeline.recorded()[self.role][self.read :]
        self.read += len(new)
        changes = {"forward": 1, "backward": -1}
        return max(itertools.accumulate(changes.get(span["kind"], 0) for span in
                                        sorted(new, key=lambda span: span["start"])))

    def join(self, of_ranks: list[tuple[list[dict], list[dict]]]) -> list[int]:
        """Take what both ranks have recorded; return the numbers of steps that they have made."""
        ours, theirs = zip(*of_ranks, strict=True)
        both = functools.partial(itertools.zip_longest, fillvalue={})
        self.ours = list(itertools.starmap(joined, both(*ours)))
        self.theirs = list(itertools.starmap(joined, both(*theirs)))
        return [len(steps) for steps in ours]


def joined(first: dict, second: dict) -> dict:
    """Join what both ranks have recorded of a step."""
    both = {**first, **second,
            "one at a time": first.get("one at a time") and second.get("one at a time")}
    both |= {edge: choose(first[edge], second[edge])
             for edge, choose in (("started", min), ("ended", max))
             if edge in first and edge in second}
    for key in ("data", "in flight", "weights", "statistics", "counts", "micro-batches"):
        both[key] = {**first.get(key, {}), **second.get(key, {})}
    return both
