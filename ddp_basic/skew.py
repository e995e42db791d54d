"""What `main.py --demo skew` measures: when each rank computed and when it waited, step by step."""

import time

import torch.distributed as dist
from common import report
from torch import nn, optim

DRAWN_STEPS = 5


def timed_steps(ddp_model, samples, delay, args):
    """Train, with `delay` seconds of extra work in every step.

    Args:
        ddp_model: wrapped, on any device.
        samples: inputs (n, 10) and labels (n, 5) of this rank.
        delay: of this rank, in seconds.
        args: with `lr`, `steps` and `timeout`, the seconds that the model's process group waits.

    Returns:
        For each step, in seconds since all ranks began: its start, the start of its backward, its end.

    Raises:
        RuntimeError: in words, if the gradients of another rank did not come within the timeout.
    """
    inputs, labels = samples
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    dist.barrier()  # the clocks of all ranks start together
    zero, spans = time.perf_counter(), []
    for step in range(args.steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss = loss_fn(outputs, labels.to(outputs.device))
        time.sleep(delay)  # a slower machine, longer samples, a file that only this rank writes
        computed = time.perf_counter()
        try:
            loss.backward()  # the fast ranks wait in here
        except RuntimeError as error:
            # gloo says "Timed out waiting 2000ms for recv operation", or "Connection closed by peer" where another
            # waiting rank has given up a moment earlier. How long it took tells this from a rank that died.
            if time.perf_counter() - computed < 0.9 * args.timeout:
                raise
            raise RuntimeError(
                f"step {step + 1}: rank {dist.get_rank()} waited {args.timeout:g} s in backward() for the gradients of "
                "a slower rank; make the ranks equally fast, or give a larger --timeout"
            ) from error
        optimizer.step()
        spans.append([moment - zero for moment in (started, computed, time.perf_counter())])
    return spans


def plot(spans, args):
    """Draw `skew.png`: the first steps of every rank as bars over time; `spans` holds `timed_steps` of each rank."""
    title = f"Rank {args.slow_rank} loses {args.delay:g} s in each step, and so do all the others"
    with report.picture(args.output_dir / "skew.png", title, "time (s)", "rank") as axes:
        for rank, steps in enumerate(spans):
            computing = [(start, backward - start) for start, backward, _ in steps[:DRAWN_STEPS]]
            waiting = [(backward, end - backward) for _, backward, end in steps[:DRAWN_STEPS]]
            for bars, color, label in ((computing, "C0", "forward and extra work"),
                                       (waiting, "0.8", "backward(): mostly waiting for the others")):
                axes.broken_barh(bars, (rank - 0.35, 0.7), color=color, edgecolor="white",
                                 label=label if rank == 0 else None)
        axes.set_yticks(range(len(spans)))
        axes.invert_yaxis()
