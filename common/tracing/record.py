"""A timeline of a lesson that has no line for it: its functions are wrapped while it runs.

    python -m common.tracing param_server/main.py --epochs 2          with the program's own flags
    torchrun --nproc_per_node 3 -m common.tracing param_server/main.py --epochs 2

What is recorded stands beside the program, in its `results.py`:

    SPANS = {"param_server.main:SGD.step": ["step"],              a function: the kind of its spans
             "param_server.main:Net.forward": ["forward", "backward"]}

The second kind is that of the backward of what the function returns. A third entry names the line
of the lesson where there is none on the stack: "HybridModel.forward" calls a layer of torch's on
another process. At the end, rank 0 gathers the spans of all processes and writes `timeline.html`,
`timeline.json` and `timeline.png`. A program without results of its own has those of its folder. A
`shown_first(spans_by_role, args)` beside `SPANS` chooses what the picture shows.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import common.program
import torch
import torch.distributed as dist
from common import report
from common.cli import refuse
from common.tracing import page, timeline
from torch.distributed import rpc

STEPS_SHOWN = 3  # at first: the last ones
PLAY_SHOWN_S = 0.02  # at first, where episodes are played: the end of the last one
STEPS = ("step", "finish_episode")


class Traced:
    """Runs the `run_worker` of a program and records its spans; `launch` takes it to each process.

    Args:
        program: the name of its module, "param_server.main".
    """

    def __init__(self, program: str) -> None:
        self.program = program

    def __call__(self, rank: int, world_size: int, args: Namespace) -> dict | None:
        """Run it; see `launch`."""
        program = importlib.import_module(self.program)
        roles = [program.role_name(rank, world_size) for rank in range(world_size)]
        wrap(spans_of(self.program), program)
        timeline.start(roles[rank])
        gathered = gather_at_the_end()
        metrics = program.run_worker(rank, world_size, args)
        if rank == 0 and any(gathered.values()):
            spans = {role: gathered[role] for role in roles}
            title = f"{self.program.replace('.', '/')}.py, {world_size} processes"
            choose = getattr(results_of(self.program), "shown_first", None)
            shown = choose(spans, args) if choose else shown_first(spans)
            page.save(spans, args.output_dir, title, shown, report.machine(args))
        return metrics


def results_of(program: str) -> ModuleType | None:
    """Import the results of a program, "param_server.main"; None if there is no such program."""
    path = timeline.ROOT / f"{program.replace('.', '/')}.py"
    module = importlib.import_module(program) if path.is_file() else None
    if not hasattr(module, "build_parser"):
        return None
    if getattr(module, "finish", None) and module.finish.__module__ != program:
        return sys.modules[module.finish.__module__]
    results = common.program.belonging_to(path, "results")
    return importlib.import_module(f"{program.partition('.')[0]}.{results}")


def spans_of(program: str) -> dict[str, list[str]] | None:
    """Return the `SPANS` of a program's results; None if there are none."""
    return getattr(results_of(program), "SPANS", None)


def wrap(spans: dict[str, list[str]], program: ModuleType) -> None:
    """Record each function that `SPANS` names, in this process, whenever it is called."""
    for name, (kind, *more) in spans.items():
        module, _, attribute = name.partition(":")
        owner, _, last = attribute.rpartition(".")
        owner = pkgutil.resolve_name(f"{module}:{owner}")
        of_backward, place = (*more, None, None)[:2]
        function = getattr(owner, last)
        own = _place(pkgutil.resolve_name(f"{program.__name__}:{place}") if place else function)
        if not own and inspect.isclass(owner):
            own = _place(owner)  # a class of the lesson that inherits the function
        # The bar shows what its kind does not: the class, or the function.
        label = attribute.split(".")[0] if last == kind else last
        labels = {} if label == kind else {"name": label}
        setattr(owner, last, _recorded(function, kind, of_backward, own, labels))


def _place(definition: object) -> list[list]:
    """Return where a function or class of the lesson begins, like `timeline.here`; [] of others."""
    try:
        definition = inspect.unwrap(definition)
        path = timeline.lesson_file(inspect.getsourcefile(definition) or "")
    except TypeError:  # built into torch
        path = None
    if path is None:
        return []
    return [[path, inspect.getsourcelines(definition)[1], definition.__qualname__]]


def _recorded(function: Callable, kind: str, of_backward: str | None, own: list,
              labels: dict) -> Callable:
    @functools.wraps(function)
    def recorded(*args, **kwargs):
        where, started = own or timeline.here(), time.time()
        try:
            result = function(*args, **kwargs)
        finally:
            timeline.add(kind, started, time.time(), where, **labels)
        if of_backward:
            _record_backward(result, of_backward, where, labels)
        return result

    # Otherwise RPC would find the function behind the wrapper, and call that.
    assert not hasattr(recorded, "_wrapped_async_rpc_function"), f"{function}: wrap what it calls"
    return recorded


def _record_backward(result: object, kind: str, where: list, labels: dict) -> None:
    """Record the backward of a function: from the gradient of its result to its weights' last one.

    Args:
        result: a tensor, or a tuple that begins with one; nothing is recorded without a graph.
        kind, where, labels: of the span.
    """
    out = result[0] if isinstance(result, tuple) else result
    if not isinstance(out, torch.Tensor) or out.grad_fn is None:
        return
    nodes, todo = [], [out.grad_fn]
    seen = {out.grad_fn}
    while todo:
        node = todo.pop()
        following = {child for child, _ in node.next_functions if child is not None}
        if any(type(child).__name__ == "AccumulateGrad" for child in following):
            nodes.append(node)
        todo += following - seen
        seen |= following
    started, left, lock = [], len(nodes), threading.Lock()

    def begin(_):
        started.append(time.time())

    def one_is_done(*_):
        nonlocal left
        with lock:
            left -= 1
        if left == 0 and started:
            timeline.add(kind, started[0], time.time(), where, **labels)

    out.register_hook(begin)
    for node in nodes:
        node.register_hook(one_is_done)


def gather_at_the_end() -> dict[str, list[dict]]:
    """Let this process, when it leaves, exchange its spans with all others.

    Returns:
        `{role: spans}`, empty until then.
    """
    gathered = {}
    leave_rpc, leave_group = rpc.shutdown, dist.destroy_process_group

    def shutdown(*args, **kwargs):
        # What shutdown() itself waits with, twice: nobody has anything left to do, and now the
        # spans. Names of torch without a promise; the test of the timelines uses them.
        rpc.api._all_gather(None, timeout=0)
        for of_role in rpc.api._all_gather(timeline.recorded(), timeout=0).values():
            gathered.update(of_role)
        leave_rpc(*args, **kwargs)

    def destroy_process_group(*args, **kwargs):
        # With RPC, which has the processes outside of the group too, there is nothing to do here.
        if not gathered and not rpc.api._is_current_rpc_agent_set():
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, timeline.recorded())
            for of_role in of_ranks:
                gathered.update(of_role)
        leave_group(*args, **kwargs)

    rpc.shutdown, dist.destroy_process_group = shutdown, destroy_process_group
    return gathered


def shown_first(spans_by_role: dict[str, list[dict]]) -> dict[str, tuple[float, float]] | None:
    """Choose the window of the last steps that all trainers make, or of the last episode's end.

    Args:
        spans_by_role: `{role: spans}`.

    Returns:
        `{caption: (start, end)}`, or None, which is everything, where there are not enough steps.
    """
    of_roles = {role: [span for span in spans
                       if span["kind"] in STEPS or span["labels"].get("name") in STEPS]
                for role, spans in spans_by_role.items()}
    # Of the role that is the first to be through: until then, all others train, too.
    steps = min(filter(None, of_roles.values()), key=lambda steps: steps[-1]["end"], default=[])
    last = steps[-1] if steps else {"kind": None}
    if last["kind"] == "finish_episode":
        return {"": (last["start"] - PLAY_SHOWN_S, last["end"])}
    ends = [span["end"] for span in steps if span["where"] == last["where"]][-STEPS_SHOWN - 1 :]
    return {"": (ends[0], ends[-1])} if len(ends) > STEPS_SHOWN else None


def main(argv: list[str] | None = None) -> dict | None:
    """Run a program with its timeline; return what its own `main` returns."""
    path, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    file = timeline.lesson_file(str(Path(path).resolve()))
    program = (file or "").removesuffix(".py").replace("/", ".")
    if spans_of(program) is None:
        refuse("give a program of a lesson that has SPANS in its results, such as "
               "param_server/main.py, and its flags", None)
    module = importlib.import_module(program)
    launch = common.program.launch
    common.program.launch = lambda run_worker, args, role_name: launch(
        Traced(program), args, role_name)
    try:
        return module.main(flags)
    finally:
        common.program.launch = launch
