"""Where the time of a batch goes: what each worker does, recorded from outside of the lesson.

`record_work` hangs hooks on the shards' layers, on autograd and on the optimizers, and each of them
writes a span (tracing). A kernel of a GPU is only queued by the line that calls it: so
every span ends when the GPU has done its work.

Every moment of a batch belongs to one of `PARTS`, so the parts add up to its time. A worker that
has nothing open waits for its next piece of work. As long as the other worker still computes what
that piece needs, it waits for the other one; from then on, for messages: RPC, serialization, the
master.
"""

import functools
import importlib
import inspect
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common.session import keep_memory

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import utils as distributed_optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tracing import timeline

# "both": forward and backward at a time; "first", "turn", "between", "last": waits for the first
# features, for the first gradient, between micro-batches, for the last gradient; "messages": of
# RPC, and the master.
PARTS = ("forward", "backward", "both", "first", "turn", "between", "last", "step", "messages")
WORK = {"forward": "forward", "backward": "backward", "weight gradients": "backward",
        "step": "step"}
Spans = dict[str, list[dict]]  # of each role, as `timeline.recorded` gives them
Window = tuple[float, float]  # the start and the end of a batch, in seconds


# --- recording


def record_work(role: str, *shards: type[nn.Module]) -> None:
    """Record the work of this process from now on, and let it keep the memory that it frees.

    Call it before a process has threads. The idle times are part of the result, and memory that
    goes back to the system and is fetched again would be most of what is measured. A
    `DistributedOptimizer` of SGD uses `optim.SGD` itself from now on, whose steps can be recorded.

    Args:
        role: of this process.
        shards: classes whose `forward(x_rref, i)` is called over RPC, for micro-batch `i`: from the
            first to the last of its layers they compute.
    """
    keep_memory()
    if not timeline.is_on():  # by `python -m tracing`
        timeline.start(role)
    for shard in shards:
        for copy in _copies_of(shard):
            _record_shard(copy)
    _record_steps()


def record_stages(role: str, stage_class: type) -> None:
    """Record what a schedule calls in this process: the stages' forwards and backwards.

    A zero-bubble schedule calls two backwards: for the inputs, and for the weights. Stage 0, whose
    input has no gradient, has nothing to do in the first one, and all of it in the second one.

    Args:
        role: of this process.
        stage_class: `torch.distributed.pipelining.PipelineStage`.
    """
    record_work(role)

    def record(name, kind_of):
        compute = getattr(stage_class, name)

        @functools.wraps(compute)
        def recorded(stage, number, *args, **kwargs):
            started = time.time()
            result = compute(stage, number, *args, **kwargs)
            _wait_for(stage.device)
            if kind := kind_of(stage, **kwargs):
                timeline.add(kind, started, time.time(), micro_batch=number,
                             stage=stage.stage_index)
            return result

        setattr(stage_class, name, recorded)

    record("forward_one_chunk", lambda stage, **_: "forward")
    record("backward_one_chunk", lambda stage, full_backward=True, **_: (
        "backward" if full_backward or not stage.is_first else None))
    record("backward_weight_one_chunk", lambda stage, **_: (
        "backward" if stage.is_first else "weight gradients"))


def fetch_work(workers: Sequence[str]) -> Spans:
    """Fetch what the workers have recorded, over RPC; return it with the spans of this process."""
    spans = timeline.recorded()
    for worker in workers:
        spans |= rpc.rpc_sync(worker, timeline.recorded)
    return spans


def gather_work() -> Spans:
    """Gather from all ranks of the process group what they have recorded."""
    recorded = [None] * dist.get_world_size()
    dist.all_gather_object(recorded, timeline.recorded())
    return {role: spans for of_rank in recorded for role, spans in of_rank.items()}


def _record_shard(shard_class: type[nn.Module]) -> None:
    """Record forward and backward of the layers of each shard that will be made."""
    init, forward = shard_class.__init__, shard_class.forward
    here = threading.local()  # of each thread: its micro-batch, and the beginning of the forward

    def begin(_, inputs):
        here.x, here.where, here.started = inputs[0], timeline.here(), time.time()

    def end(module, _, out):
        _wait_for(out.device)
        timeline.add("forward", here.started, time.time(), here.where, micro_batch=here.number)
        if out.requires_grad:
            _record_backward(here.x, out, here.where, here.number)
        here.x = None

    @functools.wraps(init)
    def recorded_init(shard, *args, **kwargs):
        init(shard, *args, **kwargs)
        layers = list(shard.children())
        layers[0].register_forward_pre_hook(begin)
        layers[-1].register_forward_hook(end)

    @functools.wraps(forward)
    def recorded_forward(shard, x_rref, i):
        here.number = i
        return forward(shard, x_rref, i)

    shard_class.__init__, shard_class.forward = recorded_init, recorded_forward


def _record_backward(x: torch.Tensor, out: torch.Tensor, where: list[list], number: int) -> None:
    """Record a backward from the gradient of `out` until the last one here.

    The last one is that of the input `x`, or, where that is an image and has none, those of the
    weights of the first layer.
    """
    started = []

    def begin(_):
        _wait_for(out.device)
        started.append(time.time())

    def end(*_):
        _wait_for(out.device)
        timeline.add("backward", started[0], time.time(), where, micro_batch=number)

    out.register_hook(begin)
    (x if x.requires_grad else _first_layer(out.grad_fn)).register_hook(end)


def _first_layer(node: torch.autograd.graph.Node) -> torch.autograd.graph.Node:
    """Return the node that is last in the backward: each layer's input is its first one."""
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _record_steps() -> None:
    """Record the steps of all optimizers in this process."""
    # In the place of torch's SGD, `DistributedOptimizer` would take a functional form, which never
    # calls `SGD.step`. Private: where this table is gone, there are no such forms, either.
    getattr(distributed_optim, "functional_optim_map", {}).pop(optim.SGD, None)
    here = threading.local()

    def begin(*_):
        here.started = time.time()

    def end(optimizer, *_):
        _wait_for(optimizer.param_groups[0]["params"][0].device)
        # RPC calls the optimizer of a `DistributedOptimizer` with no line of the lesson around it.
        where = timeline.here() or timeline.place_of(type(optimizer))
        timeline.add("step", here.started, time.time(), where)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def _copies_of(owner: type) -> set[type]:
    """Return a class of the lesson, and that of its name in the module: a script is `__main__`.

    Which of them this process makes is what the master calls it, a script or not.
    """
    path = Path(inspect.getsourcefile(owner))
    module = importlib.import_module(f"{path.parent.name}.{path.stem}")
    return {owner, getattr(module, owner.__name__)}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- what the spans say


def parts_of(spans: Spans, workers: Sequence[str], window: Window) -> dict[str, dict[str, float]]:
    """Divide one batch into its parts.

    Args:
        spans: of all processes.
        workers: the roles that compute: the first and the second half of the model.
        window: of the batch.

    Returns:
        `{worker: {part: seconds}}`, with all of `PARTS`.
    """
    pieces = {worker: [span for span in timeline.within(spans[worker], window)
                       if span["kind"] in WORK] for worker in workers}
    ends = {(worker, span["kind"], span["labels"].get("micro_batch")): span["end"]
            for worker in workers for span in pieces[worker]}
    last = {worker: max((span["end"] for span in pieces[worker] if span["kind"] != "step"),
                        default=window[0]) for worker in workers}
    return {worker: _of_worker(worker, workers, pieces[worker], ends, last, window)
            for worker in workers}


def _of_worker(worker: str, workers: Sequence[str], pieces: list[dict],
               ends: dict[tuple, float], last: dict[str, float],
               window: Window) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    start, end = window
    edges = sorted({start, end, *(span[edge] for span in pieces for edge in ("start", "end"))})
    for a, b in itertools.pairwise(edges):
        kinds = {WORK[span["kind"]] for span in pieces if span["start"] <= a and b <= span["end"]}
        if {"forward", "backward"} <= kinds:
            parts["both"] += b - a
        elif kinds:
            parts[min(kinds & {"forward", "backward"} or kinds)] += b - a
        else:
            part, until = _waits_for(worker, workers, pieces, ends, last, b)
            waited = min(max(until - a, 0.0), b - a)
            parts[part] += waited
            parts["messages"] += b - a - waited
    return parts


def _waits_for(worker: str, workers: Sequence[str], pieces: list[dict], ends: dict[tuple, float],
               last: dict[str, float], until: float) -> tuple[str, float]:
    """Return what a gap that ends at `until` is, and when the other worker had done its share."""
    first, second = workers
    piece = next((span for span in pieces if span["start"] == until), None)
    before = {span["kind"] for span in pieces if span["start"] < until}
    if piece is None or WORK[piece["kind"]] == "step" and until >= last[worker]:
        return "last", last[first if worker == second else second]
    kind, number = piece["kind"], piece["labels"].get("micro_batch")
    if kind == "forward":
        part = "between" if "forward" in before else "first"
        return part, ends.get((first, kind, number), until) if worker == second else 0.0
    part = "between" if "backward" in before else "turn"
    waits = worker == first and kind == "backward"
    return part, ends.get((second, kind, number), until) if waits else 0.0


def rows_of(spans: Spans, workers: Sequence[str], num_splits: list[int],
            windows: list[list[Window]]) -> list[dict]:
    """Take the medians of each part over the timed batches, for each number of micro-batches.

    Returns:
        `[{"num_split": 4, worker: {part: seconds}}]`.
    """
    rows = []
    for num_split, of_split in zip(num_splits, windows, strict=True):
        batches = [parts_of(spans, workers, window) for window in of_split]
        rows.append({"num_split": num_split, **{
            worker: {part: statistics.median(batch[worker][part] for batch in batches)
                     for part in PARTS} for worker in workers}})
    return rows
