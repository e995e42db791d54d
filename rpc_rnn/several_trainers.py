"""What several trainers need: one pair of tables for all, and the step of their global batch.

DDP keeps the trainers' LSTMs equal: it averages their gradients in the backward pass. The tables
exist once, on the server, where each trainer's backward pass leaves gradients in a context of its
own. Average these before the step, and nobody reads a table while it changes:

    dist_autograd.backward(context_id, [loss])
    average_table_gradients(model, context_id)    waits for all; the first context has the average
    opt.step(context_id)                          the first trainer's optimizer steps the tables
    dist.barrier()                                now the next step may look them up
"""

import threading
import weakref

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

_parts = weakref.WeakValueDictionary()  # they live as long as a trainer refers to them
_parts_lock = threading.Lock()


def the_only(part_class, *args):
    """On the server: the run's only `part_class`, made for whichever trainer asks first."""
    with _parts_lock:
        if part_class not in _parts:
            part = _parts[part_class] = part_class(*args)
            return part
        return _parts[part_class]


def average_table_gradients(model, context_id):
    """Average, in the first trainer's context, what all backward passes have left on the server.

    Args:
        model: the `RNNModel` of this trainer.
        context_id: of this trainer's step.
    """
    mine = torch.tensor([context_id], device=model.device)
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)  # also a barrier: everyone's backward has ended
    if dist.get_rank() == 0:
        context_ids = [int(context_id) for context_id in gathered]
        for rref in (model.emb_table_rref, model.decoder_rref):
            rpc.rpc_sync(rref.owner(), _average, args=(rref, context_ids))


def _average(part_rref, context_ids):
    """On the server: for each parameter, into the first context."""
    first, *others = map(dist_autograd.get_gradients, context_ids)
    for param in part_rref.local_value().parameters():
        for other in others:
            first[param] += other[param]
        first[param] /= len(context_ids)


def mean_over_trainers(number):
    """The mean of one number of each trainer, each of which stands for equally many tokens."""
    if not dist.is_initialized():
        return number
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers) / len(numbers)
