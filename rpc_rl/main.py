r"""CartPole over RPC: observers play, one agent decides and learns (tutorial 6_5, first half).

The policy is small and the environments are many, so the policy stays in one place: each observer steps its own
CartPole and asks the agent for every action over RPC; after each episode the agent trains on what it recorded.

    rank 0 "agent"                                            rank 1 "observer1"
    +-------------------------+   run_episode(agent_rref)    +-----------------------+
    | Policy, optimizer       | ---------------------------> | CartPole-v1           |
    | states, actions,        |   select_action(id, state,   |                       |
    | rewards per observer    | <-- the last reward)   ----- | while not done:       |
    |                         | -------- action -----------> |   env.step(action)    |
    | finish_episode():       |                              +-----------------------+
    |   REINFORCE, one step   | <-------------------------->   rank 2 "observer2" ...
    +-------------------------+

    python rpc_rl/main.py --world_size 3                         all processes here
    python rpc_rl/main.py --check                                the same numbers as a single process?
    torchrun --nproc_per_node 3 rpc_rl/main.py                   under torchrun
    python rpc_rl/main.py --world_size 3 --rank 1 \
        --master_addr HOST --master_port 29500                   one rank per terminal or machine

Last line, about:
    CartPole-v1 solved in 189 episodes: running reward 476.2 (threshold 475), 102278 environment steps at 1659 steps/s
"""

import time

import gymnasium as gym
import torch
from common import checkpoint, report, timeline
from common.cli import Parser, bounded, refuse
from common.launch import launch
from common.session import device_for, rpc_options, wait_all
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.distributions import Categorical

from rpc_rl.reinforce import Policy, policy_loss
from rpc_rl.single_process import play_alone

ENV_NAME = "CartPole-v1"
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
PLAY_DRAWN_S = 0.02  # with --timeline: of an episode
RPC_THREADS = 2  # more only queue for the interpreter lock: 16, the default, makes 15% fewer steps per second


def role_name(rank, world_size):
    """Rank 0 is the agent, all others are observers."""
    return AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)


class Observer:
    """Owns one environment and plays the episodes that the agent asks for; lives on an observer's process."""

    def __init__(self, rpcs_per_step):
        self.id = rpc.get_worker_info().id
        self.rpcs_per_step = rpcs_per_step
        self.env = gym.make(ENV_NAME, disable_env_checker=True)

    def run_episode(self, agent_rref, n_steps, seed):
        """Play one episode of at most `n_steps` steps, asking the agent for each action; whether the pole fell."""
        agent = agent_rref.rpc_sync()
        state, _ = self.env.reset(seed=seed)
        reward = None
        for _ in range(n_steps):
            # Send the state to the agent, get an action. Plain numbers: they travel cheaper than a tiny tensor.
            if self.rpcs_per_step == 1:
                action = agent.select_action(self.id, state.tolist(), reward)  # the last reward rides along
            else:
                action = agent.select_action(self.id, state.tolist())

            # Apply the action to the environment, get the reward.
            with timeline.span("env.step"):
                state, reward, terminated, truncated, _ = self.env.step(action)

            # Report the reward to the agent, for its training.
            if self.rpcs_per_step == 2:
                agent.report_reward(self.id, reward)

            if terminated or truncated:
                break
        if self.rpcs_per_step == 1:
            agent.report_reward(self.id, reward)  # the last one has no next state to ride with
        return terminated


class Agent:
    """Decides for all observers and learns from them; lives on rank 0, master and trainer at once."""

    def __init__(self, world_size, args):
        self.gamma, self.time_limit = args.gamma, args.time_limit
        self.device = device_for(args.device)
        torch.manual_seed(args.seed)
        self.policy = Policy().to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.n_steps = max(1, args.total_steps_per_episode // (world_size - 1))
        self.n_steps = min(self.n_steps, gym.spec(ENV_NAME).max_episode_steps)
        self.history = {"episodes": 0, "env_steps": 0, "running_reward": 0.0, "rewards": [], "running_rewards": []}

        self.agent_rref = RRef(self)  # what the observers call back
        self.ob_rrefs, self.generators = {}, {}
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs[ob_info.id] = rpc.remote(ob_info, Observer, args=(args.rpcs_per_step,))
            # A generator per observer, with its own seed: rollouts differ, and whichever request comes first, one
            # --seed gives one training.
            self.generators[ob_info.id] = torch.Generator().manual_seed(1000 * args.seed + ob_info.id)

    def select_action(self, ob_id, state, reward=None):
        """Called by an observer over RPC: take the last reward, if it came along, and choose an action, 0 or 1."""
        if reward is not None:
            self.report_reward(ob_id, reward)
        step = len(self.states[ob_id])
        with timeline.span("select_action", observer=ob_id), torch.inference_mode():
            probs = self.policy(torch.tensor(state, device=self.device), self.masks[ob_id][step])
        # A uniform number falls above P(left) with probability P(right).
        action = int(self.uniforms[ob_id][step] > probs[0].item())
        self.states[ob_id].append(state)
        self.actions[ob_id].append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Called by an observer over RPC after each step, unless the reward rides along with the next state."""
        self.rewards[ob_id].append(reward)

    def run_episode(self):
        """Let every observer play one episode, all at the same time, and wait for all of them."""
        self.states, self.actions, self.rewards = ({ob_id: [] for ob_id in self.ob_rrefs} for _ in range(3))
        # All randomness of the episode in a few large draws, instead of several tiny ones in every step.
        self.masks, self.uniforms, seeds = {}, {}, {}
        for ob_id, generator in self.generators.items():
            self.masks[ob_id] = Policy.draw_masks(self.n_steps, generator).to(self.device)
            self.uniforms[ob_id] = torch.rand(self.n_steps, generator=generator).tolist()
            seeds[ob_id] = torch.randint(2**31, (), generator=generator).item()

        futs = {}
        for ob_id, ob_rref in self.ob_rrefs.items():
            # Asynchronous RPCs, so that the observers play together; each calls back: nested RPCs. No timeout: an
            # episode takes as long as it takes. Each call within it has one.
            futs[ob_id] = ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.n_steps, seeds[ob_id])
        self.fell = dict(zip(futs, wait_all(list(futs.values())), strict=True))

    def log_probs(self):
        """Log-probabilities of the recorded actions, observer after observer, with their graph: shape (steps,)."""
        states, actions = (torch.cat([torch.tensor(episode) for episode in recorded.values()]).to(self.device)
                           for recorded in (self.states, self.actions))
        masks = torch.cat([self.masks[ob_id][: len(episode)] for ob_id, episode in self.states.items()])
        return Categorical(self.policy(states, masks), validate_args=False).log_prob(actions)

    def finish_episode(self):
        """Train on the recorded episodes; returns the reward of the worst observer. No RPC here."""
        loss = policy_loss(self.log_probs(), self.rewards, self.fell, self.gamma, self.time_limit)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        min_reward = min(sum(rewards) for rewards in self.rewards.values())
        history = self.history
        history["episodes"] += 1
        history["env_steps"] += sum(map(len, self.rewards.values()))
        history["running_reward"] = 0.05 * min_reward + (1 - 0.05) * history["running_reward"]
        history["rewards"].append(min_reward)
        history["running_rewards"].append(history["running_reward"])
        return min_reward

    def state_dict(self):
        """All that a training needs to go on exactly as if it had never stopped."""
        generators = {ob_id: generator.get_state() for ob_id, generator in self.generators.items()}
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "generators": generators, "history": self.history}

    def load_state_dict(self, state, lr):
        """Go on from a `state_dict`, with the learning rate of this run."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = lr
        for ob_id, generator in self.generators.items():
            generator.set_state(state["generators"][ob_id])
        self.history = state["history"]


def train(agent, world_size, args):
    """Play and learn, episode by episode, until CartPole is solved; the metrics."""
    if args.resume:
        agent.load_state_dict(checkpoint.load(args), args.lr)
    history, resumed_steps, started = agent.history, agent.history["env_steps"], time.perf_counter()
    with report.progress(args.max_episodes, "episode", history["episodes"]) as bar:
        while history["running_reward"] <= args.reward_threshold and history["episodes"] < args.max_episodes:
            agent.run_episode()
            with timeline.span("finish_episode"):
                last_reward = agent.finish_episode()

            bar.set_postfix_str(f"running reward {history['running_reward']:.1f}", refresh=False)
            bar.update()
            if history["episodes"] % args.log_interval == 0:
                if bar.disable:  # not a terminal
                    report.log(AGENT_NAME, f"episode {history['episodes']}  last reward {last_reward:.0f}  "
                                           f"running reward {history['running_reward']:.2f}")
                if args.checkpoint:
                    checkpoint.save(args, agent.state_dict())
    train_s = time.perf_counter() - started
    if args.checkpoint:
        checkpoint.save(args, agent.state_dict())
    metrics = {"solved": history["running_reward"] > args.reward_threshold,
               "env_steps_per_s": (history["env_steps"] - resumed_steps) / train_s, **history}
    if args.timeline:
        metrics["spans"] = timeline.recorded()
        for ob_rank in range(1, world_size):
            metrics["spans"] |= rpc.rpc_sync(OBSERVER_NAME.format(ob_rank), timeline.recorded)
    return metrics


def run_worker(rank, world_size, args):
    """Rank 0 trains and returns the metrics; the others wait passively for its commands."""
    if args.timeline:
        timeline.start(role_name(rank, world_size))
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    metrics = train(Agent(world_size, args), world_size, args) if rank == 0 else None
    rpc.shutdown()  # waits for everyone: until then, the observers answer the agent's calls
    return metrics


def record_episode(rank, world_size, args):
    """For `check`: what the agent recorded of one episode over RPC, and the gradient it trained with."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    recorded = None
    if rank == 0:
        agent = Agent(world_size, args)
        agent.run_episode()
        log_probs = agent.log_probs().tolist()
        agent.finish_episode()
        gradient = torch.cat([parameter.grad.flatten() for parameter in agent.policy.parameters()]).tolist()
        recorded = {"actions": sum(agent.actions.values(), []), "rewards": sum(agent.rewards.values(), []),
                    "log_probs": log_probs, "gradient": gradient}
    rpc.shutdown()
    return recorded


def check(args):
    """Hold one episode over RPC against a single process; the differences, or None where nothing is reported."""
    recorded = launch(record_episode, args, role_name)
    if recorded is None:
        return None
    torch.manual_seed(args.seed)
    alone = play_alone(Policy(), gym.make(ENV_NAME), args)
    # Same seeds, same draws: actions and rewards are equal to the bit. The agent computes its log-probabilities in one
    # batch, the oracle one by one: float32 sums in another order, off by a few 1e-7 of the largest entry.
    tolerances = {"actions": 0, "rewards": 0, "log_probs": 1e-5, "gradient": 1e-5}
    return report.compare(recorded, alone, tolerances, scale_at_least=1.0)


def plot(metrics, args):
    """Draw `learning_curve.png`."""
    title = f"{ENV_NAME} over RPC: {args.world_size - 1} observers, one agent"
    with report.picture(args.output_dir / "learning_curve.png", title, "episode", "reward (steps balanced)") as axes:
        episodes = range(1, metrics["episodes"] + 1)
        axes.plot(episodes, metrics["rewards"], ".", color="0.7", markersize=4, label="reward of the worst observer")
        axes.plot(episodes, metrics["running_rewards"], color="C0", linewidth=2, label="running reward")
        axes.axhline(args.reward_threshold, color="C3", linestyle="--", label=f"solved above {args.reward_threshold:g}")


def plot_timeline(spans, args):
    """Draw the end of the last episode, and what the agent then learns from it: `timeline.png`."""
    if not spans[AGENT_NAME]:
        return  # there was nothing left to train
    last = spans[AGENT_NAME][-1]  # of the agent's work: finish_episode
    timeline.save(spans, args.output_dir, f"{ENV_NAME} over RPC: the end of an episode",
                  {"": (last["start"] - PLAY_DRAWN_S, last["end"])})


def build_parser():
    """The flags of this example."""
    parser = Parser("rpc_rl", __doc__, world_size=3, min_world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--gamma", type=bounded(float, at_least=0, at_most=1), default=0.99, help="how much to value future rewards")
    add("--lr", type=bounded(float, above=0), default=0.01, help="learning rate of Adam")
    add("--log_interval", type=count, default=10, metavar="N", help="episodes from one line to the next")
    add("--total_steps_per_episode", type=count, default=5000, metavar="N", help="at most; the observers share them")
    add("--max_episodes", type=count, default=2000, metavar="N", help="give up after so many")
    add("--reward_threshold", type=bounded(float, above=0), default=gym.spec(ENV_NAME).reward_threshold, metavar="R",
        help="solved when the running reward is above it")
    add("--rpcs_per_step", type=int, choices=[1, 2], default=1,
        help="2: select_action, then report_reward (the tutorial); 1: the reward rides along with the next state")
    add("--time_limit", choices=["continue", "end"], default="continue",
        help="what lies behind an episode that ran out of time: more of the same reward, or nothing (the tutorial)")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    state = checkpoint.inspect(args, needs=("generators",))
    if state and len(state["generators"]) != args.world_size - 1:
        refuse(f"--world_size {args.world_size} must be {len(state['generators']) + 1}, as in the "
               "checkpoint")
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    if args.timeline:
        plot_timeline(metrics.pop("spans"), args)
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    print(f"{ENV_NAME} {'solved' if metrics['solved'] else 'not solved'} in {metrics['episodes']} episodes: "
          f"running reward {metrics['running_reward']:.1f} (threshold {args.reward_threshold:g}), "
          f"{metrics['env_steps']} environment steps at {metrics['env_steps_per_s']:.0f} steps/s")
    return metrics


if __name__ == "__main__":
    main()
