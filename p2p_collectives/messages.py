"""A record of the messages of one rank: bytes, receivers, and the ranks that waited for them."""

import time
from datetime import timedelta
from typing import Any

from common.recorder import Recorder

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Request:
    """A request of torch that remembers whether the program has waited for it."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.waited = work, False

    def wait(self, *timeout: timedelta) -> bool:
        """Wait until the message has been sent or has arrived."""
        self.waited = True
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Messages:
    """Messages that this rank sends by `isend`, as [receiver, bytes] in order, and its requests.

    Args:
        recorder: Recorder; when it ends, so does this record.
        delay_s: Seconds before each message leaves.
    """

    def __init__(self, recorder: Recorder, delay_s: float = 0.0) -> None:
        self.requests, self.sent = [], []

        @recorder.around(dist, "isend")
        def isend(original, tensor, dst=None, group=None, tag=0, group_dst=None):
            time.sleep(delay_s)
            # `send` and P2POp give the receiver's rank in the group.
            to = dst if group_dst is None else dist.get_global_rank(group or dist.group.WORLD,
                                                                   group_dst)
            self.sent.append([to, tensor.nbytes])
            self.requests.append(Request(original(tensor, dst, group, tag, group_dst)))
            return self.requests[-1]

        @recorder.around(dist, "irecv")
        def irecv(original, *place, **options):
            self.requests.append(Request(original(*place, **options)))
            return self.requests[-1]

        for name in ("isend", "irecv"):
            recorder.put(distributed_c10d, name, getattr(dist, name))  # P2POp looks there

    def not_waited_for(self) -> int:
        """Count the requests without a wait."""
        return sum(not request.waited for request in self.requests)

    def since(self, first: int) -> list:
        """Return the bytes sent since message number `first`, and the list of their receivers."""
        sent = self.sent[first:]
        return [sum(n_bytes for _, n_bytes in sent), sorted({receiver for receiver, _ in sent})]
