"""What a `--check` records of a training: each step, and the state in which it leaves the workers.

A model is too large to keep it once for every step. So the other program makes its steps beside the
lesson's, and after each of them both are held against each other: of a tensor only two numbers are
kept, the one that is furthest off, and the largest.
"""

import itertools
import math
import threading
import time

import torch
from common import timeline
from torch.distributed import rpc
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from model_parallel_resnet import early_backward
from model_parallel_resnet import main as lesson


class StepByStep:
    """Listens to the modules of this process, and follows a training with the other program.

    `ours` and `theirs` have a dict for each step: its "data" and "outputs"; the "weights" after it
    and the running "statistics" of each BatchNorm, see `furthest`; for each worker the "counts" of
    batches that a BatchNorm has seen, and the numbers of the "micro-batches". In `ours` are also
    when the step "started" and "ended", in seconds, and whether the forwards of a worker were "one
    at a time", in `theirs` its "loss".

    Args:
        workers: the roles whose state is compared here.
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, workers, alone):
        self.workers, self.alone = workers, alone
        self.ours, self.theirs = [], []
        self.now = {}  # what is known of a step that is under way
        self.seen = dict.fromkeys(workers, 0)  # spans
        self.running = {}  # (statistics, count) of each BatchNorm, as they should be
        register_module_forward_pre_hook(self.before)
        register_module_forward_hook(self.after)

    def add_step(self, states, layers=("",)):
        """Compare after a step; a step that the other program does not make is only kept.

        Args:
            states: of `self.workers`, from `state`, in the order of the model.
            layers: how the names of what they have begin in the other program.
        """
        ours, self.now = self.now, {}
        self.ours.append(ours)
        theirs = next(self.alone, None)
        if theirs is None:
            return
        self.theirs.append(theirs)

        def named(kind, whole):
            of_workers = [x for state in states for x in state[kind]]
            names = [name for name in whole if name.startswith(tuple(layers))]
            return dict(zip(names, of_workers, strict=True))

        weights = named("weights", theirs["weights"])
        norms = named("norms", theirs["statistics"][0])
        ours |= {"counts": {}, "micro-batches": {}, "one at a time": True}
        theirs |= {"counts": {}, "micro-batches": {}}
        names = iter(norms)
        for worker, state in zip(self.workers, states, strict=True):
            of_worker = list(itertools.islice(names, len(state["norms"])))
            self.add_worker(worker, state, of_worker, ours, theirs)
        ours["weights"], theirs["weights"] = furthest(weights, theirs["weights"])
        ours["statistics"], theirs["statistics"] = furthest(
            {name: norm["running"] for name, norm in norms.items()},
            {name: running for name, (running, _) in self.running.items()})

    def add_worker(self, worker, state, norms, ours, theirs):
        """Add the micro-batches of a step that a worker has had; `norms` are its BatchNorms."""
        spans = self.new_spans(worker, state["spans"])
        for kind in ("forward", "backward"):
            ours["micro-batches"][f"{worker} {kind}"] = sorted(numbers_of(kind, spans))
            theirs["micro-batches"][f"{worker} {kind}"] = list(range(theirs["splits"]))
        ours["one at a time"] &= one_at_a_time(spans)
        self.fold(norms, theirs["statistics"], numbers_of("forward", spans))
        ours["counts"][worker] = [norm["count"] for norm in state["norms"]]
        theirs["counts"][worker] = [self.running[name][1] for name in norms]

    def new_spans(self, worker, spans):
        """Those of the worker since the last step, in order of their start."""
        new, self.seen[worker] = spans[worker][self.seen[worker] :], len(spans[worker])
        return sorted(new, key=lambda span: span["start"])

    def fold(self, norms, of_pieces, order):
        """Add up the statistics of micro-batches as BatchNorm does, in their order."""
        for name in norms:
            mean, var = of_pieces[0][name]
            start = torch.stack([torch.zeros_like(mean), torch.ones_like(var)])
            running, count = self.running.get(name, (start, 0))
            for number in order:
                if number < len(of_pieces):
                    running = 0.9 * running + 0.1 * of_pieces[number][name]
                    count += 1
            self.running[name] = running, count


class Recorder(StepByStep):
    """On the master: listens to its model, its loss and its optimizer, and asks the workers.

    A model is called with a batch, or, by a thread for each, with its micro-batches and their
    numbers.

    Args:
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, alone):
        super().__init__(lesson.WORKERS, alone)
        self.optimizer_steps = 0
        self.here = threading.local()  # the number of this thread's micro-batch
        recorder = self

        def listening(honest):
            class Recorded(honest):
                def step(self, *context):
                    super().step(*context)
                    recorder.after_step()

            return Recorded

        lesson.DistributedOptimizer = listening(lesson.DistributedOptimizer)
        early_backward.EarlyOptimizer = listening(early_backward.EarlyOptimizer)

    def before(self, module, inputs):
        """A batch begins, or one of its micro-batches."""
        if isinstance(module, lesson.DistResNet50):
            images, self.here.number = (*inputs, 0)[:2]
            self.now.setdefault("started", time.time())
            self.keep("images", images)

    def after(self, module, inputs, output):
        """The model has its outputs, or the loss is there."""
        if isinstance(module, lesson.DistResNet50):
            self.keep("outputs", output)
            self.now["rrefs"] = module.p1_rref, module.p2_rref
        elif isinstance(module, torch.nn.MSELoss):
            self.keep("targets", inputs[1])

    def keep(self, name, tensor):
        """Of the micro-batch of this thread, or of the batch."""
        self.now.setdefault(name, {})[self.here.number] = tensor.detach()

    def after_step(self):
        """Fetch what the workers have; a second step of the same batch is only counted."""
        self.optimizer_steps += 1
        if self.now:
            self.now["ended"] = time.time()
            whole = {name: torch.cat([piece for _, piece in sorted(self.now.pop(name).items())])
                     for name in ("images", "targets", "outputs") if name in self.now}
            self.now |= {"outputs": whole.pop("outputs"), "data": whole}
            rrefs = self.now.pop("rrefs")
            self.add_step([rpc.rpc_sync(rref.owner(), state_of, args=(rref,)) for rref in rrefs])


def state_of(shard_rref):
    """On a worker: `state` of its shard."""
    return state(shard_rref.local_value())


def state(model):
    """The weights, the running statistics of each BatchNorm, and the spans so far."""
    norms = [{"running": torch.stack([norm.running_mean, norm.running_var]).cpu(),
              "count": norm.num_batches_tracked.item()}
             for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
    return {"weights": [param.detach().cpu() for param in model.parameters()], "norms": norms,
            "spans": timeline.recorded()}


def furthest(run, oracle):
    """Two numbers of each tensor of a run: the one that is furthest off, and the largest expected.

    Args:
        run: `{name: tensor}`.
        oracle: `{name: tensor}`, which may have more names.

    Returns:
        `{name: [number, largest]}` of the run, and of the oracle; whole tensors where their shapes
        differ.
    """
    ours, theirs = {}, {}
    for name, numbers in run.items():
        expected = oracle[name].detach()
        if numbers.shape != expected.shape:
            ours[name], theirs[name] = numbers, expected
            continue
        at = (numbers - expected).abs_().argmax()  # NaN is the largest
        largest = torch.linalg.vector_norm(expected, math.inf).item()
        ours[name] = [numbers.flatten()[at].item(), largest]
        theirs[name] = [expected.flatten()[at].item(), largest]
    return ours, theirs


def numbers_of(kind, spans):
    """The micro-batches of the spans of a kind."""
    return [span["labels"].get("micro_batch") for span in spans if span["kind"] == kind]


def one_at_a_time(spans):
    """Whether no two forwards of a worker overlap; `spans` are in order of their start."""
    forwards = [span for span in spans if span["kind"] == "forward"]
    return all(a["end"] <= b["start"] for a, b in itertools.pairwise(forwards))
