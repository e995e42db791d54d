r"""CartPole with answers in batches: one forward decides for all observers (6_8, second half).

As in rpc_rl, observers play and one agent decides. Here, every request waits for the last one, but
no thread waits. The last request runs the policy once for all observers, and completes the future
of the other requests.

    rank 1 "observer1"                                  rank 0 "agent"
    +--------------+                                    +--------------------------------------+
    | K CartPoles  | -- select_action_batch(0, states)->| states[0]; a future                  |
    +--------------+ <----------- actions ------------- |            the last request:         |
    rank 2 "observer2"                                  |               policy(all states)     |
    +--------------+                                    |               future.set_result      |
    | K CartPoles  | -- select_action_batch(1, states)->| states[1]; the same future           |
    +--------------+ <----------- actions ------------- +--------------------------------------+

    python batch_rl/main.py                            with and without batches
    python batch_rl/main.py --check                    compare with a single process
    torchrun --nproc_per_node 6 batch_rl/main.py       one agent, five observers
    python batch_rl/main.py --world_size 3 --rank 1 --master_addr HOST    one rank per terminal

The last line compares the environment steps per second with batches and without. Variants:

    vector.py             one vector environment per observer, bytes in the messages
    until_solved.py       plays and learns in batches until CartPole is solved
"""

import argparse
import threading
from collections.abc import Callable

from common.cli import MOST_PROCESSES, Parser, bounded, given, refuse, require_processes
from common.launch import launch
from common.program import run_program
from common.report import Clock, require_finite
from common.session import device_for, rpc_options, wait_all

import gymnasium as gym
import torch
from torch import nn, optim
from torch.distributed import rpc
from torch.distributions import Categorical
from torch.nn import functional as F

from batch_rl.results import ENV_NAME, Rounds, finish, require_room

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
RPC_THREADS = 2  # more threads only wait for the interpreter lock
EPS = torch.finfo(torch.float32).eps


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the agent, all other ranks are observers."""
    return AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)


class Policy(nn.Module):
    """A map from states (..., 4) to the probabilities (..., 2) of a push to the left or right."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the probabilities of any number of states at once."""
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=-1)


class Observer:
    """The owner of K environments, which plays episodes for the agent; on ranks 1, 2, ..."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.gamma = args.gamma
        self.envs = [gym.make(ENV_NAME, disable_env_checker=True)
                     for _ in range(args.envs_per_observer)]

    def run_episode(self, agent_rref: rpc.RRef, batch: bool, n_steps: int,
                    seed: int) -> tuple[torch.Tensor, float]:
        """Play n_steps; return their returns (K, n_steps), and the first stretches' mean length.

        A stretch lasts from a reset until the pole falls or time runs out; elsewhere, this is
        called an episode. Here, as in the tutorial, an episode is n_steps of all environments.
        """
        select_action = Agent.select_action_batch if batch else Agent.select_action
        states = [env.reset(seed=seed + k)[0].tolist() for k, env in enumerate(self.envs)]
        rewards, returns = [[] for _ in self.envs], [[] for _ in self.envs]
        first_lengths = {}
        for step in range(n_steps):
            # One RPC sends K states and returns K actions. Numbers cost less than small tensors.
            actions = rpc.rpc_sync(agent_rref.owner(), select_action,
                                   args=(agent_rref, self.id, states))
            for k, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
                state, reward, terminated, truncated, _ = env.step(action)
                rewards[k].append(reward)
                if terminated or truncated or step + 1 == n_steps:
                    returns[k] += self.returns(rewards[k], terminated, n_steps)
                    first_lengths.setdefault(k, len(rewards[k]))
                    rewards[k] = []
                    state, _ = env.reset()
                states[k] = state.tolist()
        return torch.tensor(returns), sum(first_lengths.values()) / len(first_lengths)

    def returns(self, rewards: list[float], terminated: bool, n_steps: int) -> list[float]:
        """Compute the discounted return of each step of one stretch, a list like `rewards`."""
        # Tutorial: R started at 0 after every stretch, even if only time had run out.
        R = 0.0 if terminated else rewards[-1] / max(1 - self.gamma, 1 / n_steps)
        returns = []
        for r in reversed(rewards):
            R = r + self.gamma * R
            returns.append(R)
        return returns[::-1]


class Agent:
    """The policy and its training: it chooses actions for all observers; on rank 0."""

    observer_class = Observer  # vector.py overrides it

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        self.args = args
        self.device = device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=args.lr)
        self.running_reward = 0.0
        self.seeds = torch.Generator().manual_seed(args.seed)  # draws the environments' seeds
        self.agent_rref = rpc.RRef(self)
        self.ob_rrefs = [
            rpc.remote(OBSERVER_NAME.format(ob_rank), self.observer_class, args=(args,))
            for ob_rank in range(1, world_size)]
        self.lock = threading.Lock()

    def act(self, states: list) -> tuple[list, torch.Tensor]:
        """Choose actions (...) for states (..., 4), both lists; also return their log-probs."""
        m = Categorical(self.policy(torch.tensor(states, device=self.device)))
        actions = m.sample()
        return actions.tolist(), m.log_prob(actions)

    @staticmethod
    def select_action(agent_rref: rpc.RRef, ob_id: int, states: list[list[float]]) -> list[int]:
        """Answer an observer over RPC: K actions for K states, in a forward pass of their own."""
        self = agent_rref.local_value()
        actions, log_probs = self.act(states)
        self.saved_log_probs[ob_id].append(log_probs)
        return actions

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref: rpc.RRef, ob_id: int,
                            states: list[list[float]]) -> torch.futures.Future:
        """Return a future of the answer, so no thread waits for the other observers."""
        self = agent_rref.local_value()
        with self.lock:
            # Tutorial: copied into one tensor, which autograd on a CPU needs unchanged.
            self.states[ob_id] = states
            batch, future_actions = self.states, self.future_actions
            last = len(batch) == len(self.ob_rrefs)
            if last:
                self.states, self.future_actions = {}, torch.futures.Future()  # for the next step
        future_action = future_actions.then(lambda future_actions: future_actions.wait()[ob_id])
        if last:  # outside the lock: set_result sends the answers, and the observers ask again
            actions, log_probs = self.act([batch[ob_id] for ob_id in range(len(batch))])
            self.saved_log_probs.append(log_probs)
            future_actions.set_result(actions)
        return future_action

    def run_episode(self, batch: bool) -> float:
        """Let all observers play at the same time; return their mean first length."""
        self.saved_log_probs = [] if batch else [[] for _ in self.ob_rrefs]
        self.states, self.future_actions = {}, torch.futures.Future()
        futs = []
        for ob_rref in self.ob_rrefs:
            # Tutorial: one seed made all environments identical.
            seed = torch.randint(2**30, (), generator=self.seeds).item()
            observer = ob_rref.rpc_async(timeout=0)  # no limit, because each request has one
            futs.append(observer.run_episode(self.agent_rref, batch, self.args.num_steps, seed))
        rets = wait_all(futs)
        self.returns = torch.stack([returns for returns, _ in rets])
        return sum(length for _, length in rets) / len(rets)

    def log_probs(self, batch: bool) -> torch.Tensor:
        """Stack the actions' log-probabilities, with their graph: (observers, K, steps)."""
        if batch:
            return torch.stack(self.saved_log_probs, dim=-1)
        return torch.stack([torch.stack(saved, dim=-1) for saved in self.saved_log_probs])

    def finish_episode(self, batch: bool, ep_reward: float) -> None:
        """Train on the recorded episode with REINFORCE. No RPC here."""
        returns, log_probs = self.returns, self.log_probs(batch)
        # Tutorial: without batches, the shapes differed.
        assert log_probs.shape == returns.shape
        # Tutorial: used the returns as they were, whose spread makes the gradient noisy.
        returns = (returns - returns.mean()) / (returns.std(correction=0) + EPS)
        policy_loss = -(log_probs * returns.to(log_probs)).sum() / len(returns)
        require_finite(policy_loss, "after an episode")
        self.optimizer.zero_grad()
        policy_loss.backward()
        self.optimizer.step()
        self.running_reward = 0.5 * ep_reward + 0.5 * self.running_reward


def run_worker(rank: int, world_size: int, args: argparse.Namespace,
               agent_class: type[Agent] = Agent) -> dict | None:
    """Time episodes with and without batches on rank 0; the other ranks answer its calls.

    Returns:
        On rank 0 "timed", by mode, seconds and environment steps of each episode; None elsewhere.
    """
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = None
    if rank == 0:
        agent = agent_class(world_size, args)
        rounds = Rounds(world_size - 1, args.num_episode)
        for episode in range(1 + args.num_episode):  # episode 0 is the warm-up
            # Tutorial: a run for each mode, timed together with the start of its processes.
            for batch in (True, False):
                with Clock() as clock:
                    ep_reward = agent.run_episode(batch)
                    agent.finish_episode(batch, ep_reward)
                rounds.add(episode, batch, clock.seconds, agent.returns)
        metrics = rounds.metrics()
    rpc.shutdown()  # waits for all ranks; until then, the observers answer the agent's calls
    return metrics


def build_parser(example: str = "batch_rl", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=None, min_world_size=2, rpc=True)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--observers", type=bounded(int, at_least=1, at_most=MOST_PROCESSES - 1), nargs="+",
        metavar="N", help="numbers of observers to compare (default: 1 2 5 10; with --check, 3)")
    add("--envs_per_observer", type=count, default=1, metavar="K",
        help="environments of each observer, all in one request")
    add("--num_episode", type=count, default=2, metavar="N",
        help="timed episodes of each mode, after a warm-up")
    add("--num_steps", type=count, default=500, metavar="N",
        help="steps of each environment in an episode")
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99,
        help="discount factor of future rewards")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    return parser


def set_observers(args: argparse.Namespace) -> None:
    """Make `args.observers` a list; refuse it if it contradicts `--world_size` or `--check`."""
    flag = None if args.observers is None else given(args, "observers")
    if args.world_size is not None:  # from torchrun or a manual launch
        if args.observers not in (None, [args.world_size - 1]):
            refuse(f"{flag} must be {args.world_size - 1} with --world_size {args.world_size}: "
                   "all processes but the agent are observers")
        args.observers = [args.world_size - 1]
    elif args.observers is None:
        args.observers = [3] if args.check else [1, 2, 5, 10]
    else:
        args.observers = list(dict.fromkeys(args.observers))  # without repetitions
        require_processes(flag, max(args.observers) + 1, rpc=True)
    if args.check and len(args.observers) > 1:
        refuse(f"{flag} must be a single number with --check")
    args.world_size = max(args.observers) + 1


def launch_each(run_worker: Callable[..., dict | None], args: argparse.Namespace,
                role_name: Callable[[int, int], str]) -> dict[int, dict] | None:
    """Launch the program with each number of observers; return `{observers: metrics}`."""
    runs = {}
    for observers in args.observers:  # new processes each time, because idle ones would cost time
        args.world_size = observers + 1
        runs[observers] = launch(run_worker, args, role_name)
    return None if None in runs.values() else runs


def main(argv: list[str] | None = None) -> dict | None:
    """Compare both modes, or compare with a single process if `--check` is given.

    Returns:
        The metrics, or the differences of the check, on the reporting process; None elsewhere.
    """
    args = build_parser().parse_args(argv)
    set_observers(args)
    require_room(args)
    return run_program(run_worker, args, role_name, finish, start=launch_each)


if __name__ == "__main__":
    main()
