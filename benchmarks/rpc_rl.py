"""What does one RPC cost in rpc_rl, and how near is the lesson to the fastest that RPC allows?

Three agents play the same episodes, in turns, within one run (a noisy machine cannot favour one of them):

    2 RPCs a step   the tutorial's protocol: select_action, then report_reward
    1 RPC a step    the reward rides along with the next state
    ceiling         the same RPCs as with 1, answered at once: the agent only reads the actions from a list

    python benchmarks/rpc_rl.py --world_size 3 --rounds 60
"""

import copy
import statistics
import sys
import time
from pathlib import Path

# As a script, this file's folder comes first on the path: there, `rpc_rl` is this very file.
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]

from common import report  # noqa: E402
from common.cli import bounded  # noqa: E402
from common.launch import launch  # noqa: E402
from common.session import rpc_options  # noqa: E402
from torch.distributed import rpc  # noqa: E402

from rpc_rl import main as rpc_rl  # noqa: E402

TWO, ONE, CEILING = "2 RPCs a step", "1 RPC a step", "ceiling"


class Replay(rpc_rl.Agent):
    """Answers with the actions that another agent chose in the same episode, and does not learn."""

    def __init__(self, world_size, args, played):
        super().__init__(world_size, args)
        self.played = played

    def run_episode(self):
        """Play the last episode of the other agent again."""
        self.script = {ob_id: iter(actions) for ob_id, actions in self.played.actions.items()}
        super().run_episode()

    def select_action(self, ob_id, state, reward=None):
        """Read the next action; what is left is the price of the RPC and of the environment."""
        return next(self.script[ob_id])

    def report_reward(self, ob_id, reward):
        """Nobody will learn from it."""

    def finish_episode(self):
        """Nothing to learn."""


def run_worker(rank, world_size, args):
    """Time the three agents on the same episodes; rank 0 returns steps/s of each round."""
    rpc.init_rpc(rpc_rl.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, rpc_rl.RPC_THREADS))
    metrics = measure(rank, world_size, args) if rank == 0 else None
    rpc.shutdown()
    return metrics


def measure(rank, world_size, args):
    """What `run_worker` returns."""
    one, two = (copy.copy(args) for _ in range(2))
    one.rpcs_per_step, two.rpcs_per_step = 1, 2
    agents = {TWO: rpc_rl.Agent(world_size, two), ONE: rpc_rl.Agent(world_size, one)}
    agents[CEILING] = Replay(world_size, one, agents[ONE])
    speeds = {name: [] for name in agents}
    for _ in range(args.rounds):
        for name, agent in agents.items():
            started = time.perf_counter()
            agent.run_episode()
            agent.finish_episode()
            seconds = time.perf_counter() - started
            # One seed, one training: all three have made the steps that agent ONE has counted.
            steps = sum(map(len, agents[ONE if name == CEILING else name].rewards.values()))
            if steps >= args.min_steps:  # the short episodes of the beginning measure the start of an episode
                speeds[name].append(steps / seconds)
    return {"steps_per_s": speeds}


def build_parser():
    """The flags of rpc_rl, whose training is timed, and how long."""
    parser = rpc_rl.build_parser()
    parser.description = __doc__
    parser.set_defaults(example="benchmark_rpc_rl", output_dir=Path("outputs", "benchmark_rpc_rl"))
    count = bounded(int, at_least=1)
    parser.add_argument("--rounds", type=count, default=100, metavar="N", help="episodes of each agent")
    parser.add_argument("--min_steps", type=count, default=200, metavar="N", help="skip episodes with fewer steps")
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    metrics = launch(run_worker, args, rpc_rl.role_name)
    if metrics is None:
        return None
    medians = {name: statistics.median(speeds) for name, speeds in metrics["steps_per_s"].items()}
    rows = [{"protocol": name, "env_steps_per_s": speed, "share_of_ceiling": speed / medians[CEILING]}
            for name, speed in medians.items()]
    metrics = report.save_metrics(args, {**metrics, "rows": rows}, backend="tensorpipe")
    print(f"{'':15} steps/s   of the ceiling   (medians of {len(metrics['steps_per_s'][ONE])} episodes)")
    for row in rows:
        print(f"{row['protocol']:15} {row['env_steps_per_s']:7.0f}   {row['share_of_ceiling']:14.0%}")
    return metrics


if __name__ == "__main__":
    main()
