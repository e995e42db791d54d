"""Measure the cost of an RPC in rpc_rl, and compare the lesson with the fastest possible RPCs.

Four agents play alternately within one run, so a noisy machine cannot favor one of them:

    plain                 the tutorial's: 2 RPCs a step, select_action and report_reward
    fast, 2 RPCs a step   acts without a graph
    fast                  the same episodes, but the reward rides along with the next state
    ceiling               the RPCs of fast, answered at once: it only reads the actions from a list

    python -m benchmarks.rpc_rl --world_size 3 --rounds 60
"""

import statistics
import time

from common import report
from common.cli import bounded
from common.launch import launch
from common.session import rpc_options

from torch.distributed import rpc

from rpc_rl import main as lesson
from rpc_rl.fast import FastAgent

PLAIN, TWO, ONE, CEILING = "plain", "fast, 2 RPCs a step", "fast", "ceiling"


class TwoRPCs(FastAgent):
    """The fast agent with the tutorial's protocol."""

    def __init__(self, world_size, args):
        super().__init__(world_size, args)
        self.ob_rrefs = {ob_id: rpc.remote(ob_id, lesson.Observer) for ob_id in self.ob_rrefs}


class Replay(FastAgent):
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
        """Ignore the reward: this agent does not learn."""

    def finish_episode(self):
        """Nothing to learn."""


def run_worker(rank, world_size, args):
    """Time the agents in turns; rank 0 returns steps/s of each round."""
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, lesson.RPC_THREADS))
    metrics = measure(world_size, args) if rank == 0 else None
    rpc.shutdown()
    return metrics


def measure(world_size, args):
    """Return the metrics of `run_worker`."""
    agents = {PLAIN: lesson.Agent(world_size, args), TWO: TwoRPCs(world_size, args),
              ONE: FastAgent(world_size, args)}
    agents[CEILING] = Replay(world_size, args, agents[ONE])
    speeds = {name: [] for name in agents}
    for _ in range(args.rounds):
        for name, agent in agents.items():
            started = time.perf_counter()
            agent.run_episode()
            agent.finish_episode()
            seconds = time.perf_counter() - started
            counted = agents[ONE] if name == CEILING else agent  # which plays what ONE has played
            steps = sum(map(len, counted.rewards.values()))
            if steps >= args.min_steps:  # short episodes measure the start of an episode
                speeds[name].append(steps / seconds)
    return {"steps_per_s": speeds}


def build_parser():
    """The flags of rpc_rl, whose training is timed, and how long."""
    parser, count = lesson.build_parser("benchmark_rpc_rl", __doc__), bounded(int, at_least=1)
    parser.add_argument("--rounds", type=count, default=100, metavar="N",
                        help="episodes of each agent")
    parser.add_argument("--min_steps", type=count, default=200, metavar="N",
                        help="skip episodes with fewer steps")
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = build_parser().parse_args(argv)
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    medians = {name: statistics.median(speeds) for name, speeds in metrics["steps_per_s"].items()}
    rows = [{"agent": name, "env_steps_per_s": speed, "share_of_ceiling": speed / medians[CEILING]}
            for name, speed in medians.items()]
    metrics = report.save_metrics(args, {**metrics, "rows": rows}, backend="tensorpipe")
    episodes = len(metrics["steps_per_s"][ONE])
    print(f"{'':20} steps/s   of the ceiling   (medians of {episodes} episodes)")
    for row in rows:
        print(f"{row['agent']:20} {row['env_steps_per_s']:7.0f}   {row['share_of_ceiling']:14.0%}")
    return metrics


if __name__ == "__main__":
    main()
