r"""The tutorial's ring all-reduce, and how it becomes as fast as `dist.all_reduce` (tutorial 6_4).

Every rank has a tensor, and all ranks need the sum. In a ring, each rank only sends to its right
neighbor and only receives from its left neighbor. Three rings, from the tutorial's to a fast one:

    allreduce        "ring_naive" below: the whole tensor, S bytes, goes round the ring; each rank
                     sends (N-1) S bytes
    ring_chunked     chunk by chunk, in two rounds: each rank sends 2 (N-1)/N S, less than 2 S bytes
    RingAllReduce    the same bytes, faster: in place, receives posted before the data arrives, no
                     allocations, one segment is added while the next one travels

    reduce-scatter, N-1 steps: add and pass on        all-gather, N-1 steps: keep and pass on
    rank 0 ---chunk 0--> rank 1                       rank 0 ---sum 1--> rank 1
       ^                    |                            ^                  |
    chunk 3              chunk 1                       sum 0              sum 2
       |                    v                            |                  v
    rank 3 <--chunk 2--- rank 2                       rank 3 <--sum 3--- rank 2

    python p2p_collectives/ring_allreduce.py --world_size 4      all processes here
    python p2p_collectives/ring_allreduce.py --check             compare with a single process
    torchrun --nproc_per_node 4 p2p_collectives/ring_allreduce.py

It ends with, about:
    64 MiB on 4 ranks: RingAllReduce takes 105 ms, 0.98 times as fast as all_reduce, ...
"""

import time
from argparse import Namespace
from collections.abc import Callable

from common import report
from common.cli import Parser, bounded, refuse
from common.program import role_name, run_program
from common.session import group_options

import torch
import torch.distributed as dist

from p2p_collectives import ring_allreduce_results as results
from p2p_collectives.fast_ring import RingAllReduce, flattened, group_with_small_buffers


def allreduce(send: torch.Tensor, recv: torch.Tensor) -> None:
    """Send whole tensors round the ring, and add them up at every rank.

    Args:
        send: Tensor of this rank, contiguous, of any shape.
        recv: Tensor for the sum, of the same shape; may be the same tensor.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    send_buff = send.clone()
    recv_buff = send.clone()
    accum = send.clone()

    left = ((rank - 1) + size) % size
    right = (rank + 1) % size

    for i in range(size - 1):
        if i % 2 == 0:
            # Send send_buff, receive into recv_buff
            send_req = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv_buff[:]
        else:
            # Pass on what has arrived: send recv_buff, receive into send_buff
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
        send_req.wait()  # before the next step overwrites what is being sent
    recv[:] = accum[:]


def ring_chunked(tensor: torch.Tensor) -> None:
    """Sum a contiguous tensor in place: the exercise that the tutorial leaves to its reader.

    Tutorial: its ring sends the whole tensor N-1 times, which is N/2 times the bytes.

    Raises:
        ValueError: if `tensor` is not contiguous.
    """
    flat = flattened(tensor)
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    # tensor_split always makes `size` chunks; torch.chunk splits 5 elements for 4 ranks into 3.
    chunks = flat.tensor_split(size)

    # Reduce-scatter: after step s, this rank's chunk rank-s-1 holds the sum of s+2 ranks. A
    # negative index counts from the end, as a ring does.
    for step in range(size - 1):
        send_req = dist.isend(chunks[rank - step], right)
        received = torch.empty_like(chunks[rank - step - 1])
        dist.recv(received, left)
        chunks[rank - step - 1].add_(received)
        send_req.wait()

    # All-gather: chunk rank+1 is complete now. Pass it on, then every complete chunk that arrives.
    for step in range(size - 1):
        send_req = dist.isend(chunks[(rank - step + 1) % size], right)
        dist.recv(chunks[rank - step], left)
        send_req.wait()


def algorithms() -> dict[str, Callable[[torch.Tensor], object]]:
    """Return functions that sum in place, by name; torch's own first. All ranks must call this."""
    return {"all_reduce": dist.all_reduce, "ring_naive": lambda tensor: allreduce(tensor, tensor),
            "ring_chunked": ring_chunked,
            "RingAllReduce": RingAllReduce(group_with_small_buffers())}


def contribution(rank: int, n: int) -> torch.Tensor:
    """Return the tensor (n,) of one rank: whole numbers, so their sum is exact in any order."""
    return (torch.arange(n) % 100 + rank).float()


def measure(rank: int, world_size: int, args: Namespace) -> list[dict]:
    """Time all algorithms alternately, A B C D A B C D, so a noisy machine cannot favor one.

    Returns:
        One row for each size and algorithm, with the median of its rounds: see `rows_of`.
    """
    rows, measured = [], algorithms()
    bar = report.progress(len(args.sizes) * (args.repeats + 1) * len(measured), "sum",
                          show=rank == 0, role="rank0")
    for n_bytes in args.sizes:
        mine = contribution(rank, n_bytes // 4)
        tensor, seconds = torch.empty_like(mine), {name: [] for name in measured}
        for repeat in range(args.repeats + 1):
            for name, all_reduce in measured.items():
                tensor.copy_(mine)
                slowest = time_slowest(all_reduce, tensor)
                results.require_sum(name, tensor, world_size)
                if repeat > 0:  # the first round connects the ranks and touches the memory
                    seconds[name].append(slowest)
                bar.update()
        rows += results.rows_of(seconds, world_size, n_bytes)
        if rank == 0:
            report.log("rank0", f"{results.size_text(n_bytes)}: timed {args.repeats} "
                       f"round{'s' if args.repeats != 1 else ''}")
    bar.close()
    return rows


def time_slowest(collective: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Call `collective` on all ranks together; return the seconds of the slowest rank."""
    dist.barrier()  # otherwise the first rank would count its wait for the last one
    started = time.perf_counter()
    collective(tensor)
    slowest = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join the group, measure, and leave; rank 0 returns the rows."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    rows = measure(rank, world_size, args)
    dist.destroy_process_group()
    return {"rows": rows} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/ring_allreduce", __doc__, world_size=4)
    add = parser.add_argument
    add("--sizes", type=bounded(int, at_least=1), nargs="+", default=[2**14, 2**20, 2**26],
        metavar="BYTES", help="bytes of the tensor on each rank")
    add("--repeats", type=bounded(int, at_least=1), default=9, metavar="N",
        help="timed rounds, after a first one; the results are medians")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    for n_bytes in args.sizes:
        if n_bytes % 4:
            refuse(f"--sizes {n_bytes} must be a multiple of 4, the bytes of a float32")
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: gloo sends and receives main memory only. "
               "On GPUs, NCCL has rings of its own")
    # Two tensors of 8-byte numbers in `contribution`, and six of 4 bytes: three, and the three
    # copies of ring_naive.
    results.require_room(args, tensors=2 + 6)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
