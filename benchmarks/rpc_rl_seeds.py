"""How many episodes, and how long, until CartPole is solved?

`rpc_rl/fast.py` as a user starts it, once per seed: its numbers are the same on one kind of CPU.

    python -m benchmarks.rpc_rl_seeds --seeds 0 1 2 3 4
    python -m benchmarks.rpc_rl_seeds --seeds 0 1 2 3 4 --truncation terminal

The last one has the tutorial's returns.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common.cli import LARGEST_SEED, PlainParser, bounded

PROGRAM = Path(__file__).resolve().parent.parent / "rpc_rl" / "fast.py"
COLUMNS = ("episodes", "env_steps", "env_steps_per_s", "wall_s")


def build_parser():
    """The seeds, and two flags of rpc_rl."""
    parser, seed = PlainParser(__doc__), bounded(int, at_least=0, at_most=LARGEST_SEED)
    parser.add_argument("--seeds", type=seed, nargs="+", default=[0, 1, 2, 3, 4], metavar="N",
                        help="one run for each")
    parser.add_argument("--truncation", choices=["bootstrap", "terminal"], default="bootstrap",
                        help="see rpc_rl")
    parser.add_argument("--max_episodes", type=bounded(int, at_least=1), default=2000, metavar="N",
                        help="give up after so many")
    return parser


def train(seed, args):
    """One run; its numbers in the order of COLUMNS."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"seed": seed, "truncation": args.truncation, "max_episodes": args.max_episodes,
                 "output_dir": folder}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
        metrics = json.loads(Path(folder, "metrics.json").read_text())
    return [metrics[name] for name in COLUMNS]


def main(argv=None):
    """Print a row per seed, then the medians."""
    args = build_parser().parse_args(argv)
    print("  ".join(f"{name:>15}" for name in ("seed", *COLUMNS)))
    rows = []
    for seed in args.seeds:
        rows.append(train(seed, args))
        print("  ".join(f"{value:15.0f}" for value in (seed, *rows[-1])), flush=True)
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"{'median':>15}  " + "  ".join(f"{value:15.0f}" for value in medians))


if __name__ == "__main__":
    main()
