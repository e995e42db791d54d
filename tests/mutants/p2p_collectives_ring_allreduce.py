"""Mistakes in `p2p_collectives/ring_allreduce.py`."""

from tests.mutants import Mutant

MAIN, FAST = "p2p_collectives/ring_allreduce.py", "p2p_collectives/fast_ring.py"
RESULTS, HANGS = "p2p_collectives/ring_allreduce_results.py", ("--timeout", "10")
RINGS = "tests/test_reports.py::test_rings"
MUTANTS = [
    Mutant("the ring turns the other way", MAIN,
           "    left = ((rank - 1) + size) % size\n    right = (rank + 1) % size\n",
           "    right = ((rank - 1) + size) % size\n    left = (rank + 1) % size\n", check="ring_naive, .*to whom"),
    Mutant("a buffer is sent twice", MAIN, "            send_req = dist.isend(recv_buff, right)",
           "            send_req = dist.isend(send_buff.clone(), right)", check="ring_naive"),
    Mutant("one round too few", MAIN, "    for i in range(size - 1):", "    for i in range(size - 2):", check="ring_naive"),
    Mutant("one round too many", MAIN, "    for i in range(size - 1):", "    for i in range(size):", check="ring_naive"),
    Mutant("wait forgotten", MAIN, "        send_req.wait()  # before the next step overwrites what is being sent\n", "",
           check="requests|ring_naive"),
    Mutant("the wrong chunk is added to", MAIN, "chunks[rank - step - 1].add_(received)",
           "chunks[rank - step].add_(received)", check="ring_chunked|error", flags=HANGS),
    Mutant("chunks are kept, not added", MAIN, "chunks[rank - step - 1].add_(received)",
           "chunks[rank - step - 1].copy_(received)", check="ring_chunked"),
    Mutant("torch.chunk makes too few", MAIN, "tensor.view(-1).tensor_split(size)", "tensor.view(-1).chunk(size)",
           check="ring_chunked|error", flags=HANGS),
    Mutant("the whole tensor instead of chunks", MAIN, '"ring_chunked": ring_chunked',
           '"ring_chunked": lambda tensor: allreduce(tensor, tensor)', check="ring_chunked"),
    Mutant("the fast ring passes on before it adds", FAST, "segment.add_(next_arrival())",
           "arrived = next_arrival(); segment.copy_(arrived)", check="RingAllReduce", program=MAIN),
    Mutant("the warm-up counts", MAIN, "                if repeat > 0:", "                if repeat >= 0:", check="reported time"),
    Mutant("the time of one's own, not of the slowest", MAIN,
           "    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)\n", "", check="reported time"),
    Mutant("bytes are counted wrongly", RESULTS, "2 * (world_size - 1) / world_size * n_bytes / seconds",
           "2 * (world_size - 1) * n_bytes / seconds", test=RINGS),
    Mutant("mean for median", RESULTS, "statistics.median(times)", "statistics.fmean(times)", check="reported time", program=MAIN),
    Mutant("the ratio is upside down", RESULTS, 'medians["all_reduce"] / median}', 'median / medians["all_reduce"]}',
           test=RINGS),
]
