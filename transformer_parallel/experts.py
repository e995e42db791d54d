r"""Mixture of experts: many MLPs, of which each token sees one; each rank has some of them.

In each block a router gives every token the probability of each of E experts. The token goes to the
most probable one, and what comes back is multiplied by that probability, through which the router
learns. So the model has E times the weights of an MLP, and a token costs about as much as before.

                 rank 0's tokens         rank 1's tokens
    route        e0 e2 e2 e1 ...         e3 e0 e2 e2 ...
    boxes        [e0][e1] [e2][e3]       [e0][e1] [e2][e3]      each of C places, some empty
    all-to-all   rank 0: both [e0][e1]   rank 1: both [e2][e3]  a box to the rank of its expert
    compute      e0, e1                  e2, e3
    all-to-all   back: every token to where it came from

All boxes have C = ceil(capacity_factor x tokens of a rank / E) places, or an all-to-all would need
to know how much comes; but at most one for each of these tokens. A token without a place is
dropped: the sum around the MLP carries it on. So that few are, a second loss asks for balance: E x
the sum over the experts of (share of tokens) x (mean probability), over the tokens of a rank. It is
part of the loss that is shown.

    --ways        experts on each rank    sent in a step for each block, besides averaged gradients
    replicas      all E                   nothing, but the gradients of all experts are averaged
    experts       E / N                   4 all-to-alls of E x C x units: forward, backward
    uneven        E / N                   1 all-to-all of counts; 4 of the places that are not empty
    functional    as experts, with torch's exchange, which has its backward

    python transformer_parallel/experts.py                          on four ranks
    python transformer_parallel/experts.py --twin                   torch's own beside them
    python transformer_parallel/experts.py --capacity_factor 0.5    who is dropped?
    python transformer_parallel/experts.py --balance 0
    python transformer_parallel/experts.py --check                  the same numbers as one process?

Source: Fedus et al., "Switch Transformers", https://arxiv.org/abs/2101.03961, sections 2.1 and 2.2.
"""

import math
from argparse import Namespace
from typing import Any

from common.cli import Parser, bounded, refuse
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn

# Private by its name, and what torch advises in place of torch.distributed.nn.functional.
from torch.distributed._functional_collectives import all_to_all_single_autograd

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Buckets
from transformer_parallel.model import MLP, Shape, Transformer, loss_of


class Exchange(torch.autograd.Function):
    """Sends a part of a tensor to each rank, cut along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int] | None = None,
                received: list[int] | None = None) -> torch.Tensor:
        """Return what all ranks have sent here, in their order; see `exchanged`."""
        ctx.sent, ctx.received = sent, received
        return exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send the gradients back to where the parts came from: what came, goes."""
        return exchanged(gradient, ctx.received, ctx.sent), None, None


def exchanged(x: torch.Tensor, sent: list[int] | None = None,
              received: list[int] | None = None) -> torch.Tensor:
    """Give part r to rank r; return what all have given to this one.

    Args:
        x: the parts, one behind the other.
        sent, received: how long they are, and those that come; by default, all are equal.
    """
    result = x.new_empty(sum(received) if received else len(x), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent)
    return result


class Experts(nn.Module):
    """Takes the place of a block's MLP: (B, T, units) to the same.

    Attributes:
        experts: by their numbers; of a rank that has some of them, those.
        balance: of the last forward, the second loss.
        counts: of the last forward, how many tokens wanted each expert, (E,).
        dropped: of the last forward, how many got no place.
    """

    def __init__(self, units: int, args: Namespace) -> None:
        super().__init__()
        self.n_experts, self.capacity_factor = args.experts, args.capacity_factor
        self.router = nn.Linear(units, args.experts, bias=False)
        self.experts = nn.ModuleDict({str(i): MLP(units) for i in range(args.experts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let each token be transformed by the expert that the router chooses."""
        # route
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        gate, chosen = probabilities.max(-1)
        wanted = nn.functional.one_hot(chosen, self.n_experts)  # (tokens, E)
        self.counts = wanted.sum(0)
        shares = self.counts / len(tokens)
        self.balance = self.n_experts * (shares * probabilities.mean(0)).sum()
        # boxes: the n-th token that wants an expert gets the n-th place of its box, if there is one
        capacity = math.ceil(min(self.capacity_factor * len(tokens) / self.n_experts, len(tokens)))
        place = (wanted.cumsum(0) - 1).gather(1, chosen[:, None])[:, 0]
        kept = place < capacity
        self.dropped = (~kept).sum()
        slot = (chosen * capacity + place)[kept]
        boxes = tokens.new_zeros(self.n_experts * capacity, tokens.shape[1])
        boxes = boxes.index_put((slot,), tokens[kept]).view(self.n_experts, capacity, -1)
        # all-to-all, compute, all-to-all
        found = self.of_experts(boxes).flatten(0, 1)[slot] * gate[kept, None]
        # in the order of the tokens; what has no place is 0
        return torch.zeros_like(tokens).index_put((kept.nonzero()[:, 0],), found).view_as(x)

    def of_experts(self, boxes: torch.Tensor) -> torch.Tensor:
        """Compute each expert with its box: (E, capacity, units) to the same."""
        return torch.stack([expert(box) for expert, box in
                            zip(self.experts.values(), boxes, strict=True)])


class ShardedExperts(Experts):
    """Has some of the experts, and computes the tokens of all ranks with them."""

    def keep(self, rank: int, size: int) -> None:
        """Drop the experts of the other ranks."""
        self.size, count = size, self.n_experts // size
        for number in set(range(self.n_experts)) - set(range(rank * count, (rank + 1) * count)):
            del self.experts[str(number)]

    def of_experts(self, boxes: torch.Tensor) -> torch.Tensor:
        """Send the boxes to their experts, compute those that are here, and send them back."""
        # Those of rank 0 for the experts that are here, of rank 1 for them, ...
        here = self.exchange(boxes).unflatten(0, (self.size, -1))
        by_expert = here.transpose(0, 1).flatten(1, 2)  # (experts, places of all ranks, units)
        found = super().of_experts(by_expert).unflatten(1, (self.size, -1)).transpose(0, 1)
        return self.exchange(found.flatten(0, 1), back=True)

    def exchange(self, boxes: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send each box to the rank of its expert, or back."""
        return Exchange.apply(boxes)


class UnevenExperts(ShardedExperts):
    """Leaves the empty places at home; how many are full, the ranks tell each other first."""

    def of_experts(self, boxes: torch.Tensor) -> torch.Tensor:
        """Send the counts, which have no gradient, and then the boxes."""
        self.full = self.counts.clamp(max=boxes.shape[1])  # places of each box
        self.coming = exchanged(self.full)
        return super().of_experts(boxes)

    def exchange(self, boxes: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send the full places, and lay what comes into boxes again: twice (E, places, units)."""
        full, coming = (self.coming, self.full) if back else (self.full, self.coming)
        places = torch.arange(boxes.shape[1], device=boxes.device)
        sent, received = (counts.view(self.size, -1).sum(1).tolist() for counts in (full, coming))
        rows = Exchange.apply(boxes[places < full[:, None]], sent, received)
        there = (places < coming[:, None]).nonzero(as_tuple=True)
        return torch.zeros_like(boxes).index_put(there, rows)


class FunctionalExperts(ShardedExperts):
    """Leaves the exchange, with its backward, to torch."""

    def exchange(self, boxes: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Send each box to the rank of its expert, or back."""
        return all_to_all_single_autograd(boxes.contiguous(), None, None, dist.group.WORLD)


class Replicas(Buckets):
    """Has all experts on each rank, and averages all gradients."""

    make_experts = Experts

    def __init__(self, model: Transformer, args: Namespace) -> None:
        self.weight = args.balance
        super().__init__(with_experts(model, args, self.make_experts), args)
        self.layers = [block.mlp for block in model.blocks]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's tokens, and the weighted one of the balance."""
        loss = loss_of(self.model(tokens), targets)
        return loss + self.weight * sum(layer.balance for layer in self.layers)

    def figures(self) -> dict[str, float | list]:
        """Return how many tokens wanted each expert in the last step, and how many were dropped."""
        counts = torch.stack([torch.cat([layer.counts, layer.dropped[None]])
                              for layer in self.layers])
        dist.all_reduce(counts)
        wanted, dropped = counts[:, :-1], counts[:, -1]
        return {"dropped": dropped.sum().item(), "fullest": wanted.max().item(),
                "emptiest": wanted.min().item(), "tokens": wanted.tolist()}


class Sharded(Replicas):
    """Has a part of the experts; what is the same on all ranks is averaged."""

    make_experts = ShardedExperts

    def averaged(self) -> list[nn.Parameter]:
        """Return the parameters that all ranks have."""
        return [parameter for name, parameter in self.model.named_parameters()
                if ".experts." not in name]

    def finish_gradients(self) -> None:
        """Average the gradients; those of an expert are complete, but of the sum of all losses."""
        super().finish_gradients()
        for layer in self.layers:
            for parameter in layer.experts.parameters():
                parameter.grad /= self.size


class Uneven(Sharded):
    """Sends no empty places."""

    make_experts = UnevenExperts


class TorchExchange(Sharded):
    """Does the same with torch's exchange."""

    make_experts = FunctionalExperts


WAYS = {"replicas": Replicas, "experts": Sharded, "uneven": Uneven, "functional": TorchExchange}
TWINS = {"experts": "functional"}  # of a way, torch's own


def with_experts(model: Transformer, args: Namespace,
                 make_experts: type[Experts] = Experts) -> Transformer:
    """Put experts in the place of each block's MLP, the same on all ranks; return the model."""
    for block in model.blocks:
        block.mlp = make_experts(Shape().units, args).to(model.head.weight.device)
        if isinstance(block.mlp, ShardedExperts):
            block.mlp.keep(dist.get_rank(), dist.get_world_size())
    return model


def finish(metrics: dict, args: Namespace) -> dict:
    """Write and print what the other programs do, and how many tokens wanted each expert."""
    model = with_experts(Transformer(Shape(blocks=args.blocks)), args)
    whole = results.finish(metrics, args, model)
    for block, tokens in enumerate(whole["rows"][0]["figures"]["tokens"]):
        print(f"tokens that wanted each expert of block {block}: {' '.join(map(str, tokens))}")
    return whole


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/experts", __doc__, WAYS, TWINS)
    add = parser.add_argument
    add("--experts", type=bounded(int, at_least=1, at_most=1000), default=8, metavar="E",
        help="of each block, each with 166,608 parameters")
    add("--capacity_factor", type=bounded(float, above=0), default=1.25, metavar="F",
        help="places for F times the tokens that an expert would get, if all got as many")
    add("--balance", type=bounded(float, at_least=0), default=0.01, metavar="W",
        help="weight of the second loss")
    parser.set_defaults(blocks=2)  # of eight MLPs each
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    places = min(args.capacity_factor, args.experts)  # for each token, in all boxes
    copies = args.world_size if "replicas" in args.ways else 1
    results.require_room(args, copies, mlps=args.experts, places=places)
    data_parallel.require_equal_parts(args)
    if args.experts % args.world_size and {*args.ways} != {"replicas"}:
        refuse(f"--experts {args.experts} must be a multiple of {args.world_size} ranks: each has "
               "as many")
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
