"""Records from outside what a process computes: bars of forward, loss, backward, step.

    work.start()    in each process, before messages.start

    forward, loss   the outermost call of a module in a thread; or all of a function that RPC runs,
                    if nothing in it waits, and forwards are all that it does
    backward        of torch; with distributed autograd, in each process that of its own forwards
    step            of an optimizer, and of a `DistributedOptimizer` where it is called
    env.step        of an environment of gymnasium

A kind that a lesson records in a process itself (`timeline.add`) is not recorded there twice.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common.tracing import messages, timeline
from common.tracing.messages import here as thread
from torch import nn
from torch.distributed import autograd
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import internal, rref_proxy
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

Forward = tuple[Any, list, str]  # its result, its place, its name
_backwards = []  # that are going on: when they began


class Here(threading.local):
    """Holds what a thread is in."""

    def __init__(self) -> None:
        self.calls = []  # of modules, the outermost first: when, after how many waits, its forwards
        self.steps = []  # of optimizers: when
        self.averages = False  # DDP the gradients, in the next backward
        self.run = None  # what RPC runs here: its forwards so far, while there is nothing else


_here = Here()


def start() -> None:
    """Record the work of this process from now on."""
    modules.register_module_forward_pre_hook(_call)
    modules.register_module_forward_hook(_called, always_call=True)
    optimizers.register_optimizer_step_pre_hook(lambda *_: _here.steps.append(time.time()))
    optimizers.register_optimizer_step_post_hook(_stepped)
    messages.replace(DistributedOptimizer, "step", lambda step: _recorded(step, "step"))
    messages.replace(torch.autograd, "backward", _backward)
    messages.replace(autograd, "backward", lambda function: _backward(function, remote=True))
    messages.replace(internal, "_run_function", _run)
    for name in ("make", "make_vec") if "gymnasium" in sys.modules else ():
        messages.replace(sys.modules["gymnasium"], name, _make)


def _add(kind: str, started: float, where: list | None = None, name: str | None = None,
         forwards: list[Forward] = ()) -> None:
    """Record that something ends now, and the backwards of its forwards, which are to come."""
    bar = {"kind": kind, "start": started, "end": time.time(),
           "where": timeline.here() if where is None else where,
           "labels": {"name": name} if name else {}, "thread": threading.get_ident()}
    waits, bars = _here.run or (None, None)
    if kind == "forward" and waits == thread.waits:
        bars.append((bar, forwards))
    else:
        _end_run()
        _write(bar, forwards)


def _end_run() -> None:
    """Let the forwards in what RPC runs be bars of their own, and what follows, too."""
    (_, bars), _here.run = _here.run or (None, []), None
    for bar, forwards in bars:
        _write(bar, forwards)


def _write(bar: dict, forwards: list[Forward]) -> None:
    messages.write("bar", bar, thread.run)
    for forward in forwards:
        _record_backward(*forward)


def _recorded(function: Callable, kind: str) -> Callable:
    def recorded(*args, **kwargs):
        started = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            _add(kind, started)

    return recorded


def _make(function: Callable) -> Callable:
    def make(*args, **kwargs):
        env = function(*args, **kwargs)
        env.step = _recorded(env.step, "env.step")
        return env

    return make


# --- forward


def _call(module: nn.Module, _: tuple) -> None:
    if isinstance(module, DistributedDataParallel):
        _here.averages = module.require_backward_grad_sync and torch.is_grad_enabled()
    _here.calls.append((time.time(), thread.waits, []))


def _called(module: nn.Module, _: tuple, result: Any) -> None:
    started, waits, forwards = _here.calls.pop()
    name = type(module).__name__
    if type(module).__module__ == nn.modules.loss.__name__:
        kind, forwards = "loss", []
    else:
        kind = "forward"
        # One that has waited may be elsewhere in part: then the modules within go back here.
        if waits == thread.waits and _is_distributed():
            forwards = [(result, timeline.here(), name)]
    if _here.calls:
        _here.calls[-1][2].extend(forwards)
    else:
        _add(kind, started, name=name, forwards=forwards)


def _is_distributed() -> bool:
    """Return whether this process takes part in a context of distributed autograd."""
    return autograd._get_debug_info()["num_autograd_contexts"] > 0


def _run(function: Callable) -> Callable:
    """Record what RPC runs as one forward, if it is nothing else."""
    def run(call):
        owner = None  # of a forward that RPC calls, not the module
        if (getattr(call, "func", None) is rref_proxy._local_invoke
                and call.args[1] == "forward"):
            owner = call.args[0].local_value()
        started, _here.run = time.time(), (thread.waits, [])
        result = function(call)
        waits, bars = _here.run or (None, [])
        if waits != thread.waits or not (bars or isinstance(owner, nn.Module)):
            _end_run()
            return result
        _here.run = None
        where = bars[0][0]["where"] if bars else []
        *_, owner_name, name = ["", "forward", *(where[0][2].split(".") if where else ())]
        if name == "forward":  # then its class says more
            name = (bars[0][0]["labels"]["name"] if len(bars) == 1
                    else owner_name or type(owner).__name__)
        _add("forward", started, where, name,
             [(result, where, name)] if _is_distributed() else [])
        return result

    return run


# --- backward, step


def _backward(function: Callable, remote: bool = False) -> Callable:
    def backward(*args, **kwargs):
        averages, _here.averages = _here.averages, False
        if remote and not averages:  # then it waits, and each process has bars of its own
            return function(*args, **kwargs)
        started = time.time()
        _backwards.append(started)
        try:
            return function(*args, **kwargs)
        finally:
            _backwards.remove(started)
            _add("backward with all_reduce" if averages else "backward", started)

    return backward


def _record_backward(result: Any, where: list, name: str) -> None:
    """Record the backward of a forward: from the gradient of its result to its weights' last one.

    Args:
        result: a tensor, or a tuple that begins with one; nothing is recorded without a graph.
        where, name: of the forward.
    """
    out, run = result[0] if isinstance(result, tuple) else result, thread.run
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
        if not _backwards:  # which are bars themselves
            started.append(time.time())

    def one_is_done(*_):
        nonlocal left
        with lock:
            left -= 1
        if left == 0 and started:
            messages.write("bar", {"kind": "backward", "start": started[0], "end": time.time(),
                                   "where": where, "labels": {"name": name},
                                   "thread": threading.get_ident()}, run)

    out.register_hook(begin)
    for node in nodes:
        node.register_hook(one_is_done)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    started = _here.steps.pop()
    if not _here.steps:
        _add("step", started, name=type(optimizer).__name__)
