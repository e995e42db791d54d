"""Record from outside what a process computes: bars of forward, loss, backward, step.

    work.start()    in each process, before messages.start

    forward, loss   the outermost call of a module in a thread, or the RPC around it (merge.py)
    backward        torch's; with distributed autograd, each process has those of its own forwards
    step            an optimizer's, and a `DistributedOptimizer`'s in the process that calls it
    env.step        a gymnasium environment's
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn, optim
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tracing import messages
from tracing.events import here

NONE_GOES_BACK = ()  # value of `here.forwards` in a call whose backward pass is torch's own
_backwards = []  # start times of torch's running backward passes
# Private. Without them, the backward passes of distributed autograd have no bars.
_agent_is_set = getattr(rpc.api, "_is_current_rpc_agent_set", bool)
_debug_info = getattr(autograd, "_get_debug_info", dict)


def start() -> None:
    """Record the work of this process from now on."""
    messages.replace(nn.Module, "__call__", _call)
    messages.replace(DistributedDataParallel, "forward", _average)
    register_optimizer_step_pre_hook(_step)
    register_optimizer_step_post_hook(_stepped)
    messages.replace(DistributedOptimizer, "step", lambda step: _recorded(step, "step"))
    for name in ("backward", "grad"):
        messages.replace(torch.autograd, name, _backward)
    messages.replace(autograd, "backward", lambda function: _backward(function, remote=True))
    with suppress(AttributeError, ImportError):
        from torch.distributed.rpc import internal, rref_proxy

        local_invoke = rref_proxy._local_invoke
        messages.replace(internal, "_run_function", lambda function: _run(function, local_invoke))
    for name in ("make", "make_vec") if "gymnasium" in sys.modules else ():
        messages.replace(sys.modules["gymnasium"], name, _make)


def _recorded(function: Callable, kind: str) -> Callable:
    def recorded(*args, **kwargs):
        started = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            messages.recorder.bar(kind, started)

    return recorded


def _make(function: Callable) -> Callable:
    def make(*args, **kwargs):
        env = function(*args, **kwargs)
        env.step = _recorded(env.step, "env.step")
        return env

    return make


def _step(*_: object) -> None:
    here.steps += (time.time(),)


def _stepped(optimizer: optim.Optimizer, *_: object) -> None:
    *here.steps, started = here.steps
    if not here.steps:
        messages.recorder.bar("step", started, type(optimizer).__name__)


# --- forward and loss


def _call(function: Callable) -> Callable:
    """Record the outermost call of a module in a thread.

    Inside that call, `here.forwards` collects the forwards that go back by distributed autograd.
    """
    def call(module, *args, **kwargs):
        outer = here.forwards
        if outer is NONE_GOES_BACK:  # most calls: they must cost next to nothing
            return function(module, *args, **kwargs)
        started, waits = time.time(), here.waits
        here.forwards = forwards = [] if _has_context() else NONE_GOES_BACK
        try:
            result = function(module, *args, **kwargs)
        finally:
            here.forwards = outer
        kind, name, place = "forward", type(module).__name__, _place(module)
        if type(module).__module__ == nn.modules.loss.__name__:
            kind, forwards = "loss", NONE_GOES_BACK
        # A forward that has waited may be elsewhere in part. Then the modules in it go back here.
        elif forwards is not NONE_GOES_BACK and waits == here.waits:
            forwards = [(result, name, place)]
        if outer is not None:
            outer += forwards
            return result
        messages.recorder.bar(kind, started, name, place)
        for forward in forwards:
            _record_backward(*forward)
        return result

    return call


def _has_context() -> bool:
    """Return whether this process takes part in a context of distributed autograd."""
    return (torch.is_grad_enabled() and _agent_is_set()  # without an agent, torch raises an error
            and _debug_info().get("num_autograd_contexts", 0) > 0)


def _place(module: nn.Module) -> int:
    recorder = messages.recorder
    return recorder.place() or recorder.place_of(type(module).forward)


def _run(function: Callable, local_invoke: Callable) -> Callable:
    """Record a forward that RPC calls by its name like a call of the module."""
    def run(call):
        by_name = getattr(call, "func", None) is local_invoke and call.args[1] == "forward"
        module = call.args[0].local_value() if by_name else None
        if not isinstance(module, nn.Module):
            return function(call)
        return _call(lambda _: function(call))(module)

    return run


# --- backward


def _average(function: Callable) -> Callable:
    def forward(module, *args, **kwargs):
        here.averages = module.require_backward_grad_sync and torch.is_grad_enabled()
        return function(module, *args, **kwargs)

    return forward


def _backward(function: Callable, remote: bool = False) -> Callable:
    def backward(*args, **kwargs):
        averages, here.averages = here.averages, False
        if remote and not averages:  # it waits, and each process has bars of its own
            return function(*args, **kwargs)
        started = time.time()
        _backwards.append(started)
        try:
            return function(*args, **kwargs)
        finally:
            _backwards.remove(started)
            messages.recorder.bar("backward with all_reduce" if averages else "backward", started)

    return backward


def _record_backward(result: object, name: str, place: int) -> None:
    """Record the backward pass of a forward: from the gradient of its result to its last weight's.

    Args:
        result: Tensor, or a tuple that begins with one. Without a graph, nothing is recorded.
        name: Name of the module.
        place: Place of the forward.
    """
    out, run = result[0] if isinstance(result, tuple) else result, here.run
    if not isinstance(out, torch.Tensor) or out.grad_fn is None:
        return
    nodes, todo, seen = [], [out.grad_fn], {out.grad_fn}
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
            messages.recorder.bar("backward", started[0], name, place, run)

    out.register_hook(begin)
    for node in nodes:
        node.register_hook(one_is_done)
