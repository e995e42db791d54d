r"""CartPole over RPC: observers play, one agent decides and learns (tutorial 6_5, first half).

The policy is small and the environments are many, so the policy stays in one place: each observer
steps its own CartPole and asks the agent for every action over RPC; after each episode the agent
trains on what it has recorded.

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
    python rpc_rl/main.py --check                              the same numbers as one process?
    torchrun --nproc_per_node 3 rpc_rl/main.py                 under torchrun
    python rpc_rl/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                 one rank per terminal or machine

It ends with, about (which observer asks first is chance, and so is what it draws):
    CartPole-v1 solved in 187 episodes: running reward 475.7 (threshold 475), 121694 environment ...

`rpc_rl/fast.py` trains the same with half the messages, and can be continued from a checkpoint.
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
RPC_THREADS = 2  # more only queue for the interpreter lock: the default, 16, is slower


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the agent, all others are observers."""
    return AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)


class Policy(nn.Module):
    """Maps states (..., 4) to the probabilities (..., 2) of pushing the cart left and right."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Work on any number of states at once: the last axis is the one that matters."""
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=-1)


class Observer:
    """Owns one environment and plays the episodes that the agent asks for; not on rank 0."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.env = gym.make(ENV_NAME, disable_env_checker=True)

    def run_episode(self, agent_rref: RRef, n_steps: int, seed: int) -> bool:
        """Play at most `n_steps` steps, asking the agent; return whether the pole fell."""
        # Tutorial: _remote_method(Agent.select_action, agent_rref, ...). RRefs can do that by now.
        agent = agent_rref.rpc_sync()
        state, _ = self.env.reset(seed=seed)  # Tutorial: one seed for all, identical environments.
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
    """Decides for all observers and learns from them: master and trainer at once; on rank 0."""

    observer_class = Observer

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        self.args = args
        self.device = device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=args.lr)
        self.eps = torch.finfo(torch.float32).eps
        self.running_reward = 0.0
        # Tutorial: 100 steps for all observers together, which can never reach 475.
        n_steps = args.total_steps_per_episode // (world_size - 1)
        self.n_steps = min(max(1, n_steps), gym.spec(ENV_NAME).max_episode_steps)

        self.agent_rref = RRef(self)  # what the observers call back
        self.ob_rrefs, self.generators = {}, {}
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs[ob_info.id] = remote(ob_info, self.observer_class)
            seed = 1000 * args.seed + ob_info.id  # of the environment: others for each observer
            self.generators[ob_info.id] = torch.Generator().manual_seed(seed)

    def select_action(self, ob_id: int, state: list[float]) -> int:
        """Answer an observer over RPC: choose an action, 0 or 1, for a state, 4 numbers."""
        probs = self.policy(torch.tensor(state, device=self.device))
        report.require_finite(probs[0], "in an episode", "a probability")
        m = Categorical(probs, validate_args=False)  # it would look at them once more
        action = m.sample()
        self.saved_actions[ob_id].append((probs, action))
        return action.item()

    def report_reward(self, ob_id: int, reward: float) -> None:
        """Record the reward of a step; an observer calls this over RPC."""
        self.rewards[ob_id].append(reward)

    def run_episode(self) -> None:
        """Let all observers play one episode at the same time, and wait for all."""
        self.rewards = {ob_id: [] for ob_id in self.ob_rrefs}
        self.saved_actions = {ob_id: [] for ob_id in self.ob_rrefs}
        futs = []
        for ob_id, ob_rref in self.ob_rrefs.items():
            seed = torch.randint(2**31, (), generator=self.generators[ob_id]).item()
            # Asynchronous: the observers play together. Each calls back: a nested RPC. No timeout:
            # an episode takes as long as it takes, and each call within it has a timeout.
            observer = ob_rref.rpc_async(timeout=0)
            futs.append(observer.run_episode(self.agent_rref, self.n_steps, seed))
        self.terminated = dict(zip(self.ob_rrefs, wait_all(futs), strict=True))

    def log_probs(self) -> torch.Tensor:
        """Compute the actions' log-probabilities, with graph, observer after observer: (steps,)."""
        # Tutorial: each by itself, in select_action. All at once they cost less.
        probs, actions = zip(*sum(self.saved_actions.values(), []), strict=True)
        return Categorical(torch.stack(probs), validate_args=False).log_prob(torch.stack(actions))

    def finish_episode(self) -> float:
        """Train on the episodes (REINFORCE); return the reward of the worst observer. No RPC."""
        # Tutorial: one R over the joined rewards; returns leaked from one observer into another.
        returns = []
        for ob_id, rewards in self.rewards.items():
            returns += self.returns(rewards, self.terminated[ob_id])
        # float64, and no Bessel's correction: one step, or equal returns, would give NaN or noise.
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
        # Tutorial: 0 behind the last step, although at the time limit nothing has failed: a perfect
        # episode's end looked bad. Better: the last reward would have gone on for ever.
        bootstrap = self.args.truncation == "bootstrap" and not terminated
        R = rewards[-1] / max(1 - self.args.gamma, self.eps) if bootstrap else 0.0
        returns = []
        for r in reversed(rewards):
            R = r + self.args.gamma * R
            returns.append(R)
        return returns[::-1]


def train(agent: Agent, history: History, args: argparse.Namespace) -> None:
    """Play and learn, episode by episode, until CartPole is solved."""
    while agent.running_reward <= args.reward_threshold and history.episodes < args.max_episodes:
        agent.run_episode()
        last_reward = agent.finish_episode()
        history.add(last_reward)


def run_worker(rank: int, world_size: int, args: argparse.Namespace,
               agent_class: type[Agent] = Agent,
               history_class: type[History] = History) -> dict | None:
    """Train on rank 0, which returns the metrics; the others wait for its calls."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = None
    if rank == 0:
        agent = agent_class(world_size, args)
        history = history_class(agent, args)
        train(agent, history, args)
        metrics = history.metrics()
    rpc.shutdown()  # waits for everyone: until then, the observers answer the agent's calls
    return metrics


def build_parser(example: str = "rpc_rl", description: str = __doc__) -> Parser:
    """Return the parser of this program's flags, or of a variant's."""
    parser = Parser(example, description, world_size=3, min_world_size=2, rpc=True)
    add, count = parser.add_argument, bounded(int, at_least=1)
    # Tutorial: a gamma of 0.1, which sees two steps ahead.
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99,
        help="how much to value future rewards")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    add("--log_interval", type=count, default=10, metavar="N", help="episodes between two lines")
    add("--total_steps_per_episode", type=count, default=5000, metavar="N",
        help="at most; the observers share them")
    add("--max_episodes", type=count, default=2000, metavar="N", help="give up after so many")
    add("--reward_threshold", type=bounded(float, above=0), metavar="R",
        default=gym.spec(ENV_NAME).reward_threshold,
        help="solved when the running reward is above it")
    add("--truncation", choices=["bootstrap", "terminal"], default="bootstrap",
        help="after an episode's time limit: more of the same reward, or nothing (the tutorial)")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    refuse_what_cannot_end(args)
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
