"""Mistakes in `p2p_collectives/ring_allreduce.py`."""

from tests.mutants import Mutant

MAIN, FAST = "p2p_collectives/ring_allreduce.py", "p2p_collectives/fast_ring.py"
HANGS = ("--timeout", "10")
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
    Mutant("torch.chunk makes too few", MAIN, "flat.tensor_split(size)", "flat.chunk(size)",
           check="ring_chunked|error", flags=HANGS),
    Mutant("the whole tensor instead of chunks", MAIN, '"ring_chunked": ring_chunked',
           '"ring_chunked": lambda tensor: allreduce(tensor, tensor)', check="ring_chunked"),
    Mutant("the fast ring passes on before it adds", FAST, "segment.add_(next_arrival())",
           "arrived = next_arrival(); segment.copy_(arrived)", check="RingAllReduce", program=MAIN),
    *(Mutant(f"a column is taken, {where}", file, "flat = flattened(tensor)", "flat = tensor.view(-1)",
             test="tests/test_p2p_collectives.py::test_a_column_is_refused") for where, file in (
                 ("chunk by chunk", MAIN), ("fast", FAST))),
]
