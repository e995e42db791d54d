"""A parameter server that serves all trainers at the same time: beyond tutorial 6_6.

In main.py, one trainer at a time has exclusive access to the server. Here, each forward copies the
weights and computes with the copies. The backward needs only these copies, so other trainers may
step before it.

What it gains: with four trainers 725 samples/s in place of 492 (`--world_size 5`, on 2 cores;
docs/results/param_server_4_async.json, param_server_4.json).
What it costs: the copies, and staleness. When a gradient is applied, other trainers have changed
the weights since they were read: N equally fast trainers make about N-1 steps in between. A larger
staleness needs a smaller `--lr`; eight trainers may diverge with the default. The server counts it:

    steps of all trainers   ...   17        18        19        20   ...
    trainer1                   forward -------- backward ------- step      staleness 2
    trainer2                        step    forward      step              staleness 0

    python param_server/async_server.py                        one server, two trainers
    python param_server/async_server.py --world_size 5         four trainers
    python param_server/async_server.py --check                compare every number with one process

It ends with, about:
    digits: test accuracy 97.2% after 920 updates by 2 trainers (async): 644 samples/s
"""

import collections
import copy
from argparse import Namespace
from collections.abc import Iterable

from common.cli import Parser
from common.data import load_data
from common.program import run_program
from common.session import rpc_options

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from param_server import main as tutorial
from param_server.data import get_next_batch, require_inputs
from param_server.main import ParameterServer, get_accuracy, remote_method, role_name
from param_server.results import History, finish


class AsyncParameterServer(ParameterServer):
    """A server whose weights may change between a trainer's forward and its backward.

    A thread holds `lock` while it copies or updates the weights, so no copy contains half a step.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        # `functional_call` puts the copies into a module while it computes, so each trainer needs
        # its own module. In a shared module, it could compute with another trainer's copies.
        self.nets = nn.ModuleList(copy.deepcopy(self.model).to("meta")  # without weights
                                  for _ in range(args.world_size - 1))
        self.steps = 0  # of all trainers
        self.read_at = {}  # for each trainer, the number of steps when it last read the weights
        self.staleness = collections.defaultdict(list)  # for each trainer, of all its gradients

    def forward(self, inp: torch.Tensor, trainer: int | None = None) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), with copies of the weights.

        Args:
            inp: images, on the CPU.
            trainer: rank of the trainer that will step; None if no step follows.
        """
        if trainer is None:  # every trainer has joined, so the weights do not change
            return super().forward(inp)
        with self.lock:
            self.note_read(trainer)
            # Gradients flow through the copies to the parameters.
            weights = {name: param.clone() for name, param in self.model.named_parameters()}
        inp = inp.to(self.input_device)
        return functional_call(self.nets[trainer - 1], weights, (inp,)).to("cpu")

    def note_read(self, trainer: int) -> None:
        """Note which weights this trainer reads, by the number of steps that led to them."""
        self.read_at[trainer] = self.steps

    def note_step(self, trainer: int) -> None:
        """Count the steps between this trainer's last forward and the step it has just made."""
        self.staleness[trainer].append(self.steps - self.read_at[trainer])
        self.steps += 1

    def join(self, rank: int, result: dict) -> list[dict]:
        """Add the staleness of each gradient to a trainer's result; see `ParameterServer.join`."""
        result["staleness"] = self.staleness[rank]
        return super().join(rank, result)


class AsyncTrainerNet(tutorial.TrainerNet):
    """The network as a trainer sees it; each forward of the training names the trainer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), both on the CPU."""
        trainer = rpc.get_worker_info().id if self.training else None
        return remote_method(AsyncParameterServer.forward, self.param_server_rref, x, trainer)


class AsyncSGD(tutorial.SGD):
    """An SGD on the server that steps for one trainer.

    Args:
        params: parameters of the server's network.
        trainer: rank of the trainer.
        defaults: as in `optim.SGD`.
    """

    def __init__(self, params: Iterable[torch.Tensor], trainer: int, **defaults) -> None:
        super().__init__(params, **defaults)
        self.trainer = trainer

    def step(self, closure: None = None) -> None:
        """Apply this trainer's gradients, while no other trainer copies or steps."""
        server = tutorial.param_server
        with server.lock:
            super().step()
            server.note_step(self.trainer)


def run_training_loop(rank: int, train_set: TensorDataset, test_set: TensorDataset,
                      args: Namespace) -> dict | None:
    """Do what main.py's loop does, without exclusive access to the server."""
    net = AsyncTrainerNet(args)
    param_rrefs = net.get_global_param_rrefs()
    opt = DistributedOptimizer(AsyncSGD, param_rrefs, rank, lr=args.lr)
    net.train()
    server = net.param_server_rref
    first_epoch = remote_method(ParameterServer.get_first_epoch, server)
    history = History(rank, train_set, first_epoch, args)
    for epoch in range(first_epoch, args.epochs):
        for data, target in get_next_batch(train_set, rank, epoch, args):
            with dist_autograd.context() as cid:
                model_output = net(data)
                loss = F.nll_loss(model_output, target)
                dist_autograd.backward(cid, [loss])
                opt.step(cid)
            history.add(loss, len(target))
        history.end_epoch()
        if rank == 1:
            remote_method(ParameterServer.save, server, epoch + 1)
    per_trainer = server.rpc_sync(timeout=0).join(rank, history.of_trainer())
    if rank != 1:
        return None
    return {"test_accuracy": get_accuracy(test_set, net), "per_trainer": per_trainer}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0, train on every other rank; return the metrics on rank 1, None elsewhere."""
    if rank == 0:
        tutorial.param_server = AsyncParameterServer(args)  # what `get_parameter_server` returns
        return tutorial.run_parameter_server(rank, world_size, args)
    train_set, test_set = load_data(args)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    metrics = run_training_loop(rank, train_set, test_set, args)
    rpc.shutdown()
    return metrics


def build_parser() -> Parser:
    """Return the parser of this program's flags, which are those of main.py."""
    return tutorial.build_parser("param_server/async_server", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process (`--check`).

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_inputs(args, tutorial.Net)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
