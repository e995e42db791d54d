"""The ladder of this folder: which agent and which observers `--agent`, `--envs` choose.

    --agent plain               main.py as it stands
    --agent fast                fast_agent.py: no RRef in requests
    --envs vector               vector_agent.py: arrays for lists, one vector environment for K
    --envs sync                 the same, for environments of which there is no vector version
    --double_buffering          double_buffering.py: one half plays while the other waits

Each one has all that the one above it has.
"""

from common.cli import refuse

VECTOR_FROM = 8  # environments of an observer: with fewer, one after the other is as fast


def add_flags(parser):
    """Add the flags that choose."""
    add = parser.add_argument
    add("--agent", choices=["plain", "fast"], default="fast", help="fast: no RRef in requests")
    add("--envs", choices=["plain", "sync", "vector"],
        help="vector: one for all environments of an observer; sync: as vector, but inside of it "
             "they step one by one, as those do that have no vector version "
             f"(default: vector where an observer has {VECTOR_FROM} or more, else plain)")
    add("--double_buffering", action="store_true",
        help="one half of the environments plays while the other waits for its actions")


def resolve(args):
    """Fill in the default of `--envs`; refuses what does not go together."""
    n_envs = args.envs_per_observer
    if args.agent == "plain" and args.envs in ("sync", "vector"):
        refuse(f"--envs {args.envs} requires --agent fast: the plain agent knows lists only")
    if args.double_buffering:
        if args.agent == "plain" or args.envs == "plain":
            plain = "--envs plain" if args.envs == "plain" else "--agent plain"
            refuse(f"--double_buffering is for vector environments, not for {plain}")
        if n_envs % 2 and not args.check:
            refuse(f"--double_buffering requires an even number of environments, which it halves: "
                   f"--envs_per_observer {n_envs} is odd")
        args.envs = args.envs or "vector"
    if args.envs is None:
        vector = args.agent == "fast" and n_envs >= VECTOR_FROM
        args.envs = "vector" if vector else "plain"


def agent_class(args):
    """The class of the agent that the flags choose; it knows that of its observers."""
    from batch_rl import double_buffering, fast_agent, main, vector_agent  # they build on main.py

    if args.double_buffering:
        return double_buffering.DoubleBufferedAgent
    if args.envs != "plain":
        return vector_agent.VectorAgent
    return fast_agent.FastAgent if args.agent == "fast" else main.Agent
