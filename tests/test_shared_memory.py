"""Collectives in memory that the ranks of one machine share (tutorial 6_4)."""

import os

import pytest

from p2p_collectives.shared_memory import SharedMemory


@pytest.fixture
def waiting():
    """One of two ranks, and the pipe into which the missing rank would write."""
    shared = SharedMemory.__new__(SharedMemory)
    shared.place, shared.size, shared.timeout, shared.outboxes = 0, 2, 0.05, []
    shared.inbox, outbox = os.pipe()
    yield shared, outbox
    shared.close()


def test_a_barrier_does_not_wait_forever(waiting):
    shared, outbox = waiting
    with pytest.raises(TimeoutError, match=r"this machine's 2 ranks, 1 not heard of for 0\.05 s"):
        shared.barrier()
    os.close(outbox)
    with pytest.raises(ConnectionError, match="has ended"):
        shared.barrier()
