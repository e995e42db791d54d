r"""Synchronous SGD, written out with the collectives of main.py (tutorial 6_4, second half).

Every rank has the full model and a part of the data. In each step, every rank computes the gradient
of its own piece of the batch. The gradients are averaged over all ranks, so all ranks make the same
step, and the models stay bitwise identical.

    rank 0                              rank 1
    piece 0 -> loss -> gradient         piece 1 -> loss -> gradient
                          |                                   |
                          +--- average_gradients: all_reduce -+   once for each parameter
                          |                                   |
    optimizer.step()  <---+                                   +--->  optimizer.step()
    the same weights                                                 the same weights

    python p2p_collectives/train.py --world_size 2             all processes here
    python p2p_collectives/train.py --check                    compare with a single process
    torchrun --nproc_per_node 2 p2p_collectives/train.py       under torchrun

It ends with, about:
    digits: test accuracy 96.4% after 10 epochs on 2 ranks: 3430 samples/s, ...

train_flat.py does the same with one all_reduce per step, train_ddp.py with DistributedDataParallel.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from common import checkpoint, report
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

# Tutorial: momentum 0.5 and lr 0.01, which reach 68% in the 120 steps that 10 epochs have here.
MOMENTUM = 0.9


class Partition:
    """Part of a dataset: the elements at the positions `index`."""

    def __init__(self, data: Any, index: torch.Tensor) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """Return the element at a position in the part, or a batch for a tensor of positions."""
        return self.data[self.index[index]]


class DataPartitioner:
    """Random split of a dataset into parts of given sizes, the same on every rank.

    Args:
        data: Dataset to split.
        sizes: Fractions of the dataset, at most 1 together.
        seed: Seed of the split. It must be the same on all ranks, or the parts would overlap.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1),
                 seed: int = 1234) -> None:
        self.data = data
        self.partitions = []
        indexes = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        start = 0
        for part in range(len(sizes)):
            # Tutorial: it rounds each length down and loses samples. Rounded ends lose none.
            end = math.floor(sum(sizes[: part + 1]) * len(data) + 0.5)
            self.partitions.append(indexes[start:end])
            start = end

    def use(self, partition: int) -> Partition:
        """Return the part with that number."""
        return Partition(self.data, self.partitions[partition])


def partition_dataset(args: Namespace) -> tuple[Partition, list[int], TensorDataset]:
    """Return this rank's part, the samples of all ranks in each step, and the test set."""
    dataset, test_set = load_data(args)  # Tutorial: all ranks download MNIST at the same time
    size = dist.get_world_size()
    partition_sizes = [1.0 / size for _ in range(size)]
    partitioner = DataPartitioner(dataset, partition_sizes, args.seed)
    # Tutorial: bsz = 128 / float(size) is a float, which DataLoader refuses.
    global_batches = steps_of_epoch(partitioner.partitions, args.global_batch_size)
    return partitioner.use(dist.get_rank()), global_batches, test_set


class Net(nn.Module):
    """Classifier of digits, from PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def average_gradients(model: nn.Module, share: float) -> None:
    """Sum the gradients of all ranks, each weighted by its share: one all_reduce per parameter.

    Args:
        model: This rank's replica. Its gradients become the gradients of the step's mean loss.
        share: This rank's fraction of the step's samples: 1 / world size for equal pieces.
    """
    for param in model.parameters():
        param.grad *= share  # Tutorial: /= size is wrong if the pieces are not equal
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


def run(rank: int, size: int, args: Namespace) -> dict:
    """Train this rank's replica; return the metrics, which are complete on rank 0."""
    device = device_for(args.device)
    torch.manual_seed(args.seed)  # the same on all ranks, so all start with the same weights
    train_set, global_batches, test_set = partition_dataset(args)
    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
    epochs = resume(model, optimizer, args) if args.resume else []
    progress = results.Progress(epochs, global_batches, args)
    for epoch in range(len(epochs), args.epochs):
        seed_epoch(epoch, args)
        epoch_loss = 0.0
        with progress.clock:
            for data, target, share in batches(train_set, global_batches, rank):
                optimizer.zero_grad()
                output = model(data.to(device))
                loss = F.nll_loss(output, target.to(device))
                epoch_loss += progress.step(loss) * len(target) / len(train_set)
                loss.backward()
                average_gradients(model, share)
                optimizer.step()
        end_epoch(epochs, epoch_loss, model, optimizer, test_set, args)
    require_equal_weights(model)
    return progress.metrics()


def seed_epoch(epoch: int, args: Namespace) -> None:
    """Seed the order of this rank's samples, and its dropout.

    Every rank and every epoch has a seed of its own. Therefore a resumed run continues as if it had
    never stopped.
    """
    torch.manual_seed(1_000_000 * args.seed + 1000 * epoch + dist.get_rank())


def end_epoch(epochs: list[dict], epoch_loss: float, model: Net, optimizer: optim.Optimizer,
              test_set: TensorDataset, args: Namespace) -> None:
    """Gather the losses of all ranks; rank 0 evaluates, prints a line and saves the checkpoint.

    Args:
        epochs: Results of the epochs so far; receives one more.
        epoch_loss: Mean loss of this rank's samples.
        model: This rank's replica.
        optimizer: Optimizer over its parameters.
        test_set: Images and labels for the accuracy.
        args: The parsed flags.
    """
    device = device_for(args.device)
    losses = [torch.zeros((), dtype=torch.float64, device=device)
              for _ in range(dist.get_world_size())]
    dist.all_gather(losses, torch.tensor(epoch_loss, dtype=torch.float64, device=device))
    losses = torch.stack(losses)
    epochs.append({"loss": losses.mean().item(), "loss_per_rank": losses.tolist()})
    if dist.get_rank() == 0:  # one rank is enough: the replicas are equal
        epochs[-1]["accuracy"] = results.accuracy(model, test_set, device)
        results.show_epoch(epochs)
        if args.checkpoint:  # rank 0 only: the other ranks would race for the file
            checkpoint.save(args, {"model": model.state_dict(), "epochs": epochs,
                                   "optimizer": optimizer.state_dict()})


def resume(model: Net, optimizer: optim.Optimizer, args: Namespace) -> list[dict]:
    """Load the checkpoint on all ranks; return the results of the epochs so far."""
    # Only rank 0 reads the file: on another machine there may be none, or another one.
    state = [checkpoint.load(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    [state] = state
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epochs"]


def require_equal_weights(model: Net) -> None:
    """Require bitwise identical weights on all ranks.

    Raises:
        ArithmeticError: if the weights differ.
        NotFiniteError: if the weights are not finite any more.
    """
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    if not weights.isfinite().all():
        raise report.NotFiniteError("has weights that are not finite after the last step: training "
                                    "has diverged; give a smaller --lr")
    rank0s = weights.clone()
    dist.broadcast(rank0s, src=0)
    equal = torch.tensor(float(torch.equal(weights, rank0s)), device=weights.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # 1 only if it is 1 on every rank
    if not equal:
        raise ArithmeticError("the replicas have drifted apart")


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join the group, train, and leave; rank 0 returns the metrics."""
    dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank,
                            world_size=world_size)
    metrics = {"backend": dist.get_backend(), **run(rank, world_size, args)}
    dist.destroy_process_group()
    return metrics if rank == 0 else None


def build_parser(example: str = "p2p_collectives/train", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add_data_flags(parser)
    add("--epochs", type=count, default=10, metavar="N", help="passes over the training images")
    add("--global_batch_size", type=count, default=128, metavar="N",
        help="samples of all ranks in a step, on average")
    add("--lr", type=bounded(float, above=0), default=0.05, help="learning rate")
    parser.add_checkpoint_flags()
    return parser


def require_inputs(args: Namespace) -> None:
    """Refuse flags that cannot work, before any process starts.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.global_batch_size < args.world_size:
        refuse(f"{given(args, 'global_batch_size')} must be at least {given(args, 'world_size')}: "
               "every rank needs a sample")
    fetch_data(args)
    if starts_rank(args, 0) and args.world_size > (n_samples := len(load_data(args)[0])):
        refuse(f"{given(args, 'world_size')} must be at most {n_samples}: every rank "
               "needs a sample")
    state = checkpoint.inspect(args, Net)
    if state:
        checkpoint.require_epochs(args, len(state["epochs"]))


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_inputs(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
