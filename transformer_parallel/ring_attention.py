r"""Context parallelism: each rank has some characters of every row, and K and V travel.

Every layer but attention works on one token at a time, so it needs nothing from another rank. In
attention, the queries stay on their rank and meet the keys and values of one rank after the other:

                 hop 0          hop 1          hop 2          hop 3
    rank 0 has   K0 V0          K3 V3          K2 V2          K1 V1      each rank sends on its K
    rank 1       K1 V1          K0 V0          K3 V3          K2 V2      and V, and computes with
    rank 2       K2 V2          K1 V1          K0 V0          K3 V3      them meanwhile
    rank 3       K3 V3          K2 V2          K1 V1          K0 V0

A softmax needs the sum over all keys. The ring computes it piece by piece ("online"): a larger
score scales down the sums so far. In backward, K and V travel around the ring again, followed by
their gradients. Each rank adds to these gradients; after N hops they are back on their own rank.

    --ways    a rank has of T characters      of K and V, at most    scores of the busiest rank
    gather    T / N, side by side             all                    T x T / N
    ring      T / N, side by side             its own and two more   T x T / N: the last rank's
    zigzag    2 pieces of T / 2N, from the    its own and two more   about half of that, on each
              front and from the end                                 of the ranks
    torch_ring  PyTorch's own ring, as zigzag; its kernel stores no scores

Causal attention skips later tokens: in `ring`, rank 0 has nothing to compute in hops 1 to 3.
PyTorch's ring is part of the experimental `context_parallel`, which has kernels for GPUs only.
`torch_ring` calls that ring with a kernel for CPUs, and lets K and V travel around the ring. By
default, `context_parallel` gathers them.

    python transformer_parallel/ring_attention.py                 on four ranks
    python transformer_parallel/ring_attention.py --builtin       and PyTorch's built-in version
    python transformer_parallel/ring_attention.py --batch_size 1 --seq_len 4096 --steps 3 --blocks 1
    python transformer_parallel/ring_attention.py --check         compare with a single process

Sources: Liu et al., "Ring Attention", https://arxiv.org/abs/2310.01889; the balanced order comes
from https://github.com/zhuzilin/ring-flash-attention.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from common.cli import Parser, on_cpu, ranks_here, refuse
from common.program import role_name, run_program
from common.session import device_of_group

import torch
import torch.distributed as dist

# Private: the ring inside the public `context_parallel`, which knows no kernel of CPUs.
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_attention
from torch.nn import functional as F

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Buckets, Weights
from transformer_parallel.model import Transformer, loss_of
from transformer_parallel.tensor_parallel import Gather


class RingAttention(torch.autograd.Function):
    """Attention to the tokens of all ranks, while their K and V pass by."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, way: "Ring") -> torch.Tensor:
        """Compute softmax(q k' / sqrt(units)) v without later tokens.

        Args:
            q: Queries of this rank's tokens, (B, heads, T / N, head_units).
            kv: K and V of the same tokens, stacked: (2, B, heads, T / N, head_units).
            way: Variant, which knows the tokens of each rank.
        """
        pieces = q.chunk(way.pieces, dim=-2)
        sums = [nothing(piece) for piece in pieces]
        way.scores = 0
        for owner, visiting in round_the_ring(kv, way):
            for i, j, same in way.pairs(owner):
                k, v = visiting.chunk(way.pieces, dim=-2)[j].unbind()
                scores = scores_of(pieces[i], k, same)
                sums[i] = merged(sums[i], scores, v)
                way.scores += scores.shape[-2] * scores.shape[-1]
        out = torch.cat([mixed / total for _, total, mixed in sums], dim=-2)
        log_sums = torch.cat([largest + total.log() for largest, total, _ in sums], dim=-2)
        ctx.save_for_backward(q, kv, out, log_sums)
        ctx.way = way
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Send K and V round again, followed by their gradients."""
        q, kv, out, log_sums = ctx.saved_tensors
        way, q_gradient, kv_gradient = ctx.way, torch.zeros_like(q), torch.zeros_like(kv)
        # For p = softmax(s), let g be the gradient of p v. Then, row by row,
        # ds = p (g v' - sum of p g v'), and that sum is the sum of out x g.
        row_sums = (out * gradient).sum(-1, keepdim=True)
        mine = [x.chunk(way.pieces, dim=-2) for x in (q, gradient, log_sums, row_sums, q_gradient)]
        for owner, visiting in round_the_ring(kv, way):
            for i, j, same in way.pairs(owner):
                piece, g, log_sum, row_sum, piece_gradient = (x[i] for x in mine)
                k, v = visiting.chunk(way.pieces, dim=-2)[j].unbind()
                k_gradient, v_gradient = kv_gradient.chunk(way.pieces, dim=-2)[j].unbind()
                p = (scores_of(piece, k, same) - log_sum).exp()
                of_scores = p * (g @ v.mT - row_sum) / math.sqrt(q.shape[-1])
                piece_gradient += of_scores @ k  # views: this adds to q_gradient,
                k_gradient += of_scores.mT @ piece  # and these to kv_gradient
                v_gradient += p.mT @ g
            # K and V may still be on their way from the same rank; messages arrive in order.
            kv_gradient = passed_on(kv_gradient)
        return q_gradient, kv_gradient, None


def round_the_ring(kv: torch.Tensor, way: "Ring") -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each rank and its K and V, this rank first; the next K and V travel meanwhile."""
    rank, n, own = dist.get_rank(), dist.get_world_size(), kv
    for hop in range(n - 1):
        arriving = torch.empty_like(kv)
        way.note(own, kv, arriving)
        requests = start_hop(kv, arriving)
        yield (rank - hop) % n, kv
        for request in requests:
            request.wait()
        kv = arriving
    yield (rank - (n - 1)) % n, kv  # the last hop: no rank needs them after this one


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """Send a tensor to the next rank; return the tensor of the rank before."""
    arriving = torch.empty_like(x)
    for request in start_hop(x, arriving):
        request.wait()
    return arriving


def start_hop(x: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
    """Begin to send a tensor to the next rank, and to receive one from the rank before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    # Both in one call: with nccl, two ranks that both send first would wait for each other.
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % n),
                                   dist.P2POp(dist.irecv, arriving, (rank - 1) % n)])


def scores_of(q: torch.Tensor, k: torch.Tensor, same: bool) -> torch.Tensor:
    """Compute the scores of queries and keys, (..., queries, keys).

    Args:
        q, k: Queries and keys of one piece of the row each, (..., tokens, units).
        same: Whether both are the same piece, in which some keys are later than some queries.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if same:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    return scores


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def nothing(q: torch.Tensor) -> Sums:
    """Return the empty sums of queries (..., tokens, units); see `merged`."""
    column = q[..., :1]
    return torch.full_like(column, -math.inf), torch.zeros_like(column), torch.zeros_like(q)


def merged(sums: Sums, scores: torch.Tensor, values: torch.Tensor) -> Sums:
    """Add more keys to a softmax that has seen some keys ("online softmax").

    Args:
        sums: Largest score so far, m, (..., queries, 1); sum of exp(score - m), of the same shape;
            and sum of exp(score - m) value, (..., queries, units).
        scores: Scores of more keys, (..., queries, keys).
        values: Values of these keys, (..., keys, units).

    Returns:
        The sums over both.
    """
    largest, total, mixed = sums
    larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
    weights, smaller = (scores - larger).exp(), (largest - larger).exp()
    total = total * smaller + weights.sum(-1, keepdim=True)
    return larger, total, mixed * smaller + weights @ values


class GatherKV(Buckets):
    """K and V of all tokens on each rank, which attends with the queries of its own tokens."""

    pieces = 1  # pieces of a row on each rank

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.rank, self.scores, self.kv_bytes, self.length = dist.get_rank(), 0, 0, args.seq_len
        for block in model.blocks:
            block.attention.attend = self.attend

    def pieces_of(self, rank: int) -> list[int]:
        """Return the numbers of a rank's pieces of each row."""
        return [rank]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's characters of each row: (B, T) to (B, T / N)."""
        pieces = whole.chunk(self.size * self.pieces, dim=1)
        return torch.cat([pieces[number] for number in self.pieces_of(self.rank)], dim=1)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's characters, at their positions in the row."""
        places = self.part(torch.arange(self.length, device=tokens.device)[None])[0]
        return loss_of(self.model(tokens, places), targets)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to the tokens of all ranks but later ones: (B, heads, T / N, head_units)."""
        kv = Gather.apply(torch.stack([k, v]), None)
        places = torch.arange(kv.shape[-2], device=q.device)
        not_later = places <= self.part(places[None]).T
        self.note(kv)
        self.scores = not_later.numel()
        return F.scaled_dot_product_attention(q, *kv, attn_mask=not_later)

    def note(self, *tensors: torch.Tensor) -> None:
        """Note the bytes of K and V that this rank holds at once; a tensor counts once."""
        self.kv_bytes = max(self.kv_bytes, sum(one.nbytes for one in {*tensors}))

    def figures(self) -> dict[str, float]:
        """Return the megabytes of K and V in a block, and the share of T x T scores."""
        return {"MB of K, V": self.kv_bytes / results.MB, "scores": self.scores / self.length**2}


class Ring(GatherKV):
    """K and V go round the ring; a rank holds those of one other rank at a time."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to the tokens of all ranks but later ones, as they arrive."""
        return RingAttention.apply(q, torch.stack([k, v]), self)

    def pairs(self, owner: int) -> Iterator[tuple[int, int, bool]]:
        """Yield i, j and whether they are one piece: our piece i attends to the owner's piece j."""
        for i, ours in enumerate(self.pieces_of(self.rank)):
            for j, theirs in enumerate(self.pieces_of(owner)):
                if theirs <= ours:
                    yield i, j, theirs == ours


class Zigzag(Ring):
    """A ring whose ranks do equal work: each has a piece from the front and one from the end."""

    pieces = 2

    def pieces_of(self, rank: int) -> list[int]:
        """Return two pieces: one from the front, and one at the same distance from the end."""
        return [rank, 2 * self.size - 1 - rank]


class TorchRing(Zigzag):
    """PyTorch's ring, which balances the work in the same order."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        torch_attention.set_rotate_method("alltoall")  # by default, all K and V are gathered
        torch_attention._cp_options.convert_to_f32 = False  # by default, it merges in float32

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to the tokens of all ranks but later ones."""
        return TorchRingAttention.apply(q, k, v)

    def figures(self) -> dict[str, float]:
        """Return nothing: PyTorch does not report these numbers."""
        return {}


class TorchRingAttention(torch.autograd.Function):
    """PyTorch's ring with the kernel of CPUs instead of those of GPUs."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute the same as `RingAttention`; q, k and v are (B, heads, T / N, head_units)."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, log_sums = torch_attention._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k and v."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return torch_attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, gradient, "grad_out", *ctx.saved_tensors, is_causal=True,
            dropout_p=0.0)


WAYS = {"gather": GatherKV, "ring": Ring, "zigzag": Zigzag, "torch_ring": TorchRing}
BUILTIN = {"zigzag": "torch_ring"}  # {variant: PyTorch's built-in version of it}


def costs_of(way: str) -> Callable[..., dict]:
    """Return what derives the costs of a variant; see `costs_of_each` of main.py.

    K and V of a rank are b bytes in each block. `gather` fetches n - 1 times b, and scatters the
    gradients, of the same size. In a ring, K and V go n - 1 hops in forward and in backward; their
    gradients go n hops.
    """
    def costs(args: Namespace, n: int, weights: Weights) -> dict:
        item, blocks = next(iter(weights.values())).itemsize, args.blocks
        b = 2 * item * args.batch_size * args.seq_len // n * args.shape.units
        gradients = data_parallel.costs_of_buckets(args, n, weights)
        if way == "gather":
            calls, sent, held = {"all_gather": blocks, "reduce_scatter": blocks}, 2 * (n - 1), n
            more = {"scores": 1 / n}
        else:
            calls, sent, held = {"send": blocks * (3 * n - 2)}, 3 * n - 2, min(n, 3)
            # Of n pieces, a rank reads its own and earlier ones; of 2 n pieces, 2 n + 1 pairs.
            more = {"scores": [(rank + 1) / n**2 if way == "ring" else (2 * n + 1) / (2 * n) ** 2
                               for rank in range(n)],
                    "hops behind attention": 2 * blocks * (n - 1)}  # forward and backward
        return {**gradients, **more, "calls": gradients["calls"] | calls,
                "bytes sent": gradients["bytes sent"] + blocks * sent * b,
                "MB of K, V": held * b / results.MB}
    return costs


COSTS = {way: costs_of(way) for way in ("gather", "ring", "zigzag")}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; on GPUs without `torch_ring`, which calls a kernel of CPUs."""
    if device_of_group(args).type == "cuda":
        args.ways = [way for way in args.ways if way != "torch_ring"]
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/ring_attention", __doc__, WAYS, BUILTIN)


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    # `ring` holds four times the scores of a hop, for one block at a time; the others hold less.
    results.require_room(args, args.world_size, scores=4 / args.world_size / args.blocks)
    on_gpus = not on_cpu(args) and len(ranks_here(args)) <= torch.cuda.device_count()
    if (on_gpus or args.device == "cuda") and {*args.ways} == {"torch_ring"}:
        refuse("--ways torch_ring calls a kernel of CPUs: give --device cpu, too")
    pieces = args.world_size * max(WAYS[name].pieces for name in args.ways)
    if args.seq_len % pieces:
        refuse(f"--seq_len {args.seq_len} must be a multiple of {pieces}: the pieces of a row on "
               f"{args.world_size} ranks must have the same length")
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
