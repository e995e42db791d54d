"""What a worker does beside the lesson: it keeps its memory, and writes its times on the timeline.

A kernel of a GPU is only queued by the line that calls it. Where the timeline is on, every span
here ends when the GPU has done its work.
"""

import contextlib
import time

import torch
from common import timeline
from common.session import keep_memory
from torch import optim


def start(role):
    """Call it before a process has threads. The idle times are part of the result."""
    keep_memory()
    timeline.start(role)


@contextlib.contextmanager
def span(kind, device, **labels):
    """A `with` block on the timeline, until `device` has done what the block has given it to do."""
    with timeline.span(kind, **labels):
        yield
        _wait_for(device)


def record_backward(x, out, micro_batch, **labels):
    """Record the backward of a shard: from the gradient of `out` until the last one here.

    The last one is that of the input `x`, or, where that is an image and has none, those of the
    weights of the first layer.
    """
    if not timeline.is_on() or not out.requires_grad:
        return
    started, where = [], timeline.here()  # hooks run without the lesson's lines around them

    def start(_):
        _wait_for(out.device)
        started.append(time.time())

    def end(*_):
        _wait_for(out.device)
        timeline.add("backward", started[0], time.time(), where, micro_batch=micro_batch,
                     **labels)

    out.register_hook(start)
    if x.requires_grad:
        x.register_hook(end)
    else:
        _first_layer(out.grad_fn).register_hook(end)


def record_weight_gradients(stage):
    """Record the second backward that a zero-bubble schedule calls, for the weights alone.

    The hooks of `record_backward` see the first one, for the input. Stage 0 has no input with a
    gradient: there, torch computes everything in the second one, and the hooks see that.
    """
    compute = stage.backward_weight_one_chunk

    def recorded(bwd_chunk_id, last_backward=False):
        with span("weight gradients", stage.device, micro_batch=bwd_chunk_id,
                  stage=stage.stage_index):
            compute(bwd_chunk_id, last_backward)

    if not stage.is_first:
        stage.backward_weight_one_chunk = recorded


class SGD(optim.SGD):
    """torch's SGD with its time on the timeline.

    `DistributedOptimizer` does not know this class, and leaves it as it is. What it knows, it
    compiles to TorchScript, where nothing can be recorded.
    """

    def step(self, closure=None):
        """Of the parameters of one worker."""
        with span("step", self.param_groups[0]["params"][0].device):
            return super().step(closure)


def _first_layer(node):
    """The node of the graph that is last in the backward: each layer's input is its first one."""
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _wait_for(device):
    if timeline.is_on() and device.type == "cuda":
        torch.cuda.synchronize(device)
