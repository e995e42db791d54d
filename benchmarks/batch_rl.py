"""What does double buffering win in batch_rl, with and without batches?

`vector.py` and `double_buffering.py` play episodes in turns, within one run, training included.

    python -m benchmarks.batch_rl --observers 1 --envs_per_observer 64 --envs sync
    python -m benchmarks.batch_rl --observers 1 --envs_per_observer 512 --variants vector
"""

import os
import statistics
import time

from common import report
from common.cli import refuse
from common.launcher import launch
from common.session import rpc_options
from torch.distributed import rpc

from batch_rl import main as lesson
from batch_rl.double_buffering import DoubleBufferedAgent
from batch_rl.results import env_steps, require_room
from batch_rl.vector import VectorAgent, add_envs_flag
from benchmarks import one_core

MODES = {"batched": True, "single": False}
VARIANTS = {"vector": VectorAgent, "double_buffering": DoubleBufferedAgent}


def run_worker(rank, world_size, args):
    """Time the variants on episodes of their own; rank 0 returns environment steps/s of each."""
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, lesson.RPC_THREADS))
    metrics = measure(rank, world_size, args) if rank == 0 else None
    rpc.shutdown()
    return metrics


def measure(rank, world_size, args):
    """Play in turns; what `run_worker` returns."""
    variants = one_core.VARIANTS if args.one_core else VARIANTS
    agents = {name: variants[name](world_size, args) for name in args.variants}
    plays = [(f"{name}, {mode}", agent, batch)
             for name, agent in agents.items() for mode, batch in MODES.items()]
    speeds = {name: [] for name, _, _ in plays}
    for episode in range(1 + args.num_episode):
        for name, agent, batch in plays:
            started = time.perf_counter()
            agent.finish_episode(batch, agent.run_episode(batch))
            seconds = time.perf_counter() - started
            if episode > 0:  # the first one is the warm-up
                speeds[name].append(env_steps(agent.returns) / seconds)
    return {"env_steps_per_s": speeds}


def build_parser():
    """Make the parser: the flags of batch_rl, whose episodes are timed, and which variants."""
    parser = lesson.build_parser("benchmark_batch_rl", __doc__)
    add_envs_flag(parser)
    parser.add_argument("--one_core", action="store_true",
                        help="playing gives way to messages (one_core.py)")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", metavar="NAME",
                        help=f"to compare, of {', '.join(VARIANTS)} (default: all)")
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    lesson.set_observers(args)
    require_room(args)
    halves = args.envs_per_observer % 2 == 0
    args.variants = args.variants or [name for name in VARIANTS
                                      if name != "double_buffering" or halves]
    if args.one_core and not hasattr(os, "SCHED_IDLE"):
        refuse("--one_core needs Linux, where a thread can give way to all others")
    if "double_buffering" in args.variants and not halves:
        refuse(f"--envs_per_observer {args.envs_per_observer} must be even for double buffering")
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    medians = {name: statistics.median(speeds)
               for name, speeds in metrics["env_steps_per_s"].items()}
    metrics = {"envs_per_observer": args.envs_per_observer, **metrics, "medians": medians}
    if {"vector", "double_buffering"} <= set(args.variants):
        metrics["double_buffering_gain"] = {
            mode: medians[f"double_buffering, {mode}"] / medians[f"vector, {mode}"]
            for mode in MODES}
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    print(f"{args.world_size - 1} observers, {args.envs_per_observer} environments each: "
          f"environment steps per second, medians of {args.num_episode} episodes")
    for name in args.variants:
        batched, single = (medians[f"{name}, {mode}"] for mode in MODES)
        print(f"{name:16}   batched {batched:7.0f}   single {single:7.0f}   "
              f"speed-up {batched / single:.2f}")
    return metrics


if __name__ == "__main__":
    main()
