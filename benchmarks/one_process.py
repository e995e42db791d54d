"""batch_rl without RPC: one process has the policy and a vector environment; the same training.

    python -m benchmarks.one_process                        steps/s, by number of environments
    python -m benchmarks.one_process --mode train           until solved, with each of them

Compare RPC with this program. It is faster than all variants of batch_rl as long as one process
can step all environments: the work that the variants distribute costs less than their messages.
"""

import statistics
import time

from common import report
from common.cli import Parser, bounded, require_memory
from common.session import device_for

import numpy as np
import torch

from batch_rl import until_solved
from batch_rl.main import Policy
from batch_rl.results import ENV_BYTES, STEP_BYTES, env_steps
from batch_rl.vector import Environments, Group, VectorAgent, add_envs_flag


class OneProcess(VectorAgent):
    """`VectorAgent` with the environments beside it.

    Args:
        args: Flags of batch_rl.
        num_envs: Number of environments.
    """

    def __init__(self, args, num_envs):
        self.args, self.device = args, device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.running_reward, self.num_envs = 0.0, num_envs
        self.seeds = torch.Generator().manual_seed(args.seed)
        self.rng = np.random.default_rng(args.seed)
        self.ob_rrefs = [None]  # one observer, which is this process
        self.envs = Environments(num_envs, args.envs)

    def run_episode(self, batch):
        """Make the steps of an episode; the mean length of the first stretches."""
        group = Group(self, batch, self.num_envs)
        seed = torch.randint(2**30, (), generator=self.seeds).item()
        states = self.envs.reset(self.args.num_steps, seed)
        for step in range(self.args.num_steps):
            actions, saved = group.act([states.tobytes()])
            group.saved_log_probs.append(saved)
            states = self.envs.step(step, actions[0])
        returns, first_lengths = self.envs.returns(self.args.gamma)
        self.group, self.returns = group, returns.unsqueeze(0)
        return first_lengths.mean().item()


def build_parser():
    """Make the parser: the flags of batch_rl that mean something here."""
    parser = Parser("benchmark_one_process", __doc__, distributed=False)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--mode", choices=["compare", "train"], default="compare", help="train: until solved")
    add("--num_envs", type=count, nargs="+", default=[16, 64, 320, 1024], metavar="K",
        help="how many environments; several to compare")
    add_envs_flag(parser)
    add("--num_episode", type=count, default=3, metavar="N", help="to time, after a warm-up")
    add("--num_steps", type=count, default=500, metavar="N", help="of an episode")
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99, help="discount factor")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    until_solved.add_training_flags(parser)
    return parser


def measure(args, num_envs):
    """Environment steps/s of the median episode after a warm-up, or how a training went."""
    agent, started = OneProcess(args, num_envs), time.perf_counter()
    if args.mode == "train":
        metrics = until_solved.train(agent, args)
        return {**{key: metrics[key]
                   for key in ("solved", "episodes", "env_steps", "env_steps_per_s")},
                "seconds": time.perf_counter() - started}
    speeds = []
    for _ in range(1 + args.num_episode):
        started = time.perf_counter()
        agent.finish_episode(True, agent.run_episode(True))
        speeds.append(env_steps(agent.returns) / (time.perf_counter() - started))
    return {"env_steps_per_s": statistics.median(speeds[1:])}


def main(argv=None):
    """Print a line for each number of environments and write metrics.json."""
    args = build_parser().parse_args(argv)
    require_memory(args, ["num_envs", "num_steps"],
                   max(args.num_envs) * (ENV_BYTES + args.num_steps * STEP_BYTES))
    torch.set_num_threads(1)  # a second one is no faster for so small layers
    rows = []
    for num_envs in args.num_envs:
        numbers = measure(args, num_envs)
        rows.append({"num_envs": num_envs, **numbers})
        text = f"{num_envs:6} environments: {numbers['env_steps_per_s']:8.0f} environment steps/s"
        if args.mode == "train":
            solved = "solved" if numbers["solved"] else "not solved"
            text += f", {solved} in {numbers['episodes']} episodes, {numbers['seconds']:.1f} s"
        print(text)
    return report.save_metrics(args, {"mode": args.mode, "rows": rows}, backend=None)


if __name__ == "__main__":
    main()
