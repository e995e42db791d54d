"""`--backward early`: each micro-batch goes back as soon as the master has its outputs.

The tutorial waits for the outputs of the whole batch before it sends the first gradient. But an
error that is a mean over images is a sum over micro-batches: what one of them adds to the gradients
needs no other. So the master sends its gradient at once, and worker2 works on it while worker1
still has others to send forward. This is the order of "1f1b" in schedules.py, which here nobody
has to write down.

    whole     worker1  F0 F1 F2 F3 .. .. .. .. .. B0 B1 B2 B3 step
              worker2  .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. .. .. step
    early     worker1  F0 F1 F2 F3 B0 .. B1 .. B2 .. B3 step
              worker2  .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. step

Two backwards of a worker may run at a time: that takes a core which the other one leaves idle, and
is worth more than turns (docs/measurements/model_parallel_resnet.md). What early takes:

- a context of its own for each micro-batch. The first gradient that reaches a worker makes its
  autograd count what every gradient of that context has to wait for; a forward that comes later
  would not be among them;
- a thread of the master for each micro-batch, since a context belongs to a thread;
- an optimizer that steps with the sum of several contexts' gradients: `DistributedOptimizer` knows
  one context.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed.autograd as dist_autograd
from common import timeline
from common.session import wait_all
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import RRef

from model_parallel_resnet import measuring
from model_parallel_resnet.main import DistResNet50


class EarlyResNet50(DistResNet50):
    """A model whose `forward` is that of one micro-batch."""

    def forward(self, x, i):
        """Micro-batch `i`, images (n, 3, H, W), to logits (n, num_classes)."""
        y_rref = self.p1_rref.remote().forward(RRef(x), i)
        return self.p2_rref.rpc_sync().forward(y_rref, i)


class ShardOptimizer:
    """On a worker: adds up the gradients of the micro-batches, then makes the step of its shard."""

    def __init__(self, shard_rref, lr):
        self._lock = threading.Lock()  # RPC calls `add` in many threads
        self.opt = measuring.SGD(shard_rref.local_value().parameters(), lr=lr)

    def add(self, context_id):
        """Add what a micro-batch's context has, while it is open."""
        gradients = dist_autograd.get_gradients(context_id)
        with self._lock, timeline.span("add"):
            for param, gradient in gradients.items():
                param.grad = gradient if param.grad is None else param.grad.add_(gradient)

    def step(self):
        """With the sum, and forget it."""
        self.opt.step()
        self.opt.zero_grad()


class EarlyOptimizer:
    """On the master: the optimizers of both shards."""

    def __init__(self, shard_rrefs, lr):
        self.rrefs = [rpc.remote(shard_rref.owner(), ShardOptimizer, args=(shard_rref, lr))
                      for shard_rref in shard_rrefs]

    def add(self, context_id):
        """See `ShardOptimizer.add`."""
        wait_all([rref.rpc_async().add(context_id) for rref in self.rrefs])

    def step(self):
        """See `ShardOptimizer.step`."""
        wait_all([rref.rpc_async().step() for rref in self.rrefs])


def train_batch(model, inputs, labels, opt):
    """Each micro-batch forward and back in a thread of its own, and a step; the loss of the batch.

    Raises:
        Exception: what the first thread to fail raises, when all have ended.
    """
    loss_fn = nn.MSELoss()

    def micro_batch(i, x, y):
        with dist_autograd.context() as context_id:
            outputs = model(x, i)
            with timeline.span("loss"):
                # A mean over these images: their share of the mean over the batch.
                loss = loss_fn(outputs, y) * (len(y) / len(labels))
            dist_autograd.backward(context_id, [loss])
            opt.add(context_id)  # the gradients go with their context
        return loss.detach()

    number = model.num_split
    with ThreadPoolExecutor(number) as threads:
        losses = list(threads.map(micro_batch, range(number), inputs.tensor_split(number),
                                  labels.tensor_split(number)))
    opt.step()
    return sum(losses)


def early(args, workers):
    """The model, the function and the optimizer that take the place of the tutorial's."""
    model = EarlyResNet50(1, workers, args)
    return model, train_batch, EarlyOptimizer([model.p1_rref, model.p2_rref], args.lr)
