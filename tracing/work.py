"""Records from outside what a process computes: bars of forward, loss, backward, step.

    work.start()    in each process, before messages.start

    forward, loss   the outermost call of a module in a thread, or that of RPC around it (merge.py)
    backward        of torch; with distributed autograd, in each process that of its own forwards
    step            of an optimizer, and of a `DistributedOptimizer` where it is called
    env.step        of an environment of gymnasium
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import internal, rref_proxy
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from tracing import messages, timeline

_backwards = []  # that are going on, of torch: when they began


class Here(threading.local):
    """Holds what a thread is in."""

    def __init__(self) -> None:
        # Of modules, the outermost first: when, after how many waits, and the forwards within it
        # that go back by distributed autograd.
        self.calls = []
        self.steps = []  # of optimizers: when
        self.averages = False  # whether DDP averages the gradients of the next backward


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


def _add(kind: str, started: float, name: str | None = None, where: list | None = None,
         run: int | None = None) -> None:
    """Record that something ends now."""
    messages.write("bar", run or messages.here.run, {
        "kind": kind, "start": started, "end": time.time(), "thread": threading.get_ident(),
        "where": timeline.here() if where is None else where,
        "labels": {"name": name} if name else {}})


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


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    started = _here.steps.pop()
    if not _here.steps:
        _add("step", started, type(optimizer).__name__)


def _call(module: nn.Module, _: tuple) -> None:
    if isinstance(module, DistributedDataParallel):
        _here.averages = module.require_backward_grad_sync and torch.is_grad_enabled()
    calls = _here.calls
    if calls and calls[0][2] is None:  # most calls: they must cost next to nothing
        calls.append(None)
    else:
        calls.append((time.time(), messages.here.waits, [] if messages.has_context() else None))


def _called(module: nn.Module, _: tuple, result: Any) -> None:
    call = _here.calls.pop()
    if call is None:
        return
    started, waits, forwards = call
    kind, name = "forward", type(module).__name__
    if type(module).__module__ == nn.modules.loss.__name__:
        kind, forwards = "loss", None
    # One that has waited may be elsewhere in part: then the modules within it go back here.
    elif forwards is not None and waits == messages.here.waits:
        forwards = [(result, name, _place(module))]
    if _here.calls:
        _here.calls[-1][2].extend(forwards or ())
        return
    _add(kind, started, name, _place(module))
    for forward in forwards or ():
        _record_backward(*forward)


def _place(module: nn.Module) -> list[list]:
    return timeline.here() or timeline.place_of(type(module).forward)


def _run(function: Callable) -> Callable:
    """Let a forward that RPC calls by its name be a call of the module."""
    def run(call):
        by_name = getattr(call, "func", None) is rref_proxy._local_invoke
        module = call.args[0].local_value() if by_name and call.args[1] == "forward" else None
        if not isinstance(module, nn.Module):
            return function(call)
        _call(module, ())
        result = function(call)
        _called(module, (), result)
        return result

    return run


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


def _record_backward(result: Any, name: str, where: list[list]) -> None:
    """Record the backward of a forward: from the gradient of its result to its weights' last one.

    Args:
        result: a tensor, or a tuple that begins with one; nothing is recorded without a graph.
        name, where: of the forward.
    """
    out, run = result[0] if isinstance(result, tuple) else result, messages.here.run
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
            _add("backward", started[0], name, where, run)

    out.register_hook(begin)
    for node in nodes:
        node.register_hook(one_is_done)
