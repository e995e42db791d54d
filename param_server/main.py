r"""A parameter server: the network lives on one process, any number of others train it (6_6).

Trainers have the data and no network: forward, backward and optimizer step all run on the server.
One trainer at a time has the server, from its forward to its step.

    rank 0 "parameter_server"                    rank 1 "trainer1", rank 2 "trainer2", ...
    +----------------------------------+         +------------------------------------------+
    | ParameterServer: Net             | <------ | net(data): images                        |
    |   forward                        | ------> |   log-probabilities                      |
    |                                  |         | loss = F.nll_loss(model_output, target)  |
    |   gradients of context cid       | <------ | dist_autograd.backward(cid, [loss])      |
    |   SGD step                       | <------ | opt.step(cid)                            |
    +----------------------------------+         +------------------------------------------+

    python param_server/main.py --world_size 3                 one server, two trainers
    python param_server/main.py --check                        every number, against one process
    torchrun --nproc_per_node 3 param_server/main.py           under torchrun
    python param_server/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                 manual launch, as in the tutorial

It ends with, about:
    digits: test accuracy 96.1% after 920 updates by 2 trainers (lock): 466 samples/s

async_server.py serves all trainers at the same time.
"""

import contextlib
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Self

from common import checkpoint
from common.cli import Parser, bounded
from common.data import add_data_flags, load_data
from common.program import run_program
from common.session import device_for, rpc_options, serving_options

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from param_server.data import get_next_batch, require_inputs
from param_server.results import History, finish

SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"  # Tutorial: "trainer_1", ...


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: 0 is the server, all others are trainers."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


class Net(nn.Module):
    """Classifies images of digits: the network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)  # Tutorial: Dropout2d, but there are no channels here.
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), where the weights are."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def call_method(method: str, rref: rpc.RRef, *args, **kwargs) -> Any:
    """Call a method of the object behind `rref`, on its owner."""
    # Tutorial: passes the function. With its name, a subclass of the server can have its own.
    return getattr(rref.local_value(), method)(*args, **kwargs)


def remote_method(method: str, rref: rpc.RRef, *args, **kwargs) -> Any:
    """Call a method of the object behind `rref` where it lives, and wait for what it returns."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs)


class ParameterServer(nn.Module):
    """Has the network and all that trainers may ask of it; RPC calls it in many threads."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.input_device = device_for(args.device)
        self.model = Net().to(self.input_device)
        self.turn = threading.Lock()
        self.brought, self.all_are_there = {}, threading.Barrier(args.world_size - 1)
        self.args, self.first_epoch = args, 0
        if args.resume:
            state = checkpoint.load(args)
            self.model.load_state_dict(state["model"])
            self.first_epoch = state["epochs"]
            torch.set_rng_state(state["random_numbers"])

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Turn images into log-probabilities, both on the CPU: RPC carries them."""
        inp = inp.to(self.input_device)
        out = self.model(inp)
        return out.to("cpu")

    def get_dist_gradients(self, cid: int) -> dict[str, torch.Tensor]:
        """Return the gradients in context `cid`, by name: for `--check`."""
        # Tutorial: fetched in every step, and keyed by tensors, of which only copies arrive.
        grads = dist_autograd.get_gradients(cid)
        return {name: grads[param].to("cpu") for name, param in self.model.named_parameters()}

    def get_param_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef for each parameter, for the trainers' optimizers."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def set_mode(self, training: bool) -> None:
        """Turn dropout on or off, for all trainers."""
        self.train(training)

    def acquire(self) -> None:
        """Wait until it is the caller's turn; the thread that waits is one of the server's."""
        self.turn.acquire()

    def release(self) -> None:
        """End the caller's turn."""
        self.turn.release()

    def all_gather(self, rank: int, value: dict | None) -> list[dict | None]:
        """Wait until all trainers have called this; return the values of all, by rank."""
        self.brought[rank] = value
        self.all_are_there.wait()
        return [self.brought[rank] for rank in sorted(self.brought)]

    def get_first_epoch(self) -> int:
        """Return with which epoch a training begins: 0, or that of the checkpoint."""
        return self.first_epoch

    def save(self, epochs: int) -> None:
        """Write a checkpoint here, with the CPU's random numbers; those of a GPU begin anew."""
        if self.args.checkpoint:
            with self.turn:  # nobody is in the middle of a step
                checkpoint.save(self.args, {"model": self.model.state_dict(), "epochs": epochs,
                                            "random_numbers": torch.get_rng_state()})


param_server = None
global_lock = threading.Lock()


def get_parameter_server(args: Namespace, server_class: type[ParameterServer] = ParameterServer
                         ) -> ParameterServer:
    """Return the one server of this run, on rank 0; the first call makes it."""
    global param_server
    with global_lock:
        if param_server is None:
            param_server = server_class(args)
        return param_server


def run_parameter_server(rank: int, world_size: int, args: Namespace,
                         server_class: type[ParameterServer] = ParameterServer) -> None:
    """Answer the trainers' calls, on rank 0, until all of them have finished."""
    get_parameter_server(args, server_class)  # with its own flags: the checkpoint is on its machine
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=serving_options(args))
    rpc.shutdown()  # waits for everyone


class TrainerNet(nn.Module):
    """Stands for the network on a trainer: its calls go to the server."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.param_server_rref = rpc.remote(SERVER_NAME, get_parameter_server, args=(args,))

    def get_global_param_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef for each of the server's parameters, for `DistributedOptimizer`."""
        return remote_method("get_param_rrefs", self.param_server_rref)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), on the CPU."""
        return remote_method("forward", self.param_server_rref, x)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network itself."""
        # Tutorial: `model.eval()` reaches this wrapper alone, and dropout stays on in the accuracy.
        remote_method("set_mode", self.param_server_rref, mode)
        return super().train(mode)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Have the server alone, for a forward, its backward and its step."""
        # Tutorial: one trainer's step broke another's backward: "modified by an inplace operation".
        remote_method("acquire", self.param_server_rref)
        yield  # in no `finally`: an error in there ends the run on all ranks, those that wait, too
        remote_method("release", self.param_server_rref)


class SGD(optim.SGD):
    """Is optim.SGD under a name that `DistributedOptimizer` does not know.

    Of a class that it does not know it makes ordinary optimizers, which step under a lock. Of
    torch's own it makes a functional form without one: of two steps at a time one can be lost.
    """


def run_training_loop(
        rank: int, train_set: TensorDataset, test_set: TensorDataset, args: Namespace,
        net_class: type[TrainerNet] = TrainerNet,
        optimizer_class: type[DistributedOptimizer] = DistributedOptimizer) -> dict | None:
    """Train on all epochs, then take the accuracy; the first trainer returns the metrics of all."""
    net = net_class(args)
    param_rrefs = net.get_global_param_rrefs()
    opt = optimizer_class(SGD, param_rrefs, lr=args.lr)  # Tutorial: optim.SGD
    net.train()
    server = net.param_server_rref
    first_epoch = remote_method("get_first_epoch", server)
    remote_method("all_gather", server, rank, None)  # all begin together
    history = History(rank, train_set, first_epoch, args)
    for epoch in range(first_epoch, args.epochs):
        for data, target in get_next_batch(train_set, rank, epoch, args):
            with net.turn(), dist_autograd.context() as cid:
                model_output = net(data)
                loss = F.nll_loss(model_output, target)
                dist_autograd.backward(cid, [loss])
                opt.step(cid)  # of this trainer's gradients alone: they are in its context
            history.add(loss, len(target))
        history.end_epoch()
        if rank == 1:  # the others may be a few batches elsewhere
            remote_method("save", server, epoch + 1)
    # Tutorial: all take the accuracy, while others step. Waiting for them may last: no timeout.
    per_trainer = server.rpc_sync(timeout=0).all_gather(rank, history.of_trainer())
    if rank != 1:
        return None
    return {"test_accuracy": get_accuracy(test_set, net), "per_trainer": per_trainer}


def get_accuracy(test_set: TensorDataset, model: TrainerNet) -> float:
    """Return the share of the test images that the server's network takes for what they are."""
    model.eval()
    correct_sum = 0
    images, labels = test_set.tensors
    with torch.no_grad():  # here only: it does not reach the server
        for data, target in zip(images.split(500), labels.split(500), strict=True):
            out = model(data)  # Tutorial: model(data, -1), a TypeError.
            pred = out.argmax(dim=1)
            correct_sum += pred.eq(target).sum().item()
    return correct_sum / len(labels)


def run_worker(
        rank: int, world_size: int, args: Namespace,
        server_class: type[ParameterServer] = ParameterServer,
        net_class: type[TrainerNet] = TrainerNet,
        optimizer_class: type[DistributedOptimizer] = DistributedOptimizer) -> dict | None:
    """Serve on rank 0, train on the others; the first trainer returns the metrics."""
    if rank == 0:
        return run_parameter_server(rank, world_size, args, server_class)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    train_set, test_set = load_data(args)
    metrics = run_training_loop(rank, train_set, test_set, args, net_class, optimizer_class)
    rpc.shutdown()
    return metrics


def build_parser(example: str = "param_server", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=3, min_world_size=2, rpc=True)
    parser.set_defaults(default_master_addr="localhost")  # as in the tutorial: --rank is enough
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=20, metavar="N", help="times a trainer sees its images")
    add("--batch_size", type=count, default=32, metavar="N", help="images of a trainer in a step")
    add("--lr", type=bounded(float, above=0), default=0.03, help="learning rate of SGD")
    parser.add_checkpoint_flags()
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_inputs(args, Net)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
