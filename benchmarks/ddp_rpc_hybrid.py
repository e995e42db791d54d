"""What do sparse gradients do to the bytes and the time of a step?

`ddp_rpc_hybrid/main.py`, run in turns.

    python -m benchmarks.ddp_rpc_hybrid --rounds 3
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common.cli import PlainParser, bounded

MAIN = Path(__file__).resolve().parent.parent / "ddp_rpc_hybrid" / "main.py"
COLUMNS = ("ms_per_step", "bytes_per_step", "table_gradient_bytes")
RUNS = [(rows, sparse) for rows in (100, 1_000_000) for sparse in (False, True)]


def build_parser():
    """How often, and for how long."""
    parser, count = PlainParser(__doc__), bounded(int, at_least=1)
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="runs of each kind")
    parser.add_argument("--epochs", type=count, default=20, metavar="N",
                        help="of ten batches of each trainer")
    return parser


def train(rows, sparse, epochs):
    """One run; its numbers in the order of COLUMNS."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"num_embeddings": rows, "epochs": epochs, "output_dir": folder}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, MAIN, *words, *(["--sparse"] if sparse else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        metrics = json.loads(Path(folder, "metrics.json").read_text())
    return {**metrics, "ms_per_step": 1000 / metrics["steps_per_s"]}


def main(argv=None):
    """Print a row per kind of run: the medians."""
    args = build_parser().parse_args(argv)
    results = {run: [] for run in RUNS}
    for _ in range(args.rounds):
        for rows, sparse in RUNS:
            results[rows, sparse].append(train(rows, sparse, args.epochs))
    print(f"{'rows':>9}  {'gradient':>8}" + "".join(f"{name:>22}" for name in COLUMNS))
    for (rows, sparse), runs in results.items():
        medians = (statistics.median(run[name] for run in runs) for name in COLUMNS)
        numbers = "".join(f"{median:22,.1f}" for median in medians)
        print(f"{rows:9}  {'sparse' if sparse else 'dense':>8}{numbers}")


if __name__ == "__main__":
    main()
