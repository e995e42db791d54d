r"""Synchronous SGD, written out on the collectives of main.py (tutorial 6_4, second half).

Every rank has the whole model and a part of the data. In each step every rank computes the gradient
of its own piece of the batch, the gradients are averaged over all ranks, and all make the same
step: the models stay bitwise identical.

    rank 0                              rank 1
    piece 0 -> loss -> gradient         piece 1 -> loss -> gradient
                          |                                   |
                          +--- average_gradients: all_reduce -+   once for each parameter
                          |                                   |
    optimizer.step()  <---+                                   +--->  optimizer.step()
    the same weights                                                 the same weights

    python p2p_collectives/train.py --world_size 2             all processes here
    python p2p_collectives/train.py --check                    the same as a single process?
    torchrun --nproc_per_node 2 p2p_collectives/train.py       under torchrun

It ends with, about:
    digits: test accuracy 96.7% after 10 epochs on 2 ranks: 3430 samples/s, ...

train_flat.py does the same with one all_reduce a step, train_ddp.py with DistributedDataParallel.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from common import checkpoint
from common.cli import Parser, bounded, given, refuse, starts_rank
from common.data import add_data_flags, fetch_data, load_data
from common.program import role_name, run_program
from common.session import device_for, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from p2p_collectives import train_results as results
from p2p_collectives.data import batches, steps_of_epoch

MOMENTUM = 0.9
MAX_NORM = 1.0  # gradients are clipped to it: large steps would end in chaos


class Partition:
    """Holds a part of a dataset: the elements at the positions `index`."""

    def __init__(self, data: Any, index: torch.Tensor) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """Return the element at one position of the part, or a batch for a tensor of positions."""
        return self.data[self.index[index]]


class DataPartitioner:
    """Cuts a dataset into parts of the given sizes, at random, and on every rank alike.

    Args:
        data: the dataset.
        sizes: shares of it; together at most 1.
        seed: the same on all ranks, or the parts would overlap.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1),
                 seed: int = 1234) -> None:
        self.data = data
        self.partitions = []
        indexes = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        start = 0
        for part in range(len(sizes)):
            # Tutorial: rounds each length down, and loses samples. Rounded ends lose none.
            end = math.floor(sum(sizes[: part + 1]) * len(data) + 0.5)
            self.partitions.append(indexes[start:end])
            start = end

    def use(self, partition: int) -> Partition:
        """Return the part with that number."""
        return Partition(self.data, self.partitions[partition])


def partition_dataset(args: Namespace) -> tuple[Partition, list[int], TensorDataset]:
    """Return this rank's part, how many samples all ranks have in each step, and the test set."""
    dataset, test_set = load_data(args)  # Tutorial: all ranks race to download MNIST
    size = dist.get_world_size()
    partition_sizes = [1.0 / size for _ in range(size)]
    partitioner = DataPartitioner(dataset, partition_sizes, args.seed)
    # Tutorial: bsz = 128 / float(size), a float, which DataLoader refuses.
    global_batches = steps_of_epoch(partitioner.partitions, args.global_batch_size)
    return partitioner.use(dist.get_rank()), global_batches, test_set


class Net(nn.Module):
    """Classifies digits, as PyTorch's MNIST example did; half its dropout, as 10 epochs are few."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, 0.25, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def train_step(model: nn.Module, optimizer: optim.Optimizer, data: torch.Tensor,
               target: torch.Tensor, share: float) -> torch.Tensor:
    """Make one step, in which all ranks take part.

    Args:
        model: this rank's replica.
        optimizer: of its parameters.
        data, target: this rank's piece of the batch: images (N, 1, 28, 28), labels (N,).
        share: of this piece in the samples of the step.

    Returns:
        The mean loss of the piece.
    """
    optimizer.zero_grad()
    output = model(data)
    loss = F.nll_loss(output, target)
    loss.backward()
    average_gradients(model, share)
    # After the average: clipped pieces would not add up to the whole batch's gradient.
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return loss.detach()


def average_gradients(model: nn.Module, share: float) -> None:
    """Sum the gradients of all ranks, each weighted by its share: an all_reduce for each parameter.

    `model` has this rank's gradients, and then those of all samples of the step, of which this rank
    has the `share`: 1 / world size, where the pieces are equal.
    """
    for param in model.parameters():
        param.grad *= share  # Tutorial: /= size, which is wrong where the pieces are not equal
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


def run(rank: int, size: int, args: Namespace, train_step: Callable = train_step,
        wrap: Callable = lambda net: net) -> dict:
    """Train this rank's replica; rank 0 writes the checkpoints.

    Args:
        rank, size: of this process, and how many there are.
        args: the parsed flags.
        train_step: makes a step; see above.
        wrap: makes of the network what the steps call.

    Returns:
        The metrics, which are complete on rank 0.
    """
    device = device_for(args.device)
    torch.manual_seed(args.seed)  # the same on all ranks: all start with the same weights
    train_set, global_batches, test_set = partition_dataset(args)
    net = Net().to(device)
    model = wrap(net)
    # Tutorial: lr 0.01 in all epochs, momentum 0.5; too slow for as few steps as ours.
    optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=MOMENTUM, nesterov=True)
    epochs = resume(net, optimizer, args) if args.resume else []
    history = results.History(len(train_set), global_batches, epochs, args)
    for epoch in range(len(epochs), args.epochs):
        # Another seed on each rank, for the order of its samples and for dropout; and in each
        # epoch, so that a training resumed with the same --epochs goes on as if never stopped.
        torch.manual_seed(1_000_000 * args.seed + 1000 * epoch + rank)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - epoch / args.epochs)  # smaller and smaller
        history.begin_epoch()
        for data, target, share in batches(train_set, global_batches, rank):
            loss = train_step(model, optimizer, data.to(device), target.to(device), share)
            history.add(loss, len(target))
        history.end_epoch(net, test_set, device)
        if rank == 0 and args.checkpoint:  # rank 0 only: the others would race for the file
            checkpoint.save(args, {"model": net.state_dict(), "epochs": history.epochs,
                                   "optimizer": optimizer.state_dict()})
    results.require_equal_weights(net)
    return history.metrics()


def resume(net: nn.Module, optimizer: optim.Optimizer, args: Namespace) -> list[dict]:
    """Load the checkpoint on all ranks; return the epochs that are behind it."""
    # Only rank 0 reads the file: on another machine the others would find none, or another one.
    state = [checkpoint.load(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    [state] = state
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epochs"]


def run_worker(rank: int, world_size: int, args: Namespace, train_step: Callable = train_step,
               wrap: Callable = lambda net: net) -> dict | None:
    """Join, train, leave; rank 0 returns the metrics. The last two arguments: see `run`."""
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    metrics = {"backend": dist.get_backend(), **run(rank, world_size, args, train_step, wrap)}
    dist.destroy_process_group()
    return metrics if rank == 0 else None


def build_parser(example: str = "p2p_collectives/train", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=10, metavar="N", help="passes over the images")
    add("--global_batch_size", type=count, default=128, metavar="N", help="of all ranks, in a step")
    add("--lr", type=bounded(float, above=0), default=0.15, help="learning rate of the first epoch")
    parser.add_checkpoint_flags()
    return parser


def require_inputs(args: Namespace) -> None:
    """Refuse what cannot work, before any process starts.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.global_batch_size < args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be at least {given(args, 'world_size')}: "
               "every rank needs a sample")
    fetch_data(args)
    if starts_rank(args, 0) and args.world_size > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples}: each needs a sample")
    state = checkpoint.inspect(args, make_model=Net, needs={
        "optimizer": checkpoint.OPTIMIZER,
        "epochs": [{"loss": float, "loss_per_rank": list, "accuracy": float}]})
    if state:
        checkpoint.require_epochs(args, len(state["epochs"]))


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_inputs(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
