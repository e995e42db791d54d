"""For how long a stage of schedules.py computes: the rest of a batch is the pipeline's bubble."""

import functools
from collections.abc import Callable

from common.report import Clock

import torch
from torch.distributed.pipelining import PipelineStage


def timed(compute: Callable) -> Callable:
    """Return a method of `TimedStage` that calls `compute` and measures how long it takes."""
    @functools.wraps(compute)
    def method(stage: "TimedStage", *args: object, **kwargs: object) -> object:
        with stage.busy:
            result = compute(stage, *args, **kwargs)
            if stage.device.type == "cuda":  # its kernels are only queued so far
                torch.cuda.synchronize(stage.device)
        return result

    return method


class TimedStage(PipelineStage):
    """A stage that adds up the seconds in which it computes; its schedule calls these methods."""

    busy = Clock()  # of this process: one for all its stages
    forward_one_chunk = timed(PipelineStage.forward_one_chunk)
    backward_one_chunk = timed(PipelineStage.backward_one_chunk)
    backward_weight_one_chunk = timed(PipelineStage.backward_weight_one_chunk)
