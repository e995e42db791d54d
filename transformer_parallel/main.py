r"""Data parallelism written out: each rank has the full model and a share of the batch.

All ranks average their gradients, so all ranks make the same update. The variants (--ways) differ
in when they send gradients, and in how many gradients travel together:

    each       after the backward pass: one all-reduce for each gradient
    buckets    after the backward pass: one all-reduce for each megabyte of gradients
    overlap    during the backward pass: one all-reduce as soon as a bucket is full
    ddp        PyTorch's DistributedDataParallel, which works like overlap

    backward   [ head, block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
    overlap                     [bucket 0 ][bucket 1 ][bucket 2 ][bucket 3 ][4]  <- sent meanwhile

    python transformer_parallel/main.py                        the first three, on four ranks
    python transformer_parallel/main.py --builtin              and PyTorch's built-in version
    python transformer_parallel/main.py --ways overlap --bucket_kb 100
    python transformer_parallel/main.py --accumulate 2         two backward passes for each step
    python transformer_parallel/main.py --check                compare with a single process
    torchrun --nproc_per_node 4 transformer_parallel/main.py

The run ends with:
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

Weights = dict[str, torch.Tensor]  # by name


class Way:
    """A variant of training; this one holds the full model and reads a share of the batch.

    The other variants override what differs. In each step, `train` calls, in this order: `part`,
    `forward_backward`, `finish_gradients`, the optimizer's step, `after_step` and `reported`.
    After the last step, it calls `figures`.
    """

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        self.model, self.size = model, dist.get_world_size()
        self.accumulate = args.accumulate  # backward passes of a step

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates."""
        return self.model.parameters()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch: (B, T) to (B / N, T)."""
        return whole.chunk(self.size)[dist.get_rank()]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of some of this rank's rows."""
        return loss_of(self.model(tokens), targets)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of this rank's rows, piece by piece; return their mean loss."""
        loss, n = torch.zeros((), device=tokens.device), self.accumulate
        pieces = zip(tokens.chunk(n), targets.chunk(n), strict=True)
        for number, piece in enumerate(pieces, start=1):
            with contextlib.nullcontext() if number == n else self.no_sync():
                piece_loss = self.loss(*piece) / n
                piece_loss.backward()
            loss += piece_loss.detach()
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Return the context of a backward pass whose gradients are not averaged yet."""
        return contextlib.nullcontext()

    def finish_gradients(self) -> None:
        """Complete the gradients after the backward pass: here, nothing is left to do."""

    def after_step(self) -> None:
        """Finish the step after the optimizer: here, nothing is left to do."""

    def reported(self, loss: torch.Tensor) -> float:
        """Return the loss of the full batch, on all ranks."""
        return mean_of_ranks(loss)

    def figures(self) -> dict[str, float | list]:
        """Return further numbers of this variant for the table, by their headings."""
        return {}


class Each(Way):
    """One all-reduce for each gradient, after the backward pass."""

    def finish_gradients(self) -> None:
        """Average the gradients."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size


class Buckets(Way):
    """One all-reduce for many gradients, which lie in few vectors, in the backward pass's order."""

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
        """Return the parameters whose gradients are averaged, in the order of the model."""
        return list(self.model.parameters())

    def finish_gradients(self) -> None:
        """Average the vectors."""
        for vector, _ in self.buckets:
            dist.all_reduce(vector)
            vector /= self.size


class Overlap(Buckets):
    """Buckets that leave as soon as they are full, while backward computes the next gradients."""

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
        """Let the backward pass only add to the gradients."""
        self.syncing = False
        yield
        self.syncing = True

    def one_is_there(self, number: int) -> None:
        """Count a gradient of a bucket, and send the full bucket; autograd calls this hook."""
        if self.syncing:
            self.missing[number] -= 1
            # All ranks have the same graph, so they fill their buckets in the same order. DDP
            # cannot rely on that and sends the buckets in the order of their numbers.
            if self.missing[number] == 0:
                self.works.append(dist.all_reduce(self.buckets[number][0], async_op=True))

    def finish_gradients(self) -> None:
        """Wait for the buckets that are still on their way."""
        for work in self.works:
            work.wait()
        for vector, _ in self.buckets:
            vector /= self.size
        self.works, self.missing = [], [len(parameters) for _, parameters in self.buckets]


class TorchDDP(Way):
    """PyTorch's DistributedDataParallel, whose backward pass ends with averaged gradients."""

    def __init__(self, model: nn.Module, args: Namespace) -> None:
        super().__init__(DDP(model, bucket_cap_mb=args.bucket_kb * 1000 / 2**20,
                             gradient_as_bucket_view=True), args)

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Return DDP's own context."""
        return self.model.no_sync()


WAYS = {"each": Each, "buckets": Buckets, "overlap": Overlap, "ddp": TorchDDP}
BUILTIN = {"overlap": "ddp"}  # {variant: PyTorch's built-in version of it}


def split_into_buckets(parameters: Sequence[nn.Parameter],
                       n_bytes: int) -> list[list[nn.Parameter]]:
    """Split a list into buckets; the parameter that fills a bucket to `n_bytes` is its last."""
    lists, held = [[]], 0
    for parameter in parameters:
        if held >= n_bytes:
            lists.append([])
            held = 0
        lists[-1].append(parameter)
        held += parameter.nbytes
    return lists


def mean_of_ranks(value: torch.Tensor) -> float:
    """Average a number over the ranks; every rank gets the mean as a float."""
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


def train(rank: int, world_size: int, make_way: type[Way], args: Namespace) -> dict:
    """Train one variant.

    Returns:
        The loss of each step, as the mean over the ranks; the seconds of each step, and the seconds
        that this rank waited for gradients; what this rank sent in the last step, and what it held
        at the end of that backward pass, in bytes.

    Raises:
        NotFiniteError: A loss is infinite or NaN.
    """
    device = device_of_group(args)
    # Each rank makes the full model, even if it keeps a shard only. A model that no rank can hold
    # would be made on torch's device "meta", and each rank would fill in its shard.
    torch.manual_seed(args.seed)  # the same weights on all ranks
    way = make_way(Transformer(args.shape).to(device), args)
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
    """Join the group, train each variant, leave; rank 0 returns what all ranks measured."""
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    if rank == 0 and args.device == "cuda" and dist.get_backend() == "gloo":
        report.log("rank0", "not every rank has a GPU of its own: using the CPU")
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


def costs_of_each(args: Namespace, n: int, weights: Weights, calls: int | None = None) -> dict:
    """Derive what a rank sends in a step and holds: 2 P (n-1)/n bytes; P, P and 2 P.

    `--check` compares these numbers with the counted ones.

    Args:
        args: Parsed flags.
        n: Number of ranks.
        weights: Parameters of the full model, by name.
        calls: Number of all-reduces; by default, one for each gradient.

    Returns:
        Numbers by name; a list has a number for each rank.
    """
    p = bytes_of(weights)
    return {"calls": {"all_reduce": calls or len(weights)}, "bytes sent": 2 * p * (n - 1) / n,
            "weights held": p, "gradients held": p, "state held": 2 * p}


def costs_of_buckets(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the costs with one all-reduce for each bucket; see `costs_of_each`."""
    return costs_of_each(args, n, weights, calls=len(gradients_of_buckets(args, weights)))


def costs_of_overlap(args: Namespace, n: int, weights: Weights) -> dict:
    """Derive the same; all gradients after the first bucket are computed while it is sent."""
    behind = len(weights) - gradients_of_buckets(args, weights)[0] + 1
    return {**costs_of_buckets(args, n, weights), "gradients behind a bucket": behind}


def gradients_of_buckets(args: Namespace, weights: Weights) -> list[int]:
    """Count the gradients of each bucket, without the code that makes the buckets."""
    counts, n_bytes = [0], 0
    for weight in reversed(weights.values()):
        if n_bytes >= 1000 * args.bucket_kb:
            counts, n_bytes = [*counts, 0], 0
        counts[-1] += 1
        n_bytes += weight.nbytes
    return counts


def bytes_of(weights: Weights) -> int:
    """Return the bytes of all weights."""
    return sum(weight.nbytes for weight in weights.values())


COSTS = {"each": costs_of_each, "buckets": costs_of_buckets, "overlap": costs_of_overlap}


class WaysParser(Parser):
    """Parser of the flags that all programs of this folder share.

    Args:
        example: Name of the program.
        description: Docstring of the program.
        ways: Variants that `--ways` can name.
        builtin: PyTorch's built-in version of a variant, by the variant's name.
    """

    def __init__(self, example: str, description: str, ways: Mapping[str, type[Way]],
                 builtin: Mapping[str, str]) -> None:
        super().__init__(example, description, world_size=4, min_world_size=2)
        self.builtin = builtin
        self.written_out = [way for way in ways if way not in builtin.values()]
        add, count = self.add_argument, bounded(int, at_least=1)
        add("--ways", choices=ways, nargs="+", metavar="WAY",
            help=f"variants to train: some of {', '.join(ways)} (default: all but those of "
                 "--builtin)")
        add("--builtin", action="store_true",
            help=f"also train PyTorch's built-in versions: {', '.join(builtin.values())}; --check "
                 "without --ways includes them")
        add("--steps", type=count, default=10, metavar="N",
            help="optimizer steps of each variant")
        add("--batch_size", type=count, default=24, metavar="N",
            help="rows of a batch, over all ranks")
        add("--seq_len", type=count, default=64, metavar="N", help="characters of a row")
        add("--lr", type=bounded(float, above=0), default=0.001, help="learning rate of AdamW")
        add("--blocks", type=bounded(int, at_least=1, at_most=1000), default=4, metavar="N",
            help="number of blocks of the model, of 250,704 parameters each")
        self.set_defaults(accumulate=1, bucket_kb=1000)  # only main.py has flags for these

    def parse_args(self, args: Sequence[str] | None = None,
                   namespace: Namespace | None = None) -> Namespace:
        """Parse the flags, choose the variants and the model's shape; see `Parser.parse_args`."""
        args = super().parse_args(args, namespace)
        with_builtin = args.builtin or (args.check and args.ways is None)
        args.ways = args.ways or self.written_out
        if with_builtin:
            args.ways = args.ways + [self.builtin[way] for way in args.ways if way in self.builtin]
        args.shape = Shape(blocks=args.blocks)
        return args


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = WaysParser("transformer_parallel", __doc__, WAYS, BUILTIN)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--bucket_kb", type=count, metavar="N", help="kilobytes of gradients in a bucket")
    add("--accumulate", type=count, metavar="N",
        help="gradient accumulation: backward passes of each step")
    return parser


def require_equal_parts(args: Namespace) -> None:
    """Refuse a batch that the ranks cannot split evenly: a mean of means would not be the mean.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.batch_size % (args.world_size * args.accumulate):
        backwards = f" x {args.accumulate} backward passes" if args.accumulate > 1 else ""
        refuse(f"--batch_size {args.batch_size} must be a multiple of {args.world_size} "
               f"ranks{backwards}: all parts must have the same number of rows")


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=args.world_size)
    require_equal_parts(args)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
