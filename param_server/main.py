r"""A parameter server: the network lives on one process, and trainers train it over RPC (6_6).

The trainers hold the data but no network. Forward, backward and optimizer step run on the server.
One trainer at a time has exclusive access to the server, from its forward to its step.

    rank 0 "parameter_server"                    rank 1 "trainer1", rank 2 "trainer2", ...
    +----------------------------------+         +------------------------------------------+
    | ParameterServer: Net             | <------ | net(data): images                        |
    |   forward                        | ------> |   log-probabilities                      |
    |                                  |         | loss = F.nll_loss(model_output, target)  |
    |   gradients of context cid       | <------ | dist_autograd.backward(cid, [loss])      |
    |   SGD step                       | <------ | opt.step(cid)                            |
    +----------------------------------+         +------------------------------------------+

    python param_server/main.py --world_size 3                 one server, two trainers
    python param_server/main.py --check                        compare every number with one process
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
from collections.abc import Callable, Iterator
from typing import Any, Self

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

from param_server.data import get_next_batch, load_checkpoint, require_inputs, save_checkpoint
from param_server.results import History, finish

SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"  # Tutorial: "trainer_1", ...


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the server, every other rank is a trainer."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


class Net(nn.Module):
    """A classifier of digits: the network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)  # Tutorial: Dropout2d, but there are no channels here.
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), on the weights' device."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def call_method(method: Callable, rref: rpc.RRef, *args, **kwargs) -> Any:
    """Call `method` with the object behind `rref`; this runs on the owner of the object."""
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Callable, rref: rpc.RRef, *args, **kwargs) -> Any:
    """Call a method of the object behind `rref` on the object's owner, and return the result."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs)


class ParameterServer(nn.Module):
    """The network, and the methods that trainers call; RPC runs them in many threads."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.input_device = device_for(args.device)
        self.model = Net().to(self.input_device)
        self.lock = threading.Lock()
        self.results, self.all_have_joined = {}, threading.Barrier(args.world_size - 1)
        self.args, self.first_epoch = args, load_checkpoint(self.model, args)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10); RPC carries CPU tensors."""
        inp = inp.to(self.input_device)
        out = self.model(inp)
        return out.to("cpu")

    def get_dist_gradients(self, cid: int) -> dict[str, torch.Tensor]:
        """Return the gradients in context `cid` by parameter name, to verify them."""
        # Tutorial: fetched in every step, and keyed by tensors, which reach a trainer as copies.
        grads = dist_autograd.get_gradients(cid)
        return {name: grads[param].to("cpu") for name, param in self.model.named_parameters()}

    def get_param_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef for each parameter, for the trainers' optimizers."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def set_mode(self, training: bool) -> None:
        """Turn dropout on or off, for all trainers."""
        self.train(training)

    def acquire(self) -> None:
        """Give the calling trainer exclusive access; a thread of the server waits for it."""
        self.lock.acquire()

    def release(self) -> None:
        """End the exclusive access of the calling trainer."""
        self.lock.release()

    def join(self, rank: int, result: dict) -> list[dict]:
        """Wait until every trainer has called this method; return all their results, by rank."""
        self.results[rank] = result
        self.all_have_joined.wait()
        return [self.results[rank] for rank in sorted(self.results)]

    def get_first_epoch(self) -> int:
        """Return the epoch at which training begins: 0, or the next one after the checkpoint."""
        return self.first_epoch

    def save(self, epochs: int) -> None:
        """Write a checkpoint of `epochs` epochs, on the machine of the server."""
        with self.lock:  # no trainer is between its forward and its step
            save_checkpoint(self.model, epochs, self.args)


param_server = None
global_lock = threading.Lock()


def get_parameter_server(args: Namespace) -> ParameterServer:
    """Return the one server of this run, on rank 0; the first call creates it."""
    global param_server
    with global_lock:
        if param_server is None:
            param_server = ParameterServer(args)
        return param_server


def run_parameter_server(rank: int, world_size: int, args: Namespace) -> None:
    """Answer the trainers' calls, on rank 0, until every trainer has finished."""
    get_parameter_server(args)  # with rank 0's own flags: the checkpoint is on its machine
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=serving_options(args))
    rpc.shutdown()  # waits for every trainer


class TrainerNet(nn.Module):
    """The network as a trainer sees it: each call goes to the server."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.param_server_rref = rpc.remote(SERVER_NAME, get_parameter_server, args=(args,))

    def get_global_param_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef for each of the server's parameters, for `DistributedOptimizer`."""
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (N, 1, 28, 28) into log-probabilities (N, 10), both on the CPU."""
        return remote_method(ParameterServer.forward, self.param_server_rref, x)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the server's network, and of this wrapper."""
        # Tutorial: `model.eval()` reaches this wrapper alone, so the accuracy is with dropout.
        remote_method(ParameterServer.set_mode, self.param_server_rref, mode)
        return super().train(mode)

    @contextlib.contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Hold exclusive access to the server for one forward, backward and optimizer step."""
        # Tutorial: one trainer's step broke another's backward: "modified by an inplace operation".
        remote_method(ParameterServer.acquire, self.param_server_rref)
        yield  # without `finally`: an error inside ends the run on all ranks, waiting ones too
        remote_method(ParameterServer.release, self.param_server_rref)


class SGD(optim.SGD):
    """An ordinary optimizer: see `Adam` in rpc_rnn/main.py."""


def run_training_loop(rank: int, train_set: TensorDataset, test_set: TensorDataset,
                      args: Namespace) -> dict | None:
    """Train for all epochs; the first trainer then measures the accuracy.

    Returns:
        On rank 1, the test accuracy and the results of every trainer; elsewhere None.
    """
    net = TrainerNet(args)
    param_rrefs = net.get_global_param_rrefs()
    # Tutorial: optim.SGD, whose compiled form takes no lock: of two steps at once, one can be lost.
    opt = DistributedOptimizer(SGD, param_rrefs, lr=args.lr)
    net.train()
    server = net.param_server_rref
    first_epoch = remote_method(ParameterServer.get_first_epoch, server)
    history = History(rank, train_set, first_epoch, args)
    for epoch in range(first_epoch, args.epochs):
        for data, target in get_next_batch(train_set, rank, epoch, args):
            with net.exclusive_access(), dist_autograd.context() as cid:
                model_output = net(data)
                loss = F.nll_loss(model_output, target)
                dist_autograd.backward(cid, [loss])
                opt.step(cid)  # with this trainer's gradients alone: they are in its context
            history.add(loss, len(target))
        history.end_epoch()
        if rank == 1:  # the other trainers may be a few batches ahead or behind
            remote_method(ParameterServer.save, server, epoch + 1)
    # Tutorial: every trainer measures the accuracy, while other trainers still step.
    # No timeout here: the slowest trainer may take long.
    per_trainer = server.rpc_sync(timeout=0).join(rank, history.of_trainer())
    if rank != 1:
        return None
    return {"test_accuracy": get_accuracy(test_set, net), "per_trainer": per_trainer}


def get_accuracy(test_set: TensorDataset, model: TrainerNet) -> float:
    """Return the fraction of the test images that the server's network classifies correctly."""
    model.eval()
    correct_sum = 0
    images, labels = test_set.tensors
    with torch.no_grad():  # on this trainer only: it does not reach the server
        for data, target in zip(images.split(500), labels.split(500), strict=True):
            out = model(data)  # Tutorial: model(data, -1), a TypeError.
            pred = out.argmax(dim=1)
            correct_sum += pred.eq(target).sum().item()
    return correct_sum / len(labels)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0, train on every other rank; return the metrics on rank 1, None elsewhere."""
    if rank == 0:
        return run_parameter_server(rank, world_size, args)
    train_set, test_set = load_data(args)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))  # waits for every rank: all begin together
    metrics = run_training_loop(rank, train_set, test_set, args)
    rpc.shutdown()
    return metrics


def build_parser(example: str = "param_server", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's flags.

    Args:
        example: Folder for the results, below outputs/.
        description: Docstring of the program.
    """
    parser = Parser(example, description, world_size=3, min_world_size=2, rpc=True)
    parser.set_defaults(default_master_addr="localhost")  # as in the tutorial: --rank is enough
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=20, metavar="N",
        help="passes of each trainer over its images")
    add("--batch_size", type=count, default=32, metavar="N",
        help="images of one trainer in one step")
    add("--lr", type=bounded(float, above=0), default=0.03, help="learning rate of SGD")
    parser.add_checkpoint_flags()
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process (`--check`).

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_inputs(args, Net)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
