r"""A ResNet in two processes, and a pipeline of micro-batches through them, over RPC (tutorial 6_7).

Each worker has half of the model. With one piece of work at a time, one of them always waits; so the master splits the
batch into micro-batches, and while worker2 has the first, worker1 has the second. Distributed autograd brings the
gradients back the same way, and they meet in the same pipeline.

    rank 0 "master"                  rank 1 "worker1"                rank 2 "worker2"
    +---------------------+          +--------------------+          +---------------------+
    | DistResNet50        | -- x --> | ResNetShard1       | -- y --> | ResNetShard2        |
    |   micro-batches     |          |   conv1 .. layer2  |          |   layer3 .. fc      |
    |   loss              | <------------------------------- z ------|                     |
    |   backward, step    | ------------------------------ dz -----> |                     |
    +---------------------+          |                    | <- dy -- |                     |
                                     +--------------------+          +---------------------+

    python model_parallel_resnet/main.py --num_splits 1 2 4 8      seconds per batch, for each number of micro-batches
    python model_parallel_resnet/main.py --timeline                and a timeline of every process: timeline.png
    python model_parallel_resnet/main.py --check                   the same as torchvision's model in one process?
    torchrun --nproc_per_node 3 model_parallel_resnet/main.py      under torchrun
    python model_parallel_resnet/main.py --rank 1 \
        --master_addr HOST --master_port 29500                     one rank per terminal or machine

Last line, about:
    resnet50, RPC pipeline: loss 0.3568 -> 0.0219 |
    best with num_split 4: 2.03 s a batch, 2.01 times as fast as with 1 (ideal 1.60), workers idle 24%
"""

import time

import torch
import torch.distributed.autograd as dist_autograd
from common import report, timeline
from common.cli import Parser, bounded, given, on_cpu, ranks_here, refuse, require_memory
from common.launch import launch
from common.session import device_for, rpc_options, wait_all
from common.worker_env import keep_memory
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from model_parallel_resnet.data import get_batch
from model_parallel_resnet.results import finish
from model_parallel_resnet.single_process import step_alone
from model_parallel_resnet.stages import ARCHS, ResNetShard1, ResNetShard2, parameters_of

EVERY = 97  # of millions of weights, the check compares every so many
MASTER_NAME = "master"
WORKERS = ["worker1", "worker2"]


def role_name(rank, world_size):
    """Rank 0 is the master; the others have a shard each."""
    return [MASTER_NAME, *WORKERS][rank]


class SGD(optim.SGD):
    """The same, with its time on the timeline; and `DistributedOptimizer`, which does not know it, leaves it as it is.

    What it knows it compiles to TorchScript, where nothing can be recorded.
    """

    def step(self, closure=None):
        """Of the parameters of one worker."""
        with timeline.span("step"):
            return super().step(closure)


def make_shard(shard_class, args):
    """On a worker: its half of the model, on its own device."""
    return shard_class(args.arch, args.num_classes, args.seed, device_for(args.device))


def micro_batches(xs, num_split):
    """Exactly `num_split` pieces along the first axis, which differ by one sample at most.

    `xs.split(n)` takes the *size* of the pieces, and `xs.chunk(n)` may make fewer than n.
    """
    return xs.tensor_split(num_split)


class DistResNet50(nn.Module):
    """The model as the master sees it: two shards elsewhere, and `num_split` micro-batches on their way."""

    def __init__(self, num_split, workers, args):
        super().__init__()
        self.num_split = num_split
        self.p1_rref, self.p2_rref = (rpc.remote(worker, make_shard, args=(shard, args)) for worker, shard in
                                      zip(workers, (ResNetShard1, ResNetShard2), strict=True))

    def forward(self, xs):
        """Images (N, 3, H, W) to logits (N, num_classes), in the order of the images."""
        out_futures = []
        with timeline.span("send"):
            for i, x in enumerate(micro_batches(xs, self.num_split)):
                # Nothing here waits. worker1 fetches x; worker2 asks worker1 for y, and gets it once it is there.
                x_rref = RRef(x)
                y_rref = self.p1_rref.remote().forward(x_rref, i)
                out_futures.append(self.p2_rref.rpc_async().forward(y_rref, i))
        return torch.cat(wait_all(out_futures))

    def parameter_rrefs(self):
        """RRefs of the parameters of both shards."""
        return self.p1_rref.rpc_sync().parameter_rrefs() + self.p2_rref.rpc_sync().parameter_rrefs()

    def train(self, mode=True):
        """Reaches the shards: without this, `model.eval()` would switch this empty shell alone."""
        for rref in (self.p1_rref, self.p2_rref):
            rref.rpc_sync().set_mode(mode)
        return super().train(mode)


def train_step(model, opt, loss_fn, inputs, labels):
    """Forward, backward and step, all in the context of this step; the loss."""
    with dist_autograd.context() as context_id:
        outputs = model(inputs)
        with timeline.span("loss"):
            loss = loss_fn(outputs, labels)
        # To worker2 go the gradients of all micro-batches; each goes on to worker1 as soon as it is through.
        dist_autograd.backward(context_id, [loss])
        opt.step(context_id)
    return loss.item()


def run_master(args):
    """All split counts in turns, a warm-up batch of each first; the metrics, and the spans of all processes."""
    model = DistResNet50(1, WORKERS, args)
    loss_fn, (inputs, labels) = nn.MSELoss(), get_batch(args)
    opt = DistributedOptimizer(SGD, model.parameter_rrefs(), lr=args.lr)
    at_first = shards_call(model, parameters_of)
    losses, windows = [], {num_split: [] for num_split in args.num_splits}
    with report.progress((args.num_batches + 1) * len(args.num_splits), "batch") as bar:
        for batch in range(args.num_batches + 1):  # in turns: whatever else the machine does, it does to all of them
            for num_split in args.num_splits:
                model.num_split = num_split
                started = time.time()
                losses.append(train_step(model, opt, loss_fn, inputs, labels))
                windows[num_split].append((started, time.time()))
                bar.update()
                report.log(MASTER_NAME, f"{'warm-up' if batch == 0 else f'batch {batch}'}  splits {num_split}  "
                                        f"loss {losses[-1]:.4f}  {windows[num_split][-1][1] - started:.2f} s")
    for worker, before, after in zip(WORKERS, at_first, shards_call(model, parameters_of), strict=True):
        if torch.equal(before, after):
            raise ArithmeticError(f"the parameters of {worker} have not changed")
    require_fall(losses, args)
    spans = timeline.recorded()
    for worker in WORKERS:
        spans |= rpc.rpc_sync(worker, timeline.recorded)
    for num_split, of_split in windows.items():
        for worker in WORKERS:
            n_forward = sum(span["kind"] == "forward" for span in timeline.within(spans[worker], of_split[-1]))
            if n_forward != num_split:
                raise ArithmeticError(f"{worker} had {n_forward} micro-batches with --num_splits {num_split}")
    return {"losses": losses, "windows": [of_split[1:] for of_split in windows.values()], "spans": spans}


def require_fall(losses, args):
    """The batch is always the same: what does not lower its loss does not train."""
    first, last = (sum(of_round) / len(args.num_splits) for of_round in
                   (losses[: len(args.num_splits)], losses[-len(args.num_splits) :]))
    if not last < first:
        raise ArithmeticError(f"the loss of the same batch has not fallen: {first:.4f} to {last:.4f}; a smaller --lr?")


def shards_call(model, function, *args):
    """`function(shard, *args)` on both workers; the results."""
    futures = [rpc.rpc_async(rref.owner(), on_shard, args=(rref, function, *args))
               for rref in (model.p1_rref, model.p2_rref)]
    return wait_all(futures)


def on_shard(rref, function, *args):
    """On the worker that has the shard."""
    return function(rref.local_value(), *args)


def join(rank, world_size, args):
    """Become an RPC worker with a thread for each micro-batch, most of which only wait, and some for the gradients."""
    keep_memory()
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, 8 + 2 * max(args.num_splits)))


def run_worker(rank, world_size, args):
    """Rank 0 runs the experiment and returns its metrics; the others serve their shards."""
    timeline.start(role_name(rank, world_size))  # always: the idle shares are part of the result
    join(rank, world_size, args)
    metrics = run_master(args) if rank == 0 else None
    rpc.shutdown()  # waits for everyone: until then, the workers answer the master's calls
    return metrics


def record(rank, world_size, args):
    """For `check`: the same step with each split count, from the same weights; rank 0 returns what came of them."""
    torch.set_default_dtype(torch.float64)  # see compare_with_whole
    join(rank, world_size, args)
    results = {}
    if rank == 0:
        inputs, labels = get_batch(args)
        for num_split in args.num_splits:
            model = DistResNet50(num_split, WORKERS, args)  # anew: the initial weights
            with torch.no_grad():
                in_training_mode = model.train()(inputs)
            model = DistResNet50(num_split, WORKERS, args).eval()
            opt = DistributedOptimizer(SGD, model.parameter_rrefs(), lr=args.lr)
            with dist_autograd.context() as context_id:
                outputs = model(inputs)
                dist_autograd.backward(context_id, [nn.functional.mse_loss(outputs, labels)])
                gradients = torch.cat(shards_call(model, gradients_of, context_id))
                opt.step(context_id)
            parameters = torch.cat(shards_call(model, parameters_of))
            results[str(num_split)] = {"outputs": outputs.tolist(), "gradients": gradients[::EVERY].tolist(),
                                       "parameters": parameters[::EVERY].tolist(),
                                       "outputs, training mode": in_training_mode.tolist()}
    rpc.shutdown()
    return results or None


def gradients_of(shard, context_id):
    """On a worker: the gradients of its shard, which with distributed autograd are in the context, in one tensor."""
    gradients = dist_autograd.get_gradients(context_id)
    return torch.cat([gradients[param].flatten().cpu() for param in shard.parameters()])


def check(args):
    """Hold every split count against the whole model in one process; the differences, or None."""
    recorded = launch(record, args, role_name)
    return None if recorded is None else compare_with_whole(recorded, args)


def compare_with_whole(recorded, args):
    """Print the differences for each split count; those in training mode are shown, and not judged."""
    whole = step_alone(args)
    whole = {what: tensor[::EVERY] if tensor.dim() == 1 else tensor for what, tensor in whole.items()}
    ours, oracle, tolerances = {}, {}, {}
    for num_split in args.num_splits:
        of_split = recorded[str(num_split)]
        for what in ("outputs", "gradients", "parameters"):
            name = f"splits {num_split}, {what}"
            # The same sums in another order, in float64: in float32, a few of the many ReLUs see a number on the other
            # side of zero, which is 3e-4 in the gradients of a resnet50 that has no working BatchNorm.
            ours[name], oracle[name], tolerances[name] = of_split[what], whole[what], 1e-9
        what = "outputs, training mode"
        difference = (torch.tensor(of_split[what]) - whole[what]).abs().max() / whole[what].abs().max()
        report.log("check", f"splits {num_split}, {what}: differ by {difference:.1e} (BatchNorm: statistics of "
                            f"{'the batch' if num_split == 1 else 'each micro-batch'})")
    return report.compare(ours, oracle, tolerances)


def build_parser(description=__doc__, example="model_parallel_resnet", world_size=3, **options):
    """The flags of this example, and of schedules.py."""
    parser = Parser(example, description, world_size=world_size, **options)
    add, count = parser.add_argument, bounded(int, at_least=1)
    splits = bounded(int, at_least=1, at_most=1000)  # each has two threads on a worker: see `join`
    add("--num_splits", type=splits, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="numbers of micro-batches to try; 1 is always among them, to compare with")
    add("--batch_size", type=count, default=32, metavar="N", help="images in a batch, over all micro-batches")
    add("--image_size", type=bounded(int, at_least=32), default=128, metavar="N", help="height and width in pixels")
    add("--num_batches", type=count, default=3, metavar="N", help="timed batches for each number of micro-batches")
    add("--num_classes", type=bounded(int, at_least=2), default=1000, metavar="N", help="of the targets")
    add("--arch", choices=ARCHS, default="resnet50", help="of torchvision")
    add("--lr", type=bounded(float, above=0), default=0.05, help="learning rate of SGD")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    return parser


def require_sizes(args, roles):
    """Refuse what cannot be split, or held by this machine, before any process starts.

    Args:
        args: the parsed flags.
        roles: what each rank has: of "batch", "first half" and "second half".
    """
    if args.world_size != len(roles):
        refuse(f"--world_size {args.world_size} must be {len(roles)}: one process for each role")
    args.num_splits = sorted({1, *args.num_splits})
    most = args.num_splits[-1]
    if most > args.batch_size:
        refuse(f"--num_splits {most} must be at most {given(args, 'batch_size')}: every "
               "micro-batch needs a sample")
    if args.batch_size // most == 1 and args.image_size == 32:  # BatchNorm of a single number
        refuse(f"{given(args, 'image_size')} must be above 32 with --num_splits {most} and "
               f"{given(args, 'batch_size')}: the last layers would see one pixel of one image")
    # Images and one-hot targets, which were integers; what the first layer and its BatchNorm make
    # of an image, each 64 channels of half the height and width; the last layer's weights.
    first_layers = 2 * 64 * (args.image_size // 2) ** 2 if on_cpu(args) else 0
    numbers = {"batch": args.batch_size * 3 * (args.image_size**2 + args.num_classes),
               "first half": args.batch_size * first_layers,
               "second half": {"resnet18": 512, "resnet50": 2048}[args.arch] * args.num_classes}
    n_bytes = 4 * sum(numbers[part] for rank in ranks_here(args) for part in roles[rank])
    require_memory(args, ["batch_size", "image_size", "num_classes"], n_bytes)


def main(argv=None):
    """Run the experiment, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch"], ["first half"], ["second half"]])
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    return None if metrics is None else finish(metrics, args, "RPC pipeline", WORKERS, backend="tensorpipe")


if __name__ == "__main__":
    main()
