r"""Collectives without messages: the ranks of one machine sum in memory that they share (6_4).

A ring sends every byte through the kernel twice. On one machine, nothing needs to be sent: the
tensor of each rank lies where all ranks can read and write it, and each rank sums one slice of all
tensors. The ranks only have to wait for each other, twice.

    one block of memory, mapped by all ranks           all_reduce(tensor)
              slice 0   slice 1   slice 2   slice 3
    rank 0  [    :    |         |         |         ]  1. wait until all tensors are written
    rank 1  [    :    |         |         |         ]  2. rank r: the sum of slice r of all tensors,
    rank 2  [    :    |         |         |         ]            written into slice r of all tensors
    rank 3  [    v    |         |         |         ]  3. wait until all slices are written
             rank 0    rank 1    rank 2    rank 3

Summing a small tensor takes less time than a wait. Therefore each rank copies its small tensor to
where all ranks can read it. After one wait, each rank reads all tensors for itself. The next tensor
goes to a second place, so no rank has to wait until all ranks have read the first one.

Several machines: reduce-scatter inside each machine, rings between the machines, all-gather inside
each machine (`HierarchicalAllReduce`).

    python p2p_collectives/shared_memory.py --world_size 4          gloo, rings, shared memory
    python p2p_collectives/shared_memory.py --ranks_per_machine 2   as if on two machines
    torchrun --nnodes 2 --nproc_per_node 2 ... p2p_collectives/shared_memory.py     on two machines
    python p2p_collectives/shared_memory.py --check                 compare with a single process

It ends with, about:
    64 MiB on 4 ranks: all_reduce by shared_memory takes 27 ms, 4.98 times as fast as gloo
"""

import contextlib
import os
import select
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from common import report
from common.cli import Parser, bounded, ranks_here, refuse
from common.program import role_name, run_program
from common.session import group_options

import torch
import torch.distributed as dist

from p2p_collectives import shared_memory_results as results
from p2p_collectives.fast_ring import RingAllReduce, flattened, group_with_small_buffers
from p2p_collectives.ring_allreduce import contribution, time_slowest
from p2p_collectives.ring_allreduce_results import require_room
from p2p_collectives.shared_memory_results import COPIED, HIERARCHICAL, SHARED, SMALL_BYTES

BLOCK_SIZE = 2**16  # elements of a slice that are summed at a time: a core's cache holds them
PAGE_BYTES = 2**12


class SharedMemory:
    """Memory with one tensor of each rank of a machine, which all these ranks can read and write.

    The collectives work in place on a tensor of this rank. A tensor that `empty` has returned is
    summed where it is; any other tensor is copied there and back. NCCL calls tensors of the first
    kind registered buffers.

    Args:
        n_bytes: Largest size of each rank's tensor.
        ranks: Ranks of this machine. Every rank of the default group must create this object, with
            the ranks of its own machine.
        timeout: Seconds that a rank may wait for another rank.
    """

    def __init__(self, n_bytes: int, ranks: Iterable[int], timeout: float) -> None:
        self.ranks, self.timeout = list(ranks), timeout
        self.place, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        # Memory and pipe have no name in a folder, so nothing stays behind, whatever happens. Other
        # ranks open them by the descriptors of this process. Untouched pages take no memory.
        memory = os.memfd_create("tensors")
        inbox, outbox = os.pipe()
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (memory, outbox)]
        opened = [None] * dist.get_world_size()
        dist.all_gather_object(opened, paths)
        row = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        length = row + 2 * SMALL_BYTES
        self.rows, *self.small = torch.from_file(
            opened[self.ranks[0]][0], shared=True, size=self.size * length, dtype=torch.uint8,
        ).view(self.size, length).split([row, SMALL_BYTES, SMALL_BYTES], dim=1)
        others = self.ranks[1:] if self.place == 0 else self.ranks[:1]
        self.inbox = inbox
        self.outboxes = [os.open(opened[rank][1], os.O_WRONLY) for rank in others]
        dist.barrier()  # every rank has opened the files of all ranks
        os.close(memory)
        os.close(outbox)

    def close(self) -> None:
        """Close the pipes. The memory stays until no tensor uses it any more."""
        for descriptor in (self.inbox, *self.outboxes):
            os.close(descriptor)

    def empty(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `n` elements of this rank's tensor."""
        return self.rows[self.place, : n * dtype.itemsize].view(dtype)

    def barrier(self) -> None:
        """Return after all ranks of this machine have called this: the first rank counts them.

        Raises:
            TimeoutError: if a rank has not called it within `timeout`.
            ConnectionError: if all ranks for which this rank waits have ended.
        """
        if self.place == 0:
            self._receive(self.size - 1)
        for outbox in self.outboxes:
            os.write(outbox, b"!")
        if self.place > 0:
            self._receive(1)

    def _receive(self, n: int) -> None:
        while n > 0:
            if not select.select([self.inbox], [], [], self.timeout)[0]:
                raise TimeoutError(f"timed out: at a barrier of this machine's {self.size} ranks, "
                                   f"{n} not heard of for {self.timeout:g} s")
            arrived = len(os.read(self.inbox, n))
            if arrived == 0:
                raise ConnectionError("a rank of this machine has ended")
            n -= arrived

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks of this machine, bitwise identically on all ranks.

        This collective and the next two work in place, on a tensor of the same size on all ranks.

        Raises:
            ValueError: if `tensor` is not contiguous.
        """
        if tensor.nbytes <= SMALL_BYTES:
            flattened(tensor).copy_(self._read_all(tensor).sum(dim=0, dtype=tensor.dtype))
            return
        with self._shared(tensor) as slices:
            for block in slices[self.place].split(BLOCK_SIZE, dim=1):
                block.copy_(block.sum(dim=0, dtype=tensor.dtype))

    def reduce_scatter(self, tensor: torch.Tensor) -> None:
        """Sum slice r of all ranks into slice r of rank r; its other slices are undefined then."""
        if tensor.nbytes <= SMALL_BYTES:
            mine, of_all = (whole.tensor_split(self.size, dim=-1)[self.place]
                            for whole in (flattened(tensor), self._read_all(tensor)))
            mine.copy_(of_all.sum(dim=0, dtype=tensor.dtype))
            return
        with self._shared(tensor) as slices:
            for block in slices[self.place].split(BLOCK_SIZE, dim=1):
                block[self.place] = block.sum(dim=0, dtype=tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> None:
        """Copy slice r from rank r to all ranks."""
        if tensor.nbytes <= SMALL_BYTES:
            slices = self._read_all(tensor).tensor_split(self.size, dim=1)
            torch.cat([of_all[place] for place, of_all in enumerate(slices)], out=flattened(tensor))
            return
        with self._shared(tensor) as slices:
            for place, of_all in enumerate(slices):
                if place != self.place:
                    of_all[self.place] = of_all[place]

    @contextlib.contextmanager
    def _shared(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the slices of all ranks' tensors, (ranks, elements) each, while no rank leaves."""
        flat = flattened(tensor)
        mine = self.empty(len(flat), tensor.dtype)
        elsewhere = flat.data_ptr() != mine.data_ptr()
        if elsewhere:
            mine.copy_(flat)
        self.barrier()  # all tensors are written
        yield self.rows[:, : flat.nbytes].view(tensor.dtype).tensor_split(self.size, dim=1)
        self.barrier()  # all slices are written
        if elsewhere:
            flat.copy_(mine)

    def _read_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the small tensors of all ranks, (ranks, elements), until the call after next.

        That call writes into the same place again. Before it, a rank has waited for all ranks.
        """
        self.small.reverse()
        of_all = self.small[0][:, : tensor.nbytes].view(tensor.dtype)
        of_all[self.place] = flattened(tensor)
        self.barrier()  # all small tensors are written
        return of_all


class HierarchicalAllReduce:
    """Sum of contiguous float32 tensors, in place, over all ranks of all machines.

    M machines with n ranks each form n rings of M ranks, and each ring carries one slice. A machine
    sends 2 (M-1)/M tensors, in 2(M-1) messages one after the other. In one ring of all ranks, it
    would send 2 (Mn-1)/(Mn) tensors, in 2(Mn-1) messages.

    machine 0   rank 0 [slice 0 | slice 1]      1. reduce-scatter inside: ranks 0 and 2 have the sum
                rank 1 [slice 0 | slice 1]         of slice 0 of their machines, 1 and 3 of slice 1
                   ring |          | ring       2. rings of ranks 0 and 2, of ranks 1 and 3
    machine 1   rank 2 [slice 0 | slice 1]      3. all-gather inside
                rank 3 [slice 0 | slice 1]

    Args:
        shared: `SharedMemory` of this machine; all machines have the same number of ranks.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        peers = range(shared.place, dist.get_world_size(), shared.size)  # one rank of each machine
        self.ring = RingAllReduce(ranks=peers)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, bitwise identically on all ranks: each slice is summed once."""
        self.shared.reduce_scatter(tensor)
        self.ring(flattened(tensor).tensor_split(self.shared.size)[self.shared.place])
        self.shared.all_gather(tensor)


def ring_reduce_scatter(tensor: torch.Tensor) -> None:
    """Sum slice r of a contiguous tensor over all ranks, on rank r.

    This is the first round of `ring_chunked`, begun one slice later.

    Raises:
        ValueError: if `tensor` is not contiguous.
    """
    flat = flattened(tensor)
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    slices = flat.tensor_split(size)
    # A negative index counts from the end, as a ring does.
    for step in range(1, size):
        send_req = dist.isend(slices[rank - step], right)
        received = torch.empty_like(slices[rank - step - 1])
        dist.recv(received, left)
        slices[rank - step - 1].add_(received)
        send_req.wait()


def ring_all_gather(tensor: torch.Tensor) -> None:
    """Copy slice r of a contiguous tensor from rank r to all ranks: the second round.

    Raises:
        ValueError: if `tensor` is not contiguous.
    """
    flat = flattened(tensor)
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    slices = flat.tensor_split(size)
    for step in range(size - 1):
        send_req = dist.isend(slices[rank - step], right)
        dist.recv(slices[rank - step - 1], left)
        send_req.wait()


def collectives(rank: int, world_size: int,
                shared: SharedMemory) -> dict[str, dict[str, Callable[[torch.Tensor], object]]]:
    """Return the measured in-place functions, `{collective: {variant: function}}`, gloo's first.

    `reduce_scatter` leaves the sum in slice r of rank r, and `all_gather` begins with that slice.
    """
    def mine(tensor):
        return tensor.tensor_split(world_size)[rank]

    # torch 2.13 has new names for them.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    ways = {
        "all_reduce": {"gloo": dist.all_reduce,
                       "ring": RingAllReduce(group_with_small_buffers())},
        # gloo sums all slices on every rank, and keeps one.
        "reduce_scatter": {"gloo": lambda tensor: reduce_scatter(mine(tensor), tensor),
                           "ring": ring_reduce_scatter},
        "all_gather": {"gloo": lambda tensor: all_gather(tensor, mine(tensor)),
                       "ring": ring_all_gather},
    }
    if shared.size == world_size:  # one machine
        for name, of_collective in ways.items():
            of_collective[SHARED] = of_collective[COPIED] = getattr(shared, name)
    else:
        ways["all_reduce"][HIERARCHICAL] = HierarchicalAllReduce(shared)
    return ways


def measure(rank: int, world_size: int, args: Namespace) -> list[dict]:
    """Time all variants of each collective alternately, A B C A B C.

    Returns:
        One row for each collective, size and variant, with the median of its rounds: see `rows_of`.
    """
    rows = []
    first = rank - rank % args.ranks_per_machine
    shared = SharedMemory(max(args.sizes), range(first, first + args.ranks_per_machine),
                          args.timeout)
    measured = collectives(rank, world_size, shared)
    bar = report.progress(sum(map(len, measured.values())) * len(args.sizes) * (args.repeats + 1),
                          "call", show=rank == 0, role="rank0")
    for collective, ways in measured.items():
        for n_bytes in args.sizes:
            brought = contribution(rank, n_bytes // 4)
            tensors = {way: torch.empty_like(brought) for way in ways}
            for way in tensors.keys() & {SHARED, HIERARCHICAL}:
                tensors[way] = shared.empty(len(brought), brought.dtype)
            seconds = {way: [] for way in ways}
            for repeat in range(args.repeats + 1):
                for way, function in ways.items():
                    tensors[way].copy_(brought)
                    slowest = time_slowest(function, tensors[way])
                    results.require_right(collective, way, tensors[way], rank, world_size)
                    if repeat > 0:  # the first round connects the ranks and touches the memory
                        seconds[way].append(slowest)
                    bar.update()
            rows += results.rows_of(collective, seconds, world_size, n_bytes)
    bar.close()
    shared.close()
    return rows


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Join the group, measure, and leave; rank 0 returns the rows."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    args.ranks_per_machine = args.ranks_per_machine or int(os.environ["LOCAL_WORLD_SIZE"])
    rows = measure(rank, world_size, args)
    dist.destroy_process_group()
    return {"rows": rows, "ranks_per_machine": args.ranks_per_machine} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/shared_memory", __doc__, world_size=4)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--sizes", type=count, nargs="+", default=[2**16, 2**20, 2**26], metavar="BYTES",
        help="bytes of the tensor on each rank")
    add("--repeats", type=count, default=9, metavar="N",
        help="timed rounds, after a first one; the results are medians")
    add("--ranks_per_machine", type=count, metavar="N",
        help="ranks that share memory, as if on one machine (default: all ranks of this machine)")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    for n_bytes in args.sizes:
        if n_bytes % (4 * args.world_size):
            refuse(f"--sizes {n_bytes} must be a multiple of {4 * args.world_size}: gloo's "
                   f"reduce_scatter needs slices of one size for {args.world_size} ranks")
    if not hasattr(os, "memfd_create"):
        refuse("shared_memory.py needs Linux (WSL and Colab are): elsewhere, memory without a name "
               "cannot be opened by another process", rank=None)
    here = len(ranks_here(args))
    if args.ranks_per_machine and here % args.ranks_per_machine:
        refuse(f"--ranks_per_machine {args.ranks_per_machine} must be a divisor of {here}, the "
               "ranks that this command starts", rank=None)
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: these ranks share main memory, and NCCL has "
               "collectives of its own for GPUs")
    # A rank's own numbers, a tensor for each variant, and the buffers of a receive.
    require_room(args, tensors=10)
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
