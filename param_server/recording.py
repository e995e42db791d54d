"""What `--check` records of a training: the lesson's own, in its own processes.

Two short epochs run while PyTorch's hooks on the server see what each forward reads, each gradient,
and the weights after each step. Several trainers come in an order of their own, and dropout draws
from one generator for all of them: both orders are recorded, so that `check.py` can follow them.
"""

import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from common import checkpoint
from common.data import load_data
from torch.distributed import rpc
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer
from torch.utils.data import TensorDataset

from param_server import main as lesson

EPOCHS, BATCH_SIZE = 2, 8  # images, at most
# Updates of all trainers together in each epoch, about; test images for more than one batch of the
# accuracy.
UPDATES, TEST_IMAGES = 8, 510
HEAD_START_S = 0.3
REST_STEPS, REST_S, REST_AT_MOST_S = 3, 0.2, 10.0
LAYERS = ("dropout1", "dropout2")


class Recording:
    """What the server's process sees of a training.

    `forwards` in a context: context, images, the weights that were read, how many steps had ended
    before it and how many had begun at its end. `steps`: context, gradients, weights afterwards.
    `draws` of dropout, in order: context, what it multiplied with. `evaluations`, the forwards
    outside of a context: images, log-probabilities. `events`: forwards and steps, in order.
    `saved`: the checkpoints. `gathered`: when all trainers had met. `rested`: how many steps the
    others could and did make during the first forward of trainer1. `metrics`: what the first
    trainer returns.
    """

    def __init__(self):
        self.forwards, self.steps, self.draws, self.evaluations = [], [], [], []
        self.events, self.saved, self.gathered, self.metrics = [], [], [], None
        self.rested = None
        self.begun, self.drawing, self.thread = 0, threading.Lock(), threading.local()

    def in_order(self, ranks):
        """Whose each forward, step and draw was.

        Returns:
            The forwards of each rank, in lists; for each step of the optimizer, the trainer and the
            number of its forward, from 0; for each draw, the same and the layer.
        """
        forwards, place_of = {rank: [] for rank in ranks}, {}
        for forward in self.forwards:
            rank = forward["context"] >> 48  # the first 16 bits are the rank that opened it
            place_of[forward["context"]] = rank, len(forwards[rank])
            forwards[rank].append(forward)
        steps = [place_of[step["context"]] for step in self.steps if step["context"] in place_of]
        draws, drawn = [], dict.fromkeys((context for context, _ in self.draws), 0)
        for context, _ in self.draws:
            layer = LAYERS[min(drawn[context], len(LAYERS) - 1)]
            draws.append((*place_of.get(context, (0, 0)), layer))
            drawn[context] += 1
        return forwards, steps, draws


recording = Recording()  # of this process; in a trainer's, it stays empty


def record_run(program, rank, world_size, args):
    """Run the worker of a program on `small_data`; on rank 0, the `Recording`."""
    lesson.load_data = small_data
    if rank == 0:
        record_server(args)
    else:
        record_trainer()
    program.run_worker(rank, world_size, args)
    return recording if rank == 0 else None


def small_data(args):
    """The first images: a few batches for each trainer, and those for the accuracy."""
    train, test = (half.tensors for half in load_data(args))
    n_trainers = args.world_size - 1
    # Whole batches, a smaller one at the end, and shares that differ by one image.
    whole = batches_of_each(args) - 1
    n_images = n_trainers * (whole * args.batch_size + (args.batch_size + 1) // 2) + 1
    test = [torch.cat([tensor, tensor]) for tensor in test]
    return tuple(TensorDataset(images[:number].double(), labels[:number])
                 for (images, labels), number in ((train, n_images), (test, TEST_IMAGES)))


def batches_of_each(args):
    """How many steps each trainer makes in an epoch."""
    return max(2, UPDATES // (args.world_size - 1))


# --- on a trainer


def record_trainer():
    """Train until `last_epoch`, and send the server the metrics that come of it."""
    honest_loop, honest_batches = lesson.run_training_loop, lesson.get_next_batch

    def get_next_batch(train_set, rank, epoch, args):
        *batches, last = honest_batches(train_set, rank, epoch, args)
        yield from batches
        if rank > 1 and epoch == args.epochs - 1:
            # The first trainer is ready before the others: its accuracy must wait for their steps.
            time.sleep(HEAD_START_S)
        yield last

    def run_training_loop(rank, train_set, test_set, args, *classes):
        args.epochs = rpc.rpc_sync(lesson.SERVER_NAME, last_epoch)
        metrics = honest_loop(rank, train_set, test_set, args, *classes)
        if metrics is not None:
            rpc.rpc_sync(lesson.SERVER_NAME, receive, args=(metrics,))
        return metrics

    lesson.run_training_loop, lesson.get_next_batch = run_training_loop, get_next_batch


# --- on the server


def last_epoch():
    """When a check ends: only the server has the checkpoint that says where it began."""
    return lesson.param_server.first_epoch + EPOCHS


def receive(metrics):
    """Take the metrics of the first trainer."""
    recording.metrics = metrics


def record_server(args):
    """Look on where the server is made, and at every forward and step of this process."""
    honest_init = lesson.ParameterServer.__init__

    def init(server, args):
        honest_init(server, args)
        args.epochs = server.first_epoch + EPOCHS
        record_calls(server)

    lesson.ParameterServer.__init__ = init
    record_modules(args)
    checkpoint.save = save  # a check writes over no file


def record_calls(server):
    """Record when trainers call a server."""
    honest_forward, honest_gather = server.forward, server.all_gather

    def forward(*inputs):
        recording.thread.ended, recording.thread.began = len(recording.steps), time.time()
        recording.events.append(("forward", current_context()))
        return honest_forward(*inputs)

    def all_gather(rank, value):
        values = honest_gather(rank, value)
        recording.gathered.append(time.time())
        return values

    server.forward, server.all_gather = forward, all_gather


def save(_, state):
    """Record a checkpoint, in place of writing it."""
    recording.saved.append({"epochs": state["epochs"], "weights": copied(state["model"].items())})


def record_modules(args):
    """Set PyTorch's hooks, which see every forward and every step of this process."""
    def before_forward(module, _):
        if is_dropout(module):
            recording.drawing.acquire()  # one draw at a time, so that there is an order of them
        elif type(module).__name__ == "Net" and (current_context() or 0) >> 48 == 1:
            rest(args)

    def after_forward(module, inputs, output):
        if is_dropout(module):
            before = inputs[0].detach()  # where it is zero, nobody can see the mask
            factors = torch.where(before != 0, output.detach() / before, torch.nan)
            recording.draws.append((current_context(), factors))
            recording.drawing.release()
        elif type(module).__name__ == "Net" and current_context() is None:
            recording.evaluations.append({"images": inputs[0].cpu(), "output": output.cpu()})
        elif type(module).__name__ == "Net":
            recording.forwards.append({
                "context": current_context(), "images": inputs[0].detach().cpu().clone(),
                "weights": copied(module.named_parameters()),
                "ended": recording.thread.ended, "begun": recording.begun,
                "began": recording.thread.began})

    def before_step(*_):
        recording.begun += 1

    def after_step(*_):
        context, server = current_context(), lesson.param_server
        recording.events.append(("step", context))
        recording.steps.append({"context": context, "moment": time.time(),
                                "gradients": copied(server.get_dist_gradients(context).items()),
                                "weights": copied(server.model.named_parameters())})

    every_module.register_module_forward_pre_hook(before_forward)
    every_module.register_module_forward_hook(after_forward)
    every_optimizer.register_optimizer_step_pre_hook(before_step)
    every_optimizer.register_optimizer_step_post_hook(after_step)


def rest(args):
    """The first forward of trainer1 has read the weights: now the others step, if they may."""
    others = args.world_size - 2
    if recording.rested is not None or others == 0:
        return
    before = len(recording.steps)
    may = REST_STEPS if args.bound is None else min(REST_STEPS, args.bound)
    expected = min(may, others * EPOCHS * batches_of_each(args) - before)
    recording.rested = {"expected": expected, "made": 0}
    ends = time.time() + REST_AT_MOST_S
    while len(recording.steps) < before + expected and time.time() < ends:
        time.sleep(0.01)
    if args.bound is not None:
        time.sleep(REST_S)  # is there one step too many?
    recording.rested["made"] = len(recording.steps) - before


def current_context():
    """The distributed autograd context of this thread, or None."""
    try:
        return dist_autograd._current_context()._context_id()
    except RuntimeError:
        return None


def is_dropout(module):
    """Whether a module draws a mask now."""
    return "Dropout" in type(module).__name__ and module.training


def copied(named_tensors):
    """The tensors as they are now, by name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors}
