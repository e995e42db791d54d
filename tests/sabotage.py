"""What the workers of `test_faults.py` run: a lesson that never ends by itself, or in which one role fails.

    python tests/sabotage.py LESSON RANK WHAT SLOWED flags of the lesson ...

runs the module LESSON for ever; in rank RANK, WHAT (`-`, or `module:function`, or `module:function:fault` with one of
FAULTS) fails when it is called for the third time. Before each call of SLOWED, functions with commas between them,
there is a pause. No pytest here: the workers need not import it.
"""

import ctypes
import faulthandler
import functools
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import program

PAUSE_S = 0.1  # before each call of what a program does again and again: the machine has other tests to run


def for_ever(rank, world_size, args):
    """Run the `run_worker` of `args.lesson`, and where that is short, its operations again and again."""
    lesson = importlib.import_module(args.lesson)
    if args.start_method == "spawn":
        print(f"rank {rank} prints", flush=True)
    for what in args.slowed:
        replace(what, lambda original: lambda *a, **k: (time.sleep(args.pause_s), original(*a, **k))[1])
    if args.raises is not None and rank == args.raises[0]:
        let_raise(args.raises[1], args.moment)
    if args.lesson == "p2p_collectives.main":
        collectives = lesson.run_collectives
        lesson.DEMOS["collectives"] = lambda *place: (outcome for _ in iter(int, 1) for outcome in collectives(*place))
    result = lesson.run_worker(rank, world_size, args)
    for _ in range(10_000):  # it is over
        time.sleep(0.1)
        importlib.import_module("tests.sabotage").nothing()
    return result


def nothing(*_):
    """A worker that does nothing, and what a worker does that has nothing more to do."""


def let_raise(what, moment):
    """Let a function or method fail when it is called for the third time, and write down the moment to a file."""
    module, function, fault = [*what.split(":"), "exception"][:3]
    calls = []

    def sabotaged(original):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                Path(moment).write_text(str(time.monotonic()))  # one clock for all processes
                faulthandler.disable()  # writes piece by piece: where several runs share stderr, into each other's lines
                FAULTS[fault]()
            return original(*args, **kwargs)

        return call

    replace(f"{module}:{function}", sabotaged)


def throw(error):
    """Raise it: `raise` is no expression."""
    raise error


def loop():
    """Do this and that, and never come to an end; not so much that the other tests have no time."""
    while True:
        time.sleep(0.001)


def wait_for_a_lock():
    """Wait for a lock that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# What a rank does to itself, by its key in tests/fault_table.py.
FAULTS = {
    "exception": lambda: throw(ValueError("sabotage")),
    "long traceback": lambda: throw(ValueError("x" * 10_000_000)),
    "KeyboardInterrupt": lambda: throw(KeyboardInterrupt()),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "segmentation fault": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "lock held": lambda: ctypes.PyDLL(None).sleep(1000),  # of the interpreter
    "destroyed group": dist.destroy_process_group,
    "aborted group": lambda: dist.distributed_c10d._abort_process_group(),
    "sleep": lambda: time.sleep(1000),
    "loop": loop,
    "lock": wait_for_a_lock,
    "lone barrier": lambda: dist.barrier(),
    "send without recv": lambda: dist.send(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size()),
}


def replace(what, wrapper):
    """Put `wrapper(function)` in the place of a function or method, `module:name` or `module:Class.name`."""
    module, name = what.split(":")
    *path, last = name.split(".")
    owner = importlib.import_module(module)
    for step in path:
        owner = getattr(owner, step)
    original = getattr(owner, last)
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(owner, last, staticmethod(wrapped) if isinstance(vars(owner).get(last), staticmethod) else wrapped)


def main(name, rank, what, slowed, *flags):
    """Run the lesson `name` with `for_ever` in place of its `run_worker`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # of the ranks, too
    lesson = importlib.import_module(name)
    launch = program.launch

    def launch_for_ever(run_worker, args, role_name):
        args.lesson, args.moment, args.pause_s = name, args.output_dir / "moment", PAUSE_S
        args.raises, args.slowed = None if what == "-" else [int(rank), what], slowed.split(",")
        return launch(for_ever, args, role_name)

    program.launch = launch_for_ever
    lesson.main(list(flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
