"""`--check` of schedules.py: a short training run on two ranks, compared with a single process.

The run is the lesson's own `run_worker`, on a few small images in float64. Each rank also runs the
single process of check.py, one step after each of its own, and compares the layers that it has.
"""

import argparse
import math
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, by_rank, verdict
from common.recorder import Recorder, copies

import torch
from torch import nn

from model_parallel_resnet import check as oracle
from model_parallel_resnet import schedules as lesson

# Beginnings of the single process's layer names, for each stage; and the stages of each rank.
HALVES = [("conv1", "bn1", "layer1", "layer2"), ("layer3", "layer4", "fc")]
QUARTERS = [("conv1", "bn1", "layer1"), ("layer2",), ("layer3",), ("layer4", "fc")]
PLACES = {"gpipe": [[0], [1]], "1f1b": [[0], [1]], "interleaved": [[0, 2], [1, 3]],
          "zero_bubble": [[0, 2], [1, 3]], "zero_bubble_v": [[0, 3], [1, 2]]}
# The most micro-batches whose activations a rank keeps. This number identifies a schedule, because
# the gradients are the same with each. With gpipe, no rank goes back before all have gone forward.
KEPT = {"gpipe": lambda rank, splits: splits,
        "1f1b": lambda rank, splits: min(splits, len(lesson.STAGES) - rank)}


class OnRank:
    """Records the steps of one rank.

    Args:
        recorder: Active recorder of this process.
        stages: Numbers of the stages that this rank should have.
        layers: Beginnings of the layer names of each stage of the model.
        steps: Receives the steps.
    """

    def __init__(self, recorder: Recorder, stages: list[int], layers: list[tuple[str, ...]],
                 steps: oracle.Steps) -> None:
        self.stages, self.last, self.steps = stages, len(layers) - 1, steps
        self.layers = tuple(name for stage in stages for name in layers[stage])
        self.models = {}
        self.begin()
        recorder.on_forward(after=self.after_forward)
        recorder.on_step(after=lambda _: self.after_step())

        @recorder.around(lesson.TimedStage, "__init__")
        def make(init, stage, model, number, *others):
            init(stage, model, number, *others)
            self.models[number] = model

        @recorder.around(lesson.TimedStage, "forward_one_chunk")
        def forward(original, stage, *args, **kwargs):
            self.forwards[stage.stage_index] += 1
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            return original(stage, *args, **kwargs)

        @recorder.around(lesson.TimedStage, "backward_one_chunk")
        def backward(original, stage, *args, **kwargs):
            self.in_flight -= 1
            return original(stage, *args, **kwargs)

    def begin(self) -> None:
        """Begin a step."""
        self.pieces = {"images": [], "outputs": [], "targets": []}
        self.forwards, self.in_flight, self.most = dict.fromkeys(self.stages, 0), 0, 0

    def after_forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep the images and outputs of a micro-batch, or the targets of its loss."""
        if module is self.models.get(0):
            self.pieces["images"] += copies(inputs)
        if module is self.models.get(self.last):
            self.pieces["outputs"] += copies([output])
        elif isinstance(module, nn.MSELoss):
            self.pieces["targets"] += copies(inputs[1:])

    def after_step(self) -> None:
        """Add the step, and drop from the single process's step what another rank records."""
        data = {name: torch.cat(pieces) for name, pieces in self.pieces.items() if pieces}
        states = [oracle.state(self.models[stage]) for stage in self.stages]
        ours = {key: [tensor for state in states for tensor in state[key]] for key in states[0]}
        ours |= {"outputs": data.pop("outputs", []), "data": data, "micro-batches": self.forwards,
                 "in flight": self.most}
        if theirs := self.steps.add(ours, self.layers):
            theirs["micro-batches"] = dict.fromkeys(self.stages, theirs["splits"])
            theirs["data"] = {name: theirs["data"][name] for name in data}
            theirs["outputs"] = theirs["outputs"] if self.last in self.stages else []
        self.begin()


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson and record it; the rank with the last stage returns the findings."""
    layers = oracle.layers_of_both(args)
    oracle.prepare(args)
    stages = PLACES[args.schedule][rank]
    steps = oracle.Steps(oracle.single_process(args))
    with Recorder() as recorder:
        recorder.on_forward(before=oracle.average_plainly)
        OnRank(recorder, stages, HALVES if len(stages) == 1 else QUARTERS, steps)
        of_ranks = recorder.gather_at_end(lambda: (steps.ours, steps.theirs))
        metrics = lesson.run_worker(rank, world_size, args)
    if metrics is None:
        return None
    ours, theirs = zip(*of_ranks, strict=True)
    _, alone = steps.finished()
    found = Comparison(f"{world_size} processes")
    oracle.compare_run(found, metrics["losses"], alone, lambda key: (
        by_rank(ours, key), by_rank(theirs, key)))
    found.equal("steps", [len(of_rank) for of_rank in ours], [len(alone)] * world_size,
                "of the optimizer", "rank")
    found.equal("schedule", [metrics["schedule"] == args.schedule], [True], "in the metrics", "run")
    if args.schedule in KEPT:
        found.equal("in flight", by_rank(ours, "in flight"),
                    [{f"rank {rank}": KEPT[args.schedule](rank, step["splits"])
                      for rank in range(world_size)} for step in alone],
                    "the most micro-batches whose activations a rank kept at a time")
    oracle.compare_layers(found, *layers)
    return found.as_dict()


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Run schedules.py and the single process; return the differences on the reporting rank.

    Raises:
        SystemExit: 1 if a comparison does not hold.
    """
    oracle.shorten(program, args, lambda num_splits: 3 * math.lcm(*num_splits))
    return verdict(launch(record, args, program.role_name))
