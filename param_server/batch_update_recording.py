"""What `--check` of the batched updates records of a training: the lesson's own, in its processes.

PyTorch's hooks see what the trainers compute with, and on the server the gradients and weights of
each step. All trainers are let in at the same moment: an addition without the lock would be seen.
"""

import threading
import time

import torch
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

from param_server import batch_update as lesson

MEETING_S = 10  # that the server waits for the gradients of all trainers, to add them at once


class Recording:
    """What a process sees of a training.

    On a trainer, `forwards`: images, labels, whether in training mode, the running statistics and
    the sums of each parameter that the model has then, when forward began and when backward ended.
    On the server, `steps`: mean gradients, and weights afterwards. `arrivals`: the ranks, in order.
    `locked`: for each addition, whether the lock was held. `final_statistics`, at the end.
    """

    def __init__(self):
        self.forwards, self.steps, self.arrivals, self.locked = [], [], [], []
        self.final_statistics = None


recording = Recording()  # of this process


def record_run(program, rank, world_size, args):
    """Run the worker of a program; what it returns, and the `Recording` of this process."""
    if rank == 0:
        record_server()
    else:
        record_trainer()
    return program.run_worker(rank, world_size, args), recording


def running_statistics(model):
    """The running means and variances of BatchNorm, by name."""
    return {name: buffer for name, buffer in model.named_buffers()
            if name.endswith(("running_mean", "running_var"))}


def flat(statistics):
    """All of these numbers, in one tensor on the CPU."""
    return torch.cat([tensor.flatten().cpu() for tensor in statistics.values()])


def sums_of(weights):
    """Of each parameter, the sum of its numbers and of their absolute values."""
    return torch.tensor([[tensor.detach().sum(), tensor.detach().abs().sum()]
                         for tensor in weights.values()])


def record_trainer():
    """Hooks on model and loss; what they saw comes back with the result of `run_trainer`."""
    honest = lesson.run_trainer

    def before_forward(module, inputs):
        if type(module).__name__ == "ResNet":
            if not recording.forwards:  # the gradient of the first parameter is the last one
                next(module.parameters()).register_post_accumulate_grad_hook(after_backward)
            recording.forwards.append({
                "began": time.perf_counter(),
                "images": inputs[0].cpu().clone(), "training": float(module.training),
                "statistics": flat(running_statistics(module)),
                "sums": sums_of(dict(module.named_parameters()))})
        elif type(module).__name__ == "MSELoss":
            recording.forwards[-1]["labels"] = inputs[1].cpu().clone()

    def after_backward(_):
        recording.forwards[-1]["ended"] = time.perf_counter()

    def run_trainer(*arguments):
        return {**honest(*arguments), "forwards": recording.forwards}

    every_module.register_module_forward_pre_hook(before_forward)
    lesson.run_trainer = run_trainer


def record_server():
    """A hook on the optimizer, and a wrapper around what the trainers call."""
    honest = lesson.run_ps

    def run_ps(server, args, trainer_class):
        named = dict(server.model.named_parameters())

        def after_step(*_):
            recording.steps.append({
                "gradients": {name: param.grad.clone() for name, param in named.items()},
                "weights": {name: param.detach().clone() for name, param in named.items()}})

        every_optimizer.register_optimizer_step_post_hook(after_step)
        server.update_and_fetch_model = meeting(server, args.world_size - 1)
        server.sums = [Watched(total, server.lock) for total in server.sums]
        trained = honest(server, args, trainer_class)
        recording.final_statistics = flat(running_statistics(server.model))
        return trained

    lesson.run_ps = run_ps


def meeting(server, n_trainers):
    """The server's `update_and_fetch_model`, into which all trainers are let at the same moment."""
    honest, barrier = server.update_and_fetch_model, threading.Barrier(n_trainers)

    def update_and_fetch_model(rank, *arguments):
        recording.arrivals.append(rank)
        try:
            barrier.wait(MEETING_S)
        except threading.BrokenBarrierError:
            barrier.reset()
        return honest(rank, *arguments)

    return update_and_fetch_model


class Watched:
    """A sum, which records with each addition whether the lock was held."""

    def __init__(self, total, lock):
        self.total, self.lock = total, lock

    def __iadd__(self, gradient):
        recording.locked.append(self.lock.locked())
        self.total += gradient
        return self

    def __itruediv__(self, number):
        self.total /= number
        return self

    def zero_(self):
        """As of the tensor."""
        self.total.zero_()
