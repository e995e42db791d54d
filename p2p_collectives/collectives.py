"""What `shared_memory.py` compares: gloo, rings, shared memory, and the last two together."""

import torch
import torch.distributed as dist

from p2p_collectives.fast_ring import RingAllReduce, group_with_small_buffers
from p2p_collectives.hierarchical import HierarchicalAllReduce

SHARED, COPIED = "shared_memory", "shared_memory_copied"
HIERARCHICAL = "hierarchical"


def ring_reduce_scatter(tensor):
    """Slice r of a contiguous tensor becomes the sum over all ranks, on rank r.

    It is the first round of `ring_chunked`, begun one slice later.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    slices = tensor.view(-1).tensor_split(size)
    # A negative index counts from the end, as a ring does.
    for step in range(1, size):
        send_req = dist.isend(slices[rank - step], right)
        received = torch.empty_like(slices[rank - step - 1])
        dist.recv(received, left)
        slices[rank - step - 1].add_(received)
        send_req.wait()


def ring_all_gather(tensor):
    """Slice r of a contiguous tensor becomes that of rank r, on all ranks: the second round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    slices = tensor.view(-1).tensor_split(size)
    for step in range(size - 1):
        send_req = dist.isend(slices[rank - step], right)
        dist.recv(slices[rank - step - 1], left)
        send_req.wait()


def collectives(rank, world_size, shared, dtype):
    """What is measured: `{collective: {way: function}}`, each in place; the library's first.

    `reduce_scatter` leaves the sum in slice r of rank r, `all_gather` begins with that.
    """
    def mine(tensor):
        return tensor.tensor_split(world_size)[rank]

    # Since torch 2.13 they have new names.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    ways = {
        "all_reduce": {"gloo": dist.all_reduce,
                       "ring": RingAllReduce(dtype, group_with_small_buffers())},
        # gloo sums everything on every rank, and keeps a slice.
        "reduce_scatter": {"gloo": lambda tensor: reduce_scatter(mine(tensor), tensor),
                           "ring": ring_reduce_scatter},
        "all_gather": {"gloo": lambda tensor: all_gather(tensor, mine(tensor)),
                       "ring": ring_all_gather},
    }
    if shared.size == world_size:  # one machine
        for name, of_collective in ways.items():
            of_collective[SHARED] = of_collective[COPIED] = getattr(shared, name)
    else:
        ways["all_reduce"][HIERARCHICAL] = HierarchicalAllReduce(shared, dtype)
    return ways
