"""What `--check` records of single_machine.py: each step of each training, on a clock of its own.

The other program makes its steps beside the lesson's, and of every tensor two numbers are kept: see
recording.py.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from model_parallel_resnet import single_machine as lesson
from model_parallel_resnet.recording import furthest, state


class Recorder:
    """Listens to each step of each training, and gives the lesson another clock.

    `ours` and `theirs` have a dict for each step: its "data"; the "weights" and the running
    "statistics" after it, see `furthest`; the "counts" of batches that each BatchNorm has seen. In
    `theirs` are also its "row" and its "loss". `events` says when the lesson has read the clock.

    Args:
        alone: the steps of the other program, from `single_process`.
    """

    def __init__(self, alone):
        self.alone = alone
        self.ours, self.theirs, self.events = [], [], []
        self.now, self.model = {}, None  # the data of the step under way, and what is trained
        self.trainings, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def installed(self, resnet50):
        """Record what the lesson does inside, with `resnet50` in the place of torchvision's."""
        train, synchronize = lesson.train, lesson.synchronize

        def recorded_train(model, *others):
            self.model = model
            losses = train(model, *others)
            self.trainings += 1
            self.seconds += self.trainings  # all trainings take different times
            self.events.append("train")
            return losses

        def recorded_synchronize(devices):
            self.events.append("synchronize")
            synchronize(devices)

        def perf_counter():
            self.events.append("clock")
            return self.seconds

        torchvision = SimpleNamespace(models=SimpleNamespace(resnet50=resnet50))
        hooks = [register_module_forward_pre_hook(self.before_forward),
                 register_optimizer_step_post_hook(self.after_step)]
        try:
            with mock.patch.multiple(
                    lesson, train=recorded_train, synchronize=recorded_synchronize,
                    time=SimpleNamespace(perf_counter=perf_counter),
                    import_torchvision=lambda: torchvision):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def before_forward(self, module, inputs):
        """A batch comes to the model, or its outputs to the loss."""
        if module is self.model:
            self.now["images"] = inputs[0].detach().cpu().clone()
        elif isinstance(module, torch.nn.MSELoss):
            self.now["targets"] = inputs[1].detach().cpu().clone()

    def after_step(self, *_):
        """Let the other program make its step, and compare."""
        ours, self.now = {"data": self.now}, {}
        self.ours.append(ours)
        theirs = next(self.alone, None)
        if theirs is None:  # our step is one too many
            return
        self.theirs.append(theirs)
        model = state(self.model)
        ours["weights"], theirs["weights"] = furthest(
            dict(zip(theirs["weights"], model["weights"], strict=True)), theirs["weights"])
        ours["statistics"], theirs["statistics"] = furthest(
            {f"BatchNorm {i}": norm["running"] for i, norm in enumerate(model["norms"])},
            theirs["statistics"])
        ours["counts"] = [norm["count"] for norm in model["norms"]]
