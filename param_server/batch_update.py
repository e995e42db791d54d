r"""A parameter server that updates once per batch of trainers (tutorial 6_8, first half).

Every trainer has a model of its own, computes a gradient with its own images, and asks the server for new weights. The
answer is a future: the server adds up the gradients as they come, and the last one of a batch makes the step for all.

    rank 0 "parameter_server"                                     rank 1 "trainer1"
    +----------------------------------------------+              +----------------------------------+
    | BatchUpdateParameterServer                   |              | Trainer                          |
    |   update_and_fetch_model(gradient)           | <-gradient-- |   loss.backward()                |
    |     with lock: sum += gradient               |              |                                  |
    |     return a future  . . . . . . . . . . . . | - weights -> |   m = the model with new weights |
    |     the last one: mean, optimizer.step(),    |              +----------------------------------+
    |       future.set_result(weights)             | <----------> rank 2 "trainer2" ...
    +----------------------------------------------+

    python param_server/batch_update.py --world_size 6                one server, five trainers, ResNet50
    python param_server/batch_update.py --arch resnet18               a smaller model
    python param_server/batch_update.py --timeline                    a timeline of every process, as a picture
    python param_server/batch_update.py --check                       the same as a single process? no gradient lost?
    torchrun --nproc_per_node 6 param_server/batch_update.py          under torchrun
    python param_server/batch_update.py --world_size 6 --rank 1 \
        --master_addr HOST --master_port 29500                        one rank per terminal or machine

Last line, about:
    resnet50, 5 trainers: 2.6 s per update in the median, 945 MB each; loss 0.580 -> 0.179
"""

import statistics
import sys
import threading
import time

import torch
from common import report, timeline
from common.cli import Parser, bounded, on_cpu, ranks_here, require_memory
from common.launch import launch
from common.session import device_for, rpc_options, wait_all
from common.vision import import_torchvision
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from param_server.single_process import batch_updates_alone

CHECK_UPDATES, PUSHES = 2, 5
EVERY = 97  # of millions of weights, the check compares every so many
SERVER_NAME = "parameter_server"
TRAINER_NAME = "trainer{}"


def role_name(rank, world_size):
    """Rank 0 is the server, all others are trainers."""
    return SERVER_NAME if rank == 0 else TRAINER_NAME.format(rank)


def build_model(args):
    """The ResNet of `--arch`."""
    return import_torchvision().models.get_model(args.arch, num_classes=args.num_classes)


def running_statistics(model):
    """The means and variances that BatchNorm will use in evaluation mode: they are learned, but not by gradients."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flat_gradient(model):
    """Make the gradients of a model views of one flat tensor, so that nothing must be packed; behind them is room.

    Returns:
        That tensor: as many zeros as the model has parameters and running statistics.
    """
    sizes = [tensor.numel() for tensor in (*model.parameters(), *running_statistics(model))]
    flat = torch.zeros(sum(sizes), device=next(model.parameters()).device)
    for param, gradient in zip(model.parameters(), flat.split(sizes), strict=False):
        param.grad = gradient.view_as(param)
    return flat


def use_weights(model, weights):
    """Make parameters and running statistics of a model views of one flat tensor."""
    vector_to_parameters(weights, [*model.parameters(), *running_statistics(model)])


def batches_of(rank, args):
    """Yield the images (N, 3, H, W) and targets (N, num_classes) of a trainer: noise over the pattern of a class.

    Which classes, a trainer draws once; the targets stay the same, so that the loss can fall.
    """
    size = (3, args.image_size, args.image_size)
    patterns = torch.randn(args.num_classes, *size, generator=torch.Generator().manual_seed(args.seed))  # for all alike
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    one_hot_indices = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    labels = F.one_hot(one_hot_indices, args.num_classes).to(patterns)
    for _ in range(args.num_updates):
        yield patterns[one_hot_indices] + torch.randn(args.batch_size, *size, generator=generator), labels


class BatchUpdateParameterServer:
    """The weights, and the only optimizer; lives on rank 0, where RPC calls it in many threads.

    All that travels is one flat tensor each way, as long as `weights`: parameters first, running statistics behind.
    """

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.model = build_model(args)
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.batch_update_size = args.world_size - 1
        self.lock = threading.Lock()
        self.future_model = Future()
        self.arrived = set()  # ranks whose gradients are in the sum

        self.weights = parameters_to_vector([*self.model.parameters(), *running_statistics(self.model)]).detach()
        use_weights(self.model, self.weights)
        self.sum = flat_gradient(self.model)
        self.n_params = sum(param.numel() for param in self.model.parameters())

    def get_model(self):
        """The weights, for a trainer that begins."""
        return self.weights

    @rpc.functions.async_execution
    def update_and_fetch_model(self, rank, sent):
        """Add a trainer's gradient; the answer follows when all trainers' gradients are there.

        Args:
            rank: of the trainer.
            sent: the gradient of its batch, and its running statistics: a flat tensor, as long as `weights`.

        Returns:
            A future of (weights after the step, seconds that the gradient has waited for it).
        """
        arrived = time.perf_counter()
        with self.lock:  # the sum, too: of two additions at the same time one could be lost
            with timeline.span("add", trainer=rank):
                self.sum += sent
            self.arrived.add(rank)
            future_model = self.future_model
            # Of what completes the future, each trainer gets its part.
            answer = future_model.then(lambda fut: (fut.wait()[0], fut.wait()[1] - arrived))
            if len(self.arrived) < self.batch_update_size:
                return answer
            with timeline.span("step"):
                self.sum /= self.batch_update_size
                self.optimizer.step()
                # Not a gradient, but as good a mean: every trainer has moved the same statistics by its own images.
                self.weights[self.n_params :] = self.sum[self.n_params :]
                self.sum.zero_()
            self.arrived, self.future_model = set(), Future()  # for the next batch
        # `weights` itself, no copy: nobody sends the next gradient before it has them, so nothing changes until then.
        future_model.set_result((self.weights, time.perf_counter()))
        return answer


class Trainer:
    """A model and images of its own; lives on a trainer's process."""

    def __init__(self, ps_rref, args):
        self.rank, self.args = rpc.get_worker_info().id, args
        self.ps_rref, self.loss_fn = ps_rref, nn.MSELoss()
        self.device = device_for(args.device)
        with torch.device("meta"):  # no memory yet, and no random numbers: the weights will come from the server
            self.m = build_model(args)
        self.m.to_empty(device=self.device)
        self.gradient = flat_gradient(self.m)
        self.n_params = sum(param.numel() for param in self.m.parameters())

    def get_next_batch(self):
        """Yield images (N, 3, H, W) and one-hot targets (N, num_classes), where the model is."""
        for inputs, labels in batches_of(self.rank, self.args):
            yield inputs.to(self.device), labels.to(self.device)

    def train(self):
        """All updates; for each one its loss, and the seconds it took."""
        weights, told = self.ps_rref.rpc_sync().get_model().to(self.device), []
        use_weights(self.m, weights)
        for update, (inputs, labels) in enumerate(self.get_next_batch(), 1):
            started = time.perf_counter()
            with timeline.span("forward", update=update):
                loss = self.loss_fn(self.m(inputs), labels)
            with timeline.span("backward", update=update):
                self.gradient.zero_()  # not `zero_grad`, which would drop the views
                loss.backward()
            # The running statistics travel behind the gradient.
            self.gradient[self.n_params :] = weights[self.n_params :]
            sent = self.gradient.cpu()
            computed = time.perf_counter()
            weights, waiting = self.ps_rref.rpc_sync().update_and_fetch_model(self.rank, sent)
            weights = weights.to(self.device)
            use_weights(self.m, weights)
            seconds = time.perf_counter() - started
            compute = computed - started
            told.append({"loss": loss.item(), "seconds": seconds, "compute": compute, "waiting": waiting,
                         "transfer": seconds - compute - waiting})
        return told


def run_trainer(ps_rref, args):
    """Called on every trainer's process, for the length of the whole training."""
    updates = Trainer(ps_rref, args).train()
    return {"updates": updates, "peak_memory": peak_memory(), "spans": timeline.recorded()}


def run_trainers(server, function, args):
    """Call `function(ps_rref, args)` on all trainers at the same time; what they return."""
    ps_rref = RRef(server)
    names = [TRAINER_NAME.format(rank) for rank in range(1, args.world_size)]
    # A training takes as long as it takes: no timeout. Every update in it has one.
    futs = [rpc.rpc_async(name, function, args=(ps_rref, args), timeout=0) for name in names]
    try:
        return wait_all(futs)
    except RuntimeError as error:
        if "set timeout" not in str(error):
            raise
        late = [name for rank, name in enumerate(names, 1) if rank not in server.arrived]
        raise TimeoutError(f"timed out: no gradient from {', '.join(late)} for {args.timeout:g} s") from None


def peak_memory():
    """Of this process until now, in bytes."""
    import resource  # not on Windows, where `common` says in words what to do

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_worker(rank, world_size, args):
    """Rank 0 serves, starts the trainers and returns the metrics."""
    if args.timeline:
        timeline.start(role_name(rank, world_size))
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    if rank == 0:
        server = BatchUpdateParameterServer(args)
        trainers = run_trainers(server, run_trainer, args)
    rpc.shutdown()  # waits for everyone: until then, the trainers do what they are asked
    if rank != 0:
        return None
    updates = list(zip(*(trainer["updates"] for trainer in trainers), strict=True))  # each of all trainers
    seconds = [max(told["seconds"] for told in update) for update in updates]
    spans = dict(item for trainer in trainers for item in trainer["spans"].items())
    shares = {what: [statistics.mean(told[what] for told in update) for update in updates]
              for what in ("compute", "transfer", "waiting")}
    return {"spans": {**timeline.recorded(), **spans},
            "updates": seconds, "median_update_s": statistics.median(seconds), **shares,
            "loss": [statistics.mean(told["loss"] for told in update) for update in updates],
            "bytes_per_update": 2 * len(trainers) * server.weights.nbytes,
            "peak_memory_gb": (peak_memory() + sum(trainer["peak_memory"] for trainer in trainers)) / 1e9}


def push_known_gradients(ps_rref, args):
    """For `check`, on every trainer: its rank, as every entry of the gradient, several times."""
    rank, ps = rpc.get_worker_info().id, ps_rref.rpc_sync()
    gradient = torch.full_like(ps.get_model(), rank)
    for _ in range(PUSHES):
        ps.update_and_fetch_model(rank, gradient)


def record(rank, world_size, args):
    """For `check`, in double precision: two updates, and then many known gradients on weights that are zero."""
    torch.set_default_dtype(torch.float64)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args))
    recorded = None
    if rank == 0:
        server = BatchUpdateParameterServer(args)
        trainers = run_trainers(server, run_trainer, args)
        losses = [[told["loss"] for told in trainer["updates"]] for trainer in trainers]
        # The momentum is the mean gradients alone; in the weights they would be lost beside what was there before.
        momentum = [state["momentum_buffer"].flatten() for state in server.optimizer.state.values()]
        recorded = {"losses": losses, "weights": server.weights[: server.n_params : EVERY].tolist(),
                    "momentum": torch.cat(momentum)[::EVERY].tolist(),
                    "statistics": server.weights[server.n_params :].tolist()}
        server = BatchUpdateParameterServer(args)
        server.weights.zero_()
        run_trainers(server, push_known_gradients, args)
        pushed = server.weights[: server.n_params]
        recorded["pushed"] = [pushed.min().item(), pushed.max().item()]
    rpc.shutdown()
    return recorded


def check(args):
    """Hold the batched updates against one process that steps with the mean gradient; the differences, or None."""
    args.num_updates = CHECK_UPDATES
    recorded = launch(record, args, role_name)
    return None if recorded is None else compare(recorded, args)


def compare(recorded, args):
    """Print and return the differences from one process, in double precision too."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(args.seed)
    batches = [list(batches_of(rank, args)) for rank in range(1, args.world_size)]
    alone = batch_updates_alone(build_model(args), batches, args.lr)
    alone = {what: numbers if what in ("losses", "statistics") else numbers[::EVERY] for what, numbers in alone.items()}
    # One number, and the mean of all ranks as its gradient, over and over.
    number = nn.Parameter(torch.zeros(()))
    optimizer = optim.SGD([number], lr=args.lr, momentum=0.9)
    for _ in range(PUSHES):
        number.grad = torch.tensor(args.world_size / 2)  # (1 + 2 + ... + N-1) / (N-1)
        optimizer.step()
    alone["pushed"] = [number.item()] * 2
    torch.set_default_dtype(torch.float32)
    # In double precision the order of the sums changes nothing that could be seen: what differs more is wrong.
    whats = ("losses", "weights", "momentum", "statistics", "pushed")
    return report.compare(recorded, alone, dict.fromkeys(whats, 1e-9))


def plot(metrics, args):
    """Draw `batch_update.png`: what every update was spent on."""
    title = f"{args.arch}, {args.world_size - 1} trainers: what an update is spent on"
    with report.picture(args.output_dir / "batch_update.png", title, "update", "seconds, mean of the trainers") as axes:
        updates, bottom = list(range(1, 1 + len(metrics["updates"]))), torch.zeros(len(metrics["updates"]))
        for what in ("compute", "transfer", "waiting"):
            axes.bar(updates, metrics[what], bottom=bottom, label=what)
            bottom += torch.tensor(metrics[what])
        axes.set_xticks(updates)


def draw_timeline(spans, args):
    """Draw and write the last two updates, from the moment at which the one before them was done."""
    steps = [span["end"] for span in spans[SERVER_NAME] if span["kind"] == "step"]
    began = min(span["start"] for lane in spans.values() for span in lane)
    window = (steps[-3] if len(steps) > 2 else began, steps[-1])
    idle = timeline.save(spans, args.output_dir, f"{args.arch}: the last updates", {"": window})[""]
    report.log(SERVER_NAME, "idle: " + ", ".join(f"{role} {share:.0%}" for role, share in idle.items()))


def build_parser():
    """The flags of this example."""
    parser = Parser("param_server_batch_update", __doc__, world_size=6, min_world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--arch", choices=["resnet18", "resnet50"], default="resnet50", help="the model")
    add("--batch_size", type=bounded(int, at_least=2), default=20, metavar="N",
        help="images of one trainer in one update")
    add("--image_size", type=bounded(int, at_least=8), default=64, metavar="N", help="height and width of an image")
    add("--num_classes", type=count, default=30, metavar="N", help="classes of images")
    add("--num_updates", type=count, default=6, metavar="N", help="steps of the server")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    add("--lr", type=bounded(float, above=0), default=0.001, help="learning rate of SGD; the momentum is 0.9")
    return parser


def require_sizes(args):
    """Refuse images and classes that this machine cannot hold."""
    features, others = {"resnet18": (512, 11_176_512), "resnet50": (2048, 23_508_032)}[args.arch]
    weights, pixels = others + features * args.num_classes, 3 * args.image_size**2
    # An image and its noise; a one-hot target, first of integers; on a CPU, what the first layer
    # and its BatchNorm make of the image, each 64 channels of half the height and width.
    of_image = 2 * pixels + 3 * args.num_classes
    of_image += 2 * 64 * (args.image_size // 2) ** 2 if on_cpu(args) else 0
    # A trainer has a pattern for each class; weights and gradient; the server also the momentum.
    of_trainer = 2 * weights + args.num_classes * pixels + args.batch_size * of_image
    numbers = sum(3 * weights if rank == 0 else of_trainer for rank in ranks_here(args))
    require_memory(args, ["batch_size", "image_size", "num_classes"], 4 * numbers)


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_sizes(args)
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    spans = metrics.pop("spans")
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    if spans:
        draw_timeline(spans, args)
    typical = {what: statistics.median(metrics[what]) for what in ("compute", "transfer", "waiting")}
    spent = ", ".join(f"{what} {seconds / sum(typical.values()):.0%}" for what, seconds in typical.items())
    report.log(SERVER_NAME, f"an update is {spent}; peak memory of all processes {metrics['peak_memory_gb']:.1f} GB")
    first, last = metrics["loss"][0], metrics["loss"][-1]
    print(f"{args.arch}, {args.world_size - 1} trainers: {metrics['median_update_s']:.1f} s per update in the median, "
          f"{metrics['bytes_per_update'] / 1e6:.0f} MB each; loss {first:.3f} -> {last:.3f}")
    return metrics


if __name__ == "__main__":
    main()
