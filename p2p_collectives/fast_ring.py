"""`ring_chunked` of ring_allreduce.py, fast enough to keep up with `dist.all_reduce`."""

import itertools
import os
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

SOCKET_BUFFER_BYTES = 256 * 2**10


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view (n,) of a contiguous tensor.

    Raises:
        ValueError: if it is not contiguous. gloo's `all_reduce` would sum other numbers.
    """
    if not tensor.is_contiguous():
        raise ValueError("the tensor must be contiguous, but other numbers lie between its own in "
                         "memory. Pass tensor.contiguous(), and copy the result back")
    return tensor.view(-1)


class RingAllReduce:
    """Sum of contiguous float32 tensors, in place: `ring_chunked`, as fast as Python allows.

    - Receives are posted before the data arrives. Without a posted receive, a message must first
      ask where to go.
    - In the reduce-scatter, a chunk travels in segments. While one segment is added, the next one
      travels, and each sum is passed on at once. All calls share the two buffers of this object.
    - In the all-gather there is nothing to add: whole chunks travel straight to their place in the
      tensor.
    - `group` may have connections of its own: see `group_with_small_buffers`.

    Args:
        group: Group of all ranks; None for the default group.
        segment_size: Numbers in a segment, by default 8 MiB of them. Smaller segments overlap
            sooner, but each message costs a core about 0.1 ms in Python and gloo.
        ranks: Ranks of the ring, in their order; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, segment_size: int = 2 * 2**20,
                 ranks: Sequence[int] | None = None) -> None:
        self.group, self.segment_size = group, segment_size
        self.ranks = range(dist.get_world_size()) if ranks is None else ranks
        # Two receives are posted at a time, each into a buffer of its own.
        self.buffers = [torch.empty(segment_size, dtype=torch.float32) for _ in range(2)]

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ring, bitwise identically on all ranks: each chunk is summed once.

        Raises:
            ValueError: if `tensor` is not contiguous.
        """
        flat = flattened(tensor)
        rank, size = self.ranks.index(dist.get_rank()), len(self.ranks)
        if size == 1:
            return
        left, right = self.ranks[rank - 1], self.ranks[(rank + 1) % size]
        chunks = flat.tensor_split(size)
        # The chunk of each step, in segments. From the second step on, an arriving segment is added
        # before the sum is sent.
        steps = [chunks[rank - step].split(self.segment_size) for step in range(size)]

        # Where messages land, in order of arrival: segments in the two buffers by turns, complete
        # chunks in place. A complete chunk may overwrite a sent chunk before `wait` for that send:
        # its sum contains the sent numbers, so they have arrived.
        to_add = itertools.chain.from_iterable(steps[1:])
        landings = deque(buffer[: len(segment)]
                         for buffer, segment in zip(itertools.cycle(self.buffers), to_add))
        landings.extend(chunks[rank - step] for step in range(size - 1))
        posted, sends = deque(), []

        def send(piece):
            sends.append(dist.isend(piece, right, self.group))

        def post_receive():
            if landings:
                posted.append((landings[0], dist.irecv(landings.popleft(), left, self.group)))

        def next_arrival():
            landing, receive = posted.popleft()
            receive.wait()
            return landing

        for _ in self.buffers:
            post_receive()
        for segment in steps[0]:
            send(segment)
        for step, segments in enumerate(steps[1:], start=1):  # reduce-scatter
            for segment in segments:
                segment.add_(next_arrival())
                if step < size - 1:
                    send(segment)
                post_receive()  # now that the buffer is free again
        send(chunks[rank - size + 1])  # all-gather: this chunk is complete
        for _ in range(size - 2):
            send(next_arrival())
            post_receive()
        next_arrival()
        for request in sends:
            request.wait()


def group_with_small_buffers() -> dist.ProcessGroup:
    """Create a group of all ranks whose connections on one machine hold little data at a time.

    By default, several megabytes are on their way from rank to rank inside the kernel, more than a
    core's cache holds. With 256 KiB the rings were measurably faster, presumably because the
    receiver finds the data in a cache. A fast connection across a network needs the large buffers.
    On several machines, and on systems without /proc, this function changes nothing.

    Raises:
        RuntimeError: if not all ranks call it, after the timeout of the default group.
    """
    before = _sockets()
    group = dist.new_group()
    dist.barrier(group)  # connected by now
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        for descriptor in _sockets() - before:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)
    return group


def _sockets() -> set[int]:
    """Return the descriptors of this process's sockets; they do not show which are gloo's."""
    return {int(path.name) for path in Path("/proc/self/fd").glob("*") if path.is_socket()}
