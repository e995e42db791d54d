r"""Five deadlocks on purpose, and the line that tells who waits for whom (for tutorial 6_4).

    rank 0 --- waits for ---> rank 1        Neither will do what the other one waits for.
       ^                         |          Each kind stands in two functions: the mistake, and
       +------- waits for -------+          below it the same lines mended.

    send_first        Every rank sends to its right, then receives. gloo's `send` returns when the
                      receiver has come, and no rank comes to its `recv`.
                      Way out: `isend`, or one rank that receives first.
    other_collective  Rank 0 calls `all_reduce` where the others call `broadcast`. Each kind of
                      collective has messages of its own, so both wait for some that never come.
                      Way out: all ranks make the same calls in the same order.
    other_shape       All call `all_reduce`, rank 0 with 2 numbers and the others with 1. Here they
                      wait. With 4 and 8, gloo kills the process; with 3 and 6, on three ranks, one
                      gets wrong sums, and no error (torch 2.13).
                      Way out: agree on the size first, and pad.
    one_fewer         Rank 0 alone comes to a `barrier`; the others go on to their next `recv`.
                      Way out: no collective inside of `if rank == 0`.
    rpc               Rank 0 calls a function of rank 1, which calls rank 0 back. Rank 1 has one
                      thread for RPC, which waits for an answer that it should itself take in.
                      Way out: a handler that returns a future, or more threads than such calls.

    python p2p_collectives/deadlock.py                             send_first, until --timeout
    python p2p_collectives/deadlock.py --kind rpc                  another one
    python p2p_collectives/deadlock.py --kind rpc --mended         the same, with its way out
    python p2p_collectives/deadlock.py --kind rpc --check          are the right lines named?
    TORCH_DISTRIBUTED_DEBUG=DETAIL python p2p_collectives/deadlock.py --kind other_shape

With DETAIL, torch compares the collectives of all ranks before each call: for other_collective and
other_shape it raises at once, and tells how they differ. Without it, the run ends with status 1,
within `--timeout` (here 5 s by default) + 10 s, and its last line is like this one:
    error: rank 1 (rank1) has waited for 5 s at FILE:LINE, `code`; rank 0 (rank0) is at FILE:LINE,
    `code`
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
    """Pass a number round a ring: everybody sends, nobody receives."""
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    # Way out: isend, which returns at once.
    dist.send(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    return theirs


def send_first_mended(rank: int, size: int) -> torch.Tensor:
    """Pass a number round a ring: begin to send, receive, then wait for the send."""
    mine, theirs = torch.tensor([rank + 1.0]), torch.zeros(1)
    sending = dist.isend(mine, dst=(rank + 1) % size)
    dist.recv(theirs, src=(rank - 1) % size)
    sending.wait()  # until here, `mine` may not be changed
    return theirs


def other_collective(rank: int, size: int) -> torch.Tensor:
    """Add up on rank 0 alone; the others do not add, but wait for its result."""
    numbers = torch.tensor([rank + 1.0])
    if rank == 0:
        # Way out: all ranks call it; it gives the sum to all, and needs no broadcast.
        dist.all_reduce(numbers)
    else:
        dist.broadcast(numbers, src=0)
    return numbers


def other_collective_mended(rank: int, size: int) -> torch.Tensor:
    """Add up on all ranks."""
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    return numbers


def other_shape(rank: int, size: int) -> torch.Tensor:
    """Add up tensors of which rank 0's is longer, as in a last batch that is not cut evenly."""
    numbers = torch.full((2 if rank == 0 else 1,), rank + 1.0)
    # Way out: tensors of one size, on which all ranks agree.
    dist.all_reduce(numbers)
    return numbers


def other_shape_mended(rank: int, size: int) -> torch.Tensor:
    """Agree on the largest size, and fill up with zeros, which add nothing."""
    numbers = torch.full((2 if rank == 0 else 1,), rank + 1.0)
    largest = torch.tensor(len(numbers))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    numbers = torch.nn.functional.pad(numbers, (0, largest.item() - len(numbers)))
    dist.all_reduce(numbers)
    return numbers


def one_fewer(rank: int, size: int) -> torch.Tensor:
    """Wait with the barrier of all ranks for those that do not come to it."""
    numbers = torch.tensor([rank + 1.0])
    if rank == 0:
        # Way out: the barrier before the `if`, for all ranks.
        dist.barrier()
        for other in range(1, size):
            dist.send(numbers, dst=other)
    else:
        dist.recv(numbers, src=0)
    return numbers


def one_fewer_mended(rank: int, size: int) -> torch.Tensor:
    """Let all ranks come to the barrier."""
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
    """Add the number of the caller, which must be asked for it; called over RPC."""
    # Way out: rpc_async, whose future is returned: no thread waits. (Or `rpc_options(args, 2)`.)
    theirs = rpc.rpc_sync(caller, own_number)
    return theirs + own_number()


@rpc.functions.async_execution  # the caller is answered when the future is complete
def add_own_number_mended(caller: str) -> torch.futures.Future:
    """Ask the caller, and return at once; the sum follows. Called over RPC."""
    theirs = rpc.rpc_async(caller, own_number)
    return theirs.then(lambda done: done.value() + own_number())


def ask_all(handler: Callable, rank: int, size: int) -> torch.Tensor:
    """Call `handler` of all other ranks from rank 0; they serve the call in `rpc.shutdown`."""
    asked = range(1, size) if rank == 0 else ()
    calls = [rpc.rpc_async(role_name(other, size), handler, args=("rank0",)) for other in asked]
    answers = [call.wait() for call in calls]
    return torch.tensor(answers)


KINDS = {"send_first": (send_first, send_first_mended),
         "other_collective": (other_collective, other_collective_mended),
         "other_shape": (other_shape, other_shape_mended),
         "one_fewer": (one_fewer, one_fewer_mended),
         "rpc": (partial(ask_all, add_own_number), partial(ask_all, add_own_number_mended))}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run one kind; rank 0 returns what each rank holds in the end, of rpc what it holds itself."""
    run = KINDS[args.kind][args.mended]
    if rank == 0:
        report.log("rank0", f"{args.kind}{', mended' if args.mended else ''}: {world_size} ranks; "
                            f"no wait may take longer than {args.timeout:g} s")
    if args.kind == "rpc":
        # One thread; with the default, 16, the mistake would show where 16 calls come at a time.
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
    parser.add_argument("--kind", choices=KINDS, default="send_first", help="which deadlock")
    parser.add_argument("--mended", action="store_true", help="run it with its way out")
    parser.set_defaults(timeout=5.0)  # nothing else here takes long
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Run, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: what is sent here is in main memory")
    if args.check and args.mended:
        refuse("--mended cannot be given with --check, which runs both forms")
    if args.check and (args.rank is not None or dist.is_torchelastic_launched()):
        refuse("--check starts the ranks of both forms itself: give no --rank, and no torchrun")
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json and print what each rank holds; return the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    held = "; ".join(f"rank {rank} holds {' '.join(f'{number:g}' for number in numbers)}"
                     for rank, numbers in enumerate(metrics["held"]))
    print(f"{args.kind}, {'mended' if args.mended else 'which has not deadlocked here'}: {held}")
    return metrics


if __name__ == "__main__":
    main()
