"""An all-reduce for machines of several ranks: shared memory inside of each, rings between them."""

import torch.distributed as dist

from p2p_collectives.fast_ring import RingAllReduce


class HierarchicalAllReduce:
    """Call it to sum a contiguous tensor in place over all ranks of all machines.

    Of M machines with n ranks each, n rings of M ranks carry a slice each. So a machine sends
    2 (M-1)/M tensors; in one ring of all ranks it would be 2 (Mn-1)/(Mn), in 2(Mn-1) messages
    one after the other instead of 2(M-1).

    machine 0   rank 0 [slice 0 | slice 1]      1. reduce-scatter inside: rank 0 and 2 have the sums
                rank 1 [slice 0 | slice 1]         of slice 0 of their machines, 1 and 3 of slice 1
                   ring |          | ring       2. rings of rank 0 and 2, of rank 1 and 3
    machine 1   rank 2 [slice 0 | slice 1]      3. all-gather inside
                rank 3 [slice 0 | slice 1]

    Args:
        shared: the `SharedMemory` of this machine's ranks, as many on each machine.
        dtype: of the tensors to come.
    """

    def __init__(self, shared, dtype):
        self.shared = shared
        peers = range(shared.place, dist.get_world_size(), shared.size)  # one of each machine
        self.ring = RingAllReduce(dtype, ranks=peers)

    def __call__(self, tensor):
        """Bitwise identical on all ranks, as each slice is summed once."""
        self.shared.reduce_scatter(tensor)
        self.ring(tensor.view(-1).tensor_split(self.shared.size)[self.shared.place])
        self.shared.all_gather(tensor)
