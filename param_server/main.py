r"""A parameter server: the network lives on one process, any number of trainers train it (tutorial 6_6).

Trainers have the data and no network. Forward, backward and optimizer step of each of them run on the server, which
must serve them at the same time without mixing them up.

    rank 0 "parameter_server"                       rank 1 "trainer1"
    +------------------------------------+          +------------------------------------------+
    | ParameterServer: Net               | <------- | net(data): images                        |
    |   forward with a copy of the       | -------> |   log-probabilities                      |
    |   weights as they are now          |          | loss = F.nll_loss(model_output, target)  |
    |   gradients of context cid         | <------- | dist_autograd.backward(cid, [loss])      |
    |   SGD step, one at a time          | <------- | opt.step(cid)                            |
    +------------------------------------+          +------------------------------------------+
                      ^ the same, at the same time     rank 2 "trainer2" ...

    python param_server/main.py --world_size 3                        one server, two trainers
    python param_server/main.py --consistency lock                    one trainer at a time
    python param_server/main.py --check                               the same as a single process? no update lost?
    torchrun --nproc_per_node 3 param_server/main.py                  under torchrun
    python param_server/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                        one rank per terminal, as in the tutorial

Last line, about:
    digits: test accuracy 96.9% after 920 updates by 2 trainers (async): 884 samples/s
"""

import collections
import contextlib
import copy
import itertools
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from common import checkpoint, report
from common.cli import Parser, bounded, given, refuse, starts_rank
from common.data import add_data_flags, fetch_data, load_data
from common.launch import launch
from common.session import device_for, rpc_options
from common.worker_env import keep_memory
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.func import functional_call
from torch.futures import Future
from torch.nn import functional as F

from param_server.single_process import train_alone

CHECK_STEPS, PUSHES = 10, 20
EVERY = 97  # of more than a million weights, the check compares every so many
SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"


def role_name(rank, world_size):
    """Rank 0 is the server, all others are trainers."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


class SGD(optim.SGD):
    """The same, but `DistributedOptimizer` does not know it, and so makes its steps one after the other.

    What it knows it compiles to TorchScript: then two trainers' steps can run at the same time, both read the old value
    of a parameter, and one of the two updates is lost.
    """


class Net(nn.Module):
    """The network of PyTorch's MNIST example: images (N, 1, 28, 28) to log-probabilities (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)  # not 2d: there are no channels any more
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        """On the device of the weights."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class ParameterServer(nn.Module):
    """The network and all that trainers may ask of it; lives on rank 0, where RPC calls it in many threads."""

    def __init__(self, args):
        super().__init__()
        torch.manual_seed(args.seed)
        self.input_device = device_for(args.device)
        self.model = Net().to(self.input_device)
        self.shells = threading.local()
        self.args, self.first_epoch = args, 0
        if args.resume:
            state = checkpoint.load(args)
            self.model.load_state_dict(state["model"])
            self.first_epoch = state["epochs"]
            if "random_numbers" in state:  # checkpoints of earlier versions have none
                torch.set_rng_state(state["random_numbers"])
        self.lock = threading.Lock()
        self.busy, self.queue = False, collections.deque()
        self.brought, self.everyone = {}, Future()

    def forward(self, inp):
        """Images and log-probabilities come and go on the CPU, which is what RPC carries."""
        inp = inp.to(self.input_device)
        if self.args.consistency == "lock" or self.args.world_size == 2:  # nobody steps between forward and backward
            return self.model(inp).to("cpu")
        # A copy of the weights for this forward and its backward: until then, another trainer may make a step, and
        # autograd refuses weights that were "modified by an inplace operation". Gradients flow on to the parameters.
        weights = {name: param.clone() for name, param in self.model.named_parameters()}
        return functional_call(self.shell(), weights, (inp,)).to("cpu")

    def shell(self):
        """The network without weights, one for each thread: functional_call puts the copies into it for a while.

        With one for all, one thread would put its copies where another has just put its own, and the wrong ones would
        stay there: the training goes on without an error, and without an effect.
        """
        if not hasattr(self.shells, "net"):
            self.shells.net = copy.deepcopy(self.model).to("meta")
        return self.shells.net.train(self.model.training)

    def set_mode(self, training):
        """Dropout on or off, for all trainers."""
        self.train(training)

    def get_param_rrefs(self):
        """An RRef for each parameter, for the trainers' optimizers."""
        return [RRef(param) for param in self.model.parameters()]

    def start(self):
        """The epoch with which a training begins."""
        return self.first_epoch

    @rpc.functions.async_execution
    def acquire(self):
        """For `--consistency lock`: a future that is completed when it is the caller's turn. No thread waits."""
        turn = Future()
        with self.lock:
            if self.busy:
                self.queue.append(turn)
                return turn
            self.busy = True
        turn.set_result(None)
        return turn

    def release(self):
        """The next in the queue, please."""
        with self.lock:
            turn = self.queue.popleft() if self.queue else None
            self.busy = turn is not None
        if turn is not None:
            turn.set_result(None)

    @rpc.functions.async_execution
    def gather(self, rank, value):
        """Called by every trainer: a future of what all have brought, completed by the last of them."""
        with self.lock:
            self.brought[rank], everyone = value, self.everyone
            if len(self.brought) < self.args.world_size - 1:
                return everyone
            values = [self.brought[rank] for rank in sorted(self.brought)]
            self.brought, self.everyone = {}, Future()  # for the next time
        everyone.set_result(values)
        return everyone

    def save(self, epochs):
        """Write a checkpoint, on this machine, if its own flags name a file."""
        if self.args.checkpoint is not None:
            # With the state of the random numbers: dropout goes on after a resume as if it had never stopped.
            checkpoint.save(self.args, {"model": self.model.state_dict(), "epochs": epochs,
                                        "random_numbers": torch.get_rng_state()})

    def gradient(self, cid):
        """For `check`: every so many entries of the gradient in this context."""
        gradients = dist_autograd.get_gradients(cid)
        return torch.cat([gradients[param].flatten().cpu() for param in self.model.parameters()])[::EVERY].tolist()

    def push(self, gradient):
        """For `check`: a number whose derivative by every single parameter is `gradient`."""
        return gradient * sum(param.sum() for param in self.model.parameters())

    def weights(self):
        """All parameters in one tensor, on the CPU."""
        return torch.cat([param.detach().flatten().cpu() for param in self.model.parameters()])


_param_server = None
_global_lock = threading.Lock()


def get_parameter_server(args):
    """On rank 0: the only server of this run, whoever asks first."""
    global _param_server
    with _global_lock:
        if _param_server is None:
            _param_server = ParameterServer(args)
        return _param_server


class TrainerNet(nn.Module):
    """A network as a trainer sees it: calls go to the server."""

    def __init__(self, args):
        super().__init__()
        self.param_server_rref = rpc.remote(SERVER_NAME, get_parameter_server, args=(args,))

    def get_global_param_rrefs(self):
        """What `DistributedOptimizer` needs."""
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        """Images (N, 1, 28, 28) to log-probabilities (N, 10), on the CPU."""
        return self.param_server_rref.rpc_sync().forward(x)

    def train(self, mode=True):
        """Reaches the network itself: without this, `net.eval()` would switch this empty shell alone."""
        self.param_server_rref.rpc_sync().set_mode(mode)
        return super().train(mode)


def get_next_batch(train_set, rank, epoch, args):
    """Yield the batches of a trainer's own share of the images, in another order in each epoch."""
    n_trainers = args.world_size - 1
    share = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(args.seed))[rank - 1 :: n_trainers]
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + 1000 * epoch + rank)
    for batch in share[torch.randperm(len(share), generator=generator)].split(args.batch_size):
        yield train_set[batch]


@contextlib.contextmanager
def turn_of_mine(server_rref, args):
    """With `--consistency lock`, one trainer at a time gets into this block; otherwise all."""
    if args.consistency == "lock":
        server_rref.rpc_sync().acquire()
    yield
    if args.consistency == "lock":
        server_rref.rpc_sync().release()


def train_step(net, opt, data, target, args):
    """Forward, backward and step, all on the server; the loss."""
    with turn_of_mine(net.param_server_rref, args), dist_autograd.context() as cid:
        model_output = net(data)
        loss = F.nll_loss(model_output, target)
        dist_autograd.backward(cid, [loss])
        opt.step(cid)  # of this trainer's gradients alone: they are in its context
        return loss.item()


def run_training_loop(rank, train_set, test_set, args):
    """On a trainer: all epochs, then the accuracy; the first trainer returns the metrics of all."""
    net = TrainerNet(args)
    opt = DistributedOptimizer(SGD, net.get_global_param_rrefs(), lr=args.lr)
    server, role = net.param_server_rref, role_name(rank, args.world_size)
    first_epoch = server.rpc_sync().start()
    net.train()
    server.rpc_sync().gather(rank, None)  # all begin together
    losses, times, started = [], [], time.time()
    with report.progress(args.epochs, "epoch", first_epoch, show=rank == 1) as bar:
        for epoch in range(first_epoch, args.epochs):
            of_epoch = []
            for data, target in get_next_batch(train_set, rank, epoch, args):
                of_epoch.append(train_step(net, opt, data, target, args))
                times.append(time.time())
            losses.append(of_epoch)
            bar.update()
            report.log(role, f"epoch {epoch + 1}  loss {sum(of_epoch) / len(of_epoch):.3f}")
            if args.checkpoint and rank == 1:  # one trainer asks for it: the others may be a few batches elsewhere
                server.rpc_sync().save(epoch + 1)
    samples = sum(len(target) for epoch in range(first_epoch, args.epochs)
                  for _, target in get_next_batch(train_set, rank, epoch, args))
    of_trainer = {"rank": rank, "started": started, "times": times, "losses": losses, "samples": samples}
    # The accuracy is for the end, when nobody steps any more. The others may still work for long: no timeout.
    per_trainer = server.rpc_sync(timeout=0).gather(rank, of_trainer)
    return {"test_accuracy": get_accuracy(test_set, net), "per_trainer": per_trainer} if rank == 1 else None


def get_accuracy(test_set, net):
    """The share of the test images that the server's network, without dropout, takes for what they are."""
    net.eval()
    images, labels = test_set.tensors
    with torch.no_grad():
        guesses = torch.cat([net(batch).argmax(dim=1) for batch in images.split(500)])
    return (guesses == labels).double().mean().item()


def run_worker(rank, world_size, args):
    """Rank 0 serves; the others train, and the first of them returns the metrics."""
    if rank == 0:
        keep_memory(blocks_up_to=2**25)
        get_parameter_server(args)  # with the flags of this process: the checkpoint is on this machine
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    metrics = None
    if rank != 0:
        train_set, test_set = load_data(args)
        metrics = run_training_loop(rank, train_set, test_set, args)
    rpc.shutdown()  # waits for everyone: until then, the server answers the trainers' calls
    if metrics is None:
        return None
    per_trainer = metrics["per_trainer"]
    seconds = max(max(trainer["times"], default=trainer["started"]) for trainer in per_trainer) - min(
        trainer["started"] for trainer in per_trainer)
    epochs = [{"loss": sum(map(sum, same)) / sum(map(len, same))}
              for same in zip(*(trainer["losses"] for trainer in per_trainer), strict=True)]
    samples = sum(trainer["samples"] for trainer in per_trainer)
    return {"test_accuracy": metrics["test_accuracy"], "epochs": epochs, "consistency": args.consistency,
            "updates": sum(len(trainer["times"]) for trainer in per_trainer),
            "samples_per_s": samples / seconds if samples else None, "per_trainer": per_trainer}


def record(rank, world_size, args):
    """For `check`: gradients of all trainers at the same time, steps of one alone, known gradients of all again."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    recorded = None
    if rank != 0:
        net = TrainerNet(args)
        opt = DistributedOptimizer(SGD, net.get_global_param_rrefs(), lr=args.lr)
        server, gradients, losses = net.param_server_rref.rpc_sync(timeout=0), [], []
        net.eval()
        server.gather(rank, None)  # all at the same time:
        for data, target in first_batches(rank, args):
            with turn_of_mine(net.param_server_rref, args), dist_autograd.context() as cid:
                dist_autograd.backward(cid, [F.nll_loss(net(data), target)])
                gradients.append(server.gradient(cid))  # and no step: the weights stay as they are
        gradients = server.gather(rank, gradients)
        if rank == 1:  # alone
            losses = [train_step(net, opt, *batch, args) for batch in first_batches(rank, args)]
        server.gather(rank, None)
        before = server.weights()
        server.gather(rank, None)  # again all at the same time
        for _ in range(PUSHES):
            with turn_of_mine(net.param_server_rref, args), dist_autograd.context() as cid:
                dist_autograd.backward(cid, [server.push(rank)])
                opt.step(cid)
        server.gather(rank, None)
        pushed = (before - server.weights()) / args.lr
        if rank == 1:
            recorded = {"losses": losses, "weights": before[::EVERY].tolist(), "gradients": gradients,
                        "pushed": [pushed.min().item(), pushed.max().item()]}
    rpc.shutdown()
    return recorded


def first_batches(rank, args):
    """The first batches of a trainer."""
    train_set, _ = load_data(args)
    return list(itertools.islice(get_next_batch(train_set, rank, 0, args), CHECK_STEPS))


def check(args):
    """Hold a few steps against a single process, and many at a time against their sum; the differences, or None."""
    recorded = launch(record, args, role_name)
    if recorded is None:
        return None
    torch.manual_seed(args.seed)
    batches = [first_batches(rank, args) for rank in range(1, args.world_size)]
    alone = train_alone(Net().eval(), batches, args.lr)
    # Every trainer has pushed its rank, as the gradient of every parameter, so many times.
    pushed = PUSHES * sum(range(1, args.world_size))
    gradients = [[gradient[::EVERY].tolist() for gradient in of_trainer] for of_trainer in alone["gradients"]]
    alone = {"gradients": gradients, "losses": alone["losses"], "weights": alone["weights"][::EVERY].tolist(),
             "pushed": [pushed, pushed]}
    # float32: the same sums as in one process; each of many pushes is rounded.
    return report.compare(recorded, alone, dict.fromkeys(alone, 1e-5))


def plot(metrics, args):
    """Draw `loss.png`: the loss of each trainer over time."""
    title = f"{args.world_size - 1} trainers, one server ({args.consistency})"
    with report.picture(args.output_dir / "loss.png", title, "time (s)", "loss, mean of 10 steps") as axes:
        zero = min(trainer["started"] for trainer in metrics["per_trainer"])
        for trainer in metrics["per_trainer"]:
            losses = torch.tensor(sum(trainer["losses"], []))
            times = torch.tensor(trainer["times"], dtype=torch.float64) - zero
            smooth = losses.unfold(0, 10, 1).mean(dim=1) if len(losses) >= 10 else losses
            axes.plot(times[-len(smooth):], smooth, linewidth=1.5, label=TRAINER_NAME.format(trainer["rank"]))


def build_parser():
    """The flags of this example."""
    parser = Parser("param_server", __doc__, world_size=3, min_world_size=2)
    parser.set_defaults(default_master_addr="localhost")  # as in the tutorial, where --rank alone is enough
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=20, metavar="N", help="times that every trainer goes through its images")
    add("--batch_size", type=count, default=32, metavar="N", help="images of one trainer in one step")
    add("--lr", type=bounded(float, above=0), default=0.03, help="learning rate of SGD")
    add("--consistency", choices=["async", "lock"], default="async",
        help="async: all trainers at the same time; lock: one at a time")
    parser.add_checkpoint_flags()
    return parser


def parse_args(argv, parser):
    """The flags, when data and checkpoint are there and fit to them."""
    args = parser.parse_args(argv)
    fetch_data(args)
    if starts_rank(args, 1) and args.world_size - 1 > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples + 1}: every trainer needs "
               "an image", rank=1)
    state = checkpoint.inspect(args, needs=("epochs",), make_model=Net)
    if state and state["epochs"] > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {state['epochs']}: the checkpoint has so "
               "many behind it")
    return args


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = parse_args(argv, build_parser())
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    trainers = "1 trainer" if args.world_size == 2 else f"{args.world_size - 1} trainers"
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if metrics["samples_per_s"] else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {metrics['updates']} updates by "
          f"{trainers} ({args.consistency}): {speed}")
    return metrics


if __name__ == "__main__":
    main()
