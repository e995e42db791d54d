"""What does double buffering win in batch_rl?

`vector.py` and `double_buffering.py` play episodes in batches, in turns, training included.

    python -m benchmarks.batch_rl --observers 1 --envs_per_observer 64 --envs sync
"""

import functools
import os
import statistics
import time

from common import report
from common.cli import refuse
from common.launcher import launch
from common.session import rpc_options
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl.double_buffering import DoubleBufferedAgent, DoubleBufferedObserver
from batch_rl.results import env_steps, require_room
from batch_rl.vector import VectorAgent, VectorObserver, add_envs_flag

VARIANTS = {"vector": VectorAgent, "double_buffering": DoubleBufferedAgent}


def giving_way(run_episode):
    """Let the thread that plays run only while nobody else wants its core.

    An observer's request leaves, and its answer comes in, through threads of its process. They take
    microseconds, but on an only core they would wait milliseconds for the thread that plays, and
    with double buffering little would overlap.
    """
    @functools.wraps(run_episode)
    def played(*args):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # in Linux, of this thread
        return run_episode(*args)
    return played


def run_worker(rank, world_size, args):
    """Time the variants on episodes of their own; rank 0 returns environment steps/s of each."""
    if args.one_core:
        for observer in (VectorObserver, DoubleBufferedObserver):
            observer.run_episode = giving_way(observer.run_episode)
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, lesson.RPC_THREADS))
    metrics = measure(world_size, args) if rank == 0 else None
    rpc.shutdown()
    return metrics


def measure(world_size, args):
    """Play in turns; what `run_worker` returns."""
    agents = {name: agent_class(world_size, args) for name, agent_class in VARIANTS.items()}
    speeds = {name: [] for name in VARIANTS}
    for episode in range(1 + args.num_episode):
        for name, agent in agents.items():
            started = time.perf_counter()
            agent.finish_episode(True, agent.run_episode(True))
            seconds = time.perf_counter() - started
            if episode > 0:  # the first one is the warm-up
                speeds[name].append(env_steps(agent.returns) / seconds)
    return {"env_steps_per_s": speeds}


def build_parser():
    """Make the parser: the flags of batch_rl, whose episodes are timed."""
    parser = lesson.build_parser("benchmark_batch_rl", __doc__)
    add_envs_flag(parser)
    parser.set_defaults(envs_per_observer=64)
    parser.add_argument("--one_core", action="store_true",
                        help="playing gives way to messages, for a machine of one core")
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    lesson.set_observers(args)
    require_room(args)
    if args.one_core and not hasattr(os, "SCHED_IDLE"):
        refuse("--one_core needs Linux, where a thread can give way to all others")
    if args.envs_per_observer % 2:
        refuse(f"--envs_per_observer {args.envs_per_observer} must be even for double buffering")
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    medians = {name: statistics.median(speeds)
               for name, speeds in metrics["env_steps_per_s"].items()}
    metrics = report.save_metrics(args, {
        "envs_per_observer": args.envs_per_observer, **metrics, "medians": medians,
        "double_buffering_gain": medians["double_buffering"] / medians["vector"],
    }, backend="tensorpipe")
    print(f"{args.world_size - 1} observers, {args.envs_per_observer} environments each: "
          f"environment steps per second, medians of {args.num_episode} episodes")
    for name, steps in medians.items():
        print(f"{name:16}   {steps:7.0f}")
    return metrics


if __name__ == "__main__":
    main()
