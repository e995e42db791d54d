"""Start the processes of a program, watch over them, and name the one that failed.

Three ways in, and a worker never knows which one was taken:

    local      python X/main.py --world_size 3              one process per rank, started here
    torchrun   torchrun --nproc_per_node 3 X/main.py        torchrun started us: we *are* one rank
    manual     python X/main.py --world_size 3 --rank 1 ... the one rank of this terminal or machine

Whichever it is, `run_worker(rank, world_size, args)` finds RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE and INIT_METHOD in its environment, and has its fair share of the CPU threads.

    start.py        the local and the manual way: processes, the fork server, interruptions
    torchrun.py     the third way, and the process that watches over a rank there
    worker.py       what a rank does beside its work: it beats, it reports its failure, it leaves
    watch.py        who has failed: the cause, not the one that noticed it
    channel.py      the one channel between all of them: a TCPStore
    environment.py  the state that every worker is in; fork_server.py, network.py
"""

from common.launcher.start import launch

__all__ = ["launch"]
