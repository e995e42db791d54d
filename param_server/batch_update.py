r"""A parameter server that updates once per batch of trainers (tutorial 6_8, first half).

Each trainer computes gradients with its own model and its own images, sends them to the server, and
asks for new weights. The server answers with a future and adds up the gradients as they arrive. The
last trainer of a batch triggers the step, which completes the future for every trainer.

    rank 0 "parameter_server"                              rank 1 "trainer1", rank 2, ...
    +---------------------------------------+              +----------------------------------+
    | BatchUpdateParameterServer            |              | Trainer                          |
    |   update_and_fetch_model(grads)       | <--- grads - |   loss.backward()                |
    |     with lock: p.grad += g            |              |                                  |
    |     return a future  . . . . . . . .  | -- model --> |   m = the model with new weights |
    |     the last one: mean,               |              +----------------------------------+
    |       optimizer.step(), set_result    |
    +---------------------------------------+

    python param_server/batch_update.py --world_size 6         one server, five trainers, ResNet50
    python param_server/batch_update.py --arch resnet18        a smaller model
    python param_server/batch_update.py --check                compare every number with one process
    torchrun --nproc_per_node 6 param_server/batch_update.py   under torchrun
    python param_server/batch_update.py --world_size 6 --rank 1 \
        --master_addr HOST --master_port 29500                 manual launch

It ends with, about:
    resnet50, 5 trainers: 3.5 s per update in the median, 945 MB each; loss 0.580 -> 0.179
"""

import threading
import time
from argparse import Namespace
from collections.abc import Iterator

from common import report
from common.cli import Parser, bounded
from common.program import run_program
from common.session import device_for, rpc_options, wait_all
from common.vision import import_torchvision

import torch
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.futures import Future

from param_server.batch_update_results import finish, peak_memory, seconds_since
from param_server.data import require_sizes

SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the server, every other rank is a trainer."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


def build_model(args: Namespace) -> nn.Module:
    """Create the ResNet of `--arch`."""
    return import_torchvision().models.get_model(args.arch, num_classes=args.num_classes)


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return BatchNorm's means and variances: no gradients, but evaluation needs them."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


class BatchUpdateParameterServer:
    """The model and its optimizer, on rank 0, where RPC calls the methods in many threads."""

    def __init__(self, args: Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model = build_model(args)
        self.lock = threading.Lock()
        self.future_model = Future()
        self.batch_update_size = args.world_size - 1
        # Tutorial: a count of the trainers. The report needs the time at which each one arrived.
        self.arrived = {}
        self.waits = []  # for each batch, the seconds that each trainer waited
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)  # Tutorial: the next zero_grad() makes it None
        self.statistics = [torch.zeros_like(buffer) for buffer in running_statistics(self.model)]
        self.sums = [*(p.grad for p in self.model.parameters()), *self.statistics]

    def get_model(self) -> list[torch.Tensor]:
        """Return the tensors of the model: parameters, then running statistics."""
        # Tutorial: returns the module itself, which RPC pickles in each update.
        return [*(p.detach() for p in self.model.parameters()), *running_statistics(self.model)]

    @rpc.functions.async_execution  # Tutorial: a static method that takes an RRef.
    def update_and_fetch_model(self, rank: int, grads: list[torch.Tensor]) -> Future:
        """Add a trainer's gradients; the last trainer of the batch makes the step.

        Args:
            rank: rank of the trainer.
            grads: gradients of all parameters, then the trainer's running statistics.

        Returns:
            A future of what `get_model` returns after the step.
        """
        with self.lock:  # around the sum, too: of two additions at once, one could be lost
            for total, g in zip(self.sums, grads, strict=True):
                total += g
            self.arrived[rank] = time.perf_counter()
            fut = self.future_model
            if len(self.arrived) < self.batch_update_size:
                return fut
            for total in self.sums:
                total /= self.batch_update_size
            self.optimizer.step()
            # Tutorial: leaves them unchanged, so the trained model is useless in evaluation mode.
            for buffer, mean in zip(running_statistics(self.model), self.statistics, strict=True):
                buffer.copy_(mean)
            for total in self.sums:
                total.zero_()
            self.waits.append(seconds_since(self.arrived))
            self.arrived, self.future_model = {}, Future()  # for the next batch
        # Tutorial: sets it inside the lock, and RPC sends all answers from there.
        # No copy is needed: the next step needs every trainer, and each one has this model by then.
        fut.set_result(self.get_model())
        return fut


class Trainer:
    """A model and images of its own, on a trainer's process."""

    def __init__(self, ps_rref: RRef, args: Namespace) -> None:
        self.rank, self.args = rpc.get_worker_info().id, args
        self.ps_rref, self.loss_fn = ps_rref, nn.MSELoss()
        self.device = device_for(args.device)
        with torch.device("meta"):  # no memory and no random numbers: the server sends weights
            self.m = build_model(args)
        self.m.to_empty(device=self.device)
        self.generator = torch.Generator().manual_seed(1000 * args.seed + self.rank)
        self.one_hot_indices = torch.randint(
            args.num_classes, (args.batch_size, 1), generator=self.generator)

    def get_next_batch(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images (N, 3, H, W) and one-hot targets (N, num_classes), on the model's device."""
        args, size = self.args, (3, self.args.image_size, self.args.image_size)
        # Tutorial: images are pure noise: there is nothing to learn. Here, a class has a pattern.
        patterns = torch.randn(args.num_classes, *size,
                               generator=torch.Generator().manual_seed(args.seed))
        labels = torch.zeros(args.batch_size, args.num_classes).scatter_(1, self.one_hot_indices, 1)
        for _ in range(args.num_updates):
            noise = torch.randn(args.batch_size, *size, generator=self.generator)
            inputs = patterns[self.one_hot_indices.squeeze(1)] + noise
            yield inputs.to(self.device), labels.to(self.device)

    def set_model(self, numbers: list[torch.Tensor]) -> None:
        """Copy what the server's `get_model` returns into the model."""
        with torch.no_grad():
            own = [*self.m.parameters(), *running_statistics(self.m)]
            for tensor, new in zip(own, numbers, strict=True):
                tensor.copy_(new)

    def get_gradients(self) -> list[torch.Tensor]:
        """Return the gradients and running statistics for the server, on the CPU."""
        return [*(p.grad.cpu() for p in self.m.parameters()),
                *(buffer.cpu() for buffer in running_statistics(self.m))]

    def train(self) -> list[dict[str, float]]:
        """Make all updates; return the loss and the seconds of each."""
        self.set_model(self.ps_rref.rpc_sync().get_model())
        step_stats = []
        for update, (inputs, labels) in enumerate(self.get_next_batch(), start=1):
            started = time.perf_counter()
            loss = self.loss_fn(self.m(inputs), labels)
            # Tutorial: a new module in each update. None would allocate new gradients each time.
            self.m.zero_grad(set_to_none=False)
            loss.backward()
            loss = report.require_finite(loss, f"at update {update}")
            grads = self.get_gradients()
            compute = time.perf_counter() - started
            numbers = self.ps_rref.rpc_sync().update_and_fetch_model(self.rank, grads)
            self.set_model(numbers)
            step_stats.append({"loss": loss, "compute": compute,
                               "seconds": time.perf_counter() - started})
            if self.rank == 1:  # every trainer is at the same update
                report.log(TRAINER_NAME.format(1), f"update {update}  loss {loss:.3f}")
        return step_stats


def run_trainer(ps_rref: RRef, args: Namespace) -> dict:
    """Train on a trainer's process; this one call lasts for the whole training run."""
    step_stats = Trainer(ps_rref, args).train()
    return {"updates": step_stats, "peak_memory": peak_memory()}


def run_ps(server: BatchUpdateParameterServer, args: Namespace) -> list[dict]:
    """Let all trainers train at the same time; return the results of `run_trainer`, by rank."""
    ps_rref = RRef(server)
    names = [TRAINER_NAME.format(rank) for rank in range(1, args.world_size)]
    # Tutorial: the sample code limits a whole run to 60 s. Here, each update has --timeout.
    futs = [rpc.rpc_async(name, run_trainer, args=(ps_rref, args), timeout=0) for name in names]
    return wait_all(futs)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0, which starts the trainers; return the measurements there, None elsewhere."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    if rank == 0:
        server = BatchUpdateParameterServer(args)
        trainers = run_ps(server, args)
    rpc.shutdown()  # waits for every rank: until then, trainers answer calls
    if rank != 0:
        return None
    return {"trainers": trainers, "waits": server.waits, "peak_memory": peak_memory(),
            "model_bytes": sum(tensor.nbytes for tensor in server.get_model())}


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("param_server/batch_update", __doc__, world_size=6, min_world_size=2, rpc=True)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--arch", choices=["resnet18", "resnet50"], default="resnet50", help="model to train")
    add("--batch_size", type=bounded(int, at_least=2), default=20, metavar="N",
        help="images of one trainer in one update")
    add("--image_size", type=bounded(int, at_least=8), default=64, metavar="N",
        help="height and width of an image")
    add("--num_classes", type=count, default=30, metavar="N", help="classes of images")
    add("--num_updates", type=count, default=6, metavar="N", help="steps of the server")
    add("--lr", type=bounded(float, above=0), default=0.001,
        help="learning rate of SGD; the momentum is 0.9")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process (`--check`).

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_sizes(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
