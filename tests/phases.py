"""A program that stays in one of its phases, so that tests can disturb its processes just then.

    python tests/phases.py [--phase import|connect|run|shutdown] [--closed 012] flags of common.cli

It writes a file PHASE.in when it has got there, and goes on as soon as there is a file "go". In between, a rank with a
file "exitR" ends with status 0. With --closed, standard input, output or errors are closed first, as by `>&-`.
"""

import argparse
import os
import sys
import time
from pathlib import Path

LONGEST_S = 180


def wait(name, rank=""):
    """Be in this phase."""
    Path(f"{name}{rank}.in").write_text(str(os.getpid()))
    deadline = time.monotonic() + LONGEST_S
    while not Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        if Path(f"exit{rank}").exists():
            os._exit(0)


def run_worker(rank, world_size, args):
    """Be a rank, in the phase "run"; one that prints, and has a result."""
    print(f"rank {rank}", flush=True)
    if args.phase == "run":
        wait("run", rank)
    return {"sum": 1} if rank == 0 else None


def main(phase):
    """Be the launcher, or a rank of torchrun."""
    from common import cli
    from common.launcher import launch

    parser = cli.Parser("phases", "", 2)
    parser.set_defaults(phase=phase)
    result = launch(run_worker, parser.parse_args(), lambda rank, _: f"role{rank}")
    if phase == "shutdown":
        wait("shutdown", os.environ.get("RANK", ""))
    if result:
        print(f"sum {result['sum']}", flush=True)


if __name__ == "__mp_main__" and os.environ.get("PHASE") == "import":  # in the fork server
    wait("import")
if __name__ == "__mp_main__" and os.environ.get("PHASE") == "connect":
    from common.launcher import channel

    join = channel.join_store

    def wait_and_join(*address):
        """Be about to connect to a store that may be gone by then."""
        wait("connect")
        return join(*address)

    channel.join_store = wait_and_join
if __name__ == "__main__":
    own = argparse.ArgumentParser(allow_abbrev=False)
    own.add_argument("--phase", default="run")
    own.add_argument("--closed", default="")
    options, sys.argv[1:] = own.parse_known_args()
    for number in map(int, options.closed):  # as by `>&-`; Python then has None there
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    os.environ["PHASE"] = options.phase
    main(options.phase)
