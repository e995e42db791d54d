"""What does a batch save in batch_rl, and what is left to save if the agent acts without a graph?

Two agents play episodes with and without batches, all four in turns, within one run:

    with a graph      the lesson's: every forward keeps its graph, backward goes through all of them
    without a graph   states and actions are kept; all log-probabilities come from one forward at
                      the end

    python -m benchmarks.batch_rl --observers 5 --num_episode 8
"""

import statistics
import time
from pathlib import Path

import torch
from common import report
from common.launch import launch
from common.session import rpc_options
from torch.distributed import rpc
from torch.distributions import Categorical

from batch_rl import main as lesson
from batch_rl.fast_agent import FastAgent
from batch_rl.results import with_observers

MODES = {"batched": True, "single": False}


class WithoutGraph(FastAgent):
    """Acts without a graph, and without dropout: the forward at the end would draw other masks."""

    def __init__(self, world_size, args):
        super().__init__(world_size, args)
        self.policy.eval()

    def act(self, states):
        """Instead of the log-probabilities, what they can be computed from."""
        with torch.inference_mode():
            action = Categorical(self.policy(torch.tensor(states, device=self.device))).sample()
        return action.tolist(), (states, action.tolist())

    def log_probs(self, batch):
        """Of all actions of the episode, in one forward: shape (observers, K, steps)."""
        if batch:  # (steps, observers, K)
            states, actions = map(torch.tensor, zip(*self.saved_log_probs, strict=True))
        else:
            by_observer = [map(torch.tensor, zip(*saved, strict=True))
                           for saved in self.saved_log_probs]
            states, actions = (torch.stack(parts, dim=1)
                               for parts in zip(*by_observer, strict=True))
        policy = Categorical(self.policy(states.to(self.device)))
        return policy.log_prob(actions.to(self.device)).permute(1, 2, 0)


def run_worker(rank, world_size, args):
    """Time all four on episodes of their own; rank 0 returns the environment steps/s of each."""
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, lesson.RPC_THREADS))
    metrics = measure(rank, world_size, args) if rank == 0 else None
    rpc.shutdown()
    return metrics


def measure(rank, world_size, args):
    """What `run_worker` returns."""
    agents = {"with a graph": FastAgent(world_size, args),
              "without a graph": WithoutGraph(world_size, args)}
    speeds = {f"{graph}, {mode}": [] for graph in agents for mode in MODES}
    for episode in range(1 + args.num_episode):
        for graph, agent in agents.items():
            for mode, batch in MODES.items():
                started = time.perf_counter()
                agent.finish_episode(batch, agent.run_episode(batch))
                seconds = time.perf_counter() - started
                if episode > 0:  # the first one is the warm-up
                    speeds[f"{graph}, {mode}"].append(agent.returns.numel() / seconds)
    return {"env_steps_per_s": speeds}


def build_parser():
    """The flags of batch_rl, whose episodes are timed."""
    parser = lesson.build_parser()
    parser.description = __doc__
    parser.set_defaults(example="benchmark_batch_rl",
                        output_dir=Path("outputs", "benchmark_batch_rl"))
    return parser


def main(argv=None):
    """Print the table and write metrics.json."""
    args = with_observers(build_parser().parse_args(argv))
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    medians = {name: statistics.median(speeds)
               for name, speeds in metrics["env_steps_per_s"].items()}
    metrics = report.save_metrics(args, {**metrics, "medians": medians}, backend="tensorpipe")
    print(f"{args.world_size - 1} observers, {args.envs_per_observer} environments each: "
          f"environment steps per second, medians of {args.num_episode} episodes")
    for graph in ("with a graph", "without a graph"):
        batched, single = (medians[f"{graph}, {mode}"] for mode in MODES)
        print(f"{graph:15}   batched {batched:6.0f}   single {single:6.0f}   "
              f"speed-up {batched / single:.2f}")
    return metrics


if __name__ == "__main__":
    main()
