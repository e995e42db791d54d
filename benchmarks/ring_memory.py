"""The memory of a rank for rows of 4,096 and 16,384 characters, with transformer_parallel's ring.

Counted is the peak of the largest process of a run (`ru_maxrss`), above that of a run of 64
characters, with one block and one row: mostly scores. Blocks of a megabyte and more go back to
the system when they are freed; else the peak would have what malloc keeps for later.

    python -m benchmarks.ring_memory           five to ten minutes; 14 GB for the longest rows
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import report
from common.cli import Parser

from transformer_parallel.results import MB
from transformer_parallel.ring_attention import WAYS

ROOT = Path(__file__).resolve().parent.parent
SHORT, LENGTHS = 64, (4096, 16384)
COMMAND = (  # spawn: the ranks are children of the launcher, which the system counts with it
    "transformer_parallel/ring_attention.py --start_method spawn --batch_size 1 --blocks 1 "
    "--steps 1")


def peak_mb(way, length, args):
    """Run one step as `args` has it; return the peak of its largest process, in MB.

    Raises:
        SystemExit: with what the run has said, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *COMMAND.split(), "--ways", way, "--seq_len", str(length),
             "--seed", str(args.seed), "--device", args.device, "--output_dir", folder],
            cwd=ROOT, stdout=said, stderr=said,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1000000"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"error: {way}, {length} characters: {said.read()}")
    return usage.ru_maxrss * 1024 / MB


def main(argv=None):
    """Print the peaks and write metrics.json."""
    args = Parser("benchmark_ring_memory", __doc__, distributed=False).parse_args(argv)
    rows = []
    for way in WAYS:
        before = peak_mb(way, SHORT, args)
        for length in LENGTHS:
            rows.append({"way": way, "seq_len": length, "mb": peak_mb(way, length, args) - before})
            print(f"{way}, {length:,} characters: {rows[-1]['mb']:.0f} MB", flush=True)
    return report.save_metrics(args, {"rows": rows}, backend="gloo")


if __name__ == "__main__":
    main()
