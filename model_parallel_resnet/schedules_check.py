"""`--check` of schedules.py: a whole training of two stages, held against one process.

The training is the lesson's own `run_worker`, on a few small images, in float64. Each stage runs
the whole program of check.py beside its own work, and compares its weights where they are.
"""

import functools
import itertools
import math
import time

import torch
import torch.distributed as dist
from common.launch import launch
from common.oracle import verdict
from torch.optim.optimizer import register_optimizer_step_post_hook

from model_parallel_resnet import check as oracle
from model_parallel_resnet import schedules as lesson
from model_parallel_resnet.recording import StepByStep, state


def check(args):
    """Run both programs; the differences in the process that reports, None elsewhere."""
    args.num_splits = args.num_splits[: oracle.MOST_ROWS]
    oracle.smaller(args, batch_size=3 * math.lcm(*args.num_splits))
    return verdict(launch(record, args, lesson.role_name))


def record(rank, world_size, args):
    """The worker of a check; rank 1 returns what it has found."""
    layers = oracle.layers_of_both(args)
    oracle.prepare(args)
    recorder = Recorder(rank, oracle.single_process(args))
    metrics = lesson.run_worker(rank, world_size, args)
    if metrics is None:
        return None
    made, expected = recorder.join_stages(), len(args.num_splits) * (1 + args.num_batches)
    found = oracle.compare(recorder, metrics, args, args.schedule, lesson.STAGES)
    found.equal("steps", made, [expected] * 2, "that the optimizer has made", "stage")
    oracle.hold_layers(found, *layers)
    return found.as_dict()


class Recorder(StepByStep):
    """On each rank: listens to its stage, its loss and its optimizer.

    Args:
        rank: of this stage.
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, rank, alone):
        super().__init__([lesson.STAGES[rank]], alone)
        self.rank, self.model = rank, torch.nn.Module()
        register_optimizer_step_post_hook(lambda *_: self.after_step())
        honest = dist.destroy_process_group

        def gather_first():
            self.gathered = [None] * len(lesson.STAGES)
            dist.all_gather_object(self.gathered, (self.ours, self.theirs))
            honest()

        dist.destroy_process_group = gather_first

    def before(self, module, inputs):
        """A micro-batch comes to this stage."""
        if isinstance(module, lesson.Numbered):
            self.now.setdefault("started", time.time())

    def after(self, module, inputs, output):
        """The stage is done with a micro-batch, or its loss is there."""
        pieces = {}
        if isinstance(module, lesson.Numbered):
            self.model = module
            pieces = {"images": inputs[0]} if self.rank == 0 else {"outputs": output}
        elif isinstance(module, torch.nn.MSELoss):
            pieces = {"targets": inputs[1]}
        for name, tensor in pieces.items():
            self.now.setdefault(name, []).append(tensor.detach().clone().cpu())

    def after_step(self):
        """Hold this stage against its part of the other program."""
        self.now["ended"] = time.time()
        self.now["data"] = {name: torch.cat(self.now.pop(name)) for name in ("images", "targets")
                            if name in self.now}
        if "outputs" in self.now:
            self.now["outputs"] = torch.cat(self.now["outputs"])
        self.add_step([state(self.model)], at_the_end=self.rank == 1)

    def join_stages(self):
        """Add what the other stage has recorded; the numbers of steps that both have made."""
        first_ours, first_theirs = self.gathered[0]
        made = [len(first_ours), len(self.ours)]
        both = functools.partial(itertools.zip_longest, fillvalue={})
        self.ours = list(itertools.starmap(joined, both(first_ours, self.ours)))
        self.theirs = list(itertools.starmap(joined, both(first_theirs, self.theirs)))
        return made


def joined(first, second):
    """What both stages have recorded of a step."""
    both = {**first, **second,
            "one at a time": first.get("one at a time") and second.get("one at a time")}
    for key in ("data", "weights", "statistics", "counts", "micro-batches"):
        both[key] = {**first.get(key, {}), **second.get(key, {})}
    return both
