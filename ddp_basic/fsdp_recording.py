"""Runs the loop of `fsdp.py` for its oracle, interrupts it, and keeps what it sees."""

import contextlib
import shutil
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ddp_basic import fsdp as lesson

STOPPED_IN = 2  # the epoch whose checkpoint is not finished


class StoppedError(Exception):
    """In place of a kill while a checkpoint is written."""


def copies(tensors):
    """What of each tensor is on this rank, on the CPU."""
    here = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return [tensor.detach().cpu().clone() for tensor in here]


class Recorder:
    """What one rank does in each step of each training; PyTorch's hooks call it."""

    def __init__(self):
        self.trainings, self.step, self.gathered = {}, {}, 0

    def begin(self, training):
        """From now on, this training runs."""
        self.steps, self.step = self.trainings.setdefault(training, []), {}

    def watch(self, model, optimizer):
        """Listen to a model and its optimizer."""
        model.register_forward_pre_hook(self.forward)
        optimizer.register_step_post_hook(lambda *_: self.stepped(model, optimizer))
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(lambda *_: self.note_gathered(model))

    def note_gathered(self, model):
        """Before the forward of a layer: how many numbers are here that are not a shard."""
        whole = sum(p.numel() for p in model.parameters() if not hasattr(p, "to_local"))
        self.gathered = max(self.gathered, whole)

    def forward(self, model, inputs):
        """Before the forward of the whole model."""
        self.step["inputs"] = inputs[0].detach().cpu().clone()

    def stepped(self, model, optimizer):
        """After the optimizer's step. What this rank has no state of, is empty."""
        if "loss" not in self.step:
            return  # get_state_dict makes a new optimizer's state with a step of nothing
        parameters = list(model.parameters())
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        states = [inner.state.get(parameter, {}) for parameter in parameters]
        self.step |= {"samples": [self.step.pop("inputs", []), self.step.pop("labels")],
                      "gathered": self.gathered,
                      "weights": copies(parameters),
                      "gradients": copies([parameter.grad for parameter in parameters])}
        for name, key in (("Adam's means", "exp_avg"), ("Adam's squares", "exp_avg_sq")):
            self.step[name] = copies([state.get(key, torch.empty(0)) for state in states])
        self.steps.append(self.step)
        self.step, self.gathered = {}, 0


@contextlib.contextmanager
def recorded(everyone, steps, args):
    """In here, the lesson trains as it does, and `full` once more: interrupted, and resumed.

    Args:
        everyone: a list, in which rank 0 gets the trainings of all ranks: `{name: steps}`.
        steps: of an epoch.
        args: the parsed flags, with `folder` and, to do nothing but go on from there, `resumed`.
    """
    recorder = Recorder()
    honest_train, honest_loss, honest_save = lesson.train, nn.functional.mse_loss, lesson.dcp.save

    def recorded_loss(outputs, labels, **options):
        loss = honest_loss(outputs, labels, **options)
        recorder.step |= {"labels": labels.cpu(), "loss": loss.item()}
        return loss

    def watched(way):
        def make(*place):
            model, optimizer = way(*place)
            recorder.watch(model, optimizer)
            return model, optimizer

        return make

    def torn_save(state, checkpoint_id, **options):
        """The second one is interrupted when all but one rank have written."""
        honest_save(state, checkpoint_id=checkpoint_id, **options)
        if len(recorder.steps) == STOPPED_IN * steps:
            if dist.get_rank() == 0:
                max(Path(checkpoint_id).glob("*.distcp")).unlink()
            raise StoppedError

    def train_and_interrupt(rank, world_size, sharding, args):
        def train(training, **flags):
            recorder.begin(training)
            return honest_train(rank, world_size, sharding, Namespace(**{**vars(args), **flags}))

        path = [args.folder]
        dist.broadcast_object_list(path)  # under torchrun, each process has made one up
        again = {} if args.resumed else {"folder": None}
        result = train("resumed" if args.resumed else sharding, **again)
        if sharding == "full" and not args.resumed:
            with (mock.patch.object(lesson.dcp, "save", torn_save),
                  contextlib.suppress(StoppedError)):
                train("stopped", folder=path[0])
            dist.barrier()
            if rank == 0:
                shutil.copytree(path[0], path[0].with_name("torn"))
            train("resumed", folder=path[0], resumed=True)
            args.left = sorted(entry.name for entry in path[0].iterdir())
        dist.gather_object(recorder.trainings, everyone if rank == 0 else None)
        return result

    with (mock.patch.object(lesson, "train", train_and_interrupt),
          mock.patch.object(lesson, "SAMPLES", args.local_batch_size),
          mock.patch.object(nn.functional, "mse_loss", recorded_loss),
          mock.patch.dict(lesson.WAYS, {name: watched(way) for name, way in lesson.WAYS.items()})):
        yield
