"""What lets trainers wait for each other on the server: futures, which keep no thread of it."""

import collections
import contextlib
import threading

from torch.distributed import rpc
from torch.futures import Future


class Turns:
    """The part of a parameter server that says whose turn it is, and when all are there.

    Args:
        n_trainers: how many trainers there are.
    """

    def __init__(self, n_trainers):
        self.lock, self.busy, self.queue = threading.Lock(), False, collections.deque()
        self.n_trainers, self.brought, self.future_values = n_trainers, {}, Future()

    @rpc.functions.async_execution
    def acquire(self):
        """A future that is completed when it is the caller's turn."""
        turn = Future()
        with self.lock:
            if self.busy:
                self.queue.append(turn)
                return turn
            self.busy = True
        turn.set_result(None)
        return turn

    def release(self):
        """The caller's turn is over: it is that of the first in the queue."""
        with self.lock:
            turn = self.queue.popleft() if self.queue else None
            self.busy = turn is not None
        if turn is not None:
            turn.set_result(None)

    @rpc.functions.async_execution
    def all_gather(self, rank, value):
        """Called by every trainer: a future of the values of all, in the order of the ranks."""
        with self.lock:
            self.brought[rank], future_values = value, self.future_values
            if len(self.brought) < self.n_trainers:
                return future_values
            values = [self.brought[rank] for rank in sorted(self.brought)]
            self.brought, self.future_values = {}, Future()  # for the next time
        future_values.set_result(values)
        return future_values


@contextlib.contextmanager
def my_turn(server_rref, args):
    """Forward, backward and step of a trainer: let in one at a time (lock), some (bounded), all."""
    if args.consistency == "lock":
        server_rref.rpc_sync().acquire()
    elif args.consistency == "bounded":
        server_rref.rpc_sync().acquire_read(rpc.get_worker_info().id)
    try:
        yield
    except Exception:
        if args.consistency == "bounded":  # or others would wait for a step that will not come
            server_rref.rpc_async().give_up(rpc.get_worker_info().id)
        raise
    if args.consistency == "lock":
        server_rref.rpc_sync().release()


def my_step(server_rref, args):
    """With `--consistency bounded`, wait until this step makes no other gradient too old."""
    if args.consistency == "bounded":
        server_rref.rpc_sync().acquire_step(rpc.get_worker_info().id)
