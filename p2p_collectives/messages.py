"""What the oracles of this folder record of each message: its size, its receiver, who waited."""

import time
from datetime import timedelta
from typing import Any

from common.recorder import Recorder

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Request:
    """Stands for the request that it holds, and remembers whether somebody has waited for it."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.waited = work, False

    def wait(self, *timeout: timedelta) -> bool:
        """Return when the message has been sent, or is there."""
        self.waited = True
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Messages:
    """Keeps what this rank has sent without waiting, in order, and all its requests."""

    def __init__(self) -> None:
        self.requests, self.sent = [], []  # [receiver, bytes]

    def not_waited_for(self) -> int:
        """Count the requests for which nobody has waited."""
        return sum(not request.waited for request in self.requests)

    def total(self, first: int) -> list:
        """Return how many bytes were sent since message `first`, and the list of receivers."""
        since = self.sent[first:]
        return [sum(n_bytes for _, n_bytes in since), sorted({receiver for receiver, _ in since})]


def record_messages(recorder: Recorder, delay: float = 0.0) -> Messages:
    """Record `isend` and `irecv` of this process from now on.

    Args:
        recorder: takes the recording out again.
        delay: seconds before each message is sent: who reads without waiting, reads the old value.

    Returns:
        The messages, to which each one is added.
    """
    messages = Messages()

    @recorder.around(dist, "isend")
    def isend(original, tensor, dst=None, *group, **options):
        time.sleep(delay)
        messages.sent.append([dst, tensor.numel() * tensor.element_size()])
        messages.requests.append(Request(original(tensor, dst, *group, **options)))
        return messages.requests[-1]

    @recorder.around(dist, "irecv")
    def irecv(original, *place, **options):
        messages.requests.append(Request(original(*place, **options)))
        return messages.requests[-1]

    for name in ("isend", "irecv"):
        recorder.put(distributed_c10d, name, getattr(dist, name))  # P2POp looks there
    return messages
