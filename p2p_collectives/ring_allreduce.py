r"""The tutorial's ring all-reduce, and what it takes to be as fast as the library's (tutorial 6_4).

Every rank has a tensor, and all of them want the sum. In a ring each rank only sends to its right
neighbour and only receives from its left one. From the tutorial's ring to one that keeps up with
`dist.all_reduce`:

    allreduce        "ring_naive" below: the whole tensor, S bytes, goes round: (N-1) S sent by each
    ring_chunked     chunk by chunk, in two rounds: 2 (N-1)/N S by each, less than 2 S
    RingAllReduce    the same bytes, faster: in place, receives posted before the data come, no
                     allocations, one segment is added while the next one travels

    reduce-scatter, N-1 steps: add and pass on        all-gather, N-1 steps: keep and pass on
    rank 0 ---chunk 0--> rank 1                       rank 0 ---sum 1--> rank 1
       ^                    |                            ^                  |
    chunk 3              chunk 1                       sum 0              sum 2
       |                    v                            |                  v
    rank 3 <--chunk 2--- rank 2                       rank 3 <--sum 3--- rank 2

    python p2p_collectives/ring_allreduce.py --world_size 4      all processes here
    python p2p_collectives/ring_allreduce.py --check             the same sums as a single process?
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
from p2p_collectives.fast_ring import RingAllReduce, group_with_small_buffers


def allreduce(send: torch.Tensor, recv: torch.Tensor) -> None:
    """Send whole tensors round the ring, and add them up at every stop.

    Args:
        send: this rank's tensor, of any shape.
        recv: receives the sum; may be the same tensor.
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
            # What has come goes on: send recv_buff, receive into send_buff
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += send_buff[:]
        send_req.wait()  # before the next step overwrites what is being sent
    recv[:] = accum[:]


def ring_chunked(tensor: torch.Tensor) -> None:
    """Sum a contiguous tensor in place: the exercise that the tutorial leaves to its reader.

    Tutorial: sends the whole tensor N-1 times, N/2 times the bytes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    # tensor_split makes `size` chunks always; torch.chunk makes only 3 of 5 elements for 4 ranks.
    chunks = tensor.view(-1).tensor_split(size)

    # Reduce-scatter: after step s, this rank's chunk rank-s-1 holds the sum of s+2 ranks. A
    # negative index counts from the end, as a ring does.
    for step in range(size - 1):
        send_req = dist.isend(chunks[rank - step], right)
        received = torch.empty_like(chunks[rank - step - 1])
        dist.recv(received, left)
        chunks[rank - step - 1].add_(received)
        send_req.wait()

    # All-gather: chunk rank+1 is complete now. Pass it on, then every complete chunk that comes.
    for step in range(size - 1):
        send_req = dist.isend(chunks[(rank - step + 1) % size], right)
        dist.recv(chunks[rank - step], left)
        send_req.wait()


def algorithms() -> dict[str, Callable[[torch.Tensor], object]]:
    """Make functions that sum in place, by name, the library's first. All ranks must call this."""
    return {"all_reduce": dist.all_reduce, "ring_naive": lambda tensor: allreduce(tensor, tensor),
            "ring_chunked": ring_chunked,
            "RingAllReduce": RingAllReduce(group_with_small_buffers())}


def contribution(rank: int, n: int) -> torch.Tensor:
    """Make the tensor of one rank (n,): whole numbers, whose sum is exact in any order."""
    return (torch.arange(n) % 100 + rank).float()


def measure(rank: int, world_size: int, args: Namespace) -> list[dict]:
    """Time all algorithms in turns, A B C D A B C D, so that a noisy machine cannot favour one.

    Returns:
        For each size and algorithm a row, of the median of its rounds in seconds: see `rows_of`.
    """
    rows, ways = [], algorithms()
    bar = report.progress(len(args.sizes) * (args.repeats + 1) * len(ways), "sum",
                          show=rank == 0, role="rank0")
    for n_bytes in args.sizes:
        mine = contribution(rank, n_bytes // 4)
        tensor, seconds = torch.empty_like(mine), {name: [] for name in ways}
        for repeat in range(args.repeats + 1):
            for name, all_reduce in ways.items():
                tensor.copy_(mine)
                slowest = time_slowest(all_reduce, tensor)
                results.require_sum(name, tensor, world_size)
                if repeat > 0:  # the first round connects the ranks and touches the memory
                    seconds[name].append(slowest)
                bar.update()
        rows += results.rows_of(seconds, world_size, n_bytes)
        if rank == 0:
            report.log("rank0", f"{results.size_text(n_bytes)}: timed {args.repeats} rounds")
    bar.close()
    return rows


def time_slowest(collective: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Let all ranks begin together; return the seconds of the slowest."""
    dist.barrier()  # or the first to come would count its wait for the last
    started = time.perf_counter()
    collective(tensor)
    slowest = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join, measure, leave; rank 0 returns the rows."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    rows = measure(rank, world_size, args)
    dist.destroy_process_group()
    return {"rows": rows} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/ring_allreduce", __doc__, world_size=4)
    add = parser.add_argument
    add("--sizes", type=bounded(int, at_least=1), nargs="+", default=[2**14, 2**20, 2**26],
        metavar="BYTES", help="of the tensor on each rank")
    add("--repeats", type=bounded(int, at_least=1), default=9, metavar="N",
        help="rounds after the first; take medians")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Measure, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    for n_bytes in args.sizes:
        if n_bytes % 4:
            refuse(f"--sizes {n_bytes} must be a multiple of 4, the bytes of a float32")
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: gloo sends and receives main memory only, and "
               "on GPUs NCCL has rings of its own")
    # Whole numbers of 8 bytes, three tensors, and the three copies of ring_naive.
    results.require_room(args, tensors=2 + 6)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
