r"""A ResNet in two processes, and a pipeline of micro-batches through them (tutorial 6_7).

Each worker holds half of the model. If the whole batch goes through at once, one worker always
waits for the other. So the master splits the batch into micro-batches: while worker2 computes the
first one, worker1 computes the second. Distributed autograd returns the gradients the same way.

    rank 0 "master"             rank 1 "worker1"          rank 2 "worker2"
    +----------------+          +------------------+      +-----------------+
    | DistResNet50   | -- x --> | ResNetShard1     | y -> | ResNetShard2    |
    |  micro-batches |          |  conv1 .. layer2 |      |  layer3 .. fc   |
    |  loss          | <------------------------- z ----- |                 |
    |  backward,step | ------------------------- dz ----> |                 |
    +----------------+          |                  | <-dy |                 |
                                +------------------+      +-----------------+

    python model_parallel_resnet/main.py --num_splits 1 2 4 8    seconds per batch for each number
    python model_parallel_resnet/main.py --check                 the same as one whole ResNet?
    python -m tracing model_parallel_resnet/main.py       with a timeline of every process
    torchrun --nproc_per_node 3 model_parallel_resnet/main.py    under torchrun
    python model_parallel_resnet/main.py --rank 1 \
        --master_addr HOST --master_port 29500                   manual launch

It ends with, about:
    resnet50, RPC pipeline: loss 0.3693 -> 0.0221 |
    best with num_split 4: ... s a batch, ... times as fast as with 1 (ideal 1.60)

schedules.py is a pipeline without RPC.
"""

import argparse
import threading
import time

from common.cli import Parser, bounded
from common.program import run_program
from common.session import device_for, keep_memory, rpc_options, wait_all
from common.vision import import_torchvision

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.results import Batches, finish

MASTER_NAME = "master"
WORKERS = ["worker1", "worker2"]
# torchvision's kind of block, and the number of blocks in layer1 to layer4.
ARCHS = {"resnet18": ("BasicBlock", [2, 2, 2, 2]), "resnet50": ("Bottleneck", [3, 4, 6, 3])}


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the master, each other rank holds one shard."""
    return [MASTER_NAME, *WORKERS][rank]


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with a kernel of one pixel."""
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class ResNetBase(nn.Module):
    """Base class of both shards: builds layers from torchvision's blocks.

    Args:
        block: Name of torchvision's block class, "Bottleneck" or "BasicBlock".
        device: Device of the parameters. With "auto", "cpu" or "cuda", the worker chooses one
            of its own devices.
        seed: Seed for the initial weights.
    """

    def __init__(self, block: str, device: str | torch.device, seed: int) -> None:
        super().__init__()
        # RPC calls `forward` in one thread per micro-batch. Two forwards at a time would delay the
        # next stage, and both would write to the same running statistics of BatchNorm.
        self._lock = threading.Lock()
        self._block = getattr(import_torchvision().models.resnet, block)
        self._norm_layer = nn.BatchNorm2d
        # Tutorial: the master passes "cuda:0" and "cuda:1", so fewer than two GPUs are an error.
        self.device = device_for(device) if isinstance(device, str) else device
        torch.manual_seed(seed)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes * self._block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * self._block.expansion, stride),
                self._norm_layer(planes * self._block.expansion))
        first = self._block(self.inplanes, planes, stride, downsample)
        self.inplanes = planes * self._block.expansion
        return nn.Sequential(first, *(self._block(self.inplanes, planes) for _ in range(1, blocks)))

    def _init_weights(self) -> None:
        # Tutorial: only ResNetShard1 does this, unlike torchvision. BatchNorm's initial weights
        # (1) and biases (0) are already its defaults.
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def parameter_rrefs(self) -> list[RRef]:
        """Return an RRef for each parameter, for a `DistributedOptimizer` in another process."""
        return [RRef(param) for param in self.parameters()]


class ResNetShard1(ResNetBase):
    """First half of the model: images (N, 3, H, W) to features (N, 512, H/8, W/8).

    With resnet18, the features have 128 channels.

    Args:
        block: Name of torchvision's block class.
        blocks: Numbers of blocks in layer1 and layer2.
        device: Device of the parameters, see `ResNetBase`.
        seed: Seed for the initial weights.
    """

    def __init__(self, block: str, blocks: list[int], device: str | torch.device,
                 seed: int) -> None:
        super().__init__(block, device, seed)
        self.inplanes = 64
        self.seq = nn.Sequential(
            nn.Conv2d(3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False),
            self._norm_layer(self.inplanes),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            self._make_layer(64, blocks[0]),
            self._make_layer(128, blocks[1], stride=2))
        self._init_weights()
        self.to(self.device)

    def forward(self, x_rref: RRef) -> torch.Tensor:
        """Fetch a micro-batch from the master, and return its features; called over RPC."""
        x = x_rref.to_here().to(self.device)  # before the lock, so that it overlaps with computing
        with self._lock:
            out = self.seq(x)
        return out.cpu()


class ResNetShard2(ResNetBase):
    """Second half of the model: features, as `ResNetShard1` returns them, to logits.

    The logits are (N, num_classes).

    Args:
        block: Name of torchvision's block class.
        blocks: Numbers of blocks in layer3 and layer4.
        num_classes: Number of classes.
        device: Device of the parameters, see `ResNetBase`.
        seed: Seed for the initial weights.
    """

    def __init__(self, block: str, blocks: list[int], num_classes: int, device: str | torch.device,
                 seed: int) -> None:
        super().__init__(block, device, seed)
        self.inplanes = 128 * self._block.expansion
        self.seq = nn.Sequential(
            self._make_layer(256, blocks[0], stride=2),
            self._make_layer(512, blocks[1], stride=2),
            nn.AdaptiveAvgPool2d((1, 1)))
        self.fc = nn.Linear(512 * self._block.expansion, num_classes)
        self._init_weights()
        self.to(self.device)

    def forward(self, x_rref: RRef) -> torch.Tensor:
        """Fetch features from worker1, which answers after computing them; return the logits."""
        x = x_rref.to_here().to(self.device)
        with self._lock:
            out = self.fc(torch.flatten(self.seq(x), 1))
        return out.cpu()


class DistResNet50(nn.Module):
    """The whole model, as the master sees it: sends micro-batches through two remote shards.

    Args:
        num_split: Number of micro-batches.
        workers: Names of the two processes that hold the shards.
        arch: One of `ARCHS`.
        num_classes: Number of classes.
        device: Device of the shards, see `ResNetBase`.
        seed: Seed from which each shard's own seed is derived.
    """

    def __init__(self, num_split: int, workers: list[str], arch: str, num_classes: int,
                 device: str, seed: int) -> None:
        super().__init__()
        self.num_split = num_split
        block, blocks = ARCHS[arch]
        self.p1_rref = rpc.remote(workers[0], ResNetShard1,
                                  args=(block, blocks[:2], device, 2 * seed + 1))
        self.p2_rref = rpc.remote(workers[1], ResNetShard2,
                                  args=(block, blocks[2:], num_classes, device, 2 * seed + 2))

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        """Compute logits (N, num_classes) of images (N, 3, H, W), in the images' order."""
        out_futures = []
        # Tutorial: xs.split(self.split_size) reads an attribute that does not exist, and `split`
        # takes the size of a piece, not the number of pieces.
        for x in xs.tensor_split(self.num_split):
            x_rref = RRef(x)
            # No line here waits: worker1 fetches x from the master, worker2 fetches y from worker1.
            y_rref = self.p1_rref.remote().forward(x_rref)
            z_fut = self.p2_rref.rpc_async().forward(y_rref)
            out_futures.append(z_fut)
        return torch.cat(wait_all(out_futures))

    def parameter_rrefs(self) -> list[RRef]:
        """Return RRefs of the parameters of both shards."""
        remote_params = []
        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())
        remote_params.extend(self.p2_rref.remote().parameter_rrefs().to_here())
        return remote_params


def run_master(args: argparse.Namespace) -> dict:
    """Train with each of `--num_splits` alternately; return the `metrics` of `Batches`."""
    # Tutorial: starts new processes for each number, and measures their start as well.
    model = DistResNet50(1, WORKERS, args.arch, args.num_classes, args.device, args.seed)
    loss_fn = nn.MSELoss()
    # The gradients are in the context, not in `.grad`, so a plain optimizer would change nothing.
    # `parameter_rrefs` must be called before the first context: its `remote()` fetches the type of
    # each shard. An `rpc_async()` on an RRef of unknown type is sent from another thread, outside
    # the context, and its gradients are lost.
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=args.lr)
    inputs, labels = get_batch(args)  # Tutorial: draws new images each time; losses don't compare.
    batches = Batches(MASTER_NAME, args)
    for batch in range(args.num_batches + 1):  # the first one is a warm-up
        for num_split in args.num_splits:  # alternately, so that a slow moment slows all of them
            model.num_split = num_split
            started = time.perf_counter()
            with dist_autograd.context() as context_id:
                outputs = model(inputs)
                loss = loss_fn(outputs, labels)
                # Each micro-batch's gradient goes to worker2, and from there to worker1.
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
            batches.add(batch, num_split, time.perf_counter() - started, loss)
    return batches.metrics()


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train on rank 0, which returns the metrics; the other ranks serve their shards."""
    # The C library returns large freed blocks to the system and requests them again for the next
    # micro-batch, which can cost a third of a worker's time. This call must precede all threads.
    keep_memory()
    options = rpc_options(args, 8 + 2 * max(args.num_splits))  # threads; m + 1 would be enough
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=options)
    metrics = run_master(args) if rank == 0 else None
    rpc.shutdown()  # waits for all ranks; until then, the workers answer the master's calls
    return metrics


def add_flags(parser: Parser) -> Parser:
    """Add the flags that main.py and schedules.py share; return the parser."""
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--num_splits", type=bounded(int, at_least=1, at_most=1000), nargs="+", metavar="N",
        default=[1, 2, 4, 8], help="numbers of micro-batches to try; 1 is always among them")
    add("--batch_size", type=count, default=32, metavar="N", help="images per batch")
    add("--image_size", type=bounded(int, at_least=32), default=128, metavar="N",
        help="height and width of an image in pixels")
    add("--num_batches", type=count, default=3, metavar="N",
        help="timed batches for each of --num_splits")
    add("--num_classes", type=bounded(int, at_least=2), default=1000, metavar="N",
        help="number of classes")
    add("--arch", choices=ARCHS, default="resnet50", help="torchvision model to split")
    add("--lr", type=bounded(float, above=0), default=0.05, help="learning rate of SGD")
    return parser


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return add_flags(Parser("model_parallel_resnet", __doc__, world_size=3, rpc=True))


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process if `--check` is given.

    Args:
        argv: Command-line flags, `sys.argv` by default.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch"], ["first half"], ["second half"]])
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
