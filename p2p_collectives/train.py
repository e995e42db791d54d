r"""Synchronous SGD, written out on the collectives of main.py (tutorial 6_4, second half).

Every rank has the whole model and a part of the data. In each step every rank computes the gradient
of its own piece of the batch, the gradients are averaged over all ranks, and all make the same
step: the models stay bitwise identical.

    rank 0                              rank 1
    piece 0 -> loss -> gradient         piece 1 -> loss -> gradient
                          |                                   |
                          +--- average_gradients: all_reduce -+   --sync per_parameter  one for each
                          |                                   |          flat      one for all
    optimizer.step()  <---+                                   +--->      ddp       DDP
    the same weights                    the same weights

    python p2p_collectives/train.py --world_size 2             all processes here
    python p2p_collectives/train.py --sync per_parameter       the tutorial's average_gradients
    python p2p_collectives/train.py --sync ddp                 what one uses today
    python p2p_collectives/train.py --check                    the same as a single process?
    torchrun --nproc_per_node 2 p2p_collectives/train.py       under torchrun

Last line, about:
    digits: test accuracy 96.7% after 10 epochs on 2 ranks, flat: 7630 samples/s, ...
"""

import math
import time

import torch
import torch.distributed as dist
from common import checkpoint, report, timeline
from common.cli import Parser, bounded, given, refuse, starts_rank
from common.data import add_data_flags, fetch_data, load_data
from common.launcher import launch
from common.session import device_for, group_options
from torch import nn, optim
from torch.nn import functional as F

from p2p_collectives import train_results as results
from p2p_collectives.average import FlatGradients, distributed
from p2p_collectives.data import batches, steps_of_epoch

EXAMPLE = "p2p_collectives/train"
LONGEST_GRADIENT = 1.0  # its norm; longer ones are shortened: large steps would end in chaos


def role_name(rank, world_size):
    """All ranks are alike."""
    return f"rank{rank}"


class Partition:
    """A part of a dataset: the elements at the positions `index`."""

    def __init__(self, data, index):
        self.data = data
        self.index = index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        """The element at one position of the part, or a batch for a tensor of positions."""
        return self.data[self.index[index]]


class DataPartitioner:
    """Cut a dataset into parts of the given sizes, at random, and on every rank alike.

    Args:
        data: the dataset.
        sizes: shares of it; together at most 1.
        seed: the same on all ranks, or the parts would overlap.
    """

    def __init__(self, data, sizes=(0.7, 0.2, 0.1), seed=1234):
        self.data = data
        self.partitions = []
        indexes = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        start = 0
        for part in range(len(sizes)):
            # Tutorial: rounds each length down, and loses samples. Rounded ends lose none.
            end = math.floor(sum(sizes[: part + 1]) * len(data) + 0.5)
            self.partitions.append(indexes[start:end])
            start = end

    def use(self, partition):
        """The part with that number."""
        return Partition(self.data, self.partitions[partition])


def partition_dataset(args):
    """The part of this rank; how many samples all ranks have in each step; the test set."""
    dataset, test_set = load_data(args)  # Tutorial: all ranks race to download MNIST
    size = dist.get_world_size()
    partition_sizes = [1.0 / size for _ in range(size)]
    partitioner = DataPartitioner(dataset, partition_sizes, args.seed)
    # Tutorial: bsz = 128 / float(size), a float, which DataLoader refuses.
    global_batches = steps_of_epoch(partitioner.partitions, args.global_batch_size)
    return partitioner.use(dist.get_rank()), global_batches, test_set


class Net(nn.Module):
    """The network of PyTorch's MNIST example, with half the dropout: 10 epochs are few."""

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


def run(rank, size, args):
    """Train this rank's replica; rank 0 returns the metrics, and writes the checkpoints."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)  # the same on all ranks: all start with the same weights
    train_set, global_batches, test_set = partition_dataset(args)
    test_images, test_labels = (tensor.to(device) for tensor in test_set.tensors)
    net = model = Net().to(device)
    optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum,
                          nesterov=args.momentum > 0)
    average = average_gradients
    if args.sync == "flat":
        average = FlatGradients(net).average
    elif args.sync == "ddp":
        model, average = distributed(net, device), None
    average = results.record_steps(net, optimizer, average)
    epochs = resume(net, optimizer, args) if args.resume else []
    first_epoch, train_s = len(epochs), 0.0
    for epoch in range(first_epoch, args.epochs):
        # Another seed on each rank, for the order of its samples and for dropout; and in each
        # epoch, so that a resumed training goes on as if it had never stopped.
        torch.manual_seed(1_000_000 * args.seed + 1000 * epoch + rank)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - epoch / args.epochs)  # smaller and smaller
        started, epoch_loss = time.perf_counter(), 0.0
        for data, target, share in batches(train_set, global_batches, rank):
            optimizer.zero_grad(set_to_none=False)  # keep the tensors: of `flat`, they are views
            output = model(data.to(device))
            loss = F.nll_loss(output, target.to(device))
            epoch_loss += (report.require_finite(loss, f"in epoch {epoch + 1}")
                           * len(target) / len(train_set))
            if average is None:
                # DDP averages in backward(), as if all pieces were equal: undo that, then weight.
                (loss * share * size).backward()
            else:
                loss.backward()
                average(model, share)
            # After the average: clipped pieces would not add up to the whole batch's gradient.
            nn.utils.clip_grad_norm_(net.parameters(), LONGEST_GRADIENT)
            optimizer.step()
        train_s += time.perf_counter() - started
        epochs.append(results.losses_of_ranks(epoch_loss, size, device))
        if rank == 0:  # one is enough: the others wait in their next collective
            epochs[-1]["accuracy"] = results.accuracy(net, test_images, test_labels)
            results.log_epoch(epochs)
            if args.checkpoint:  # rank 0 only: the others would race for the file
                checkpoint.save(args, {"model": net.state_dict(), "epochs": epochs,
                                       "optimizer": optimizer.state_dict()})
    results.require_equal_weights(net)
    test_accuracy = results.accuracy(net, test_images, test_labels) if rank == 0 else None
    return {"epochs": epochs, "test_accuracy": test_accuracy, "sync": args.sync,
            "samples": (args.epochs - first_epoch) * sum(global_batches), "train_s": train_s}


def average_gradients(model, share):
    """An all_reduce for each parameter.

    `model` has this rank's gradients, and then those of all samples of the step, of which this rank
    has the `share`: 1 / world size, where the pieces are equal.
    """
    for param in model.parameters():
        param.grad *= share  # Tutorial: /= size, which is wrong where the pieces are not equal
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)  # left out in one printing of it


def resume(net, optimizer, args):
    """Load the checkpoint on all ranks; the epochs that are behind it."""
    # Only rank 0 reads the file: on another machine the others would find none, or another one.
    state = [checkpoint.load(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    [state] = state
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.param_groups[0].update(momentum=args.momentum, nesterov=args.momentum > 0)
    return state["epochs"]


def run_worker(rank, world_size, args):
    """Join, train, leave; rank 0 returns the metrics."""
    if args.timeline:
        timeline.start(role_name(rank, world_size))
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    metrics = {"backend": dist.get_backend(), "spans": [{}] * world_size,
               **run(rank, world_size, args)}
    if args.timeline:
        dist.all_gather_object(metrics["spans"], timeline.recorded())
    # DDP has ended with run(). It must not outlive the group: it would end the group's threads
    # while it holds Python's lock, for which one of them may wait (pytorch/pytorch issue 56297).
    dist.destroy_process_group()
    return metrics if rank == 0 else None


def build_parser():
    """The flags of this example."""
    parser = Parser(EXAMPLE, __doc__, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=10, metavar="N", help="passes over the images")
    add("--global_batch_size", type=count, default=128, metavar="N", help="of all ranks, in a step")
    add("--lr", type=bounded(float, above=0), default=0.15, help="learning rate of the first epoch")
    add("--momentum", type=bounded(float, at_least=0, at_most=1), default=0.9, help="Nesterov's")
    add("--sync", choices=["per_parameter", "flat", "ddp"], default="flat", help="gradients: how")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports."""
    args = build_parser().parse_args(argv)
    if args.global_batch_size < args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be at least {given(args, 'world_size')}: "
               "every rank needs a sample")
    fetch_data(args)
    if starts_rank(args, 0) and args.world_size > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples}: each needs a sample")
    state = checkpoint.inspect(args, needs=("epochs",), make_model=Net)
    if state and len(state["epochs"]) > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {len(state['epochs'])}: the checkpoint "
               "has so many behind it")
    if args.check:
        from p2p_collectives.train_check import check

        return check(args)
    metrics = launch(run_worker, args, role_name)
    return metrics and results.finish(metrics, args)


if __name__ == "__main__":
    main()
