r"""The experiment of main.py with one vector environment per observer, and bytes in messages.

Gymnasium's own vector CartPole steps 64 environments in the time that six plain ones take. The
agent then becomes the slowest part, so it also works on large pieces:

    observer: a vector environment                        agent
    +--------------------------+                          +------------------------------------+
    | step(actions (K,))       | -- states (K, 4) ------> | acts without a graph, with dropout |
    | returns (K, steps) in    | <- actions (K,) -------- | masks drawn before the episode     |
    | numpy, once per episode  |                          | one forward and backward for all   |
    +--------------------------+ -- returns ------------> | steps, in pieces that fit a cache  |
                                                          +------------------------------------+

    python batch_rl/vector.py --observers 5                      16 environments each
    python batch_rl/vector.py --observers 5 --envs_per_observer 64
    python batch_rl/vector.py --observers 5 --envs sync          one after the other, see below
    python batch_rl/vector.py --check                            compare with a single process

The gain: with batched requests, the second command reaches about 80,800 environment steps/s, the
first one 22,000 (2 cores; docs/results/batch_rl_64.json, batch_rl_16.json). `--envs sync` uses
gymnasium's general vector environment. It steps its environments one after the other, and can hold
environments that have no vector version.

The cost is four things to know:

- **The step that resets.** This environment resets itself, in gymnasium's NEXT_STEP mode. After a
  pole has fallen, the next step ignores its action, has no reward, and returns the first state of
  the next attempt. That step is not played: its return is NaN, and it does not count.
- **One agent per process**, in a global variable. A request then needs no RRef, which both sides
  would have to count.
- **One seed for K environments**: all resets of the vector CartPole come from one generator.
- **The same dropout twice**, when the agent acts and when it learns, so the masks are kept. The
  random numbers have a fixed order that does not depend on which observer asks first, and one
  thread sums up the whole gradient. A seed gives the same training run to the last digit, with
  and without batches.
"""

import argparse
import threading
from collections.abc import Iterator

from common.cli import Parser
from common.program import run_program
from common.report import require_finite

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch.distributed import rpc
from torch.nn import functional as F

from batch_rl import main as tutorial
from batch_rl.main import EPS, launch_each, role_name, set_observers
from batch_rl.results import ENV_NAME, finish, require_room

VECTORIZATION_MODES = {"vector": "vector_entry_point", "sync": "sync"}  # gymnasium's, by --envs
ROWS = 5000  # states in a piece of the training: its hidden layer, 2.5 MB, fits into the cache

_agent = None  # on rank 0, for the requests


class Environments:
    """A vector environment of K environments, and the results of an episode's steps."""

    def __init__(self, num_envs: int, kind: str) -> None:
        self.envs = gym.make_vec(ENV_NAME, num_envs=num_envs,
                                 vectorization_mode=VECTORIZATION_MODES[kind])
        assert self.envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP

    def reset(self, n_steps: int, seed: int) -> np.ndarray:
        """Begin an episode of `n_steps` steps; return its first states, an array (K, 4)."""
        shape = (n_steps, self.envs.num_envs)
        self.rewards = np.zeros(shape)
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        return self.envs.reset(seed=seed)[0]

    def step(self, step: int, actions: bytes) -> np.ndarray:
        """Take a step, given its number and K actions in bytes; return the next states (K, 4)."""
        (states, self.rewards[step], self.terminated[step], self.truncated[step],
         _) = self.envs.step(np.frombuffer(actions, np.int8))
        return states

    def returns(self, gamma: float) -> tuple[torch.Tensor, np.ndarray]:
        """Compute the returns (K, steps), a tensor, and the lengths of the first stretches (K,).

        The return of a step that was a reset is NaN. For the rest, see `Observer.run_episode`.
        """
        n_steps = len(self.rewards)
        over = self.terminated | self.truncated
        resets = np.concatenate([np.zeros_like(over[:1]), over[:-1]])
        over[-1] = True  # the episode ends
        beyond = np.where(self.terminated, 0.0, self.rewards / max(1 - gamma, 1 / n_steps))
        returns, R = np.empty_like(self.rewards), 0.0
        for step in reversed(range(n_steps)):
            R = self.rewards[step] + gamma * np.where(over[step], beyond[step], R)
            returns[step] = R
        returns[resets] = np.nan
        return torch.tensor(returns.T).to(torch.get_default_dtype()), over.argmax(0) + 1.0


class VectorObserver:
    """The owner of one vector environment, which plays episodes for the agent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.gamma = args.gamma
        self.envs = Environments(args.envs_per_observer, args.envs)

    def run_episode(self, agent_rref: rpc.RRef, batch: bool, n_steps: int,
                    seed: int) -> tuple[torch.Tensor, float]:
        """Play as `Observer.run_episode`; the returns of steps that were resets are NaN."""
        select_action = VectorAgent.select_action_batch if batch else VectorAgent.select_action
        agent, states = agent_rref.owner(), self.envs.reset(n_steps, seed)
        for step in range(n_steps):
            # To send arrays as objects would cost a quarter of a message; bytes cost less.
            actions = rpc.rpc_sync(agent, select_action, args=(self.id, states.tobytes()))
            states = self.envs.step(step, actions)
        returns, first_lengths = self.envs.returns(self.gamma)
        return returns, first_lengths.mean().item()


class Group:
    """The agent's state of an episode: requests, random numbers and saved actions.

    Args:
        agent: Agent that plays the episode.
        batch: Whether the episode is played in batches.
        num_envs: Number of environments of each observer, K.
    """

    def __init__(self, agent: "VectorAgent", batch: bool, num_envs: int) -> None:
        self.policy, self.device, self.num_envs = agent.policy, agent.device, num_envs
        self.observers, self.lock = range(len(agent.ob_rrefs)), threading.Lock()
        self.next_step()
        # States and actions of each step, to compute the log-probabilities when learning.
        self.saved_log_probs = [] if batch else [[] for _ in self.observers]
        shape = (agent.args.num_steps, len(self.observers), num_envs)
        hidden, kept = self.policy.affine1.out_features, 1 - self.policy.dropout.p
        self.keep = np.empty((*shape, hidden), bool)
        for keep in self.keep:  # step by step, so that each step fits into the cache
            # 64 random bits decide about four units, in a quarter of the time of four `random()`.
            bits = agent.rng.bit_generator.random_raw(keep.size // 4).view(np.uint16)
            np.less(bits.reshape(keep.shape), round(2**16 * kept), out=keep)
        self.uniforms = agent.rng.random(shape)

    def next_step(self) -> None:
        """Begin a step: no observer has asked yet, and no observer has an answer."""
        self.states = {}
        self.answers = [torch.futures.Future() for _ in self.observers]

    def answer(self, ob_id: int, states: bytes) -> torch.futures.Future:
        """Return a future of an observer's actions; the last request completes all futures."""
        with self.lock:
            self.states[ob_id] = states
            asked, answers = self.states, self.answers
            last = len(asked) == len(self.observers)
            if last:
                self.next_step()
        if last:
            actions, saved = self.act([asked[ob_id] for ob_id in self.observers])
            self.saved_log_probs.append(saved)
            for answer, of_observer in zip(answers, actions, strict=True):
                answer.set_result(of_observer)
        return answers[ob_id]

    def act(self, states: list[bytes],
            ob_id: int | None = None) -> tuple[list[bytes], tuple[np.ndarray, np.ndarray]]:
        """Choose actions for all observers, or for one; also return the states and the actions."""
        saved = self.saved_log_probs if ob_id is None else self.saved_log_probs[ob_id]
        where = len(saved) if ob_id is None else (len(saved), [ob_id])
        states = np.frombuffer(b"".join(states), np.float32).reshape(-1, self.num_envs, 4)
        with torch.inference_mode():
            left = self.probs(states, self.keep[where])[..., 0].cpu().numpy()
        # A uniform number falls above P(left) with probability P(right).
        actions = (self.uniforms[where] > left).astype(np.int8)
        return [row.tobytes() for row in actions], (states, actions)

    def probs(self, states: np.ndarray, keep: np.ndarray) -> torch.Tensor:
        """Compute `Policy.forward` of states (..., 4) with given dropout masks (..., 128)."""
        policy = self.policy
        states = torch.tensor(states).to(policy.affine1.weight)  # to its device and dtype
        x = F.relu(policy.affine1(states)) * torch.from_numpy(keep).to(states)
        # Dropout scales the units that it keeps. To scale the weights instead is less work.
        weight = policy.affine2.weight / (1 - policy.dropout.p)
        return F.softmax(F.linear(x, weight, policy.affine2.bias), dim=-1)

    def pieces(self, batch: bool,
               weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Compute the actions' log-probabilities, with their graph, one piece at a time.

        Args:
            batch: Whether the episode was played in batches.
            weights: Weights of the actions in the loss, a tensor (observers, K, steps).

        Yields:
            Log-probabilities and weights, both (steps of the piece, observers, K).
        """
        if batch:
            states, actions = map(np.stack, zip(*self.saved_log_probs, strict=True))
        else:  # the parts of each observer have the shape (steps, 1, K)
            of_each = [map(np.stack, zip(*saved, strict=True)) for saved in self.saved_log_probs]
            states, actions = (np.concatenate(parts, axis=1)
                               for parts in zip(*of_each, strict=True))
        actions = torch.from_numpy(actions).long().unsqueeze(-1).to(self.device)
        weights = weights.permute(2, 0, 1).to(self.device)
        steps = max(1, ROWS // weights[0].numel())
        for first in range(0, len(states), steps):
            piece = slice(first, first + steps)
            probs = self.probs(states[piece], self.keep[piece])
            yield probs.gather(-1, actions[piece]).squeeze(-1).log(), weights[piece]


class VectorAgent(tutorial.Agent):
    """An agent for vector environments, which learns from a whole episode at once."""

    observer_class = VectorObserver

    def __init__(self, world_size: int, args: argparse.Namespace) -> None:
        global _agent
        super().__init__(world_size, args)
        _agent = self
        self.rng = np.random.default_rng(args.seed)  # draws dropout and actions

    @staticmethod
    def select_action(ob_id: int, states: bytes) -> bytes:
        """Answer as `Agent.select_action`, with the random numbers of the observer and the step."""
        group = _agent.group
        actions, saved = group.act([states], ob_id)
        group.saved_log_probs[ob_id].append(saved)
        return actions[0]

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(ob_id: int, states: bytes) -> torch.futures.Future:
        """Answer as `Agent.select_action_batch`, with a future for each observer."""
        return _agent.group.answer(ob_id, states)

    def run_episode(self, batch: bool) -> float:
        """Create the state of the episode, then play as `Agent.run_episode`."""
        self.group = Group(self, batch, self.args.envs_per_observer)
        return super().run_episode(batch)

    def finish_episode(self, batch: bool, ep_reward: float) -> None:
        """Train as `Agent.finish_episode`; a second forward pass builds the graph."""
        played = ~self.returns.isnan()  # all steps except resets
        std, mean = torch.std_mean(self.returns[played], correction=0)
        weights = torch.where(played, (self.returns - mean) / (std + EPS), 0.0)
        self.optimizer.zero_grad()
        policy_loss = 0.0
        for log_probs, of_piece in self.group.pieces(batch, weights):
            piece_loss = -(log_probs * of_piece).sum() / len(self.ob_rrefs)
            piece_loss.backward()  # the loss is the sum of the pieces, and gradients add up
            policy_loss += piece_loss.item()
        require_finite(policy_loss, "after an episode")
        self.optimizer.step()
        self.running_reward = 0.5 * ep_reward + 0.5 * self.running_reward


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Time episodes as main.py does, with the agent for vector environments."""
    return tutorial.run_worker(rank, world_size, args, VectorAgent)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py, and `--envs`."""
    parser = tutorial.build_parser("batch_rl/vector", __doc__)
    parser.set_defaults(envs_per_observer=16)
    add_envs_flag(parser)
    return parser


def add_envs_flag(parser: Parser) -> None:
    """Add `--envs`: how the vector environments step."""
    parser.add_argument("--envs", choices=["sync", "vector"], default="vector",
                        help="vector environment; sync steps one environment after the other")


def main(argv: list[str] | None = None) -> dict | None:
    """Compare both modes, or compare with a single process if `--check` is given; see main.py."""
    args = build_parser().parse_args(argv)
    set_observers(args)
    require_room(args)
    return run_program(run_worker, args, role_name, finish, start=launch_each)


if __name__ == "__main__":
    main()
