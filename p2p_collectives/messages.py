"""What the oracles of this folder record of each message: its size, its receiver, who waited."""

import contextlib
import time
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Request:
    """A request like the one it holds, which remembers whether somebody has waited for it."""

    def __init__(self, work):
        self.work, self.waited = work, False

    def wait(self, *timeout):
        """Until the message has been sent, or is there."""
        self.waited = True
        return self.work.wait(*timeout)

    def __getattr__(self, name):
        return getattr(self.work, name)


class Messages:
    """The messages that this rank has sent without waiting, in order; and all its requests."""

    def __init__(self):
        self.requests, self.sent = [], []  # (receiver, bytes)

    def not_waited_for(self):
        """How many requests nobody has waited for."""
        return sum(not request.waited for request in self.requests)


@contextlib.contextmanager
def recorded(delay=0.0):
    """Record `isend` and `irecv` of this process.

    Args:
        delay: seconds before each message is sent: who reads without waiting, reads the old value.

    Yields:
        The `Messages`.
    """
    messages, isend, irecv = Messages(), dist.isend, dist.irecv

    def sending(tensor, dst=None, *group, **options):
        time.sleep(delay)
        messages.sent.append([dst, tensor.numel() * tensor.element_size()])
        messages.requests.append(Request(isend(tensor, dst, *group, **options)))
        return messages.requests[-1]

    def receiving(*place, **options):
        messages.requests.append(Request(irecv(*place, **options)))
        return messages.requests[-1]

    with contextlib.ExitStack() as patches:
        for module in (dist, distributed_c10d):  # P2POp looks there
            patches.enter_context(mock.patch.object(module, "isend", sending))
            patches.enter_context(mock.patch.object(module, "irecv", receiving))
        yield messages
