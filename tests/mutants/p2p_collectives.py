"""Mistakes in `p2p_collectives/main.py`."""

from tests.mutants import Mutant

MAIN, HANGS = "p2p_collectives/main.py", ("--timeout", "10")
MUTANTS = [
    Mutant("recv from the wrong rank", MAIN, "dist.recv(tensor=tensor, src=rank - 1)",
           "dist.recv(tensor=tensor, src=0)", check="error: rank|send, recv", flags=HANGS),
    Mutant("a message is not counted up", MAIN, "    tensor += 1\n    if rank < size - 1:",
           "    tensor += rank == 0\n    if rank < size - 1:", check="send, recv"),
    Mutant("wait forgotten", MAIN, "    if req is not None:\n        req.wait()\n", "",
           check="isend, irecv|requests"),
    Mutant("waits for the receiver only", MAIN, "    if req is not None:\n", "    if rank == 1:\n",
           check="requests"),
    Mutant("writes before wait", MAIN,
           "        # Do not write to `tensor` before wait(): the old or the new value may be sent.\n",
           "        tensor += 1\n", check="isend, irecv"),
    Mutant("the ring turns the other way", MAIN,
           "outgoing, (rank + 1) % size),\n        dist.P2POp(dist.irecv, incoming, (rank - 1) % size)",
           "outgoing, (rank - 1) % size),\n        dist.P2POp(dist.irecv, incoming, (rank + 1) % size)",
           check="batch_isend_irecv"),
    Mutant("the group has the wrong members", MAIN, "dist.new_group([0, 1])", "dist.new_group([0, size - 1])",
           check="all_reduce in|error: rank", flags=HANGS),
    Mutant("the whole world instead of the group", MAIN,
           "    if rank in (0, 1):  # Tutorial: all ranks call it, and those outside of the group get a warning\n"
           "        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)",
           "    if True:\n        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)", check="all_reduce in"),
    Mutant("evens and odds are one group", MAIN, "    dist.all_reduce(tensor, group=group)\n",
           "    dist.all_reduce(tensor)\n", check="evens, odds"),
    Mutant("broadcast from a rank that is not the first", MAIN, "dist.broadcast(tensor, src=rank % 2, group=group)",
           "dist.broadcast(tensor, src=rank % 2 + 2, group=group)", check="broadcast in evens"),
    Mutant("barrier forgotten", MAIN, "    dist.barrier()\n", "", check="barrier"),
    Mutant("the wrong operator", MAIN, "op=getattr(dist.ReduceOp, name)", "op=dist.ReduceOp.SUM",
           check="all_reduce (PRODUCT|MIN|MAX|AVG)"),
    Mutant("the lists of a reduce_scatter are transposed", MAIN, "mine(0), [mine(10 * r + rank) for r in ranks]",
           "mine(0), [mine(10 * rank + r) for r in ranks]", check="reduce_scatter"),
    Mutant("not copied back into the column", MAIN, "    column.copy_(copy)\n", "", check="of its copy",
           flags=("--demo", "noncontiguous")),
    Mutant("a column of rank 0 alone", MAIN, "    dist.all_reduce(column, group=group)\n",
           "    dist.broadcast(column, src=0, group=group)\n", check="of a column", flags=("--demo", "noncontiguous")),
    Mutant("broadcast forgotten", MAIN, "    dist.broadcast(tensor, src=0)\n", "", check="broadcast"),
]
