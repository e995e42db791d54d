"""How many episodes, and how long, until CartPole is solved? `rpc_rl/main.py` as it is, once per seed.

    python benchmarks/rpc_rl_seeds.py --seeds 0 1 2 3 4
    python benchmarks/rpc_rl_seeds.py --seeds 0 1 2 3 4 --time_limit end       the tutorial's returns
"""

import argparse
import contextlib
import io
import statistics

from common.cli import bounded
from rpc_rl.main import main as train


def build_parser():
    """The seeds, and the one flag of rpc_rl that changes what is learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=bounded(int, at_least=0), nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--time_limit", choices=["continue", "end"], default="continue")
    return parser


def main(argv=None):
    """Print a row per seed and the medians."""
    args = build_parser().parse_args(argv)
    columns = ("episodes", "env_steps", "env_steps_per_s", "wall_s")
    print("  ".join(f"{name:>15}" for name in ("seed", *columns)))
    rows = []
    for seed in args.seeds:
        with contextlib.redirect_stdout(io.StringIO()):
            flags = ["--seed", str(seed), "--time_limit", args.time_limit, "--output_dir", "outputs/rpc_rl_seeds"]
            metrics = train(flags)
        rows.append([metrics[name] for name in columns])
        print("  ".join(f"{value:15.0f}" for value in (seed, *rows[-1])), flush=True)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"{'median':>15}  " + "  ".join(f"{value:15.0f}" for value in medians))
    return medians


if __name__ == "__main__":
    main()
