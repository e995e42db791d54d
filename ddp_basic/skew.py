"""A loop that times what each rank does, for `--demo skew`: when it computes, and when it waits."""

import contextlib
import time

import torch.distributed as dist
from common import report
from torch import nn, optim


def timed_steps(ddp_model, inputs, labels, delay, args):
    """Train, with extra work of `delay` seconds in every step.

    Args:
        ddp_model: wrapped, on any device.
        inputs, labels: (n, 10) and (n, 5), of this rank.
        delay: of this rank, in seconds.
        args: with `lr`, `steps` and `timeout`, the seconds that the model's process group waits.

    Returns:
        For each step, in seconds since all ranks began: its start, the start of its backward, its
        end.

    Raises:
        RuntimeError: in words, if the gradients of another rank did not come within the timeout.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    dist.barrier()  # the clocks of all ranks start together
    zero, spans = time.perf_counter(), []
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels)
        report.require_finite(loss, f"at step {step}")
        time.sleep(delay)  # a slower machine, longer samples, a file that only this rank writes
        computed = time.perf_counter()
        with waits_at_most(args.timeout, step):
            loss.backward()  # the fast ranks wait in here
        optimizer.step()
        spans.append([moment - zero for moment in (started, computed, time.perf_counter())])
    return spans


@contextlib.contextmanager
def waits_at_most(timeout, step):
    """Around a `backward()`: if that has waited for longer than the timeout, say so in words."""
    started = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        # gloo says "Timed out waiting 2000ms for recv operation", or "Connection closed by peer"
        # where another waiting rank has given up a moment earlier. How long it took distinguishes
        # this from a rank that died.
        if time.perf_counter() - started < 0.9 * timeout:
            raise
        raise RuntimeError(
            f"step {step}: rank {dist.get_rank()} waited {timeout:g} s in backward() for the "
            "gradients of a slower rank; make the ranks equally fast, or give a larger --timeout"
        ) from error
