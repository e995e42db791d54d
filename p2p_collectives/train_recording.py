"""What `train.py --check` records of its trainings: the lesson's own, in its own processes.

Every rung trains once; then one goes on from the checkpoint that it has written after its first
epoch. PyTorch's hooks see each forward and each step, and all of it is in float64.
"""

import shutil
import time
from argparse import Namespace
from unittest import mock

import torch
import torch.distributed as dist
from common import checkpoint
from common.oracle import fingerprints, flat, load_float64
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from p2p_collectives import train as lesson

RUNGS = ("per_parameter", "flat", "ddp")
RESUMED = "ddp"  # goes on from its first epoch, as the training "resumed"


class Recorder:
    """What one rank does: its `steps` of each training, and what each has `reported` in the end."""

    def __init__(self):
        self.steps, self.reported = {}, {}
        self.step = {}  # the one that is being made

    def begin(self, training):
        """From now on, this training runs."""
        self.training, self.steps[training] = training, []

    def forward(self, module, inputs, output):
        """After the forward of any module."""
        if isinstance(module, lesson.Net) and module.training and torch.is_grad_enabled():
            self.step["images"] = fingerprints(inputs[0])

    def stepped(self, optimizer, *_):
        """After any optimizer's step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        settings = optimizer.param_groups[0]
        self.step |= {"gradients": flat([p.grad for p in parameters]), "weights": flat(parameters),
                      "settings": [settings[name] for name in ("lr", "momentum", "nesterov")],
                      "time": time.perf_counter()}
        self.steps[self.training].append(self.step)
        self.step = {}


def record_trainings(rank, world_size, args):
    """Run the lesson with a recorder, once for each rung and once resumed.

    Returns:
        On rank 0, for each rank its `steps` and what it `reported`, both by training; elsewhere
        nothing of use.
    """
    torch.set_default_dtype(torch.float64)
    recorder, everyone = Recorder(), [None] * world_size
    honest_run, honest_loss, honest_save = lesson.run, F.nll_loss, checkpoint.save
    first_epoch = args.checkpoint.with_name("first_epoch.pt")
    resuming = {"sync": RESUMED, "resume": True, "checkpoint": first_epoch}

    def run_all(rank, size, args):
        for training, flags in (*((rung, {"sync": rung}) for rung in RUNGS), ("resumed", resuming)):
            recorder.begin(training)
            torch.manual_seed(rank)  # nothing may depend on what was drawn before
            began = time.perf_counter()
            metrics = honest_run(rank, size, Namespace(**{**vars(args), **flags}))
            recorder.reported[training] = {**metrics, "took_s": time.perf_counter() - began}
        mine = {"steps": recorder.steps, "reported": recorder.reported}
        dist.gather_object(mine, everyone if rank == 0 else None)
        return metrics

    def recorded_loss(output, target, **options):
        loss = honest_loss(output, target, **options)
        recorder.step |= {"labels": target.cpu(), "loss": loss.item()}
        return loss

    def save_and_keep_the_first(args, state):
        honest_save(args, state)
        if len(state["epochs"]) == 1:
            shutil.copy(args.checkpoint, first_epoch)

    hooks = [register_module_forward_hook(recorder.forward),
             register_optimizer_step_post_hook(recorder.stepped)]
    with (mock.patch.object(lesson, "run", run_all),
          mock.patch.object(lesson, "load_data", load_float64),
          mock.patch.object(F, "nll_loss", recorded_loss),
          mock.patch.object(checkpoint, "save", save_and_keep_the_first)):
        lesson.run_worker(rank, world_size, args)
    for hook in hooks:
        hook.remove()
    return everyone
