r"""Context parallelism: each rank has some of the characters of every row, and K and V travel.

All but attention looks at one token alone, so it needs nothing from another rank. In attention the
queries stay where they are, and meet the keys and values of all ranks, one rank after the other:

                 hop 0          hop 1          hop 2          hop 3
    rank 0 has   K0 V0          K3 V3          K2 V2          K1 V1      each rank sends what it has
    rank 1       K1 V1          K0 V0          K3 V3          K2 V2      on to the next one, and
    rank 2       K2 V2          K1 V1          K0 V0          K3 V3      computes with it meanwhile
    rank 3       K3 V3          K2 V2          K1 V1          K0 V0

A softmax needs the sum over all keys. It is computed piece by piece ("online"): what has been
summed so far is scaled down whenever a larger score comes. In backward K and V go round once more,
and their gradients behind them, to which each rank adds; after N hops they are at home.

    --ways    a rank has of T characters      of K and V, at most    scores of the busiest rank
    gather    T / N, side by side             all                    T x T / N
    ring      T / N, side by side             its own and two more   T x T / N: the last rank's
    zigzag    2 pieces of T / 2N, from the    its own and two more   about half of that, on each
              front and from the end                                 of the ranks
    torch_ring  as zigzag, by torch's own ring, which calls a kernel that writes no scores down

Later tokens are not looked at: in `ring` rank 0 has nothing to do in hops 1 to 3. torch's own is
the experimental `context_parallel`, which knows the kernels of GPUs alone: here the ring inside of
it is called with that of CPUs, and K and V are sent round, not gathered as by default.

    python transformer_parallel/ring_attention.py                 on four ranks
    python transformer_parallel/ring_attention.py --twin          torch's own beside them
    python transformer_parallel/ring_attention.py --batch_size 1 --seq_len 4096 --steps 3 --blocks 1
    python transformer_parallel/ring_attention.py --check         the same numbers as one process?

Sources: Liu et al., "Ring Attention", https://arxiv.org/abs/2310.01889; the balanced order is that
of https://github.com/zhuzilin/ring-flash-attention.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from common.cli import Parser, on_cpu, ranks_here, refuse
from common.program import role_name, run_program
from common.session import device_of_group

import torch
import torch.distributed as dist

# Private: the ring inside of the public `context_parallel`, which knows no kernel of CPUs.
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_attention
from torch.nn import functional as F

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Buckets
from transformer_parallel.model import Transformer, loss_of
from transformer_parallel.tensor_parallel import Gather


class RingAttention(torch.autograd.Function):
    """Attends to the tokens of all ranks, while their K and V pass by."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, way: "Ring") -> torch.Tensor:
        """Compute softmax(q k' / sqrt(units)) v over all tokens that are not later.

        Args:
            q: of this rank's tokens, (B, heads, T / N, head_units).
            kv: their K and V, stacked: (2, B, heads, T / N, head_units).
            way: knows which rank has which tokens.
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
        """Send K and V round again, and their gradients behind them."""
        q, kv, out, log_sums = ctx.saved_tensors
        way, q_gradient, kv_gradient = ctx.way, torch.zeros_like(q), torch.zeros_like(kv)
        # Of p = softmax(s), with g the gradient of p v: ds = p (g v' - sum of p g v'), row by row,
        # and that sum is the one of out x g.
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
            # K and V are still on their way from the same rank: messages arrive as they were sent.
            kv_gradient = passed_on(kv_gradient)
        return q_gradient, kv_gradient, None


def round_the_ring(kv: torch.Tensor, way: "Ring") -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each rank and its K and V, the own ones first; the next ones travel meanwhile."""
    rank, n, own = dist.get_rank(), dist.get_world_size(), kv
    for hop in range(n - 1):
        arriving = torch.empty_like(kv)
        way.note(own, kv, arriving)
        requests = start_hop(kv, arriving)
        yield (rank - hop) % n, kv
        for request in requests:
            request.wait()
        kv = arriving
    yield (rank - (n - 1)) % n, kv  # of the last hop: nobody needs them after this rank


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """Send a tensor to the next rank; return that of the rank before."""
    arriving = torch.empty_like(x)
    for request in start_hop(x, arriving):
        request.wait()
    return arriving


def start_hop(x: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
    """Begin to send a tensor to the next rank, and to receive that of the rank before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    # Both in one call: with nccl, two ranks that send first would wait for each other.
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % n),
                                   dist.P2POp(dist.irecv, arriving, (rank - 1) % n)])


def scores_of(q: torch.Tensor, k: torch.Tensor, same: bool) -> torch.Tensor:
    """Compute the scores of queries and keys, (..., queries, keys).

    Args:
        q, k: of a piece of the row each, (..., tokens, units).
        same: whether it is the same piece, in which some keys are later than some queries.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if same:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    return scores


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def nothing(q: torch.Tensor) -> Sums:
    """Return what a softmax begins with, for queries (..., tokens, units): see `merged`."""
    column = q[..., :1]
    return torch.full_like(column, -math.inf), torch.zeros_like(column), torch.zeros_like(q)


def merged(sums: Sums, scores: torch.Tensor, values: torch.Tensor) -> Sums:
    """Add more keys to a softmax that has seen some ("online softmax").

    Args:
        sums: the largest score so far, m, (..., queries, 1); the sum of exp(score - m), of the same
            shape; and the sum of exp(score - m) value, (..., queries, units).
        scores: of more keys, (..., queries, keys).
        values: of those, (..., keys, units).
    """
    largest, total, mixed = sums
    larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
    weights, smaller = (scores - larger).exp(), (largest - larger).exp()
    total = total * smaller + weights.sum(-1, keepdim=True)
    return larger, total, mixed * smaller + weights @ values


class GatherKV(Buckets):
    """Fetches K and V of all tokens; each rank attends with the queries of its own."""

    pieces = 1  # of a row, on each rank

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        self.rank, self.scores, self.kv_bytes, self.length = dist.get_rank(), 0, 0, args.seq_len
        for block in model.blocks:
            block.attention.attend = self.attend

    def pieces_of(self, rank: int) -> list[int]:
        """Return which pieces of each row a rank has."""
        return [rank]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's characters of each row."""
        pieces = whole.chunk(self.size * self.pieces, dim=1)
        return torch.cat([pieces[number] for number in self.pieces_of(self.rank)], dim=1)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's characters, at the places where they stand."""
        places = self.part(torch.arange(self.length, device=tokens.device)[None])[0]
        return loss_of(self.model(tokens, places), targets)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens that are not later: (B, heads, T / N, head_units)."""
        kv = Gather.apply(torch.stack([k, v]), None)
        places = torch.arange(kv.shape[-2], device=q.device)
        not_later = places <= self.part(places[None]).T
        self.note(kv)
        self.scores = not_later.numel()
        return F.scaled_dot_product_attention(q, *kv, attn_mask=not_later)

    def note(self, *tensors: torch.Tensor) -> None:
        """Note how many bytes of K and V this rank has at a time; a tensor counts once."""
        self.kv_bytes = max(self.kv_bytes, sum(one.nbytes for one in {*tensors}))

    def figures(self) -> dict[str, float]:
        """Return what a block has of K and V at a time, and its share of T x T scores."""
        return {"MB of K, V": self.kv_bytes / results.MB, "scores": self.scores / self.length**2}


class Ring(GatherKV):
    """Sends K and V round, and has those of one other rank at a time."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens that are not later, as they come."""
        return RingAttention.apply(q, torch.stack([k, v]), self)

    def pairs(self, owner: int) -> Iterator[tuple[int, int, bool]]:
        """Yield which of our pieces look at which of another rank's, and whether it is the same."""
        for i, ours in enumerate(self.pieces_of(self.rank)):
            for j, theirs in enumerate(self.pieces_of(owner)):
                if theirs <= ours:
                    yield i, j, theirs == ours


class Zigzag(Ring):
    """Gives each rank a piece from the front and one from the end: all have as much to do."""

    pieces = 2

    def pieces_of(self, rank: int) -> list[int]:
        """Return a piece, and that which is as far from the end."""
        return [rank, 2 * self.size - 1 - rank]


class TorchRing(Zigzag):
    """Leaves the ring to torch, which balances it in the same way."""

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        torch_attention.set_rotate_method("alltoall")  # by default, all K and V are gathered
        torch_attention._cp_options.convert_to_f32 = False  # or it merges in float32, float64 too

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens that are not later."""
        return TorchRingAttention.apply(q, k, v)

    def figures(self) -> dict[str, float]:
        """Return nothing: what torch holds and computes is not looked at."""
        return {}


class TorchRingAttention(torch.autograd.Function):
    """Runs torch's ring with the kernel of CPUs, in the place where it runs those of GPUs."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute what `RingAttention` does; q, k and v are (B, heads, T / N, head_units)."""
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
TWINS = {"zigzag": "torch_ring"}  # of a way, torch's own


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as `main.py`, in these ways; on GPUs without the one that calls a kernel of CPUs."""
    if device_of_group(args).type == "cuda":
        args.ways = [way for way in args.ways if way != "torch_ring"]
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    return data_parallel.WaysParser("transformer_parallel/ring_attention", __doc__, WAYS, TWINS)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    # In `ring` a rank has four times the scores of a hop, of one block at a time, elsewhere fewer.
    results.require_room(args, args.world_size, scores=4 / args.world_size / args.blocks)
    on_gpus = not on_cpu(args) and len(ranks_here(args)) <= torch.cuda.device_count()
    if (on_gpus or args.device == "cuda") and {*args.ways} == {"torch_ring"}:
        refuse("--ways torch_ring calls a kernel of CPUs: give --device cpu, too")
    pieces = args.world_size * max(WAYS[name].pieces for name in args.ways)
    if args.seq_len % pieces:
        refuse(f"--seq_len {args.seq_len} must be a multiple of {pieces}: the pieces of a row on "
               f"{args.world_size} ranks are all as long")
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
