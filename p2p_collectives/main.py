r"""Messages between ranks: send and receive, collectives, groups (tutorial 6_4, first half).

Every operation works on small tensors. One row for each rank shows the tensor before and after the
operation, and the expected tensor.

    send, recv            broadcast             scatter               gather
    0 --> 1 --> 2 --> 3   0 --> 0 1 2 3         0 --> 0 1 2 3         0 1 2 3 --> 0
                          (the same to all)     (a piece to each)     (a piece from each)

    reduce                all_reduce            all_gather            reduce_scatter
    0+1+2+3 --> 0         0+1+2+3 --> 0 1 2 3   0 1 2 3 --> 0 1 2 3   0+1+2+3 --> 0 1 2 3
    (their sum)           (the sum to all)      (all pieces to all)   (a piece of the sum to each)

    python p2p_collectives/main.py --world_size 4             all demos, all processes here
    python p2p_collectives/main.py --demo nonblocking         one demo
    python p2p_collectives/main.py --demo noncontiguous       a sum that gloo gets wrong
    python p2p_collectives/main.py --check                    compare with a single process
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
    """One operation on one rank. A tensor is None if there is none or its numbers are undefined."""

    operation: str
    says: str
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None


def run_blocking(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Block: `send` returns when the tensor may change again, `recv` when it has arrived."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    # Tutorial: every rank except 0 receives from rank 0, which sends to rank 1 only. Rank 2 waits.
    if rank > 0:
        dist.recv(tensor=tensor, src=rank - 1)
    tensor += 1
    if rank < size - 1:
        dist.send(tensor=tensor, dst=rank + 1)
    yield Outcome("send, recv", "from rank to rank; each rank adds one", before, tensor)


def run_nonblocking(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Return at once, as `isend` and `irecv` do: until `wait()`, torch owns the tensors."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    req = None
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
        # Do not write to `tensor` before wait(): the old or the new value may be sent.
    elif rank == 1:
        req = dist.irecv(tensor=tensor, src=0)
        # Do not even read `tensor` before wait(): it may be old, new, or half of each.
    if req is not None:
        req.wait()
    says = "until wait(): rank 0 may not write the tensor, rank 1 may not even read it"
    yield Outcome("isend, irecv", says, before, tensor)

    # All ranks send round a ring at once. With send and recv, every rank would send first and wait
    # forever.
    outgoing, incoming = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    before = incoming.clone()
    for req in dist.batch_isend_irecv([  # with NCCL, several requests must start together
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]):
        req.wait()
    yield Outcome("batch_isend_irecv", "every rank sends its number to the right", before, incoming)


def run_all_reduce(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Sum over the ranks of a group."""
    # Every rank calls new_group for every group, in the same order, even for groups without it.
    # torch counts the groups, and their members find each other by that number.
    group = dist.new_group([0, 1])
    tensor = torch.ones(1, device=device)
    before = tensor.clone()
    if rank in (0, 1):  # Tutorial: all ranks call it, and those outside of the group get a warning
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)  # Tutorial: dist.reduce_op
    yield Outcome("all_reduce in [0, 1]", "the other ranks take no part", before, tensor)


def run_collectives(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Communicate among all ranks: every rank must make the same calls in the same order."""
    ranks = range(size)

    def mine(*numbers):
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    tensor = mine(10, 20) if rank == 0 else mine(0, 0)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    yield Outcome("broadcast", "rank 0's tensor to all ranks", before, tensor)

    piece = mine(0)
    pieces = [mine(10 * r) for r in ranks] if rank == 0 else None  # only the source has a list
    before = torch.cat(pieces) if rank == 0 else piece.clone()
    dist.scatter(piece, pieces, src=0)
    yield Outcome("scatter", "a piece of rank 0's list to each rank", before, piece)

    piece, pieces = mine(10 * rank), [mine(0) for _ in ranks] if rank == 0 else None
    dist.gather(piece, pieces, dst=0)
    after = torch.cat(pieces) if rank == 0 else None
    yield Outcome("gather", "a piece from each rank to rank 0", piece, after)

    tensor = mine(rank + 1)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    yield Outcome("reduce SUM", "to rank 0: N(N+1)/2; undefined on the other ranks",
                  before, tensor if rank == 0 else None)

    for name, start, says in (("SUM", rank + 1, "N(N+1)/2"), ("PRODUCT", 1 + rank % 2, "2^(N//2)"),
                              ("MIN", rank + 1, "1"), ("MAX", rank + 1, "N"),
                              ("AVG", rank + 1, "(N+1)/2")):
        tensor = mine(start)
        before = tensor.clone()
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        yield Outcome(f"all_reduce {name}", f"to all ranks: {says}", before, tensor)

    pieces = [mine(0) for _ in ranks]
    dist.all_gather(pieces, mine(10 * rank))
    yield Outcome("all_gather", "a piece from each rank to all ranks", mine(10 * rank),
                  torch.cat(pieces))

    piece, pieces = mine(0), [mine(10 * r + rank) for r in ranks]
    dist.reduce_scatter(piece, pieces, op=dist.ReduceOp.SUM)
    says = "a piece of the sum to each rank: 10rN + N(N-1)/2"
    yield Outcome("reduce_scatter SUM", says, torch.cat(pieces), piece)

    outgoing = torch.cat([mine(10 * rank + r) for r in ranks])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)  # gloo has no all_to_all in torch 2.11
    says = "piece r from each rank to rank r: a transposition"
    yield Outcome("all_to_all", says, outgoing, incoming)


def run_barrier(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Return from `barrier` after all ranks have reached it; the machine's clock shows this."""
    time.sleep(0.02 * rank)  # the ranks arrive one after the other
    arrived = torch.tensor([time.monotonic()], dtype=torch.float64, device=device)
    dist.barrier()
    left = time.monotonic()
    times = [torch.zeros_like(arrived) for _ in range(size)]
    dist.all_gather(times, arrived)
    before, after = (torch.tensor([sum(t.item() <= now for t in times)])
                     for now in (arrived.item(), left))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        says = "ranks that had arrived when this rank arrived, and when it left"
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
    yield Outcome("broadcast in evens, odds", "from the group's first rank", before, tensor)


def run_noncontiguous(rank: int, size: int, device: torch.device) -> Iterator[Outcome]:
    """Sum a column of a matrix: without an error, gloo sums other numbers.

    gloo takes numbers that lie side by side in memory (torch 2.13). It gets broadcast, reduce and
    scatter of a column wrong, too, and transposes, if the layouts of the ranks differ. all_gather,
    gather and reduce_scatter copy the tensor, so they are right. send, recv, all_to_all and NCCL
    refuse such tensors. Source: https://github.com/pytorch/pytorch/issues/192920
    """
    group = dist.new_group(backend="gloo")

    def make_column():
        # Row after row lies in memory: the column 1 2 3 is every second number.
        matrix = (rank + 1) * torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        return matrix[:, 0]

    column, before = make_column(), make_column()
    dist.all_reduce(column, group=group)
    yield Outcome("all_reduce of a column", "gloo sums 1 10 2, side by side in memory", before,
                  column)

    column = make_column()
    copy = column.contiguous()  # a copy, in which the numbers lie side by side
    dist.all_reduce(copy, group=group)
    column.copy_(copy)
    yield Outcome("all_reduce of its copy", "a copy by contiguous(), summed, and copied back",
                  before, column)


DEMOS = {"blocking": run_blocking, "nonblocking": run_nonblocking, "all_reduce": run_all_reduce,
         "collectives": run_collectives, "barrier": run_barrier, "groups": run_groups,
         "noncontiguous": run_noncontiguous}
RIGHT = [name for name in DEMOS if name != "noncontiguous"]


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the demos; rank 0 gathers the outcomes of all ranks and returns them."""
    device = device_of_group(args)
    dist.init_process_group(**group_options(args, device), rank=rank, world_size=world_size)
    operations, backend = [], dist.get_backend()
    if rank == 0 and args.device == "cuda" and backend == "gloo":
        report.log("rank0", "there is no GPU for each rank: the demos run on the CPU")
    for name in RIGHT if args.demo == "all" else [args.demo]:
        for outcome in DEMOS[name](rank, world_size, device):
            # Rank 0 prints for all ranks, later: lines of several processes would interleave.
            rows = [None] * world_size if rank == 0 else None
            dist.gather_object([numbers(value) for value in outcome[2:]], rows)
            operations.append({"demo": name, "operation": outcome.operation,
                               "says": outcome.says, "rows": rows})
    dist.destroy_process_group()
    return {"operations": operations, "backend": backend} if rank == 0 else None


def numbers(tensor: torch.Tensor | None) -> list[float] | None:
    """Convert a tensor to a list, which JSON can hold; None stays None."""
    return None if tensor is None else tensor.double().flatten().tolist()


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives", __doc__, world_size=4, min_world_size=2)
    parser.add_argument("--demo", choices=[*DEMOS, "all"], default="all",
                        help="which operations to run; all: every demo but noncontiguous")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
