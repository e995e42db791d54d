r"""A ResNet in two processes, and a pipeline of micro-batches through them (tutorial 6_7).

Each worker has half of the model. With one piece of work at a time, one of them always waits. So
the master splits the batch into micro-batches: while worker2 has the first, worker1 has the second.
Distributed autograd brings the gradients back the same way (early_backward.py: each at once).

    rank 0 "master"             rank 1 "worker1"          rank 2 "worker2"
    +----------------+          +------------------+      +-----------------+
    | DistResNet50   | -- x --> | ResNetShard1     | y -> | ResNetShard2    |
    |  micro-batches |          |  conv1 .. layer2 |      |  layer3 .. fc   |
    |  loss          | <------------------------- z ----- |                 |
    |  backward,step | ------------------------- dz ----> |                 |
    +----------------+          |                  | <-dy |                 |
                                +------------------+      +-----------------+

    python model_parallel_resnet/main.py --num_splits 1 2 4 8    seconds per batch for each number
    python model_parallel_resnet/main.py --backward whole        the tutorial's order of work
    python model_parallel_resnet/main.py --timeline              and a timeline of every process
    python model_parallel_resnet/main.py --check                 the same as one whole ResNet?
    torchrun --nproc_per_node 3 model_parallel_resnet/main.py    under torchrun
    python model_parallel_resnet/main.py --rank 1 \
        --master_addr HOST --master_port 29500                   manual launch

Last line, about:
    resnet50, RPC pipeline: loss 0.3693 -> 0.0214 |
    best with num_split 4: 2.35 s a batch, 1.54 times as fast as with 1 (ideal 1.60), ...
"""

import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from common import report, timeline
from common.cli import Parser
from common.launcher import launch
from common.session import device_for, rpc_options, wait_all
from common.vision import import_torchvision
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from model_parallel_resnet import measuring
from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.flags import add_flags
from model_parallel_resnet.results import finish, log_batch

MASTER_NAME = "master"
WORKERS = ["worker1", "worker2"]
# torchvision's kind of block, and the number of blocks in layer1 to layer4.
ARCHS = {"resnet18": ("BasicBlock", [2, 2, 2, 2]), "resnet50": ("Bottleneck", [3, 4, 6, 3])}


def role_name(rank, world_size):
    """Rank 0 is the master; the others have a shard each."""
    return [MASTER_NAME, *WORKERS][rank]


def conv1x1(in_planes, out_planes, stride=1):
    """A convolution of single pixels."""
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class ResNetBase(nn.Module):
    """What both shards share; `seed` is that of its initial weights, `device` where it computes."""

    def __init__(self, args, seed, device=None):
        super().__init__()
        # RPC calls `forward` in many threads, one for each micro-batch. Two at a time would make
        # the next stage wait, and write into the same running statistics of BatchNorm.
        self._lock = threading.Lock()
        block, self.blocks = ARCHS[args.arch]
        self._block = getattr(import_torchvision().models.resnet, block)
        self._norm_layer = nn.BatchNorm2d
        # Tutorial: "cuda:0" and "cuda:1", from the master; does not start on fewer GPUs.
        self.device = device or device_for(args.device)
        torch.manual_seed(seed)

    def _make_layer(self, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * self._block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * self._block.expansion, stride),
                self._norm_layer(planes * self._block.expansion))
        first = self._block(self.inplanes, planes, stride, downsample)
        self.inplanes = planes * self._block.expansion
        return nn.Sequential(first, *(self._block(self.inplanes, planes) for _ in range(1, blocks)))

    def _init_weights(self):
        # Tutorial: of ResNetShard1 only, unlike torchvision.
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def parameter_rrefs(self):
        """An RRef for each parameter, for a `DistributedOptimizer` elsewhere."""
        return [RRef(param) for param in self.parameters()]


class ResNetShard1(ResNetBase):
    """Images (N, 3, H, W) to features (N, 512, H/8, W/8); with resnet18, of 128 channels."""

    def __init__(self, args, device=None):
        super().__init__(args, 2 * args.seed + 1, device)  # both other than the data's
        self.inplanes = 64
        self.seq = nn.Sequential(
            nn.Conv2d(3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False),
            self._norm_layer(self.inplanes),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            self._make_layer(64, self.blocks[0]),
            self._make_layer(128, self.blocks[1], stride=2))
        self._init_weights()
        self.to(self.device)

    def forward(self, x_rref, i):
        """Called over RPC: fetch micro-batch `i`, compute, keep the result here for who asks."""
        x = x_rref.to_here().to(self.device)  # before the lock: it travels while others compute
        with self._lock, measuring.span("forward", self.device, micro_batch=i):
            out = self.seq(x)
        measuring.record_backward(x, out, i)
        return out.cpu()


class ResNetShard2(ResNetBase):
    """Those features to logits (N, num_classes)."""

    def __init__(self, args, device=None):
        super().__init__(args, 2 * args.seed + 2, device)
        self.inplanes = 128 * self._block.expansion
        self.seq = nn.Sequential(
            self._make_layer(256, self.blocks[2], stride=2),
            self._make_layer(512, self.blocks[3], stride=2),
            nn.AdaptiveAvgPool2d((1, 1)))
        self.fc = nn.Linear(512 * self._block.expansion, args.num_classes)
        self._init_weights()
        self.to(self.device)

    def forward(self, x_rref, i):
        """As above; `x_rref` is with worker1, which answers when it has computed it."""
        x = x_rref.to_here().to(self.device)
        with self._lock, measuring.span("forward", self.device, micro_batch=i):
            out = self.fc(torch.flatten(self.seq(x), 1))
        measuring.record_backward(x, out, i)
        return out.cpu()


class DistResNet50(nn.Module):
    """The model as the master sees it: two shards elsewhere, and micro-batches on their way."""

    def __init__(self, num_split, workers, args):
        super().__init__()
        self.num_split = num_split
        self.p1_rref = rpc.remote(workers[0], ResNetShard1, args=(args,))
        self.p2_rref = rpc.remote(workers[1], ResNetShard2, args=(args,))

    def forward(self, xs):
        """Images (N, 3, H, W) to logits (N, num_classes), in the order of the images."""
        out_futures = []
        with timeline.span("send"):
            # Tutorial: xs.split(self.split_size): no such attribute; and a size is not a number.
            for i, x in enumerate(xs.tensor_split(self.num_split)):
                x_rref = RRef(x)  # nothing here waits: worker1 fetches x, worker2 asks it for y
                y_rref = self.p1_rref.remote().forward(x_rref, i)
                out_futures.append(self.p2_rref.rpc_async().forward(y_rref, i))
        return torch.cat(wait_all(out_futures))

    def parameter_rrefs(self):
        """RRefs of the parameters of both shards."""
        return [param for rref in (self.p1_rref, self.p2_rref)
                for param in rref.remote().parameter_rrefs().to_here()]


def train_batch(model, inputs, labels, opt):
    """All micro-batches forward, then all of them back, and a step; the loss of the batch."""
    loss_fn = nn.MSELoss()
    with dist_autograd.context() as context_id:
        outputs = model(inputs)
        with timeline.span("loss"):
            loss = loss_fn(outputs, labels)
        # Each micro-batch's gradient goes to worker2, and on to worker1 when it is through.
        dist_autograd.backward(context_id, [loss])
        opt.step(context_id)
    return loss


def run_master(args):
    """All numbers of micro-batches in turns, after a warm-up; what `finish` in results.py takes."""
    # Tutorial: new processes for each number, and their start within the measured time.
    if args.backward == "early":
        from model_parallel_resnet.early_backward import early

        model, step, opt = early(args, WORKERS)
    else:
        model, step = DistResNet50(1, WORKERS, args), train_batch
        # The gradients are in the context, not in `.grad`: a plain optimizer would do nothing.
        opt = DistributedOptimizer(measuring.SGD, model.parameter_rrefs(), lr=args.lr)
    inputs, labels = get_batch(args)  # Tutorial: drawn anew for each batch; no loss could fall.
    losses, windows = [], {num_split: [] for num_split in args.num_splits}
    bar = report.progress((args.num_batches + 1) * len(args.num_splits), "batch")
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:  # in turns: whatever slows the machine slows all of them
            model.num_split = num_split
            started = time.time()
            loss = step(model, inputs, labels, opt)
            windows[num_split].append((started, time.time()))
            losses.append(report.require_finite(loss, f"at step {len(losses) + 1}"))
            log_batch(MASTER_NAME, batch, num_split, losses[-1], time.time() - started)
            bar.update()
    bar.close()
    spans = timeline.recorded()
    spans |= {worker: rpc.rpc_sync(worker, timeline.recorded)[worker] for worker in WORKERS}
    return {"losses": losses, "windows": [times[1:] for times in windows.values()], "spans": spans}


def run_worker(rank, world_size, args):
    """Rank 0 runs the experiment and returns its metrics; the others serve their shards."""
    measuring.start(role_name(rank, world_size))
    options = rpc_options(args, 8 + 2 * max(args.num_splits))  # threads: micro-batches wait in two
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=options)
    metrics = run_master(args) if rank == 0 else None
    rpc.shutdown()  # waits for everyone: until then, the workers answer the master's calls
    return metrics


def build_parser():
    """The flags of this example."""
    parser = add_flags(Parser("model_parallel_resnet", __doc__, world_size=3), ARCHS)
    parser.add_argument("--backward", choices=["whole", "early"], default="early",
                        help="whole: after all outputs, the tutorial's; early: after each one's")
    return parser


def main(argv=None):
    """Run the experiment or `--check`; the metrics in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch"], ["first half"], ["second half"]])
    if args.check:
        from model_parallel_resnet.check import check

        return check(args)
    metrics = launch(run_worker, args, role_name)
    return metrics and finish(metrics, args, "RPC pipeline", WORKERS, backend="tensorpipe")


if __name__ == "__main__":
    main()
