"""Collectives with MPI, gloo, the lesson's ring and the lesson's shared memory, in turns.

Run by `python -m benchmarks.peers.collectives`, as the ranks of an mpiexec. All ways run in the
same processes on the same tensors, each round A B C D A B C D. Rank 0 prints a line of JSON: the
rows of `measure`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from mpi4py import MPI

from p2p_collectives.ring_allreduce import contribution
from p2p_collectives.shared_memory import SharedMemory, collectives
from p2p_collectives.shared_memory_results import SHARED, require_right, rows_of

TIMEOUT_S = 120  # of a wait for another rank
CALLS, CALLS_BYTES = 32, 2**24  # in a row: at most so many, on at most so many bytes


def with_mpi(n: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor | None]]:
    """Make MPI's collectives `{collective: function}`, in place, for float32 tensors of up to `n`.

    MPI must not write where it reads, but for whole tensors: its `reduce_scatter` returns the sum.
    """
    comm, spare = MPI.COMM_WORLD, torch.empty(n // MPI.COMM_WORLD.size)

    def reduce_scatter(tensor):
        received = spare[: tensor.numel() // comm.size]
        comm.Reduce_scatter_block(tensor.numpy(), received.numpy())
        return received

    return {"all_reduce": lambda tensor: comm.Allreduce(MPI.IN_PLACE, tensor.numpy()),
            "reduce_scatter": reduce_scatter,
            "all_gather": lambda tensor: comm.Allgather(MPI.IN_PLACE, tensor.numpy())}


def timed(function: Callable[[torch.Tensor | None], object], tensor: torch.Tensor | None,
          calls: int) -> float:
    """Return the seconds of a call, of the slowest rank, from several calls in a row.

    Of a single short one, most would be how far apart the ranks leave the barrier before it.
    """
    MPI.COMM_WORLD.Barrier()  # or the first to come would count its wait for the last
    started = time.perf_counter()
    for _ in range(calls):
        function(tensor)
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - started, op=MPI.MAX) / calls


def measure_barrier(shared: SharedMemory, repeats: int) -> list[dict]:
    """Time in turns the barriers, which small collectives wait for; return rows, of 0 bytes."""
    ways = {"gloo": lambda _: dist.barrier(), SHARED: lambda _: shared.barrier(),
            "mpi": lambda _: MPI.COMM_WORLD.Barrier()}
    seconds = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, function in ways.items():
            time_of_call = timed(function, None, CALLS)
            if repeat > 0:
                seconds[way].append(time_of_call)
    return rows_of("barrier", seconds, shared.size, 0)


def measure(shared: SharedMemory, sizes: list[int], repeats: int) -> Iterator[dict]:
    """Time all ways of each collective in turns; each round begins with a call that is checked.

    Args:
        shared: of all ranks, for tensors of these sizes.
        sizes: in bytes, of the tensor of each rank.
        repeats: rounds after the first.

    Yields:
        Rows as those of shared_memory.py: the median time of a call of the slowest rank.

    Raises:
        ArithmeticError: if a result is wrong.
    """
    rank, world_size, comm = dist.get_rank(), dist.get_world_size(), MPI.COMM_WORLD
    of_mpi, of_lesson = with_mpi(max(sizes) // 4), collectives(rank, world_size, shared)
    for collective, ways in of_lesson.items():
        ways |= {"mpi": of_mpi[collective]}
        for n_bytes in sizes:
            brought = contribution(rank, n_bytes // 4)
            tensors = {way: torch.empty_like(brought) for way in ways}
            tensors[SHARED] = shared.empty(len(brought), brought.dtype)
            calls = max(1, min(CALLS, CALLS_BYTES // n_bytes))
            seconds = {way: [] for way in ways}
            for repeat in range(repeats + 1):
                for way, function in ways.items():
                    tensor = tensors[way]
                    tensor.copy_(brought)
                    comm.Barrier()  # no rank may read what another one has not written yet
                    received = function(tensor)
                    comm.Barrier()
                    if isinstance(received, torch.Tensor):
                        tensor.tensor_split(world_size)[rank].copy_(received)
                    require_right(collective, way, tensor, rank, world_size)
                    time_of_call = timed(function, tensor, calls)
                    if repeat > 0:  # the first round connects the ranks and touches the memory
                        seconds[way].append(time_of_call)
            yield from rows_of(collective, seconds, world_size, n_bytes)


def main():
    """Join both, measure, leave both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**16, 2**20, 2**26])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--store", help="a file that does not exist yet, where gloo's ranks meet")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as many ranks as cores, or more
    rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(world_size))
    dist.init_process_group("gloo", store=dist.FileStore(args.store, world_size), rank=rank,
                            world_size=world_size)
    shared = SharedMemory(max(args.sizes), range(world_size), TIMEOUT_S)
    rows = [*measure(shared, args.sizes, args.repeats),
            *measure_barrier(shared, args.repeats)]
    shared.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
