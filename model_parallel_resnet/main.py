r"""A ResNet in two processes, and a pipeline of micro-batches through them (tutorial 6_7).

Each worker has half of the model. With one piece of work at a time, one of them always waits. So
the master splits the batch into micro-batches: while worker2 has the first, worker1 has the second.
Distributed autograd brings the gradients back the same way.

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
    best with num_split 4: ... s a batch, ... times as fast as with 1 (ideal 1.60), ...

schedules.py is a pipeline without RPC.
"""

import argparse
import threading
import time

from common.cli import Parser, bounded
from common.program import run_program
from common.session import device_for, rpc_options, wait_all
from common.vision import import_torchvision

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.measuring import fetch_work, record_work
from model_parallel_resnet.results import Batches, finish

MASTER_NAME = "master"
WORKERS = ["worker1", "worker2"]
# torchvision's kind of block, and the number of blocks in layer1 to layer4.
ARCHS = {"resnet18": ("BasicBlock", [2, 2, 2, 2]), "resnet50": ("Bottleneck", [3, 4, 6, 3])}


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: 0 is the master, the others have a shard each."""
    return [MASTER_NAME, *WORKERS][rank]


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution of single pixels."""
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class ResNetBase(nn.Module):
    """Makes layers out of torchvision's blocks, for both shards.

    Args:
        block: the name of torchvision's kind of block, "Bottleneck" or "BasicBlock".
        device: "auto", "cpu" or "cuda", of which the worker makes one that it has; or that device.
        seed: of the initial weights.
    """

    def __init__(self, block: str, device: str | torch.device, seed: int) -> None:
        super().__init__()
        # RPC calls `forward` in many threads, one for each micro-batch. Two at a time would make
        # the next stage wait, and write into the same running statistics of BatchNorm.
        self._lock = threading.Lock()
        self._block = getattr(import_torchvision().models.resnet, block)
        self._norm_layer = nn.BatchNorm2d
        # Tutorial: "cuda:0" and "cuda:1", from the master; does not start on fewer GPUs.
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
        # Tutorial: of ResNetShard1 only, unlike torchvision. BatchNorm's 1 and 0 are its defaults.
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def parameter_rrefs(self) -> list[RRef]:
        """Return an RRef for each parameter, for a `DistributedOptimizer` elsewhere."""
        return [RRef(param) for param in self.parameters()]


class ResNetShard1(ResNetBase):
    """Computes features (N, 512, H/8, W/8) of images (N, 3, H, W); with resnet18, 128 channels.

    Args:
        blocks: the numbers of blocks in layer1 and layer2.
        block, device, seed: as above.
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

    def forward(self, x_rref: RRef, i: int) -> torch.Tensor:
        """Fetch a micro-batch, and compute; called over RPC. Its number `i` is for the record."""
        x = x_rref.to_here().to(self.device)  # before the lock: it travels while others compute
        with self._lock:
            out = self.seq(x)
        return out.cpu()


class ResNetShard2(ResNetBase):
    """Computes logits (N, num_classes) of those features.

    Args:
        blocks: the numbers of blocks in layer3 and layer4.
        block, num_classes, device, seed: as above.
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

    def forward(self, x_rref: RRef, i: int) -> torch.Tensor:
        """Do the same; `x_rref` is with worker1, which answers when it has computed it."""
        x = x_rref.to_here().to(self.device)
        with self._lock:
            out = self.fc(torch.flatten(self.seq(x), 1))
        return out.cpu()


class DistResNet50(nn.Module):
    """Joins two shards elsewhere to the master's model, and sends micro-batches through them.

    Args:
        num_split: the number of micro-batches.
        workers: where the shards will be.
        arch: one of `ARCHS`.
        num_classes, device: of the shards.
        seed: of the data; the initial weights of each shard have one of their own.
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
        """Compute logits (N, num_classes) of images (N, 3, H, W), in their order."""
        out_futures = []
        # Tutorial: xs.split(self.split_size): no such attribute; and a size is not a number.
        for i, x in enumerate(xs.tensor_split(self.num_split)):
            x_rref = RRef(x)  # nothing here waits: worker1 fetches x, worker2 asks it for y
            y_rref = self.p1_rref.remote().forward(x_rref, i)
            out_futures.append(self.p2_rref.rpc_async().forward(y_rref, i))
        return torch.cat(wait_all(out_futures))

    def parameter_rrefs(self) -> list[RRef]:
        """Return RRefs of the parameters of both shards."""
        return [param for rref in (self.p1_rref, self.p2_rref)
                for param in rref.remote().parameter_rrefs().to_here()]


def run_master(args: argparse.Namespace) -> dict:
    """Train with all numbers of micro-batches in turns; return what results.py's `finish` takes."""
    # Tutorial: new processes for each number, and their start within the measured time.
    model = DistResNet50(1, WORKERS, args.arch, args.num_classes, args.device, args.seed)
    loss_fn = nn.MSELoss()
    # The gradients are in the context, not in `.grad`: a plain optimizer would do nothing.
    # And here the shards' types become known: an RRef that has to ask for its type first sends an
    # `rpc_async()` from another thread, outside of the context, and its gradients are lost.
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=args.lr)
    inputs, labels = get_batch(args)  # Tutorial: anew for each batch; losses do not compare.
    batches = Batches(MASTER_NAME, args)
    for batch in range(args.num_batches + 1):  # the first one is a warm-up
        for num_split in args.num_splits:  # in turns: whatever slows the machine slows all of them
            model.num_split = num_split
            started = time.time()
            with dist_autograd.context() as context_id:
                outputs = model(inputs)
                loss = loss_fn(outputs, labels)
                # Each micro-batch's gradient goes to worker2, and on to worker1 when it is through.
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
            batches.add(batch, num_split, started, loss)
    return batches.metrics(fetch_work(WORKERS))


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train on rank 0, which returns the metrics; the others serve their shards."""
    # For the table. (It also keeps freed memory, and `optim.SGD` from becoming another class.)
    record_work(role_name(rank, world_size), ResNetShard1, ResNetShard2)
    options = rpc_options(args, 8 + 2 * max(args.num_splits))  # threads: m + 1 suffice
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=options)
    metrics = run_master(args) if rank == 0 else None
    rpc.shutdown()  # waits for everyone: until then, the workers answer the master's calls
    return metrics


def add_flags(parser: Parser) -> Parser:
    """Add the flags that the folder's pipelines share to a parser, which is returned."""
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--num_splits", type=bounded(int, at_least=1, at_most=1000), nargs="+", metavar="N",
        default=[1, 2, 4, 8], help="numbers of micro-batches to try, and 1, to compare with")
    add("--batch_size", type=count, default=32, metavar="N", help="images in a batch")
    add("--image_size", type=bounded(int, at_least=32), default=128, metavar="N", help="pixels")
    add("--num_batches", type=count, default=3, metavar="N", help="timed, for each of --num_splits")
    add("--num_classes", type=bounded(int, at_least=2), default=1000, metavar="N", help="targets")
    add("--arch", choices=ARCHS, default="resnet50", help="of torchvision")
    add("--lr", type=bounded(float, above=0), default=0.05, help="learning rate of SGD")
    return parser


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return add_flags(Parser("model_parallel_resnet", __doc__, world_size=3, rpc=True))


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch"], ["first half"], ["second half"]])
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
