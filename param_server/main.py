r"""A parameter server: the network lives on one process, any number of others train it (6_6).

Trainers have the data and no network: forward, backward and optimizer step all run on the server.
Here one trainer at a time has the server; `async_server.py` serves all of them at the same time,
`bounded_server.py` too, but it applies no gradient of weights that are too old.

    rank 0 "parameter_server"                    rank 1 "trainer1", rank 2 "trainer2", ...
    +----------------------------------+         +------------------------------------------+
    | ParameterServer: Net             | <------ | net(data): images                        |
    |   forward                        | ------> |   log-probabilities                      |
    |                                  |         | loss = F.nll_loss(model_output, target)  |
    |   gradients of context cid       | <------ | dist_autograd.backward(cid, [loss])      |
    |   SGD step                       | <------ | opt.step(cid)                            |
    +----------------------------------+         +------------------------------------------+

    python param_server/main.py --world_size 3                 one server, two trainers
    python param_server/main.py --consistency lock             one trainer at a time
    python param_server/main.py --consistency bounded          weights at most 1 step old
    python param_server/main.py --check                        all three, against one process
    torchrun --nproc_per_node 3 param_server/main.py           under torchrun
    python param_server/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                 manual launch, as in the tutorial

Last line, about:
    digits: test accuracy 96.9% after 920 updates by 2 trainers (async): 884 samples/s
"""

import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from common import report
from common.cli import Parser, bounded
from common.data import add_data_flags, load_data
from common.launcher import launch
from common.session import device_for, rpc_options
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

from param_server.data import get_next_batch, require_inputs
from param_server.results import finish, log_epoch
from param_server.resuming import Resumes
from param_server.staleness import CountedOptimizer, CountsSteps
from param_server.turns import Turns, my_step, my_turn

SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"


def role_name(rank, world_size):
    """Rank 0 is the server, all others are trainers."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


class Net(nn.Module):
    """The network of PyTorch's MNIST example: images (N, 1, 28, 28) to log(p) (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)  # Tutorial: Dropout2d, but there are no channels here.
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        """On the device of the weights."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def call_method(method, rref, *args, **kwargs):
    """On the owner of `rref`: call a method of the object behind it."""
    # Tutorial: passes the function. With its name, a subclass of the server can have its own.
    return getattr(rref.local_value(), method)(*args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    """Call a method of the object behind `rref` where it lives, and wait for what it returns."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs)


class ParameterServer(Turns, CountsSteps, Resumes, nn.Module):
    """The network and all that trainers may ask of it; RPC calls it in many threads of rank 0."""

    def __init__(self, args):
        nn.Module.__init__(self)
        Turns.__init__(self, args.world_size - 1)
        CountsSteps.__init__(self)
        torch.manual_seed(args.seed)
        self.input_device = device_for(args.device)
        self.model = Net().to(self.input_device)
        Resumes.__init__(self, args)

    def forward(self, inp, trainer=None):
        """Images and log-probabilities come and go on the CPU, which is what RPC carries."""
        self.note_read(trainer)
        inp = inp.to(self.input_device)
        out = self.model(inp)
        return out.to("cpu")

    def get_dist_gradients(self, cid):
        """The gradients in context `cid`, by name: for verification (`recording.py`)."""
        # Tutorial: fetched in every step, and keyed by tensors, of which only copies arrive.
        grads = dist_autograd.get_gradients(cid)
        return {name: grads[param].to("cpu") for name, param in self.model.named_parameters()}

    def get_param_rrefs(self):
        """An RRef for each parameter, for the trainers' optimizers."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def set_mode(self, training):
        """Dropout on or off, for all trainers."""
        self.train(training)


param_server = None
global_lock = threading.Lock()


def get_parameter_server(args):
    """On rank 0: the only server of this run, whoever asks first."""
    global param_server
    from param_server.async_server import AsyncParameterServer, keep_freed_memory
    from param_server.bounded_server import BoundedParameterServer

    with global_lock:
        if param_server is None:
            keep_freed_memory()
            servers = {"lock": ParameterServer, "bounded": BoundedParameterServer,
                       "async": AsyncParameterServer}
            param_server = servers[args.consistency](args)
        return param_server


def run_parameter_server(rank, world_size, args):
    """On rank 0: answer the trainers' calls until all of them have finished."""
    get_parameter_server(args)  # with the flags of this process: the checkpoint is on this machine
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    rpc.shutdown()  # waits for everyone


class TrainerNet(nn.Module):
    """The network as a trainer sees it: calls go to the server."""

    def __init__(self, args):
        super().__init__()
        self.param_server_rref = rpc.remote(SERVER_NAME, get_parameter_server, args=(args,))

    def get_global_param_rrefs(self):
        """What `DistributedOptimizer` needs."""
        return remote_method("get_param_rrefs", self.param_server_rref)

    def forward(self, x):
        """Images (N, 1, 28, 28) to log-probabilities (N, 10), on the CPU."""
        # Whose it is, if a step will follow: the server counts how old a gradient's weights are.
        trainer = rpc.get_worker_info().id if torch.is_grad_enabled() else None
        return remote_method("forward", self.param_server_rref, x, trainer)

    def train(self, mode=True):
        """Set the mode of the network itself."""
        # Tutorial: `model.eval()` reaches this wrapper alone, and dropout stays on in the accuracy.
        remote_method("set_mode", self.param_server_rref, mode)
        return super().train(mode)


class SGD(CountedOptimizer, optim.SGD):
    """A subclass that `DistributedOptimizer` does not know, so that its steps take turns."""
    # Tutorial: optim.SGD, which is compiled to TorchScript: two steps at once lose updates.


def train_step(net, opt, data, target, args):
    """Forward, backward and step, all on the server; the loss."""
    # Tutorial: one trainer's step broke another's backward: "modified by an inplace operation".
    with my_turn(net.param_server_rref, args), dist_autograd.context() as cid:
        model_output = net(data)
        loss = F.nll_loss(model_output, target)
        dist_autograd.backward(cid, [loss])
        my_step(net.param_server_rref, args)  # it waits with `bounded`
        opt.step(cid)  # of this trainer's gradients alone: they are in its context
        return loss.item()


def run_training_loop(rank, train_set, test_set, args):
    """On a trainer: all epochs, then the accuracy; the first trainer returns the metrics of all."""
    net = TrainerNet(args)
    param_rrefs = net.get_global_param_rrefs()
    server = net.param_server_rref
    opt = DistributedOptimizer(SGD, param_rrefs, server=server, trainer=rank, lr=args.lr)
    net.train()
    first_epoch = remote_method("get_first_epoch", server)
    server.rpc_sync().all_gather(rank, None)  # all begin together
    started, steps = time.time(), []
    with report.progress(args.epochs, "epoch", first_epoch, show=rank == 1) as bar:
        for epoch in range(first_epoch, args.epochs):
            steps.append([])  # of this epoch
            for data, target in get_next_batch(train_set, rank, epoch, args):
                loss = report.require_finite(train_step(net, opt, data, target, args),
                                             f"in epoch {epoch + 1}")
                steps[-1].append({"loss": loss, "samples": len(target), "time": time.time()})
            bar.update()
            log_epoch(TRAINER_NAME.format(rank), epoch, steps[-1])
            if args.checkpoint and rank == 1:  # the others may be a few batches elsewhere
                remote_method("save", server, epoch + 1)
    # Tutorial: all take the accuracy, while others step. Waiting for them may last: no timeout.
    mine = {"rank": rank, "started": started, "steps": steps}
    per_trainer = server.rpc_sync(timeout=0).all_gather(rank, mine)
    if rank != 1:
        return None
    return {"test_accuracy": get_accuracy(test_set, net), "per_trainer": per_trainer,
            "staleness": remote_method("get_staleness", server)}


def get_accuracy(test_set, model):
    """The share of the test images that the server's network takes for what they are."""
    model.eval()
    correct_sum = 0
    images, labels = test_set.tensors
    with torch.no_grad():
        for data, target in zip(images.split(500), labels.split(500), strict=True):
            out = model(data)  # Tutorial: model(data, -1), a TypeError.
            pred = out.argmax(dim=1)
            correct_sum += pred.eq(target).sum().item()
    return correct_sum / len(labels)


def run_worker(rank, world_size, args):
    """Rank 0 serves; the others train, and the first of them returns the metrics."""
    if rank == 0:
        return run_parameter_server(rank, world_size, args)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    train_set, test_set = load_data(args)
    metrics = run_training_loop(rank, train_set, test_set, args)
    rpc.shutdown()
    return metrics


def build_parser():
    """The flags of this example."""
    parser = Parser("param_server", __doc__, world_size=3, min_world_size=2)
    parser.set_defaults(default_master_addr="localhost")  # as in the tutorial: --rank is enough
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=20, metavar="N", help="times a trainer sees its images")
    add("--batch_size", type=count, default=32, metavar="N", help="images of a trainer in a step")
    add("--lr", type=bounded(float, above=0), default=0.03, help="learning rate of SGD")
    add("--consistency", choices=["async", "bounded", "lock"], default="async",
        help="async: all trainers at the same time; lock: one at a time; bounded: all, but no "
             "gradient is applied whose weights are more than K steps old")
    add("--max_staleness", type=bounded(int, at_least=0), metavar="K",
        help="with --consistency bounded (default: 1)")
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; metrics or differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_inputs(args, Net)
    if args.check:
        from param_server.check import check

        return check(args)
    metrics = launch(run_worker, args, role_name)
    return None if metrics is None else finish(metrics, args)


if __name__ == "__main__":
    main()
