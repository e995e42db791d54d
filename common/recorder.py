"""Watch a program while it runs in its own processes.

    with Recorder() as recorder:
        @recorder.around(Agent, "run_episode")
        def run_episode(original, agent, batch):     # called instead of it
            started = time.perf_counter()
            result = original(agent, batch)
            seconds.append(time.perf_counter() - started)
            return result

        recorder.on_forward(after=lambda module, inputs, output: ...)
        recorder.on_step(after=lambda optimizer: steps.append(named_weights(model)))
        program.run_worker(rank, world_size, args)

Nothing in the program knows that it is recorded. At the end of the `with`, everything is as
before.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer


class Recorder(contextlib.ExitStack):
    """Functions and hooks in a program, which leave at the end of the block."""

    def put(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of a module, a class or an object."""
        self.enter_context(mock.patch.object(owner, name, value))

    def around(self, owner: object, name: str) -> Callable[[Callable], Callable]:
        """Decorate the function that is called instead of `owner.name`.

        Its first argument is the original function. It has the original's name, so RPC finds it.
        """
        original = getattr(owner, name)
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)

        def decorate(function: Callable) -> Callable:
            @functools.wraps(original)
            def recorded(*args, **kwargs):
                return function(original, *args, **kwargs)

            self.put(owner, name, staticmethod(recorded) if is_static else recorded)
            return function

        return decorate

    def guard(self, owner: type, name: str) -> None:
        """Let the dict `owner.name` get entries only from the holder of the owner's `lock`.

        Another thread gets a RuntimeError.
        """

        class Guarded(dict):
            def __init__(self, entries, lock):
                super().__init__(entries)
                self.lock = lock

            def __setitem__(self, key, value):
                if not self.lock.locked():
                    raise RuntimeError(f"self.{name} is changed without self.lock")
                super().__setitem__(key, value)

        place = f"guarded {name}"
        guarded = property(
            lambda self: vars(self)[place],
            lambda self, entries: vars(self).update({place: Guarded(entries, self.lock)}))
        self.enter_context(mock.patch.object(owner, name, guarded, create=True))

    def on_forward(self, before: Callable | None = None, after: Callable | None = None) -> None:
        """Call `before(module, inputs)` and `after(module, inputs, output)` for every module."""
        if before:
            self.callback(every_module.register_module_forward_pre_hook(before).remove)
        if after:
            self.callback(every_module.register_module_forward_hook(after).remove)

    def on_step(self, before: Callable | None = None, after: Callable | None = None) -> None:
        """Call `before(optimizer)` and `after(optimizer)` at each step of every optimizer."""
        if before:
            self.callback(every_optimizer.register_optimizer_step_pre_hook(
                lambda optimizer, *_: before(optimizer)).remove)
        if after:
            self.callback(every_optimizer.register_optimizer_step_post_hook(
                lambda optimizer, *_: after(optimizer)).remove)

    def on_context(self, after: Callable[[int, tuple[float, float]], Any]) -> None:
        """Call `after(context_id, (entered, left))` at the end of each context of dist autograd.

        The context still holds the gradients. The times are those of `time.perf_counter`. A context
        that ends with an exception is no step.
        """

        class Context(dist_autograd.context):
            def __enter__(self):
                self.entered, self.id = time.perf_counter(), super().__enter__()
                return self.id

            def __exit__(self, *error):
                if error[0] is None:
                    after(self.id, (self.entered, time.perf_counter()))
                super().__exit__(*error)

        self.put(dist_autograd, "context", Context)

    def gather_at_end(self, recorded: Callable[[], Any]) -> list[Any]:
        """Return a list that holds `recorded()` of each rank once the program leaves its group."""
        everyone = []

        @self.around(dist, "destroy_process_group")
        def gather_and_leave(leave):
            everyone.extend(gathered(recorded()))
            leave()

        return everyone


class Barriers:
    """A record of the ranks that reach each `dist.barrier()`; barriers are numbered from 1.

    Attributes:
        passed: Number of barriers that this rank has reached.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.passed = self.asked = 0

        @recorder.around(dist, "barrier")
        def noted(barrier, *group, **options):
            self.passed += 1
            # `set` would not wait until the store has it.
            self._store().add(self._place(dist.get_rank(), self.passed), 1)
            return barrier(*group, **options)

    def has(self, rank: int, number: int) -> bool:
        """Return whether a rank has reached the barrier of this number."""
        return self._store().check([self._place(rank, number)])

    def all_had_come(self) -> bool:
        """Return whether all ranks have reached a new barrier since the last call."""
        is_new, self.asked = self.passed > self.asked, self.passed
        return is_new and all(self.has(rank, self.passed) for rank in range(dist.get_world_size()))

    @staticmethod
    def _store() -> dist.Store:
        return dist.distributed_c10d._get_default_store()  # of the current group

    @staticmethod
    def _place(rank: int, number: int) -> str:
        return f"rank {rank} is at barrier {number}"


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the weights of a module, by name."""
    named = dict(module.named_parameters())
    return dict(zip(named, copies(named.values()), strict=True))


def named_gradients(module: nn.Module, context_id: int | None = None) -> dict[str, torch.Tensor]:
    """Copy the gradients of a module by name: from a context, or else from `.grad`.

    Parameters without a gradient are left out.
    """
    in_context = {} if context_id is None else dist_autograd.get_gradients(context_id)
    named = {name: in_context.get(parameter, parameter.grad)
             for name, parameter in module.named_parameters()}
    named = {name: gradient for name, gradient in named.items() if gradient is not None}
    return dict(zip(named, copies(named.values()), strict=True))


def current_context() -> int | None:
    """Return the distributed autograd context of this thread, or None."""
    try:
        return dist_autograd._current_context()._context_id()
    except RuntimeError:
        return None


def gathered(recorded: Any) -> list[Any]:
    """Gather an object from each rank, in rank order; every rank of the group calls this."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, recorded)
    return everyone
