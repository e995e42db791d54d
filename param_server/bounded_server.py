"""A server whose gradients are never older than K steps (`--max_staleness K`): beyond tutorial 6_6.

Between main.py and async_server.py: trainers overlap, and who is fast waits before it makes a slow
one's gradient too old. With K = 1, the second step of trainer2 has to wait here:

    trainer1   forward ------------- backward ------------- step
    trainer2      forward -- step    forward -- ............... step
                  (trainer1's weights are 1 step old; a second one would make them 2 steps old)

What it wins: with four trainers and K = 3, 658 samples/s in place of 434 with main.py, and no
gradient older than 3 steps, where async_server.py makes 675 samples/s with gradients up to 5 steps
old (medians on 2 cores: `python -m benchmarks.param_server_trainers`; docs/lessons/6_6.md).
What it costs: two RPCs more in each step than async_server.py, as many as main.py, and the
waiting: with K = 0 one trainer at a time, as in main.py.

    python param_server/bounded_server.py                      weights at most 1 step old
    python param_server/bounded_server.py --world_size 5 --max_staleness 3
    python param_server/bounded_server.py --check              every number, against one process

What is bounded is how many steps come between reading weights and applying their gradient: the
bounded delay of Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI
2014), there counted in tasks: 0 is sequential, no bound is asynchronous. Stale synchronous parallel
(Ho et al., NIPS 2013) bounds something else: how many steps the fastest worker is ahead of the
slowest. With N workers a gradient may then be about N times as many steps old.
"""

import contextlib
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from common.cli import Parser, bounded
from common.program import run_program
from torch.distributed import rpc
from torch.futures import Future

from param_server import main as tutorial
from param_server.async_server import AsyncOptimizer, AsyncParameterServer, AsyncTrainerNet
from param_server.data import require_inputs
from param_server.main import SERVER_NAME, role_name
from param_server.results import finish


class Bound:
    """Decides who may read and who may step, so that no gradient is older than K steps.

    In flight are the forwards whose steps are not made yet. Order them by when they read, oldest
    first, and let age be the number of steps since then: always, age + place <= K.

    1. The invariant holds: a forward is let in last, with age 0, only while at most K are in
       flight, and a step is let through only if it holds for all others afterwards.
    2. Hence no gradient is older than K: its age is at most K minus its place when it is let
       through, and only one step at a time is let through, so that no other comes between.
    3. Nobody waits for ever: the oldest may always step, because all others get one step older and
       move up one place; and where none is in flight, any forward may read.

    K = 0 lets one trainer at a time from its forward to its step; a large K holds nobody back.
    There is no RPC in it: a trainer is a number, and what it waits for is the caller's.

    Args:
        max_staleness: K, at least 0.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness, self.steps = max_staleness, 0
        self.read_at = {}  # of the forwards in flight: trainer -> steps made when it read
        self.stepping = None  # the trainer that was let through and has not stepped yet
        self.waiting = []  # (trainer, what it wants: "read" or "step", what is returned then)

    def may_read(self) -> bool:
        """Decide whether one more forward can be in flight."""
        return len(self.read_at) <= self.max_staleness

    def may_step(self, trainer: int) -> bool:
        """Decide whether after a step of this trainer all others in flight are young enough."""
        others = sorted(moment for other, moment in self.read_at.items() if other != trainer)
        return self.stepping is None and all(
            self.steps + 1 - moment + place <= self.max_staleness
            for place, moment in enumerate(others))

    def ask(self, trainer: int, wish: str, turn: Any) -> None:
        """Let a trainer wait to "read" or to "step"; `go_on` returns `turn` when it may."""
        self.waiting.append((trainer, wish, turn))

    def go_on(self) -> list[Any]:
        """Return the turns of all who may go on: oldest gradient first, then forwards in order."""
        turns = []
        steps = [entry for entry in self.waiting if entry[1] == "step"]
        for entry in sorted(steps, key=lambda entry: self.read_at[entry[0]]):
            if self.may_step(entry[0]):
                self.stepping = entry[0]
                turns.append(entry)
        for entry in [entry for entry in self.waiting if entry[1] == "read"]:
            if self.may_read():
                self.read(entry[0])
                turns.append(entry)
        self.waiting = [entry for entry in self.waiting if entry not in turns]
        return [turn for _, _, turn in turns]

    def read(self, trainer: int) -> None:
        """Note that a trainer that was let in reads the weights now: it is the youngest."""
        self.read_at[trainer] = self.steps

    def stepped(self, trainer: int) -> None:
        """Note that a trainer has stepped: its forward is not in flight any more."""
        self.steps, self.stepping = self.steps + 1, None
        del self.read_at[trainer]


class BoundedParameterServer(AsyncParameterServer):
    """Lets its trainers ask before they read and before they step.

    An answer is a future, which keeps no thread of the server while a trainer waits.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.lock, self.bound = threading.Lock(), Bound(args.max_staleness)

    @rpc.functions.async_execution
    def acquire_read(self, trainer: int) -> Future:
        """Return a future that is completed when this trainer's forward may read the weights."""
        turn = Future()
        self.change(self.bound.ask, trainer, "read", turn)
        return turn

    @rpc.functions.async_execution
    def acquire_step(self, trainer: int) -> Future:
        """Return a future that is completed when this trainer may step, as the next one of all."""
        turn = Future()
        self.change(self.bound.ask, trainer, "step", turn)
        return turn

    def note_read(self, trainer: int | None) -> None:
        """Count the age of these weights from now, not from when the forward was let in."""
        super().note_read(trainer)
        if trainer is not None:
            self.change(self.bound.read, trainer)

    def note_step(self, trainer: int) -> None:
        """Let those go on who have waited for this step."""
        super().note_step(trainer)
        self.change(self.bound.stepped, trainer)

    def change(self, what: Callable[..., None], *about) -> None:
        """Change the bound by one of its methods, and complete the futures of all who may go on."""
        with self.lock:
            what(*about)
            turns = self.bound.go_on()
        for turn in turns:
            turn.set_result(None)


class BoundedTrainerNet(AsyncTrainerNet):
    """Asks before its forward."""

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Wait until so few forwards are in flight that this one can be, too."""
        self.param_server_rref.rpc_sync().acquire_read(rpc.get_worker_info().id)
        return super().turn()


class BoundedOptimizer(AsyncOptimizer):
    """Asks before it steps."""

    def __init__(self, sgd_class: type, params_rref: list[rpc.RRef], **defaults) -> None:
        super().__init__(sgd_class, params_rref, **defaults)
        self.server = rpc.remote(SERVER_NAME, get_server)

    def step(self, context_id: int) -> None:
        """Wait until this step makes no other gradient too old, and step."""
        self.server.rpc_sync().acquire_step(rpc.get_worker_info().id)
        super().step(context_id)


def get_server() -> BoundedParameterServer:
    """Return the server of this run, on rank 0."""
    return tutorial.param_server


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Do what the tutorial's does, with the bounded server."""
    return tutorial.run_worker(rank, world_size, args, BoundedParameterServer, BoundedTrainerNet,
                               BoundedOptimizer)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py, and the bound."""
    parser = tutorial.build_parser("param_server/bounded_server", __doc__)
    parser.add_argument("--max_staleness", type=bounded(int, at_least=0), default=1, metavar="K",
                        help="apply no gradient whose weights are more than K steps old")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_inputs(args, tutorial.Net)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
