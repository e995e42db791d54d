r"""Mixture of experts: many MLPs, and each token passes through one; each rank has some of them.

In each block, a router gives every token the probability of each of E experts. The token goes to
the most probable expert, and the expert's output is multiplied by that probability. The router
learns through this product. So the model has E times the weights of an MLP, and a token costs
about as much as before.

                 rank 0's tokens         rank 1's tokens
    route        e0 e2 e2 e1 ...         e3 e0 e2 e2 ...
    buffers      [e0][e1] [e2][e3]       [e0][e1] [e2][e3]      each of C slots, some empty
    all-to-all   rank 0: both [e0][e1]   rank 1: both [e2][e3]  a buffer to its expert's rank
    compute      e0, e1                  e2, e3
    all-to-all   back: every token to the rank it came from

Each expert buffer has C = ceil(capacity_factor x tokens of a rank / E) slots, but at most one slot
for each token. Equal buffers spare the ranks a message about their sizes. A token without a slot is
dropped: only the sum around the MLP carries it on. A second loss asks for balance, so that few
tokens are dropped: E x the sum over the experts of (share of tokens) x (mean probability), over the
tokens of a rank. The loss in the table includes it.

    --ways        experts on each rank    sent in a step for each block, besides averaged gradients
    replicas      all E                   nothing, but the gradients of all experts are averaged
    experts       E / N                   4 all-to-alls of E x C x units: forward, backward
    uneven        E / N                   1 all-to-all of counts; 4 of the filled slots
    functional    E / N                   as experts, with PyTorch's all-to-all and its backward

    python transformer_parallel/experts.py                          on four ranks
    python transformer_parallel/experts.py --builtin                and PyTorch's built-in version
    python transformer_parallel/experts.py --capacity_factor 0.5    more tokens are dropped
    python transformer_parallel/experts.py --balance 0
    python transformer_parallel/experts.py --check                  compare with a single process

Source: Fedus et al., "Switch Transformers", https://arxiv.org/abs/2101.03961, sections 2.1 and 2.2.
"""

import functools
import math
from argparse import Namespace
from typing import Any

from common.cli import Parser, bounded, refuse
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn

# Private by its name; torch recommends it instead of torch.distributed.nn.functional.
from torch.distributed._functional_collectives import all_to_all_single_autograd

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Buckets, Weights, bytes_of
from transformer_parallel.model import MLP, Transformer, loss_of


class Exchange(torch.autograd.Function):
    """An all-to-all with a backward pass: rank r gets part r of a tensor, along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int] | None = None,
                received: list[int] | None = None) -> torch.Tensor:
        """Return the parts that all ranks sent to this one, in their order; see `exchanged`."""
        ctx.sent, ctx.received = sent, received
        return exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send the gradients of the received parts back to the ranks that sent the parts."""
        return exchanged(gradient, ctx.received, ctx.sent), None, None


def exchanged(x: torch.Tensor, sent: list[int] | None = None,
              received: list[int] | None = None) -> torch.Tensor:
    """Send part r to rank r; return the parts that all ranks sent to this one.

    Args:
        x: Parts for rank 0, rank 1, ..., along the first dimension.
        sent: Lengths of these parts; by default, all are equal.
        received: Lengths of the parts that arrive; by default, all are equal.
    """
    result = x.new_empty(sum(received) if received else len(x), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent)
    return result


class Experts(nn.Module):
    """A mixture of experts, instead of a block's MLP: (B, T, units) to (B, T, units).

    Attributes:
        experts: MLPs by their numbers; a sharded module has this rank's experts only.
        balance: Second loss of the last forward.
        counts: Number of tokens that chose each expert in the last forward, (E,).
        dropped: Number of tokens without a slot in the last forward.
    """

    def __init__(self, units: int, args: Namespace) -> None:
        super().__init__()
        self.n_experts, self.capacity_factor = args.experts, args.capacity_factor
        self.router = nn.Linear(units, args.experts, bias=False)
        self.experts = nn.ModuleDict({str(i): MLP(units) for i in range(args.experts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each token by the expert that the router chooses."""
        # route
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        gate, chosen = probabilities.max(-1)
        wanted = nn.functional.one_hot(chosen, self.n_experts)  # (tokens, E)
        self.counts = wanted.sum(0)
        shares = self.counts / len(tokens)
        self.balance = self.n_experts * (shares * probabilities.mean(0)).sum()
        # buffers: the n-th token that chose an expert gets slot n of its buffer, if there is one
        capacity = math.ceil(min(self.capacity_factor * len(tokens) / self.n_experts, len(tokens)))
        slot = (wanted.cumsum(0) - 1).gather(1, chosen[:, None])[:, 0]
        kept = slot < capacity
        self.dropped = (~kept).sum()
        row = (chosen * capacity + slot)[kept]
        buffers = tokens.new_zeros(self.n_experts * capacity, tokens.shape[1])
        buffers = buffers.index_put((row,), tokens[kept]).view(self.n_experts, capacity, -1)
        # all-to-all, compute, all-to-all
        found = self.of_experts(buffers).flatten(0, 1)[row] * gate[kept, None]
        # in the order of the tokens; a token without a slot gets 0
        return torch.zeros_like(tokens).index_put((kept.nonzero()[:, 0],), found).view_as(x)

    def of_experts(self, buffers: torch.Tensor) -> torch.Tensor:
        """Compute each expert on its buffer: (E, capacity, units) to (E, capacity, units)."""
        return torch.stack([expert(buffer) for expert, buffer in
                            zip(self.experts.values(), buffers, strict=True)])


class ShardedExperts(Experts):
    """Some of the experts, which compute the tokens of all ranks."""

    def keep(self, rank: int, size: int) -> None:
        """Drop the experts of the other ranks."""
        self.size, count = size, self.n_experts // size
        for number in set(range(self.n_experts)) - set(range(rank * count, (rank + 1) * count)):
            del self.experts[str(number)]

    def of_experts(self, buffers: torch.Tensor) -> torch.Tensor:
        """Send the buffers to their experts, compute this rank's experts, send the results back."""
        # From rank 0 the buffers for this rank's experts, from rank 1 its buffers for them, ...
        here = self.exchange(buffers).unflatten(0, (self.size, -1))
        by_expert = here.transpose(0, 1).flatten(1, 2)  # (experts, slots of all ranks, units)
        found = super().of_experts(by_expert).unflatten(1, (self.size, -1)).transpose(0, 1)
        return self.exchange(found.flatten(0, 1), back=True)

    def exchange(self, buffers: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send each buffer to the rank of its expert, or back."""
        return Exchange.apply(buffers)


class UnevenExperts(ShardedExperts):
    """An exchange of filled slots only; the ranks first tell each other how many there are."""

    def of_experts(self, buffers: torch.Tensor) -> torch.Tensor:
        """Send the counts, which have no gradient, and then the buffers."""
        self.full = self.counts.clamp(max=buffers.shape[1])  # filled slots of each buffer
        self.coming = exchanged(self.full)
        return super().of_experts(buffers)

    def exchange(self, buffers: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send the filled slots, and put the arriving ones into buffers: (E, slots, units)."""
        full, coming = (self.coming, self.full) if back else (self.full, self.coming)
        slots = torch.arange(buffers.shape[1], device=buffers.device)
        sent, received = (counts.view(self.size, -1).sum(1).tolist() for counts in (full, coming))
        rows = Exchange.apply(buffers[slots < full[:, None]], sent, received)
        there = (slots < coming[:, None]).nonzero(as_tuple=True)
        return torch.zeros_like(buffers).index_put(there, rows)


class FunctionalExperts(ShardedExperts):
    """PyTorch's all-to-all, which has a backward pass."""

    def exchange(self, buffers: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send each buffer to the rank of its expert, or back."""
        return all_to_all_single_autograd(buffers.contiguous(), None, None, dist.group.WORLD)


class Replicas(Buckets):
    """All experts on each rank; all gradients are averaged."""

    make_experts = Experts

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.weight = args.balance
        super().__init__(with_experts(model, args, self.make_experts), args)
        self.layers = [block.mlp for block in model.blocks]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's tokens plus the weighted loss of the balance."""
        loss = loss_of(self.model(tokens), targets)
        return loss + self.weight * sum(layer.balance for layer in self.layers)

    def figures(self) -> dict[str, float | list]:
        """Return the tokens that chose each expert in the last step, and the dropped ones."""
        counts = torch.stack([torch.cat([layer.counts, layer.dropped[None]])
                              for layer in self.layers])
        dist.all_reduce(counts)
        wanted, dropped = counts[:, :-1], counts[:, -1]
        return {"dropped": dropped.sum().item(), "fullest": wanted.max().item(),
                "emptiest": wanted.min().item(), "tokens": wanted.tolist()}


class Sharded(Replicas):
    """Some experts on each rank; the gradients of all other parameters are averaged."""

    make_experts = ShardedExperts

    def averaged(self) -> list[nn.Parameter]:
        """Return the parameters that all ranks have."""
        return [parameter for name, parameter in self.model.named_parameters()
                if ".experts." not in name]

    def finish_gradients(self) -> None:
        """Average the gradients; an expert's gradient is already the sum over all ranks' losses."""
        super().finish_gradients()
        for layer in self.layers:
            for parameter in layer.experts.parameters():
                parameter.grad /= self.size


class Uneven(Sharded):
    """An exchange without empty slots."""

    make_experts = UnevenExperts


class TorchExchange(Sharded):
    """PyTorch's exchange."""

    make_experts = FunctionalExperts


WAYS = {"replicas": Replicas, "experts": Sharded, "uneven": Uneven, "functional": TorchExchange}
BUILTIN = {"experts": "functional"}  # {variant: PyTorch's built-in version of it}


def costs_of_replicas(args: Namespace, n: int, weights: Weights, went: list) -> dict:
    """Derive the costs of `replicas`; see `costs_of_each` of main.py."""
    return data_parallel.costs_of_buckets(args, n, weights)


def costs_of_experts(args: Namespace, n: int, weights: Weights, went: list,
                     uneven: bool = False) -> dict:
    """Derive the costs of `experts` or `uneven`: averaged gradients, exchanges in each block.

    Args:
        args: Parsed flags.
        n: Number of ranks.
        weights: Parameters of the full model, by name.
        went: For each block and rank, number of the rank's tokens with a slot at each expert.
        uneven: Whether only filled slots are sent, after their counts.
    """
    shared = {name: weight for name, weight in weights.items() if ".experts." not in name}
    of_experts = (bytes_of(weights) - bytes_of(shared)) / n
    row = next(iter(weights.values())).itemsize * args.shape.units
    elsewhere = args.experts * (n - 1) / n  # experts of other ranks
    tokens = args.batch_size // n * args.seq_len
    capacity = math.ceil(min(args.capacity_factor * tokens / args.experts, tokens))
    rows, counts = [2 * args.blocks * elsewhere * capacity] * n, 0  # there and back
    if uneven:
        rows, counts = [leaving(went, rank, n) for rank in range(n)], 8 * args.blocks * elsewhere
    costs = data_parallel.costs_of_buckets(args, n, shared)
    sent = costs["bytes sent"] + counts
    return {"calls": costs["calls"] | {"all_to_all": (5 if uneven else 4) * args.blocks},
            "bytes sent": [sent + 2 * row * of_rank for of_rank in rows],  # forward and backward
            "weights held": costs["weights held"] + of_experts,
            "gradients held": costs["gradients held"] + of_experts,
            "state held": costs["state held"] + 2 * of_experts}


def leaving(went: list, rank: int, n: int) -> int:
    """Count the rows that leave a rank in a forward pass: its tokens, and tokens it returns."""
    return sum(count for block in went for source, of_rank in enumerate(block)
               for expert, count in enumerate(of_rank)
               if (source == rank) != (expert * n // len(of_rank) == rank))


COSTS = {"replicas": costs_of_replicas, "experts": costs_of_experts,
         "uneven": functools.partial(costs_of_experts, uneven=True)}


def with_experts(model: Transformer, args: Namespace,
                 make_experts: type[Experts] = Experts) -> Transformer:
    """Replace each block's MLP by experts, the same on all ranks; return the model."""
    for block in model.blocks:
        block.mlp = make_experts(args.shape.units, args).to(model.head.weight.device)
        if isinstance(block.mlp, ShardedExperts):
            block.mlp.keep(dist.get_rank(), dist.get_world_size())
    return model


def finish(metrics: dict, args: Namespace) -> dict:
    """Write and print the results, and the number of tokens that wanted each expert."""
    model = with_experts(Transformer(args.shape), args)
    whole = results.finish(metrics, args, model)
    for block, tokens in enumerate(whole["rows"][0]["figures"]["tokens"]):
        print(f"tokens that wanted each expert of block {block}: {' '.join(map(str, tokens))}")
    return whole


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/experts", __doc__, WAYS, BUILTIN)
    add = parser.add_argument
    add("--experts", type=bounded(int, at_least=1, at_most=1000), default=8, metavar="E",
        help="number of experts in each block, of 166,608 parameters each")
    add("--capacity_factor", type=bounded(float, above=0), default=1.25, metavar="F",
        help="slots of an expert buffer, as a multiple of an equal share of the tokens")
    add("--balance", type=bounded(float, at_least=0), default=0.01, metavar="W",
        help="weight of the second loss, which asks for balance")
    parser.set_defaults(blocks=2)  # with eight MLPs each
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    slots = min(args.capacity_factor, args.experts)  # for each token, in all buffers
    copies = args.world_size if "replicas" in args.ways else 1
    results.require_room(args, copies, mlps=args.experts, slots=slots)
    data_parallel.require_equal_parts(args)
    if args.experts % args.world_size and {*args.ways} != {"replicas"}:
        refuse(f"--experts {args.experts} must be a multiple of {args.world_size} ranks: all ranks "
               "must have the same number of experts")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
