"""What `--check` records of a training: the program's own, in its own processes.

Each trainer writes down what it reads, its losses, and after every step its gradients and weights;
the first one also those of the tables on the server.
"""

import importlib
import time
import weakref

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import data, results
from rpc_rnn import main as tutorial

EVALUATION_S = 0.5  # that each evaluation is made to last: the time of the training must exclude it
STEP_S = 0.02  # that the first trainer waits before its step: who does not wait sees old tables


def record_run(rank, world_size, args):
    """Run the worker of `args.program` on a `shortened` text.

    Returns:
        On rank 1, what the `Recorder`s of all trainers have, and the metrics; elsewhere None.
    """
    recorder = Recorder(rank, world_size)
    recorder.install()
    metrics = importlib.import_module(args.program).run_worker(rank, world_size, args)
    return (recorder.of_all, metrics) if rank == 1 else None


def shortened(language, args):
    """The first tokens of a language: four steps an epoch, and two of validation.

    The last ones are shorter, and a few tokens fill no row.
    """
    n_columns = args.batch_size * (args.world_size - 1)
    last = args.bptt // 2 + 1
    train, val = ((n * args.bptt + last + 1) * n_columns + n_columns // 2 for n in (3, 1))
    return language._replace(train=language.train[:train], val=language.val[:val])


class Recorder:
    """Writes down what the trainer of this process does.

    `initial`: its first weights. `entries`: a dict for each piece of text, of the training and of
    the validation: the tokens read, the state before them, the targets, the loss, and in training
    the gradients and the weights after the step. `of_all`, on the first trainer: a dict of these
    two for each trainer.
    """

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.model, self.initial, self.entries, self.of_all = None, None, [], None

    def install(self):
        """Let this process, which ends after the check, record what the program does."""
        recorder = self

        def recorded(model_class):
            class Recorded(model_class):
                def __init__(self, *args):
                    super().__init__(*args)
                    recorder.model = weakref.proxy(self)  # a DDP must not outlive its group
                    recorder.initial = recorder.look("weights")

                def forward(self, data, hidden):
                    recorder.entries.append({
                        "training": torch.is_grad_enabled(), "data": data.clone(),
                        "hidden": torch.stack([state.detach().cpu() for state in hidden]),
                        "with history": any(state.requires_grad for state in hidden)})
                    return super().forward(data, hidden)

            return Recorded

        class Context(dist_autograd.context):
            def __enter__(self):
                self.started = time.perf_counter()
                self.id = super().__enter__()
                return self.id

            def __exit__(self, *error):
                if error[0] is None and recorder.entries:
                    recorder.entries[-1]["span"] = (self.started, time.perf_counter())
                    for what in ("gradients", "weights"):
                        recorder.entries[-1][what] = recorder.look(what, self.id)
                super().__exit__(*error)

        def after_a_loss(module, inputs, loss):
            if isinstance(module, nn.CrossEntropyLoss):
                target = inputs[1].cpu().flatten()
                recorder.entries[-1] |= {"target": target, "loss": loss.item()}

        def step(opt, context_id, original=DistributedOptimizer.step):
            if recorder.rank == 1 and recorder.world_size > 2:
                time.sleep(STEP_S)
            return original(opt, context_id)

        def evaluate(*args, original=results.evaluate):
            time.sleep(EVALUATION_S)
            return original(*args)

        def run_trainer(rank, world_size, args, model_class=tutorial.RNNModel, *how,
                        original=tutorial.run_trainer):
            metrics = original(rank, world_size, args, recorded(model_class), *how)
            recorder.gather()
            return metrics

        nn.modules.module.register_module_forward_hook(after_a_loss)
        dist_autograd.context, results.evaluate = Context, evaluate
        tutorial.run_trainer, DistributedOptimizer.step = run_trainer, step
        tutorial.load_language = lambda args: shortened(data.load_language(args), args)

    def gather(self):
        """What all trainers have recorded, on the first one."""
        mine = {"initial": self.initial, "entries": self.entries}
        self.of_all = [mine]
        if dist.is_initialized():
            self.of_all = [None] * dist.get_world_size() if self.rank == 1 else None
            dist.gather_object(mine, self.of_all)

    def look(self, what, context_id=None):
        """The "weights", or the "gradients" in a context.

        Returns:
            `{part: {name: tensor}}`: of the LSTM here, and for the first trainer of the tables.
        """
        lstm = getattr(self.model.rnn, "module", self.model.rnn)
        parts = {"LSTM": tensors_of(lstm, what, context_id)}
        if self.rank == 1:
            tables = ("table", self.model.emb_table_rref), ("decoder", self.model.decoder_rref)
            for part, rref in tables:
                parts[part] = rpc.rpc_sync(rref.owner(), look_up, args=(rref, what, context_id))
        return parts


def look_up(part_rref, what, context_id):
    """On the server: see `tensors_of`."""
    return tensors_of(part_rref.local_value(), what, context_id)


def tensors_of(module, what, context_id):
    """Copies of the weights, or of the gradients, by name.

    Gradients are in the context; with `prefetch.py`, those of the table are in `.grad`.
    """
    tensors = dict(module.named_parameters())
    if what == "gradients":
        gradients = dist_autograd.get_gradients(context_id)
        tensors = {name: gradients.get(param, param.grad) for name, param in tensors.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
