r"""CartPole over RPC: observers play, one agent decides and learns (tutorial 6_5, first half).

There is one small policy and there are many environments, so the policy stays in one place. Each
observer steps its own CartPole and asks the agent for every action over RPC. After each episode the
agent trains on the actions and rewards that it recorded.

    rank 0 "agent"                                          rank 1 "observer1"
    +------------------------+   run_episode(agent_rref)   +----------------------+
    | Policy, optimizer      | --------------------------> | CartPole-v1          |
    | actions and rewards    |   select_action(id, state)  |                      |
    | per observer           | <-------------------------- | while not done:      |
    |                        | --------- action ---------> |   env.step(action)   |
    |                        |   report_reward(id, reward) |                      |
    | finish_episode():      | <-------------------------- |                      |
    |   REINFORCE, one step  |                             +----------------------+
    +------------------------+ <------------------------->   rank 2 "observer2" ...

    python rpc_rl/main.py --world_size 3                       all processes here
    python rpc_rl/main.py --check                              compare with a single process
    torchrun --nproc_per_node 3 rpc_rl/main.py                 under torchrun
    python rpc_rl/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                 one rank per terminal or machine

It ends with a line like this one. The numbers vary from run to run, because the observer that asks
first draws the next random number:
    CartPole-v1 solved in 196 episodes: running reward 475.5 (threshold 475), 99053 environment ...

`rpc_rl/fast.py` trains the same agent with half the messages, and can resume from a checkpoint.
"""

import argparse

from common import report
from common.cli import Parser, bounded
from common.program import run_program
from common.session import device_for, rpc_options, wait_all

import gymnasium as gym
import torch
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.rpc import RRef, remote
from torch.distributions import Categorical
from torch.nn import functional as F

from rpc_rl.results import ENV_NAME, History, finish, refuse_what_cannot_end

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"  # Tutorial: "obs", the same name for all observers.
RPC_THREADS = 2  # more threads only wait for the interpreter lock; the default of 16 is slower


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
    """The owner of one environment, which plays episodes for the agent; on ranks 1, 2, ..."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.env = gym.make(ENV_NAME, disable_env_checker=True)

    def run_episode(self, agent_rref: RRef, n_steps: int, seed: int) -> bool:
        """Play at most `n_steps` steps with the agent's actions; return whether the pole fell."""
        # Tutorial: _remote_method(Agent.select_action, agent_rref, ...). rpc_sync() replaces it.
        agent = agent_rref.rpc_sync()
        state, _ = self.env.reset(seed=seed)  # Tutorial: one seed made all environments identical.
        for _ in range(n_steps):
            # Send the state to the agent to get an action.
            action = agent.select_action(self.id, state.tolist())
            # Apply the action to the environment, and get the reward.
            state, reward, terminated, truncated, _ = self.env.step(action)
            # Report the reward to the agent for training purposes.
            agent.report_reward(self.id, reward)
            if terminated or truncated:
                break
        return terminated


class Agent:
    """The policy and its training: it chooses actions for all observers; on rank 0."""

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        self.args = args
        self.device = device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=args.lr)
        self.eps = torch.finfo(torch.float32).eps
        self.running_reward = 0.0
        # Tutorial: all observers shared 100 steps, too few to ever reach a reward of 475.
        n_steps = args.total_steps_per_episode // (world_size - 1)
        self.n_steps = min(max(1, n_steps), gym.spec(ENV_NAME).max_episode_steps)

        self.agent_rref = RRef(self)  # lets the observers call this agent
        self.ob_rrefs, self.generators = {}, {}
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs[ob_info.id] = remote(ob_info, Observer)
            seed = 1000 * args.seed + ob_info.id  # each observer plays other episodes
            self.generators[ob_info.id] = torch.Generator().manual_seed(seed)

    def select_action(self, ob_id: int, state: list[float]) -> int:
        """Choose an action, 0 or 1, for a state of 4 numbers; an observer calls this over RPC."""
        probs = self.policy(torch.tensor(state, device=self.device))
        report.require_finite(probs[0], "in an episode", "a probability")
        m = Categorical(probs, validate_args=False)  # the line above has validated them
        action = m.sample()
        self.saved_actions[ob_id].append((probs, action))
        return action.item()

    def report_reward(self, ob_id: int, reward: float) -> None:
        """Record the reward of a step; an observer calls this over RPC."""
        self.rewards[ob_id].append(reward)

    def run_episode(self) -> None:
        """Let all observers play one episode at the same time, and wait for all of them."""
        self.rewards = {ob_id: [] for ob_id in self.ob_rrefs}
        self.saved_actions = {ob_id: [] for ob_id in self.ob_rrefs}
        futs = []
        for ob_id, ob_rref in self.ob_rrefs.items():
            seed = torch.randint(2**31, (), generator=self.generators[ob_id]).item()
            # Asynchronous, so the observers play together. Each one calls back: a nested RPC. The
            # episode has no timeout, because each call within it has one.
            observer = ob_rref.rpc_async(timeout=0)
            futs.append(observer.run_episode(self.agent_rref, self.n_steps, seed))
        self.terminated = dict(zip(self.ob_rrefs, wait_all(futs), strict=True))

    def log_probs(self) -> torch.Tensor:
        """Compute the log-probabilities of all actions, observer by observer: (steps,)."""
        # Tutorial: select_action computed each one. One batch for all costs less.
        probs, actions = zip(*sum(self.saved_actions.values(), []), strict=True)
        return Categorical(torch.stack(probs), validate_args=False).log_prob(torch.stack(actions))

    def finish_episode(self) -> float:
        """Train on the episodes with REINFORCE; return the lowest reward. No RPC here."""
        # Tutorial: one R ran over the joined rewards, so returns leaked between observers.
        returns = []
        for ob_id, rewards in self.rewards.items():
            returns += self.returns(rewards, self.terminated[ob_id])
        # In float32, equal returns would become noise; Bessel's correction makes one step NaN.
        returns = torch.tensor(returns, dtype=torch.float64)
        returns = (returns - returns.mean()) / (returns.std(correction=0) + self.eps)

        log_probs = self.log_probs()
        policy_loss = -(log_probs * returns.to(log_probs)).sum()
        report.require_finite(policy_loss, "after an episode")
        self.optimizer.zero_grad()
        policy_loss.backward()
        self.optimizer.step()

        min_reward = min(sum(rewards) for rewards in self.rewards.values())
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        return min_reward

    def returns(self, rewards: list[float], terminated: bool) -> list[float]:
        """Compute the discounted return of each step of an episode, a list like `rewards`."""
        # Tutorial: R started at 0 even at the time limit, so the end of a perfect episode looked
        # bad. At the time limit, we assume that the last reward would have continued forever.
        bootstrap = self.args.truncation == "bootstrap" and not terminated
        R = rewards[-1] / max(1 - self.args.gamma, self.eps) if bootstrap else 0.0
        returns = []
        for r in reversed(rewards):
            R = r + self.args.gamma * R
            returns.append(R)
        return returns[::-1]


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train on rank 0, which returns the metrics; the other ranks answer its calls."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = None
    if rank == 0:
        agent = Agent(world_size, args)
        history = History(agent, args)
        # Tutorial: count(1), so an agent that never solves CartPole would train forever.
        for _ in range(args.max_episodes):
            agent.run_episode()
            last_reward = agent.finish_episode()
            history.add(last_reward)
            if agent.running_reward > args.reward_threshold:
                break
        metrics = history.metrics()
    rpc.shutdown()  # waits for all ranks; until then, the observers answer the agent's calls
    return metrics


def build_parser(example: str = "rpc_rl", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=3, min_world_size=2, rpc=True)
    add, count = parser.add_argument, bounded(int, at_least=1)
    # Tutorial: gamma was 0.1, which looks about two steps ahead.
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99,
        help="discount factor of future rewards")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    add("--log_interval", type=count, default=10, metavar="N",
        help="episodes between two printed lines")
    add("--total_steps_per_episode", type=count, default=5000, metavar="N",
        help="most steps of an episode, shared by all observers")
    add("--max_episodes", type=count, default=2000, metavar="N", help="maximum number of episodes")
    add("--reward_threshold", type=bounded(float, above=0), metavar="R",
        default=gym.spec(ENV_NAME).reward_threshold,
        help="running reward above which CartPole counts as solved")
    add("--truncation", choices=["bootstrap", "terminal"], default="bootstrap",
        help="return after an episode's time limit: the last reward forever, or 0 (tutorial)")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process if `--check` is given.

    Returns:
        The metrics, or the differences of the check, on the reporting process; None elsewhere.
    """
    args = build_parser().parse_args(argv)
    refuse_what_cannot_end(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
