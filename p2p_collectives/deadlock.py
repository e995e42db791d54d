r"""Five deadlocks on purpose, and the line that tells which rank waits where (for tutorial 6_4).

    rank 0 --- waits for ---> rank 1        Neither rank does what the other rank waits for.
       ^                         |          Each kind stands in two functions: the mistake, and
       +------- waits for -------+          below it the same lines, fixed.

    send_first        Every rank sends to its right, then receives. gloo's `send` returns when the
                      receiver has called `recv`, and no rank reaches its `recv`.
                      Fix: `isend`, or one rank that receives first.
    other_collective  Rank 0 calls `all_reduce`, the other ranks call `broadcast`. Each kind of
                      collective sends messages of its own, so both wait for messages that never
                      arrive.
                      Fix: all ranks make the same calls in the same order.
    other_shape       All ranks call `all_reduce`, rank 0 with 2 numbers, the other ranks with 1.
                      With these sizes the ranks wait. With 4 and 8, gloo kills the process. With 3
                      and 6 on three ranks, a rank gets wrong sums, and no error (torch 2.13).
                      Fix: agree on the size first, and pad.
    one_fewer         Only rank 0 calls `barrier`; the other ranks go on to their next `recv`.
                      Fix: no collective inside `if rank == 0`.
    rpc               Rank 0 calls a function of rank 1, which calls rank 0 back. Rank 1 has one
                      thread for RPC. That thread waits for an answer that it should itself receive.
                      Fix: a handler that returns a future, or more threads than such calls.

    python p2p_collectives/deadlock.py                             send_first, until --timeout
    python p2p_collectives/deadlock.py --kind rpc                  another kind
    python p2p_collectives/deadlock.py --kind rpc --fixed          the same kind, fixed
    python p2p_collectives/deadlock.py --kind rpc --check          is the right line named?
    TORCH_DISTRIBUTED_DEBUG=DETAIL python p2p_collectives/deadlock.py --kind other_shape

With DETAIL, torch compares the collectives of all ranks before each call. For other_collective and
other_shape it raises an error at once, which says how they differ. Without DETAIL, the run ends
with status 1 within `--timeout` (here 5 s by default) + 10 s. It prints where every rank waits, and
its last line is like this one:
    error: rank 1 (rank1) has waited for 5 s at FILE:LINE, `code`
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from common import report
from common.cli import Parser, refuse
from common.program import role_name, run_program
from common.session import group_options, rpc_options

import torch
import torch.distributed as dist
from torch.distributed import rpc


def send_first(rank: int, size: int) -> torch.Tensor:
    """Pass a number round a ring: every rank sends, and no rank receives."""
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    # Fix: isend, which returns at once.
    dist.send(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    return theirs


def send_first_fixed(rank: int, size: int) -> torch.Tensor:
    """Pass a number round a ring: begin to send, receive, then wait for the send."""
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    sending = dist.isend(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    sending.wait()  # before this returns, `mine` must not change
    return theirs


def other_collective(rank: int, size: int) -> torch.Tensor:
    """Call `all_reduce` on rank 0 only; the other ranks wait for its result."""
    numbers = torch.tensor([rank + 1.0])
    if rank == 0:
        # Fix: all ranks call it. Every rank gets the sum, so no broadcast is needed.
        dist.all_reduce(numbers)
    else:
        dist.broadcast(numbers, src=0)
    return numbers


def other_collective_fixed(rank: int, size: int) -> torch.Tensor:
    """Call `all_reduce` on all ranks."""
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    return numbers


def other_shape(rank: int, size: int) -> torch.Tensor:
    """Sum tensors of two lengths; rank 0 has the longer one, as in an uneven last batch."""
    numbers = torch.full((2 if rank == 0 else 1,), rank + 1.0)
    # Fix: the ranks agree on one size.
    dist.all_reduce(numbers)
    return numbers


def other_shape_fixed(rank: int, size: int) -> torch.Tensor:
    """Agree on the largest size, and pad with zeros, which add nothing."""
    numbers = torch.full((2 if rank == 0 else 1,), rank + 1.0)
    largest = torch.tensor(len(numbers))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    numbers = torch.nn.functional.pad(numbers, (0, largest.item() - len(numbers)))
    dist.all_reduce(numbers)
    return numbers


def one_fewer(rank: int, size: int) -> torch.Tensor:
    """Wait at a barrier that only rank 0 calls."""
    numbers = torch.tensor([rank + 1.0])
    if rank == 0:
        # Fix: the barrier stands before the `if`, so all ranks call it.
        dist.barrier()
        for other in range(1, size):
            dist.send(numbers, dst=other)
    else:
        dist.recv(numbers, src=0)
    return numbers


def one_fewer_fixed(rank: int, size: int) -> torch.Tensor:
    """Call the barrier on all ranks."""
    numbers = torch.tensor([rank + 1.0])
    dist.barrier()
    if rank == 0:
        for other in range(1, size):
            dist.send(numbers, dst=other)
    else:
        dist.recv(numbers, src=0)
    return numbers


def own_number() -> float:
    """Return the number of this rank; called over RPC."""
    return rpc.get_worker_info().id + 1.0


def add_own_number(caller: str) -> float:
    """Ask the caller for its number, and add it; called over RPC."""
    # Fix: return the future of rpc_async, so no thread waits. (Or `rpc_options(args, 2)`.)
    theirs = rpc.rpc_sync(caller, own_number)
    return theirs + own_number()


@rpc.functions.async_execution  # the caller gets the answer when the future is complete
def add_own_number_fixed(caller: str) -> torch.futures.Future:
    """Ask the caller, and return the future of the sum at once; called over RPC."""
    theirs = rpc.rpc_async(caller, own_number)
    return theirs.then(lambda done: done.value() + own_number())


def ask_all(handler: Callable, rank: int, size: int) -> torch.Tensor:
    """Call `handler` on every other rank from rank 0; those ranks serve it in `rpc.shutdown`."""
    asked = range(1, size) if rank == 0 else ()
    calls = [rpc.rpc_async(role_name(other, size), handler, args=("rank0",)) for other in asked]
    answers = [call.wait() for call in calls]
    return torch.tensor(answers)


KINDS = {"send_first": (send_first, send_first_fixed),
         "other_collective": (other_collective, other_collective_fixed),
         "other_shape": (other_shape, other_shape_fixed),
         "one_fewer": (one_fewer, one_fewer_fixed),
         "rpc": (partial(ask_all, add_own_number), partial(ask_all, add_own_number_fixed))}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run one kind; rank 0 returns what each rank holds in the end (rpc: only its own numbers)."""
    run = KINDS[args.kind][args.fixed]
    if rank == 0:
        report.log("rank0", f"{args.kind}{', fixed' if args.fixed else ''}: {world_size} ranks; "
                            f"no wait may take longer than {args.timeout:g} s")
    if args.kind == "rpc":
        # One thread. With the default of 16, only 16 calls at a time would show the mistake.
        rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                     rpc_backend_options=rpc_options(args, 1))
        everyone = [run(rank, world_size).tolist()]
        rpc.shutdown()
    else:
        dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
        held = run(rank, world_size).tolist()
        everyone = [None] * world_size if rank == 0 else None
        dist.gather_object(held, everyone)
        dist.destroy_process_group()
    return {"held": everyone} if rank == 0 else None


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/deadlock", __doc__, world_size=2, min_world_size=2, rpc=True)
    parser.add_argument("--kind", choices=KINDS, default="send_first", help="the deadlock to run")
    parser.add_argument("--fixed", action="store_true", help="run the fixed code")
    parser.set_defaults(timeout=5.0)  # one waits for it in every run
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with its source and a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: these tensors are in main memory")
    if args.check and args.fixed:
        refuse("--fixed cannot be given with --check, which runs both forms")
    if args.check and (args.rank is not None or dist.is_torchelastic_launched()):
        refuse("--check starts the ranks of both forms itself: give no --rank, and no torchrun")
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print what each rank holds; return the complete metrics."""
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    held = "; ".join(f"rank {rank} holds {' '.join(f'{number:g}' for number in numbers)}"
                     for rank, numbers in enumerate(metrics["held"]))
    print(f"{args.kind}, {'fixed' if args.fixed else 'which has not deadlocked here'}: {held}")
    return metrics


if __name__ == "__main__":
    main()
