r"""Messages between ranks: send and receive, the collectives, groups, a barrier (tutorial 6_4, first half).

Every operation works on small tensors with a result in closed form. A row per rank shows what the rank held before and
after, and what it should hold.

    send, recv            broadcast             scatter               gather                reduce
    0 --> 1 --> 2 --> 3   0 --> 0 1 2 3         0 --> 0 1 2 3         0 1 2 3 --> 0         0+1+2+3 --> 0
                          (the same to all)     (a piece to each)     (a piece of each)     (their sum)

    all_reduce            all_gather            reduce_scatter        all_to_all
    0+1+2+3 --> 0 1 2 3   0 1 2 3 --> 0 1 2 3   0+1+2+3 --> 0 1 2 3   0 1 2 3 --> 0 1 2 3
    (the sum to all)      (all pieces to all)   (a piece of the sum   (piece j of everyone
                                                 to each)              to rank j)

    python p2p_collectives/main.py --world_size 4                 all demos, all processes here
    python p2p_collectives/main.py --demo nonblocking             one of them
    python p2p_collectives/main.py --check                        only how far each result is from its closed form
    torchrun --nproc_per_node 4 p2p_collectives/main.py           under torchrun

Last line:
    19 operations on 4 ranks over gloo: every rank holds what it should
"""

import os
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import report
from common.cli import Parser
from common.launch import launch
from common.session import backend_for, device_for, group_options


def role_name(rank, world_size):
    """All ranks are alike."""
    return f"rank{rank}"


class Outcome(NamedTuple):
    """One operation as one rank saw it; tensors of any shape, or None where there is nothing to see."""

    operation: str
    says: str
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    expected: list | None = None


def blocking(rank, size, device):
    """`send` returns when the tensor may be changed again, `recv` when it is there."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
    tensor += 1
    if rank < size - 1:
        dist.send(tensor, dst=rank + 1)
    yield Outcome("send, recv", "from rank to rank, each adds one", before, tensor, [rank + 1])


def nonblocking(rank, size, device):
    """`isend` and `irecv` return at once, with a request: the tensors are not ours until its `wait()` has returned."""
    tensor = torch.zeros(1, device=device)
    before = tensor.clone()
    request = None
    if rank == 0:
        tensor += 1
        request = dist.isend(tensor, dst=1)
        # Between here and wait(), do not write to `tensor`: either value may be what is sent.
    elif rank == 1:
        request = dist.irecv(tensor, src=0)
        # Between here and wait(), do not even read `tensor`: it may be old, new, or half of each.
    sum(range(1000))  # the place for work that does not need `tensor`
    if request is not None:
        request.wait()
    says = "until wait(): rank 0 may not write the tensor, rank 1 may not even read it"
    yield Outcome("isend, irecv", says, before, tensor, [1 if rank < 2 else 0])

    # All at once round a ring. With send and recv every rank would send first and wait for a receiver, for ever.
    outgoing, incoming = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    before = incoming.clone()
    for request in dist.batch_isend_irecv([  # on NCCL, several requests must start together
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]):
        request.wait()
    yield Outcome("batch_isend_irecv", "everyone sends its rank to the right", before, incoming, [(rank - 1) % size])


def collectives(rank, size, device):
    """What all ranks do together: every rank must make the same calls in the same order."""
    ranks = range(size)

    def mine(*numbers):
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    tensor = mine(10, 20) if rank == 0 else mine(0, 0)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    yield Outcome("broadcast", "rank 0's tensor to all", before, tensor, [10, 20])

    piece, pieces = mine(0), [mine(10 * r) for r in ranks] if rank == 0 else None  # only the source has a list
    before = torch.cat(pieces) if rank == 0 else piece.clone()
    dist.scatter(piece, pieces, src=0)
    yield Outcome("scatter", "a piece of rank 0's list to each", before, piece, [10 * rank])

    piece, pieces = mine(10 * rank), [mine(0) for _ in ranks] if rank == 0 else None
    dist.gather(piece, pieces, dst=0)
    after, expected = (torch.cat(pieces), [10 * r for r in ranks]) if rank == 0 else (None, None)
    yield Outcome("gather", "a piece of each to rank 0", piece, after, expected)

    tensor = mine(rank + 1)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    after, expected = (tensor, [size * (size + 1) / 2]) if rank == 0 else (None, None)
    yield Outcome("reduce SUM", "to rank 0: N(N+1)/2; what the others hold now is undefined", before, after, expected)

    for name, start, says, expected in (("SUM", rank + 1, "N(N+1)/2", size * (size + 1) / 2),
                                        ("PRODUCT", 1 + rank % 2, "2^(N/2)", 2 ** (size // 2)),
                                        ("MIN", rank + 1, "1", 1),
                                        ("MAX", rank + 1, "N", size),
                                        ("AVG", rank + 1, "(N+1)/2", (size + 1) / 2)):
        tensor = mine(start)
        before = tensor.clone()
        gap = refused(dist.all_reduce, tensor, op=getattr(dist.ReduceOp, name))
        yield gap or Outcome(f"all_reduce {name}", f"to all: {says}", before, tensor, [expected])

    pieces = [mine(0) for _ in ranks]
    dist.all_gather(pieces, mine(10 * rank))
    yield Outcome("all_gather", "a piece of each to all", mine(10 * rank), torch.cat(pieces), [10 * r for r in ranks])

    piece, pieces = mine(0), [mine(10 * r + rank) for r in ranks]
    gap = refused(dist.reduce_scatter, piece, pieces, op=dist.ReduceOp.SUM)
    expected = [10 * rank * size + size * (size - 1) / 2]
    says = "the sum of all lists, a piece to each: 10rN + N(N-1)/2"
    yield gap or Outcome("reduce_scatter SUM", says, torch.cat(pieces), piece, expected)

    outgoing, incoming = [mine(10 * rank + r) for r in ranks], [mine(0) for _ in ranks]
    gap = refused(dist.all_to_all, incoming, outgoing)
    says = "piece r of everyone to rank r: a transposition"
    yield gap or Outcome("all_to_all", says, torch.cat(outgoing), torch.cat(incoming), [10 * r + rank for r in ranks])

    time.sleep(0.02 * rank)  # the ranks come one after the other
    came = torch.tensor([time.monotonic()], dtype=torch.float64, device=device)
    dist.barrier()
    left = time.monotonic()
    times = [torch.zeros_like(came) for _ in ranks]
    dist.all_gather(times, came)
    before, after = (torch.tensor([sum(t.item() <= now for t in times)]) for now in (came.item(), left))
    says = "how many had come when this rank came, and when it left"
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        yield Outcome("barrier", says, before, after, [size])
    else:
        yield Outcome("barrier", "nothing to show: the clocks of several machines cannot be compared so finely")


def refused(collective, *tensors, **options):
    """Make the call; if the backend does not have it, the outcome that says so, which is the same on all ranks."""
    try:
        collective(*tensors, **options)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "support" not in str(error):
            raise
        return Outcome(collective.__name__, f"not in {dist.get_backend()}: {str(error).splitlines()[0]}")
    return None


def groups(rank, size, device):
    """Collectives among some of the ranks."""
    # Every rank must make every group, also those that it is not in: making one is a collective of all.
    pair = dist.new_group([0, 1])
    tensor = torch.ones(1, device=device)
    before = tensor.clone()
    if rank in (0, 1):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=pair)
    yield Outcome("all_reduce in [0, 1]", "the others take no part", before, tensor, [2 if rank < 2 else 1])

    evens, odds = dist.new_group(range(0, size, 2)), dist.new_group(range(1, size, 2))
    tensor = torch.full((1,), float(rank), device=device)
    before = tensor.clone()
    group, members = (evens, range(0, size, 2)) if rank % 2 == 0 else (odds, range(1, size, 2))
    dist.all_reduce(tensor, group=group)  # two at the same time
    yield Outcome("all_reduce in evens, odds", "two groups at the same time", before, tensor, [sum(members)])

    tensor = torch.full((1,), 10.0 * rank, device=device)
    before = tensor.clone()
    dist.broadcast(tensor, src=rank % 2, group=group)  # src is the rank in the world; group_src=0 would be the same
    yield Outcome("broadcast in evens, odds", "from the first of the group", before, tensor, [10 * (rank % 2)])


DEMOS = {"blocking": blocking, "nonblocking": nonblocking, "collectives": collectives, "groups": groups}


def run_worker(rank, world_size, args):
    """Run the demos; rank 0 collects everyone's outcomes and returns them."""
    device = device_for(args.device)
    if backend_for(device) == "gloo":
        device = torch.device("cpu")  # gloo sends and receives main memory only
    dist.init_process_group(**group_options(args, device), rank=rank, world_size=world_size)
    outcomes = []
    for name in DEMOS if args.demo == "all" else [args.demo]:
        for outcome in DEMOS[name](rank, world_size, device):
            # Rank 0 prints for all, later: lines of several processes would interleave.
            rows = [None] * world_size if rank == 0 else None
            dist.gather_object([numbers(value) for value in outcome[2:]], rows)
            outcomes.append({"demo": name, "operation": outcome.operation, "says": outcome.says, "rows": rows})
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"operations": outcomes, "backend": backend} if rank == 0 else None

def numbers(value):
    """A tensor or a list as a list of floats, which JSON can hold; None stays None."""
    return None if value is None else torch.as_tensor(value, dtype=torch.float64).flatten().tolist()


def show(operations):
    """Print a table per operation: a row per rank."""
    for operation in operations:
        print(f"\n{operation['operation']}: {operation['says']}")
        rows = [[*("" if cell is None else " ".join(f"{number:g}" for number in cell) for cell in row),
                 "" if row[2] is None else "ok" if row[1] == row[2] else "FAIL"] for row in operation["rows"]]
        if any(cell for row in rows for cell in row):
            table = [["before", "after", "expected", ""], *rows]
            widths = [max(len(row[column]) for row in table) for column in range(4)]
            for rank, row in enumerate(table, start=-1):
                cells = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                print(f"  {'rank' if rank < 0 else rank:>4}   {cells}".rstrip())


def verdicts(operations):
    """What all ranks hold and should hold, by operation: two dicts of lists."""
    ours, oracle = {}, {}
    for operation in operations:
        rows = [row for row in operation["rows"] if row[2] is not None]
        if rows:
            ours[operation["operation"]] = [number for row in rows for number in row[1]]
            oracle[operation["operation"]] = [number for row in rows for number in row[2]]
    return ours, oracle


def build_parser():
    """The flags of this example."""
    parser = Parser("p2p_collectives", __doc__, world_size=4, min_world_size=2)
    parser.add_argument("--demo", choices=[*DEMOS, "all"], default="all", help="which operations")
    return parser


def main(argv=None):
    """Run the demos, or `--check` them; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    ours, oracle = verdicts(metrics["operations"])
    if args.check:
        return report.compare(ours, oracle, dict.fromkeys(ours, 0))  # small whole numbers: exact in any order
    device = "cpu" if metrics["backend"] == "gloo" else None  # see run_worker
    report.save_metrics(args, metrics, metrics["backend"], device)
    show(metrics["operations"])
    wrong = [operation for operation in ours if ours[operation] != oracle[operation]]
    everyone = f"WRONG: {', '.join(wrong)}" if wrong else "every rank holds what it should"
    print(f"\n{len(ours)} operations on {args.world_size} ranks over {metrics['backend']}: {everyone}")
    if wrong:
        raise SystemExit(1)
    return metrics


if __name__ == "__main__":
    main()
