r"""Messages between ranks: send and receive, collectives, groups (tutorial 6_4, first half).

Every operation works on small tensors. A row per rank shows what the rank held before and after,
and what it should hold.

    send, recv            broadcast             scatter               gather
    0 --> 1 --> 2 --> 3   0 --> 0 1 2 3         0 --> 0 1 2 3         0 1 2 3 --> 0
                          (the same to all)     (a piece to each)     (a piece of each)

    reduce                all_reduce            all_gather            reduce_scatter
    0+1+2+3 --> 0         0+1+2+3 --> 0 1 2 3   0 1 2 3 --> 0 1 2 3   0+1+2+3 --> 0 1 2 3
    (their sum)           (the sum to all)      (all pieces to all)   (a piece of the sum to each)

    python p2p_collectives/main.py --world_size 4             all demos, all processes here
    python p2p_collectives/main.py --demo nonblocking         one of them
    python p2p_collectives/main.py --check                    the same as in a single process?
    torchrun --nproc_per_node 4 p2p_collectives/main.py       under torchrun

It ends with:
    19 operations on 4 ranks over gloo: every rank holds what it should
"""

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from common import report
from common.cli import Parser
from common.program import role_name, run_program
from common.session import device_of_group, group_options

import torch
import torch.distributed as dist

from p2p_collectives import results


class Outcome(NamedTuple):
    """Describes an operation as one rank saw it: tensors, or None where there is nothing to see."""

    operation: str
    says: str
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None


def run_blocking(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Block: `send` returns when the tensor may be changed again, `recv` when it is there."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    # Tutorial: all ranks but 0 receive from rank 0, which sends to rank 1 only: rank 2 would wait.
    if rank > 0:
        dist.recv(tensor=tensor, src=rank - 1)
    tensor += 1
    if rank < size - 1:
        dist.send(tensor=tensor, dst=rank + 1)
    yield Outcome("send, recv", "from rank to rank, each adds one", before, tensor)


def run_nonblocking(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Return at once, as `isend` and `irecv` do: until `wait()`, the tensors are not ours."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
        # Between here and wait(), do not write to `tensor`: either value may be what is sent.
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
        # Between here and wait(), do not even read `tensor`: it may be old, new, or half of each.
    if req is not None:
        req.wait()
    says = "until wait(): rank 0 may not write the tensor, rank 1 may not even read it"
    yield Outcome("isend, irecv", says, before, tensor)

    # All at once round a ring. With send and recv, every rank would send first and wait for ever.
    outgoing, incoming = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    before = incoming.clone()
    for req in dist.batch_isend_irecv([  # on NCCL, several requests must start together
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]):
        req.wait()
    yield Outcome("batch_isend_irecv", "everyone sends its rank to the right", before, incoming)


def run_all_reduce(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Sum over the ranks of a group."""
    # Every rank makes every group, in the same order, also those that it is not in: torch counts
    # the groups, and their members find each other by that number.
    group = dist.new_group([0, 1])
    tensor = torch.ones(1, device=device)
    before = tensor.clone()
    if rank in (0, 1):  # Tutorial: all ranks call it, and those outside of the group get a warning
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)  # Tutorial: dist.reduce_op
    yield Outcome("all_reduce in [0, 1]", "the others take no part", before, tensor)


def run_collectives(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Communicate all together: every rank must make the same calls in the same order."""
    ranks = range(size)

    def mine(*numbers):
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    tensor = mine(10, 20) if rank == 0 else mine(0, 0)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    yield Outcome("broadcast", "rank 0's tensor to all", before, tensor)

    piece = mine(0)
    pieces = [mine(10 * r) for r in ranks] if rank == 0 else None  # only the source has a list
    before = torch.cat(pieces) if rank == 0 else piece.clone()
    dist.scatter(piece, pieces, src=0)
    yield Outcome("scatter", "a piece of rank 0's list to each", before, piece)

    piece, pieces = mine(10 * rank), [mine(0) for _ in ranks] if rank == 0 else None
    dist.gather(piece, pieces, dst=0)
    after = torch.cat(pieces) if rank == 0 else None
    yield Outcome("gather", "a piece of each to rank 0", piece, after)

    tensor = mine(rank + 1)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    yield Outcome("reduce SUM", "to rank 0: N(N+1)/2; what the others hold now is undefined",
                  before, tensor if rank == 0 else None)

    for name, start, says in (("SUM", rank + 1, "N(N+1)/2"), ("PRODUCT", 1 + rank % 2, "2^(N//2)"),
                              ("MIN", rank + 1, "1"), ("MAX", rank + 1, "N"),
                              ("AVG", rank + 1, "(N+1)/2")):
        tensor = mine(start)
        before = tensor.clone()
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        yield Outcome(f"all_reduce {name}", f"to all: {says}", before, tensor)

    pieces = [mine(0) for _ in ranks]
    dist.all_gather(pieces, mine(10 * rank))
    yield Outcome("all_gather", "a piece of each to all", mine(10 * rank), torch.cat(pieces))

    piece, pieces = mine(0), [mine(10 * r + rank) for r in ranks]
    dist.reduce_scatter(piece, pieces, op=dist.ReduceOp.SUM)
    says = "the sum of all lists, a piece to each: 10rN + N(N-1)/2"
    yield Outcome("reduce_scatter SUM", says, torch.cat(pieces), piece)

    outgoing = torch.cat([mine(10 * rank + r) for r in ranks])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)  # gloo has no all_to_all in torch 2.11
    says = "piece r of everyone to rank r: a transposition"
    yield Outcome("all_to_all", says, outgoing, incoming)


def run_barrier(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Return from `barrier` only when all have come to it; shown on the clock of the machine."""
    time.sleep(0.02 * rank)  # the ranks come one after the other
    came = torch.tensor([time.monotonic()], dtype=torch.float64, device=device)
    dist.barrier()
    left = time.monotonic()
    times = [torch.zeros_like(came) for _ in range(size)]
    dist.all_gather(times, came)
    before, after = (torch.tensor([sum(t.item() <= now for t in times)])
                     for now in (came.item(), left))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        says = "how many had come when this rank came, and when it left"
        yield Outcome("barrier", says, before, after)
    else:
        yield Outcome("barrier", "nothing to show: the clocks of several machines differ by more")


def run_groups(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Use two groups at the same time."""
    evens, odds = dist.new_group(range(0, size, 2)), dist.new_group(range(1, size, 2))
    group = evens if rank % 2 == 0 else odds
    tensor = torch.full((1,), float(rank), device=device)
    before = tensor.clone()
    dist.all_reduce(tensor, group=group)
    yield Outcome("all_reduce in evens, odds", "two groups at the same time", before, tensor)

    tensor = torch.full((1,), 10.0 * rank, device=device)
    before = tensor.clone()
    dist.broadcast(tensor, src=rank % 2, group=group)  # the rank in the world, not in the group
    yield Outcome("broadcast in evens, odds", "from the first of the group", before, tensor)


DEMOS = {"blocking": run_blocking, "nonblocking": run_nonblocking, "all_reduce": run_all_reduce,
         "collectives": run_collectives, "barrier": run_barrier, "groups": run_groups}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the demos; rank 0 collects everyone's outcomes and returns them."""
    device = device_of_group(args)
    dist.init_process_group(**group_options(args, device), rank=rank, world_size=world_size)
    operations, backend = [], dist.get_backend()
    if rank == 0 and args.device == "cuda" and backend == "gloo":
        report.log("rank0", "there is no GPU for each rank: on the CPU")
    for name in DEMOS if args.demo == "all" else [args.demo]:
        for outcome in DEMOS[name](rank, world_size, device):
            # Rank 0 prints for all, later: lines of several processes would interleave.
            rows = [None] * world_size if rank == 0 else None
            dist.gather_object([numbers(value) for value in outcome[2:]], rows)
            operations.append({"demo": name, "operation": outcome.operation,
                               "says": outcome.says, "rows": rows})
    dist.destroy_process_group()
    return {"operations": operations, "backend": backend} if rank == 0 else None


def numbers(tensor: torch.Tensor | None) -> list[float] | None:
    """Make a list of a tensor, which JSON can hold; None stays None."""
    return None if tensor is None else tensor.double().flatten().tolist()


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives", __doc__, world_size=4, min_world_size=2)
    parser.add_argument("--demo", choices=[*DEMOS, "all"], default="all", help="which operations")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
