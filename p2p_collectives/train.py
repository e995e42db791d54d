r"""Synchronous SGD written out, on the collectives of main.py (tutorial 6_4, "distributed training").

Every rank has the whole model and a part of the data. In each step every rank computes the gradient of its own piece of
the batch, the gradients are averaged over all ranks, and all make the same step: the models stay equal to the bit.

    rank 0                              rank 1
    piece 0 -> loss -> gradient         piece 1 -> loss -> gradient
                          |                                   |
                          +--- average_gradients: all_reduce -+      --sync per_parameter   one for each parameter
                          |                                   |             flat            one for all of them
    optimizer.step()  <---+                                   +--->         ddp             DistributedDataParallel
    the same weights                    the same weights

    python p2p_collectives/train.py --world_size 2               all processes here
    python p2p_collectives/train.py --sync ddp                   what one uses today
    python p2p_collectives/train.py --check                      the same gradients and weights as a single process?
    torchrun --nproc_per_node 2 p2p_collectives/train.py         under torchrun

Last line, about:
    digits: test accuracy 96.7% after 10 epochs on 2 ranks, per_parameter: 4528 samples/s, weights equal to the bit
"""

import itertools
import time
from functools import partial

import torch
import torch.distributed as dist
from common import checkpoint, report, timeline
from common.cli import Parser, bounded, given, refuse, starts_rank
from common.data import add_data_flags, fetch_data, load_data
from common.launch import launch
from common.session import device_for, group_options
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from p2p_collectives.partition import batches, partition_dataset

EXAMPLE = "p2p_collectives/train"
LONGEST_GRADIENT = 1.0  # its norm; longer ones are shortened, so that large steps do not end in chaos
STEPS_DRAWN = 4  # with --timeline
SYNCS = ("per_parameter", "flat", "ddp")


def role_name(rank, world_size):
    """All ranks are alike."""
    return f"rank{rank}"


class Net(nn.Module):
    """The network that the tutorial borrows from PyTorch's MNIST example, with half the dropout: 10 epochs are few."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        """Log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, 0.25, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def average_gradients(model, share):
    """The tutorial's loop: an all_reduce for each parameter.

    Args:
        model: with this rank's gradients; afterwards with those of the joined batch.
        share: of this rank in the samples of the joined batch. Where the pieces are equal, it is 1 / world size.
    """
    for param in model.parameters():
        param.grad *= share
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


class FlatGradients:
    """One all_reduce for all parameters: their gradients are views into one flat tensor, from the beginning."""

    def __init__(self, model):
        params = list(model.parameters())
        self.flat = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
        for param, grad in zip(params, self.flat.split([param.numel() for param in params]), strict=True):
            param.grad = grad.view_as(param)

    def average(self, share):
        """Like `average_gradients`."""
        self.flat *= share
        dist.all_reduce(self.flat, op=dist.ReduceOp.SUM)


def build(args, device):
    """Make the replica of this rank, and what keeps it equal to the others.

    Returns:
        The network; the model to call, which is the network or DDP around it; the optimizer; the function that
        averages gradients after `backward()`, or None with DDP, which does so during `backward()`.
    """
    torch.manual_seed(args.seed)  # the same on all ranks: all start with the same weights
    net = Net().to(device)
    optimizer = make_optimizer(net, args)
    if args.sync == "ddp":
        device_ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(net, device_ids=device_ids)
        # A pass for nothing: after the first one DDP arranges its buckets of gradients anew, and three or more ranks
        # then sum in another order. Now all steps have the same order, also the first one after a resume.
        model(torch.zeros(1, 1, 28, 28, device=device)).sum().backward()
        return net, model, optimizer, None
    return net, net, optimizer, FlatGradients(net).average if args.sync == "flat" else partial(average_gradients, net)


def make_optimizer(net, args):
    """The same optimizer on all ranks: equal weights and equal gradients give equal weights again."""
    return torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum, nesterov=args.momentum > 0)


def train_step(model, optimizer, average, images, labels, share):
    """One step of synchronous SGD on this rank's piece, which is `share` of the joined batch; the piece's mean loss."""
    optimizer.zero_grad(set_to_none=False)  # keep the tensors: with --sync flat they are views
    with timeline.span("forward"):
        loss = F.nll_loss(model(images), labels)
    if average is None:
        # DDP divides by the world size, as if all pieces were equal: undo that, then weight.
        with timeline.span("backward with all_reduce"):
            (loss * share * dist.get_world_size()).backward()
    else:
        with timeline.span("backward"):
            loss.backward()
        with timeline.span("all_reduce"):
            average(share)
    with timeline.span("step"):
        # After the average: each piece's gradient clipped by itself would not make the joined batch's.
        nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)
        optimizer.step()
    return loss.item()


def accuracy(net, images, labels):
    """The share of these images that the network, without dropout, takes for what they are."""
    net.eval()
    with torch.inference_mode():
        guesses = torch.cat([net(batch).argmax(1) for batch in images.split(500)])
    net.train()
    return (guesses == labels).double().mean().item()


def weights(net):
    """All parameters in one tensor."""
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def equal_on_all_ranks(net):
    """Whether all ranks hold the same weights, to the bit."""
    rank0s = weights(net)
    dist.broadcast(rank0s, src=0)
    equal = torch.tensor(float(torch.equal(weights(net), rank0s)), device=rank0s.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # 1 only if it is 1 everywhere
    return bool(equal)


def run_worker(rank, world_size, args):
    """Every rank trains its replica; rank 0 also measures the accuracy, reports and writes the checkpoints."""
    device = device_for(args.device)
    if args.timeline:
        timeline.start(role_name(rank, world_size))
    dist.init_process_group(**group_options(args, device), rank=rank, world_size=world_size)
    train_set, joined_batch_sizes, test = partition_dataset(args, rank, world_size)
    test_images, test_labels = (tensor.to(device) for tensor in test.tensors)
    net, model, optimizer, average = build(args, device)
    epochs, train_s, backend = [], 0.0, dist.get_backend()
    if args.resume:
        # Only rank 0 reads the file: on another machine the others would find none, or that of another training.
        state = [checkpoint.load(args) if rank == 0 else None]
        dist.broadcast_object_list(state)
        [state] = state
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0].update(momentum=args.momentum, nesterov=args.momentum > 0)  # this run's
        epochs = state["epochs"]
    first_epoch = len(epochs)

    for epoch in range(first_epoch, args.epochs):
        # Another seed on each rank, for the order of its samples and for dropout; and in each epoch, so that a
        # resumed training goes on as if it had never stopped.
        torch.manual_seed(1_000_000 * args.seed + 1000 * epoch + rank)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - epoch / args.epochs)  # smaller and smaller steps
        started, epoch_loss = time.perf_counter(), 0.0
        for images, labels, share in batches(train_set, joined_batch_sizes, rank):
            loss = train_step(model, optimizer, average, images.to(device), labels.to(device), share)
            epoch_loss += loss * len(labels) / len(train_set)
        train_s += time.perf_counter() - started

        losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(world_size)]
        dist.all_gather(losses, torch.tensor(epoch_loss, dtype=torch.float64, device=device))
        epochs.append({"loss": torch.stack(losses).mean().item(), "loss_per_rank": torch.stack(losses).tolist()})
        if rank == 0:  # one is enough: the replicas are equal; the others wait in their next collective
            epochs[-1]["accuracy"] = accuracy(net, test_images, test_labels)
            per_rank = " ".join(f"{loss:.3f}" for loss in epochs[-1]["loss_per_rank"])
            report.log("rank0", f"epoch {epoch + 1:2}  test accuracy {epochs[-1]['accuracy']:.1%}  "
                                f"loss of each rank {per_rank}")
            if args.checkpoint:  # rank 0 only: the others would race for the file
                checkpoint.save(args, {"model": net.state_dict(), "optimizer": optimizer.state_dict(),
                                       "epochs": epochs})

    if not equal_on_all_ranks(net):
        raise ArithmeticError("the replicas have drifted apart")
    of_each_rank = [{}] * world_size
    if args.timeline:
        dist.all_gather_object(of_each_rank, timeline.recorded())
    # DDP must not outlive the group: it would end the group's threads while Python's lock is held, for which one of
    # them may wait (pytorch/pytorch issue 56297).
    del model
    dist.destroy_process_group()
    if rank != 0:
        return None
    samples = (args.epochs - first_epoch) * sum(joined_batch_sizes)
    return {"epochs": epochs, "test_accuracy": accuracy(net, test_images, test_labels), "sync": args.sync,
            "samples_per_s": samples / train_s if samples else None, "backend": backend,
            "spans": of_each_rank}

def plot_timeline(of_each_rank, args):
    """Draw the last few steps of the training: `timeline.png`."""
    spans = {role: spans for of_rank in of_each_rank for role, spans in of_rank.items()}
    steps = [span for span in spans["rank0"] if span["kind"] == "step"][-STEPS_DRAWN - 1 :]
    if len(steps) > 1:  # otherwise there was nothing left to train
        timeline.save(spans, args.output_dir, f"The last steps of a training, {args.sync}",
                      {"": (steps[0]["end"], steps[-1]["end"])})


CHECK_STEPS = 5


def train_for_check(rank, world_size, args):
    """A few steps without dropout with each --sync; rank 0 returns the first gradient and the last weights."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    results = {}
    for sync in SYNCS:
        args.sync = sync
        net, model, optimizer, average = build(args, torch.device("cpu"))
        net.eval()
        for step, (images, labels, share) in enumerate(batches_for_check(rank, world_size, args)):
            train_step(model, optimizer, average, images, labels, share)
            if step == 0:
                gradient = torch.cat([param.grad.flatten() for param in net.parameters()]).tolist()
        results |= {f"{sync}, gradient of the first step": gradient,
                    f"{sync}, weights after {CHECK_STEPS} steps": weights(net).tolist(),
                    f"{sync}, ranks alike": [equal_on_all_ranks(net)]}
    del model  # see run_worker
    dist.destroy_process_group()
    return results if rank == 0 else None

def batches_for_check(rank, world_size, args):
    """The first few pieces of `rank`, in any process."""
    torch.manual_seed(args.seed + rank)
    train_set, joined_batch_sizes, _ = partition_dataset(args, rank, world_size)
    return itertools.islice(batches(train_set, joined_batch_sizes, rank), CHECK_STEPS)


def check(args):
    """Hold all three ways against one process that trains on the joined batches; the differences, or None."""
    ours = launch(train_for_check, args, role_name)
    if ours is None:
        return None
    torch.manual_seed(args.seed)
    net = Net().eval()
    optimizer = make_optimizer(net, args)
    pieces_of_each_rank = [list(batches_for_check(rank, args.world_size, args)) for rank in range(args.world_size)]
    for step, pieces in enumerate(zip(*pieces_of_each_rank, strict=True)):
        images, labels = (torch.cat([piece[part] for piece in pieces]) for part in (0, 1))
        optimizer.zero_grad()
        F.nll_loss(net(images), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        if step == 0:
            gradient = torch.cat([param.grad.flatten() for param in net.parameters()])
    oracle, tolerances = {}, {}
    for sync in SYNCS:
        for what, value, tolerance in (
            # The same numbers are summed in another order: rounding of float32, about 1e-7 of the largest entry, which
            # later steps carry on.
            ("gradient of the first step", gradient, 1e-5), (f"weights after {CHECK_STEPS} steps", weights(net), 1e-5),
            ("ranks alike", [True], 0),
        ):
            oracle[f"{sync}, {what}"], tolerances[f"{sync}, {what}"] = value, tolerance
    return report.compare(ours, oracle, tolerances)


def build_parser():
    """The flags of this example."""
    parser = Parser(EXAMPLE, __doc__, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=10, metavar="N", help="times that every image is trained on")
    add("--global_batch_size", type=count, default=128, metavar="N", help="samples of all ranks together in one step")
    add("--lr", type=bounded(float, above=0), default=0.15, help="learning rate of the first epoch")
    add("--momentum", type=bounded(float, at_least=0, at_most=1), default=0.9, help="of SGD, Nesterov's")
    add("--sync", choices=SYNCS, default="per_parameter", help="how the gradients are averaged")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    if args.global_batch_size < args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be at least {given(args, 'world_size')}: "
               "every rank needs a sample")
    fetch_data(args)
    if starts_rank(args, 0) and args.world_size > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples}: every rank needs a "
               "sample")
    state = checkpoint.inspect(args, needs=("epochs",), make_model=Net)
    if state and len(state["epochs"]) > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {len(state['epochs'])}: the checkpoint "
               "has so many behind it")
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    of_each_rank = metrics.pop("spans")
    if args.timeline:
        plot_timeline(of_each_rank, args)
    report.save_metrics(args, metrics, metrics["backend"])
    speed = "nothing left to train" if metrics["samples_per_s"] is None else f"{metrics['samples_per_s']:.0f} samples/s"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} epochs on "
          f"{args.world_size} ranks, {args.sync}: {speed}, weights equal to the bit")
    return metrics


if __name__ == "__main__":
    main()
