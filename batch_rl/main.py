r"""CartPole with answers in batches: one forward decides for all observers (tutorial 6_8, second half).

As in rpc_rl, observers play and one agent decides. But the agent lets every request wait, without a thread of its own,
until the requests of all observers are there; the last one runs the policy once for all of them and wakes the others.

    rank 1 "observer1"                                    rank 0 "agent"
    +------------------+                                 +------------------------------------------+
    | K CartPoles      | --- select_action_batch(0, ---> | states[0]; a future                      |
    |                  |     states)                     |                the last request to come: |
    +------------------+ <--------- actions ------------ |                   policy(all states)     |
    rank 2 "observer2"                                   |                   future.set_result      |
    +------------------+                                 |                                          |
    | K CartPoles      | --- select_action_batch(1, ---> | states[1]; the same future               |
    |                  |     states)                     |                                          |
    +------------------+ <--------- actions ------------ |                                          |
                                                         +------------------------------------------+

    python batch_rl/main.py                                           with and without batches, 1 to 10 observers
    python batch_rl/main.py --observers 5 --envs_per_observer 16      16 environments behind each request
    python batch_rl/main.py --mode train --observers 5                until it is solved
    python batch_rl/main.py --check                                   the same numbers as a single process?
    torchrun --nproc_per_node 6 batch_rl/main.py                      under torchrun: one agent, five observers
    python batch_rl/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                        one rank per terminal or machine

Last line, about:
    10 observers: 2702 environment steps/s in batches, 1302 one by one: 2.1 times as many
"""

import statistics
import threading
import time

import gymnasium as gym
import torch
from common import cli, report
from common.cli import Parser, bounded, refuse
from common.launch import launch
from common.session import device_for, rpc_options, wait_all
from torch import nn, optim
from torch.distributed import rpc
from torch.distributions import Categorical
from torch.futures import Future
from torch.nn import functional as F

from batch_rl.reinforce import discounted_returns, policy_loss
from batch_rl.results import BATCHED, ENV_NAME, SINGLE, plot, table_of
from batch_rl.single_process import replay

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
RPC_THREADS = 2  # more only queue for the interpreter lock
ENV_BYTES, STEP_BYTES = 4000, 200  # an environment, and what is kept of each of its steps, at least


def role_name(rank, world_size):
    """Rank 0 is the agent, all others are observers."""
    return AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)


class Policy(nn.Module):
    """States (..., 4) to the probabilities (..., 2) of pushing left and right."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x):
        """Works on any number of states at once: the last axis is the one that matters."""
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=-1)


class Observer:
    """Owns K environments and plays the episodes that the agent asks for; lives on an observer's process."""

    def __init__(self, args):
        self.id = rpc.get_worker_info().id - 1
        self.agent_info = rpc.get_worker_info(AGENT_NAME)
        self.gamma = args.gamma
        self.envs = [gym.make(ENV_NAME, disable_env_checker=True) for _ in range(args.envs_per_observer)]

    def run_episode(self, batch, n_steps, seed):
        """Make `n_steps` steps in every environment, starting over whenever a pole has fallen.

        Returns:
            The return of each step, shape (K, n_steps), and the length of the first stretch, mean of the environments.
        """
        select_action = Agent.select_action_batch if batch else Agent.select_action
        states = [env.reset(seed=seed + k)[0].tolist() for k, env in enumerate(self.envs)]
        rewards, returns = ([[] for _ in self.envs] for _ in range(2))
        first_lengths, self.sent, self.received = {}, [], []
        for step in range(n_steps):
            # K states in one RPC, K actions back. Lists of numbers travel cheaper than small tensors.
            actions = rpc.rpc_sync(self.agent_info, select_action, args=(self.id, states))
            self.sent.append(states)
            self.received.append(actions)
            states = []
            for k, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
                state, reward, terminated, truncated, _ = env.step(action)
                rewards[k].append(reward)
                if terminated or truncated or step + 1 == n_steps:
                    # Only a fall is an end. Where time ran out, the last reward would have gone on for long.
                    after = 0.0 if terminated else reward / max(1 - self.gamma, 1 / n_steps)
                    returns[k] += discounted_returns(rewards[k], self.gamma, after)
                    first_lengths.setdefault(k, len(rewards[k]))
                    rewards[k] = []
                    state, _ = env.reset()
                states.append(state.tolist())
        return torch.tensor(returns), statistics.mean(first_lengths.values())

    def rollout(self):
        """For `check`: the states sent, shape (n_steps, K, 4), and the actions received, (n_steps, K)."""
        return self.sent, self.received


_agent = None  # on rank 0, where the requests find it: an RRef in each of them costs a sixth of the speed


class Agent:
    """Decides for all observers and learns from them; lives on rank 0."""

    def __init__(self, world_size, args):
        global _agent
        _agent = self
        self.device = device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=args.lr)
        self.n_steps, self.timeout = args.num_steps, args.timeout
        self.seeds = torch.Generator().manual_seed(args.seed)  # of the environments
        self.ob_rrefs = [rpc.remote(OBSERVER_NAME.format(ob_rank), Observer, args=(args,))
                         for ob_rank in range(1, world_size)]
        self.lock = threading.Lock()

    def act(self, states):
        """States (..., K, 4), numbers, to actions (..., K), numbers, and their log-probabilities, with a graph."""
        m = Categorical(self.policy(torch.tensor(states, device=self.device)))
        action = m.sample()
        return action.tolist(), m.log_prob(action)

    @staticmethod
    def select_action(ob_id, states):
        """Called by an observer over RPC: K states to K actions, with a forward for this observer alone."""
        self = _agent
        actions, log_probs = self.act(states)
        self.saved_log_probs[ob_id].append(log_probs)
        return actions

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(ob_id, states):
        """The same, but the answer is a future, which the last request of all observers completes.

        No thread waits for it: when it is completed, RPC sends the answer.
        """
        self = _agent
        with self.lock:
            self.states[ob_id] = states
            batch, future_actions = self.states, self.future_actions
            last = len(batch) == len(self.ob_rrefs)
            if last:
                self.states, self.future_actions = {}, Future()  # for the next step
        future_action = future_actions.then(lambda future_actions: future_actions.wait()[ob_id])
        if last:  # outside of the lock: the answers are sent in here, and what they wake up will ask again
            actions, log_probs = self.act([batch[ob_id] for ob_id in range(len(batch))])
            self.saved_log_probs.append(log_probs)
            future_actions.set_result(actions)
        return future_action

    def run_episode(self, batch):
        """Let every observer make its steps, all at the same time; the mean length of their first stretches."""
        self.batch = batch
        self.saved_log_probs = [] if batch else [[] for _ in self.ob_rrefs]
        self.states, self.future_actions = {}, Future()
        futs = []
        for ob_rref in self.ob_rrefs:
            seed = torch.randint(2**30, (), generator=self.seeds).item()  # other environments for every observer
            # An episode takes as long as it takes: no timeout. Every request in it has one.
            futs.append(ob_rref.rpc_async(timeout=0).run_episode(batch, self.n_steps, seed))
        try:
            rets = wait_all(futs)
        except RuntimeError as error:
            if "set timeout" not in str(error) or not batch:
                raise
            late = [OBSERVER_NAME.format(ob_id + 1) for ob_id in range(len(futs)) if ob_id not in self.states]
            raise TimeoutError(f"timed out: no states from {', '.join(late)} for {self.timeout:g} s") from None
        self.returns = torch.stack([returns for returns, _ in rets])
        return statistics.mean(length for _, length in rets)

    def log_probs(self):
        """Of all actions of the episode, with their graph: shape (observers, K, steps) in both modes."""
        if self.batch:
            return torch.stack(self.saved_log_probs, dim=-1)
        return torch.stack([torch.stack(of_observer, dim=-1) for of_observer in self.saved_log_probs])

    def finish_episode(self):
        """Train on the recorded episode. No RPC here."""
        self.optimizer.zero_grad()
        policy_loss(self.log_probs(), self.returns).backward()
        self.optimizer.step()


def run_worker(rank, world_size, args):
    """Rank 0 runs the experiment and returns its numbers; the others wait passively for its commands."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = None
    if rank == 0:
        agent = Agent(world_size, args)
        metrics = train(agent, args) if args.mode == "train" else compare(agent, args)
    rpc.shutdown()  # waits for everyone: until then, the observers answer the agent's calls
    return metrics


def compare(agent, args):
    """Time episodes of both modes, in turns, their training included; the seconds of each."""
    seconds = {BATCHED: [], SINGLE: []}
    for episode in range(1 + args.num_episode):
        for mode, of_mode in seconds.items():
            started = time.perf_counter()
            agent.run_episode(mode == BATCHED)
            agent.finish_episode()
            if episode > 0:  # the first one is the warm-up
                of_mode.append(time.perf_counter() - started)
    return {"seconds": seconds}


def train(agent, args):
    """Train with batches until the running reward is above the threshold."""
    rewards, running_rewards, started = [], [0.0], time.perf_counter()
    with report.progress(args.max_episodes, "episode") as bar:
        while running_rewards[-1] <= args.reward_threshold and len(rewards) < args.max_episodes:
            rewards.append(agent.run_episode(batch=True))
            agent.finish_episode()
            running_rewards.append(0.5 * rewards[-1] + 0.5 * running_rewards[-1])
            bar.set_postfix_str(f"running reward {running_rewards[-1]:.1f}", refresh=False)
            bar.update()
            if bar.disable and len(rewards) % args.log_interval == 0:  # not a terminal
                report.log(AGENT_NAME, f"episode {len(rewards)}  last reward {rewards[-1]:.1f}  "
                                       f"running reward {running_rewards[-1]:.1f}")
    env_steps = len(rewards) * args.num_steps * args.envs_per_observer * len(agent.ob_rrefs)
    return {"solved": running_rewards[-1] > args.reward_threshold, "episodes": len(rewards), "env_steps": env_steps,
            "env_steps_per_s": env_steps / (time.perf_counter() - started), "rewards": rewards,
            "running_rewards": running_rewards[1:]}


def record(rank, world_size, args):
    """For `check`: an episode of each mode, as the agent and as the observers saw it, without dropout."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    recorded = None
    if rank == 0:
        agent, recorded = Agent(world_size, args), {}
        agent.policy.eval()
        for mode in (BATCHED, SINGLE):
            agent.run_episode(mode == BATCHED)
            log_probs = agent.log_probs()
            gradient = torch.autograd.grad(policy_loss(log_probs, agent.returns), list(agent.policy.parameters()))
            states, actions = zip(*(ob_rref.rpc_sync().rollout() for ob_rref in agent.ob_rrefs), strict=True)
            recorded[mode] = {"states": states, "actions": actions, "log_probs": log_probs.tolist(),
                              "gradient": torch.cat([g.flatten() for g in gradient]).tolist()}
    rpc.shutdown()
    return recorded


def check(args):
    """Play the episodes of both modes again, in one process, with the actions that the observers received."""
    recorded = launch(record, args, role_name)
    if recorded is None:
        return None
    torch.manual_seed(args.seed)
    policy, seeds = Policy().eval(), torch.Generator().manual_seed(args.seed)
    ours, alone, tolerances = {}, {}, {}
    for mode in (BATCHED, SINGLE):
        of_mode = recorded[mode]
        replayed = replay(policy, gym.make(ENV_NAME), of_mode["actions"], seeds, args)
        # The same states to the bit. Sums of float32 in another order: off by a few 1e-7 of the largest entry.
        for what, tolerance in (("states", 0), ("log_probs", 1e-5), ("gradient", 1e-5)):
            name = f"{mode}: {what}"
            ours[name], alone[name], tolerances[name] = of_mode[what], replayed[what], tolerance
    return report.compare(ours, alone, tolerances)


def build_parser():
    """The flags of this example."""
    parser = Parser("batch_rl", __doc__, world_size=None, min_world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--mode", choices=["compare", "train"], default="compare", help="the tutorial's experiment, or until solved")
    observers = bounded(int, at_least=1, at_most=cli.MOST_PROCESSES - 1)
    add("--observers", type=observers, nargs="+", metavar="N",
        help="how many observers; several, one after the other, to compare (default: 1 2 5 10 to compare, 5 to train)")
    add("--envs_per_observer", type=count, default=1, metavar="K", help="environments of each observer, in one request")
    add("--num_episode", type=count, default=2, metavar="N", help="episodes to time in each mode, after a warm-up")
    add("--num_steps", type=count, default=500, metavar="N", help="steps of every environment in an episode")
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99, help="how much to value future rewards")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    add("--max_episodes", type=count, default=500, metavar="N", help="when training: give up after so many")
    add("--reward_threshold", type=bounded(float, above=0), default=gym.spec(ENV_NAME).reward_threshold, metavar="R",
        help="when training: solved when the running reward is above it")
    add("--log_interval", type=count, default=5, metavar="N", help="when training: episodes from one line to the next")
    return parser


def parse_args(argv, parser):
    """The flags, with `observers` as a list, whatever was given."""
    args = parser.parse_args(argv)
    given = None if args.observers is None else cli.given(args, "observers")
    if args.world_size is not None:  # torchrun's, or of a manual launch: all but the agent observe
        if args.observers not in (None, [args.world_size - 1]):
            refuse(f"{given} must be {args.world_size - 1} with --world_size {args.world_size}: "
                   "all processes but the agent are observers")
        args.observers = [args.world_size - 1]
    elif args.observers is None:
        args.observers = [3] if args.check else [5] if args.mode == "train" else [1, 2, 5, 10]
    else:
        cli.require_processes(given, max(args.observers) + 1)
    if len(args.observers) > 1 and (args.check or args.mode == "train"):
        why = "--check" if args.check else "--mode train"
        refuse(f"{given} must be a single number with {why}")
    if args.mode == "train" and args.num_steps <= args.reward_threshold:
        refuse(f"--num_steps {args.num_steps} must be above --reward_threshold "
               f"{args.reward_threshold:g}: otherwise no episode is long enough")
    args.world_size = max(args.observers) + 1
    of_observer = args.envs_per_observer * (ENV_BYTES + args.num_steps * STEP_BYTES)
    observers_here = sum(rank > 0 for rank in cli.ranks_here(args))
    cli.require_memory(args, ["envs_per_observer", "num_steps"], observers_here * of_observer)
    return args


def main(argv=None):
    """Compare, train or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = parse_args(argv, build_parser())
    if args.check:
        return check(args)
    runs = {}
    for observers in args.observers:  # a start of its own for each: waiting processes would take time from the others
        args.world_size = observers + 1
        runs[observers] = launch(run_worker, args, role_name)
    if None in runs.values():
        return None
    wall_s = sum(run["wall_s"] for run in runs.values())
    args.world_size = max(args.observers) + 1
    if args.mode == "train":
        metrics = runs[args.observers[0]]
    else:
        metrics = {**table_of(args, {observers: run["seconds"] for observers, run in runs.items()}), "wall_s": wall_s}
    metrics = report.save_metrics(args, {"envs_per_observer": args.envs_per_observer, **metrics}, backend="tensorpipe")
    plot(metrics, args)
    if args.mode == "train":
        print(f"{ENV_NAME} {'solved' if metrics['solved'] else 'not solved'} in {metrics['episodes']} episodes: "
              f"running reward {metrics['running_rewards'][-1]:.1f} (threshold {args.reward_threshold:g}), "
              f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    else:
        batched, single = (row["env_steps_per_s"] for row in metrics["rows"][-2:])
        print(f"{args.observers[-1]} observers: {batched:.0f} environment steps/s in batches, {single:.0f} one by one: "
              f"{batched / single:.1f} times as many")
    return metrics


if __name__ == "__main__":
    main()
