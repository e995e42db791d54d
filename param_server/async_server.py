"""A parameter server that serves all trainers at the same time: beyond tutorial 6_6.

In main.py, one trainer at a time has the server. Here, each forward works with copies of the
weights of that moment, and its backward needs only these: another trainer may step in between.

What it wins: with four trainers 725 samples/s in place of 492 (`--world_size 5`, on 2 cores;
docs/results/param_server_4.json, param_server_4_lock.json).
What it costs: the copies, and staleness. A gradient is that of weights that others have changed
meanwhile, by about N-1 steps of N equally fast trainers, and the more stale, the smaller `--lr` has
to be (eight trainers may diverge with the default). The server counts it:

    steps of all trainers   ...   17        18        19        20   ...
    trainer1                   forward -------- backward ------- step      staleness 2
    trainer2                        step    forward      step              staleness 0

    python param_server/async_server.py                        one server, two trainers
    python param_server/async_server.py --world_size 5         four trainers
    python param_server/async_server.py --check                every number, against one process

It ends with, about:
    digits: test accuracy 97.2% after 920 updates by 2 trainers (async): 644 samples/s
"""

import collections
import contextlib
import copy
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable

from common.cli import Parser
from common.program import run_program

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call

from param_server import main as tutorial
from param_server.data import require_inputs
from param_server.main import remote_method, role_name
from param_server.results import finish


class AsyncParameterServer(tutorial.ParameterServer):
    """Lets its weights change between a trainer's forward and its backward.

    `weights_lock` is held by whoever changes the weights, or copies them: a copy has no half step.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.n_trainers = args.world_size - 1
        self.weights_lock, self.thread = threading.Lock(), threading.local()
        self.steps, self.read_at = 0, {}  # of all trainers; trainer -> steps made when it read
        self.staleness = collections.defaultdict(collections.Counter)  # by trainer

    def forward(self, inp: torch.Tensor, trainer: int | None = None) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), with copies of the weights.

        Args:
            inp: the images.
            trainer: the rank of the trainer whose step will follow; None if none will.
        """
        if self.n_trainers == 1:  # nobody steps between forward and backward
            self.note_read(trainer)
            return super().forward(inp)
        with self.weights_lock:  # or a copy could have one half of another trainer's step
            self.note_read(trainer)
            # Gradients flow through the copies to the parameters.
            weights = {name: param.clone() for name, param in self.model.named_parameters()}
        inp = inp.to(self.input_device)
        return functional_call(self.stateless(), weights, (inp,)).to("cpu")

    def stateless(self) -> nn.Module:
        """Return the network as a stateless module, one for each thread.

        `functional_call` changes it for a while. With one for all, a thread would put its copies
        where another has just put its own, and the wrong ones would stay there: the training goes
        on without an error, and without an effect.
        """
        if not hasattr(self.thread, "net"):
            self.thread.net = copy.deepcopy(self.model).to("meta")
        return self.thread.net.train(self.model.training)

    def apply_step(self, trainer: int, step: Callable[[], None]) -> None:
        """Call `step`, which applies the gradients of this trainer."""
        with self.weights_lock:
            step()
            self.note_step(trainer)

    def save(self, epochs: int) -> None:
        """Write a checkpoint as the tutorial's server does, where trainers take no turns."""
        with self.weights_lock:
            super().save(epochs)

    def note_read(self, trainer: int | None) -> None:
        """Count from here how old the weights of this trainer's next gradient are."""
        if trainer is not None:
            self.read_at[trainer] = self.steps

    def note_step(self, trainer: int) -> None:
        """Count the steps since the forward that this step belongs to."""
        self.staleness[trainer][self.steps - self.read_at[trainer]] += 1
        self.steps += 1

    def all_gather(self, rank: int, value: dict | None) -> list[dict | None]:
        """Add to a trainer's metrics how many of its gradients had which staleness."""
        if value is not None:
            value["staleness"] = dict(self.staleness[rank])
        return super().all_gather(rank, value)


class AsyncTrainerNet(tutorial.TrainerNet):
    """Takes no turns, and sends the trainer's rank with its images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), on the CPU."""
        trainer = rpc.get_worker_info().id if torch.is_grad_enabled() else None
        return remote_method("forward", self.param_server_rref, x, trainer)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Wait for nobody."""
        return contextlib.nullcontext()


class AsyncSGD(tutorial.SGD):
    """Steps for one trainer, on the server, through the server's `apply_step`."""

    def __init__(self, params: Iterable[torch.Tensor], trainer: int, **defaults) -> None:
        super().__init__(params, **defaults)
        self.trainer = trainer

    def step(self, closure: None = None) -> None:
        """Apply the gradients of this trainer."""
        tutorial.param_server.apply_step(self.trainer, super().step)


class AsyncOptimizer(DistributedOptimizer):
    """Makes its steps on the server with an `AsyncSGD`, whatever SGD it is given."""

    def __init__(self, sgd_class: type, params_rref: list[rpc.RRef], **defaults) -> None:
        super().__init__(AsyncSGD, params_rref, trainer=rpc.get_worker_info().id, **defaults)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Do what the tutorial's does, with the asynchronous server."""
    return tutorial.run_worker(rank, world_size, args, AsyncParameterServer, AsyncTrainerNet,
                               AsyncOptimizer)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py."""
    return tutorial.build_parser("param_server/async_server", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_inputs(args, tutorial.Net)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
