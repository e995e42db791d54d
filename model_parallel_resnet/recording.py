"""What a `--check` records of a training: each step, and the state in which it leaves the workers.

A model is too large to keep it once for every step. So the other program makes a step after each of
the lesson's, and then both are held against each other: of a tensor only two numbers are kept, the
one that is furthest off, and the largest.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from common.recorder import copies

import torch
from torch import nn

from tracing import timeline


class StepByStep:
    """Follows a training with the other program.

    `ours` and `theirs` have a dict for each step: its "data" and "outputs"; the "weights" after it
    and the running "statistics" of each BatchNorm, see `furthest`; for each worker the "counts" of
    batches that a BatchNorm has seen, and the numbers of the "micro-batches". In `ours` are also
    when the step "started" and "ended", in seconds, and whether the forwards of a worker were "one
    at a time", in `theirs` its "loss".

    Args:
        workers: the roles whose state is compared here.
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, workers: list[str], alone: Iterator[dict]) -> None:
        self.workers, self.alone = workers, alone
        self.ours, self.theirs = [], []
        self.now = {}  # what is known of a step that is under way
        self.seen = dict.fromkeys(workers, 0)  # spans
        self.running = {}  # (statistics, count) of each BatchNorm, as they should be

    def add_step(self, states: list[dict], layers: Sequence[str] = ("",)) -> None:
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

    def add_worker(self, worker: str, state: dict, norms: list[str], ours: dict,
                   theirs: dict) -> None:
        """Add the micro-batches of a step that a worker has had; `norms` are its BatchNorms."""
        spans = self.new_spans(worker, state["spans"])
        for kind in ("forward", "backward"):
            ours["micro-batches"][f"{worker} {kind}"] = sorted(numbers_of(kind, spans))
            theirs["micro-batches"][f"{worker} {kind}"] = list(range(theirs["splits"]))
        ours["one at a time"] &= one_at_a_time(spans)
        self.fold(norms, theirs["statistics"], numbers_of("forward", spans))
        ours["counts"][worker] = [norm["count"] for norm in state["norms"]]
        theirs["counts"][worker] = [self.running[name][1] for name in norms]

    def new_spans(self, worker: str, spans: dict[str, list[dict]]) -> list[dict]:
        """Return those of the worker since the last step, in order of their start."""
        new, self.seen[worker] = spans[worker][self.seen[worker] :], len(spans[worker])
        return sorted(new, key=lambda span: span["start"])

    def fold(self, norms: list[str], of_pieces: list[dict[str, torch.Tensor]],
             order: list[int]) -> None:
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


def state(model: nn.Module) -> dict:
    """Copy the weights and the running statistics of each BatchNorm; add the spans so far."""
    norms = [{"running": torch.stack([norm.running_mean, norm.running_var]).cpu(),
              "count": norm.num_batches_tracked.item()}
             for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)]
    return {"weights": copies(model.parameters()), "norms": norms, "spans": timeline.recorded()}


def furthest(run: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """Pick two numbers of each tensor: the one that is furthest off, and the largest expected.

    Args:
        run: tensors by name.
        oracle: the same, which may have more names.

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


def numbers_of(kind: str, spans: list[dict]) -> list[int]:
    """Return the micro-batches of the spans of a kind."""
    return [span["labels"].get("micro_batch") for span in spans if span["kind"] == kind]


def one_at_a_time(spans: list[dict]) -> bool:
    """Return whether no two forwards of a worker overlap; `spans` are in order of their start."""
    forwards = [span for span in spans if span["kind"] == "forward"]
    return all(a["end"] <= b["start"] for a, b in itertools.pairwise(forwards))
