r"""Data parallelism written out: each rank has the whole model and a part of the batch.

The gradients of all ranks are averaged, so that all make the same step. How, is what differs:

    each       after the backward, an all-reduce for each gradient
    buckets    after the backward, an all-reduce for each megabyte of gradients
    overlap    the same, each as soon as its gradients are there: backward goes on meanwhile
    ddp        torch's DistributedDataParallel, which is the third

    backward   [ head, block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
    overlap                     [bucket 0 ][bucket 1 ][bucket 2 ][bucket 3 ][4]  <- sent meanwhile

    python transformer_parallel/main.py                        the first three, on four ranks
    python transformer_parallel/main.py --twin                 torch's own beside them
    python transformer_parallel/main.py --ways overlap --bucket_kb 100
    python transformer_parallel/main.py --accumulate 2         two backwards for each step
    python transformer_parallel/main.py --check                the same numbers as one process?
    torchrun --nproc_per_node 4 transformer_parallel/main.py

It ends with:
    1,030,752 parameters on 4 ranks: the last losses of each, buckets, overlap differ by 0e+00
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

from common import report
from common.cli import Parser, bounded, refuse
from common.program import role_name, run_program
from common.session import device_of_group, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

from transformer_parallel import results
from transformer_parallel.data import batch_of
from transformer_parallel.model import Shape, Transformer, loss_of


class Way:
    """Trains a model, whole on each rank, on a part of the batch; other ways override what differs.

    `train` calls in each step, in this order, `part`, `forward_backward`, `finish_gradients`, the
    optimizer's step, `after_step` and `reported`; at the end `figures`.
    """

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        self.model, self.size = model, dist.get_world_size()
        self.accumulate = args.accumulate  # backwards of a step

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what this rank's optimizer steps."""
        return self.model.parameters()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch."""
        return whole.chunk(self.size)[dist.get_rank()]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of what this rank has of the batch."""
        return loss_of(self.model(tokens), targets)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of the pieces of this rank's part; return the loss of all."""
        loss, n = torch.zeros((), device=tokens.device), self.accumulate
        pieces = zip(tokens.chunk(n), targets.chunk(n), strict=True)
        for number, piece in enumerate(pieces, start=1):
            with contextlib.nullcontext() if number == n else self.no_sync():
                piece_loss = self.loss(*piece) / n
                piece_loss.backward()
            loss += piece_loss.detach()
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Return what stands around a backward whose gradients are not averaged yet."""
        return contextlib.nullcontext()

    def finish_gradients(self) -> None:
        """Complete the gradients, where backward has not: here it has."""

    def after_step(self) -> None:
        """Do what remains to be done when the optimizer has stepped: here, nothing."""

    def reported(self, loss: torch.Tensor) -> float:
        """Return the loss of the whole batch, on all ranks."""
        return results.mean_of_ranks(loss)

    def figures(self) -> dict[str, float | list]:
        """Return what else there is to be shown of this way, by its heading."""
        return {}


class Each(Way):
    """Averages each gradient by itself, when backward is over."""

    def finish_gradients(self) -> None:
        """Average the gradients."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size


class Buckets(Way):
    """Averages many gradients at once: they lie in a few long vectors, in backward's order."""

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        super().__init__(model, args)
        self.buckets = []  # (vector, its parameters); each gradient is a view of a vector
        for parameters in split_into_buckets(self.averaged()[::-1], args.bucket_kb * 1000):
            sizes = [parameter.numel() for parameter in parameters]
            vector = parameters[0].new_zeros(sum(sizes))
            for parameter, piece in zip(parameters, vector.split(sizes), strict=True):
                parameter.grad = piece.view_as(parameter)
            self.buckets.append((vector, parameters))

    def averaged(self) -> list[nn.Parameter]:
        """Return whose gradients are averaged, in the order of the model."""
        return list(self.model.parameters())

    def finish_gradients(self) -> None:
        """Average the vectors."""
        for vector, _ in self.buckets:
            dist.all_reduce(vector)
            vector /= self.size


class Overlap(Buckets):
    """Sends a bucket as soon as it is full, while backward computes the next gradients."""

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        super().__init__(model, args)
        self.syncing, self.works = True, []
        self.missing = [len(parameters) for _, parameters in self.buckets]
        for number, (_, parameters) in enumerate(self.buckets):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.one_is_there(number))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only add to the gradients."""
        self.syncing = False
        yield
        self.syncing = True

    def one_is_there(self, number: int) -> None:
        """Note a gradient of a bucket; autograd calls it. The last one sends the bucket."""
        if self.syncing:
            self.missing[number] -= 1
            # All ranks have the same graph, so they fill their buckets in the same order. DDP,
            # which cannot know, sends them in the order of their numbers.
            if self.missing[number] == 0:
                self.works.append(dist.all_reduce(self.buckets[number][0], async_op=True))

    def finish_gradients(self) -> None:
        """Wait for what is still on its way."""
        for work in self.works:
            work.wait()
        for vector, _ in self.buckets:
            vector /= self.size
        self.works, self.missing = [], [len(parameters) for _, parameters in self.buckets]


class TorchDDP(Way):
    """Leaves it to DistributedDataParallel, whose backward ends when all is averaged."""

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        super().__init__(DDP(model, bucket_cap_mb=args.bucket_kb * 1000 / 2**20,
                             gradient_as_bucket_view=True), args)

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Return DDP's own."""
        return self.model.no_sync()


WAYS = {"each": Each, "buckets": Buckets, "overlap": Overlap, "ddp": TorchDDP}
TWINS = {"overlap": "ddp"}  # of a way, torch's own


def split_into_buckets(parameters: Sequence[nn.Parameter],
                       n_bytes: int) -> list[list[nn.Parameter]]:
    """Cut a list into buckets; the parameter that brings one to `n_bytes` closes it."""
    lists, held = [[]], 0
    for parameter in parameters:
        if held >= n_bytes:
            lists.append([])
            held = 0
        lists[-1].append(parameter)
        held += parameter.nbytes
    return lists


def train(rank: int, world_size: int, make_way: type[Way], args: Namespace) -> dict:
    """Train in one way.

    Returns:
        The loss of each step, as the mean of all ranks; the seconds of each step, and how many of
        them this rank has only waited for gradients; of the last step, what this rank has sent, and
        what it holds at the end of backward.
    """
    device = device_of_group(args)
    # Each rank makes the whole model, also where it then keeps a part. One that no rank could hold
    # would be made on torch's device "meta", and each rank would fill in its part.
    torch.manual_seed(args.seed)  # the same weights on all ranks
    way = make_way(Transformer(Shape(blocks=args.blocks)).to(device), args)
    way.optimizer = optim.AdamW(way.parameters(), lr=args.lr)
    losses, meter = [], results.Meter(way, device)
    for step in range(args.steps):
        tokens, targets = (way.part(whole).to(device) for whole in batch_of(step, args))
        with meter.step(last=step == args.steps - 1):
            # To zero, not to None: the gradients of a bucket are views of it.
            way.optimizer.zero_grad(set_to_none=False)
            loss = way.forward_backward(tokens, targets)
            with meter.waiting():
                way.finish_gradients()
            way.optimizer.step()
            way.after_step()
        losses.append(report.require_finite(way.reported(loss), f"at step {step + 1}"))
    return {"losses": losses, **meter.measured(), "figures": way.figures()}


def run_worker(rank: int, world_size: int, args: Namespace,
               ways: Mapping[str, type[Way]] = WAYS) -> dict | None:
    """Join, train in each way, leave; rank 0 returns what all have measured."""
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    if rank == 0 and args.device == "cuda" and dist.get_backend() == "gloo":
        report.log("rank0", "there is no GPU for each rank: on the CPU")
    measured = {}
    for name in dict.fromkeys(args.ways):
        measured[name] = [None] * world_size
        dist.all_gather_object(measured[name], train(rank, world_size, ways[name], args))
        if rank == 0:
            report.log("rank0", f"{name}: loss {measured[name][0]['losses'][-1]:.4f} "
                                f"after {args.steps} steps")
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": backend, "measured": measured} if rank == 0 else None


class WaysParser(Parser):
    """Parses the flags that all programs of this folder have.

    Args:
        example: the name of the program.
        description: its docstring.
        ways: what `--ways` can name.
        twins: torch's own, by the way to which it belongs.
    """

    def __init__(self, example: str, description: str, ways: Mapping[str, type[Way]],
                 twins: Mapping[str, str]) -> None:
        super().__init__(example, description, world_size=4, min_world_size=2)
        self.own, self.twins = [way for way in ways if way not in twins.values()], twins
        add, count = self.add_argument, bounded(int, at_least=1)
        add("--ways", choices=ways, nargs="+", metavar="WAY",
            help=f"some of {', '.join(ways)} (default: all but those of --twin)")
        add("--twin", action="store_true",
            help=f"torch's own beside them: {', '.join(twins.values())}; --check without --ways "
                 "has them, too")
        add("--steps", type=count, default=10, metavar="N", help="optimizer steps of each way")
        add("--batch_size", type=count, default=24, metavar="N",
            help="rows of all ranks, in a step")
        add("--seq_len", type=count, default=64, metavar="N", help="characters in a row")
        add("--lr", type=bounded(float, above=0), default=0.001, help="learning rate of AdamW")
        add("--blocks", type=bounded(int, at_least=1, at_most=1000), default=4, metavar="N",
            help="of the model; each has 250,704 parameters")
        self.set_defaults(accumulate=1, bucket_kb=1000)  # other values are main.py's

    def parse_args(self, args: Sequence[str] | None = None,
                   namespace: Namespace | None = None) -> Namespace:
        """Parse, and choose the ways; see `Parser.parse_args`."""
        args = super().parse_args(args, namespace)
        with_twins = args.twin or (args.check and args.ways is None)
        args.ways = args.ways or self.own
        if with_twins:
            args.ways = args.ways + [self.twins[way] for way in args.ways if way in self.twins]
        return args


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = WaysParser("transformer_parallel", __doc__, WAYS, TWINS)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--bucket_kb", type=count, metavar="N",
        help="kilobytes of gradients that are sent together")
    add("--accumulate", type=count, metavar="N",
        help="gradient accumulation: backwards of each step, whose gradients are added up")
    return parser


def require_equal_parts(args: Namespace) -> None:
    """Refuse a batch that does not divide: the mean of means of unequal parts is not the mean.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.batch_size % (args.world_size * args.accumulate):
        backwards = f" x {args.accumulate} backwards" if args.accumulate > 1 else ""
        refuse(f"--batch_size {args.batch_size} must be a multiple of {args.world_size} "
               f"ranks{backwards}: every part has as many rows")


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=args.world_size)
    require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
