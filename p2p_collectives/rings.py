"""Three ring all-reduces, from the tutorial's to one that keeps up with the library's (tutorial 6_4).

See `ring_allreduce.py` for what they have in common, and for what they cost.
"""

import itertools
import os
import socket
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

SOCKET_BUFFER_BYTES = 256 * 2**10


def ring_naive(send, recv):
    """The tutorial's `allreduce`: the whole tensor goes round the ring and is added at every stop.

    Args:
        send: this rank's tensor, of any shape.
        recv: receives the sum; may be the same tensor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        # What came in one step goes out in the next: the two buffers take turns.
        outgoing, incoming = (send_buff, recv_buff) if step % 2 == 0 else (recv_buff, send_buff)
        send_req = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        accum += incoming
        send_req.wait()  # before the next step overwrites what is being sent
    recv.copy_(accum)


def ring_chunked(tensor):
    """The exercise that the tutorial leaves to its reader: sum a contiguous tensor in place, chunk by chunk."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    # tensor_split makes `size` chunks always; torch.chunk makes only 3 of 5 elements for 4 ranks.
    chunks = tensor.view(-1).tensor_split(size)

    # Reduce-scatter: after step s, this rank's chunk rank-s-1 holds the sum of s+2 ranks. A negative index counts from
    # the end, as a ring does.
    for step in range(size - 1):
        send_req = dist.isend(chunks[rank - step], right)
        received = torch.empty_like(chunks[rank - step - 1])
        dist.recv(received, left)
        chunks[rank - step - 1].add_(received)
        send_req.wait()

    # All-gather: chunk rank+1 is complete now. Pass it on, and then every complete chunk that comes.
    for step in range(size - 1):
        send_req = dist.isend(chunks[(rank - step + 1) % size], right)
        dist.recv(chunks[rank - step], left)
        send_req.wait()


class RingAllReduce:
    """`ring_chunked`, as fast as it gets in Python: call it with a contiguous tensor, which is summed in place.

    - Receives are posted before the data come. A message that nobody waits for must first ask where to go.
    - In the reduce-scatter a chunk travels in segments: while one is added the next one travels, and it is passed on at
      once. Their buffers are made once, here, and used again in every call.
    - In the all-gather there is nothing to add: chunks travel whole, straight to their place in the tensor.
    - `group` may have connections of its own: see `group_with_small_buffers`.

    Args:
        dtype: of the tensors to come.
        group: of all ranks; None for the default one.
        segment_bytes: smaller segments overlap sooner, but each message costs a core about 0.1 ms in Python and gloo.
        n_buffers: receives posted at a time.
    """

    def __init__(self, dtype, group=None, segment_bytes=8 * 2**20, n_buffers=2):
        self.group, self.segment_size = group, segment_bytes // dtype.itemsize
        self.buffers = [torch.empty(self.segment_size, dtype=dtype) for _ in range(n_buffers)]

    def __call__(self, tensor):
        """Sum `tensor` over all ranks; all of them end with the same bits, since each chunk is added up only once."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return
        left, right = (rank - 1) % size, (rank + 1) % size
        chunks = tensor.view(-1).tensor_split(size)
        steps = [chunks[rank - step].split(self.segment_size) for step in range(size)]  # what to send, then to add to

        # Where messages land, in the order in which they come: segments in the buffers, in turns, complete chunks in
        # place. They may land on what we have sent without waiting for that send: a sum contains what we sent.
        to_add = itertools.chain.from_iterable(steps[1:])
        landings = deque(buffer[: len(segment)] for buffer, segment in zip(itertools.cycle(self.buffers), to_add))
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


def group_with_small_buffers():
    """Make a group of all ranks whose connections hold little data at a time, for ranks on one machine.

    By default several megabytes are on their way from rank to rank inside the kernel, more than a core's cache holds.
    With 256 KiB the rings were measurably faster, presumably since the receiver finds the data in a cache. Across a
    network a fast connection needs the large buffers: there, and where there is no /proc, this changes nothing.

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


def _sockets():
    """The descriptors of the sockets of this process; gloo does not tell its own."""
    return {int(path.name) for path in Path("/proc/self/fd").glob("*") if path.is_socket()}
