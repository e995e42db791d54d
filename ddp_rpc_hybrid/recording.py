"""What `--check` records: the lesson's own training, as its trainers and its server see it.

`run_worker` is the lesson's, with hooks in each of its processes. On a trainer they keep what a
step reads, computes and leaves behind; on the server each step of the table. In the end, each
trainer sends what it has to the master, where check.py compares.

For the first epochs the trainers are kept in lockstep: after a step, each waits for the others.
What is usually over in no time is made to last, so that a mistake in the order of things shows.
"""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_rpc_hybrid import main as lesson
from ddp_rpc_hybrid import results

LOCKSTEP_EPOCHS = 2
STEPS = 10  # of a trainer in an epoch
BATCHES_S = 0.5  # added to the making of an epoch's batches: no part of the training's time
STEP_S = 0.002  # added to each step of the table, so that two at a time would overlap

_run_trainer, _get_next_batch = lesson._run_trainer, lesson.get_next_batch
_table_gradient_bytes = results.table_gradient_bytes


def run_worker(rank, world_size, args):
    """The lesson's `run_worker`, recorded.

    Returns:
        What it returns; and on the master what each trainer has recorded, see `run_trainer`.
    """
    is_server = lesson.role_name(rank, world_size) == "ps"
    with (mock.patch.object(lesson, "_run_trainer", run_trainer),  # the master has it called
          _server.installed() if is_server else contextlib.nullcontext()):
        metrics = lesson.run_worker(rank, world_size, args)
    return metrics, [_delivered[rank] for rank in sorted(_delivered)]


# --- on the master

_delivered = {}


def deliver(rank, recorded):
    """Take what a trainer has recorded; see `run_trainer`."""
    _delivered[rank] = recorded


# --- on the server


class Server:
    """Each step of the table, seen by PyTorch's own hooks of optimizers."""

    def __init__(self):
        self.updates, self.overlaps = [], 0
        self.under_way, self.table = 0, None

    @contextlib.contextmanager
    def installed(self):
        """Record what happens inside."""
        hooks = [register_optimizer_step_pre_hook(self.before_step),
                 register_optimizer_step_post_hook(self.after_step)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before_step(self, optimizer, *_):
        """Two at a time would be an overlap."""
        self.under_way += 1
        self.overlaps += self.under_way > 1
        time.sleep(STEP_S)

    def after_step(self, optimizer, *_):
        """Keep the gradient of the step."""
        self.under_way -= 1
        self.updates.append(nonzero_rows(optimizer.param_groups[0]["params"][0].grad))


_server = Server()


def server_updates():
    """All steps of the table until now."""
    return {"updates": _server.updates, "overlaps": _server.overlaps}


def table_gradient(emb_rref, context_id):
    """That of one trainer's step; empty if there is none."""
    gradient = dist_autograd.get_gradients(context_id).get(emb_rref.local_value().weight)
    return {} if gradient is None else nonzero_rows(gradient)


def table_change(emb_rref):
    """The rows of the table that have changed since the last call, as they are now; first, all."""
    now, before = emb_rref.local_value().weight.detach().clone(), _server.table
    _server.table = now
    changed = torch.ones(len(now), dtype=bool) if before is None else (now != before).any(dim=1)
    return {"rows": changed.nonzero().flatten(), "entries": now[changed]}


def nonzero_rows(gradient):
    """Of a gradient, dense or sparse: the numbers of its rows that are not zero, and the rows."""
    rows, entries = torch.arange(len(gradient)), gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, entries = gradient.indices()[0], gradient.values()
    nonzero = entries.any(dim=1)
    return {"rows": rows[nonzero], "entries": entries[nonzero]}


# --- on a trainer


def run_trainer(emb_rref, rank, args):
    """`_run_trainer`, recorded, with the same arguments and the same result."""
    trainer = Trainer(emb_rref)
    with trainer.installed():
        metrics = _run_trainer(emb_rref, rank, args)
    dist.barrier()  # no step of the table is on its way any more
    recorded = {"steps": trainer.steps, "first dense": trainer.first_dense,
                "first table": trainer.first_table, "last change": trainer.table_change()}
    if dist.get_rank() == 0:
        recorded["server"] = rpc.rpc_sync("ps", server_updates)
    rpc.rpc_sync("master", deliver, args=(dist.get_rank(), recorded))
    return metrics


class Trainer:
    """Keeps a dict for each step of this trainer.

    indices, offsets, target: the batch.
    lookup: the sums of the bags, as the server has sent them.
    loss: a number.
    dense gradient, table gradient: those in the step's context, here and on the server.
    dense: the weights of the dense part after the step.
    table: in lockstep, on the first trainer: the rows that all trainers' steps have changed.
    span: when the step's context was entered and left, in seconds.
    """

    def __init__(self, emb_rref):
        self.emb_rref, self.dense, self.steps = emb_rref, None, []
        self.is_over = False

    @contextlib.contextmanager
    def installed(self):
        """Record what happens inside."""
        trainer = self

        class Context(dist_autograd.context):
            def __enter__(self):
                self.started, self.id = time.perf_counter(), super().__enter__()
                return self.id

            def __exit__(self, *error):
                if error[0] is None and not trainer.is_over:
                    trainer.after_step(self.id, self.started)
                super().__exit__(*error)

        def slow_batches(*args):
            time.sleep(BATCHES_S)
            return _get_next_batch(*args)

        def gradient_bytes(*args):
            self.is_over = True  # one more backward pass, which is no step
            return _table_gradient_bytes(*args)

        hook = register_module_forward_hook(self.after_module)
        try:
            with (mock.patch.object(dist_autograd, "context", Context),
                  mock.patch.object(lesson, "get_next_batch", slow_batches),
                  mock.patch.object(results, "table_gradient_bytes", gradient_bytes)):
                yield
        finally:
            hook.remove()

    def after_module(self, module, inputs, output):
        """Of the modules of a step, the first to end is the dense part, the last one the loss."""
        if self.is_over:
            return
        if isinstance(module, nn.Linear):
            if self.dense is None:
                self.dense = module
                self.first_dense, self.first_table = self.dense_weights(), self.table_change()
            self.steps.append({"lookup": inputs[0].detach().cpu().clone()})
        elif isinstance(module, lesson.HybridModel):
            self.steps[-1] |= {"indices": inputs[0].clone(), "offsets": inputs[1].clone()}
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": inputs[1].cpu().clone(), "loss": output.item()}

    def after_step(self, context_id, started):
        """What the step has left behind."""
        step = self.steps[-1]
        step["span"] = started, time.perf_counter()
        gradients = dist_autograd.get_gradients(context_id)
        step["dense gradient"] = {name: gradients[param].cpu().clone() for name, param
                                  in self.dense.named_parameters() if param in gradients}
        step["table gradient"] = rpc.rpc_sync("ps", table_gradient,
                                              args=(self.emb_rref, context_id))
        step["dense"] = self.dense_weights()
        if len(self.steps) <= LOCKSTEP_EPOCHS * STEPS:
            dist.barrier()  # all have made their step
            step["table"] = self.table_change()
            dist.barrier()  # the first trainer has seen it

    def dense_weights(self):
        """A copy, on the CPU."""
        return {name: param.detach().cpu().clone() for name, param in self.dense.named_parameters()}

    def table_change(self):
        """`table_change`, on the first trainer; nothing on the others."""
        if dist.get_rank() > 0:
            return {}
        return rpc.rpc_sync("ps", table_change, args=(self.emb_rref,))
