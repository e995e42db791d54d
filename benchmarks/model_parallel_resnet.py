"""Is the pipeline worth it?

Batches over RPC, with all schedules, and in one process with one thread, in turns.

    python -m benchmarks.model_parallel_resnet --num_splits 4
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import report
from common.cli import Parser
from common.session import keep_memory
from common.vision import import_torchvision

from model_parallel_resnet import main as rpc_pipeline
from model_parallel_resnet import schedules
from model_parallel_resnet.data import get_batch, require_sizes

FOLDER = Path(rpc_pipeline.__file__).parent
WAYS = {"RPC pipeline": [FOLDER / "early_backward.py"],
        "RPC whole": [FOLDER / "main.py"],
        **{name: [FOLDER / "schedules.py", "--schedule", name] for name in schedules.SCHEDULES}}
ALONE = "one process"
PASSED_ON = ("batch_size", "image_size", "num_batches", "num_classes", "arch", "lr", "seed")


def build_parser():
    """The flags of the example."""
    name = "benchmark_model_parallel_resnet"
    parser = rpc_pipeline.add_flags(Parser(name, __doc__, distributed=False))
    parser.set_defaults(num_splits=[4, 8], num_batches=3)
    return parser


def train_alone(args):
    """The lesson without any split: the same model and batch, in this process.

    Returns:
        Seconds of each batch, the first of which is the warm-up; and its losses.
    """
    images, targets = get_batch(args)
    model = getattr(import_torchvision().models, args.arch)(num_classes=args.num_classes)
    shards = (schedules.layers_of(stage, 2, args, torch.device("cpu")) for stage in range(2))
    with torch.no_grad():
        initial = (param for shard in shards for param in shard.parameters())
        for param, value in zip(model.parameters(), initial, strict=True):
            param.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    seconds, losses = [], []
    for _ in range(args.num_batches + 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def run(command, args):
    """Run one way in processes of its own; `{num_split: median seconds}`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [word for name in PASSED_ON for word in (f"--{name}", str(getattr(args, name)))]
        flags += ["--device", "cpu", "--output_dir", folder,
                  "--num_splits", *map(str, args.num_splits)]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # for each worker, on any machine
        subprocess.run([sys.executable, *command, *flags], check=True, stdout=subprocess.DEVNULL,
                       env=one_thread)
        rows = json.loads(Path(folder, "metrics.json").read_text())["rows"]
        return {row["num_split"]: row["median_s"] for row in rows}


def main(argv=None):
    """Print and write the medians, and how much faster than one process they are."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch", "first half", "second half"]])  # of the one process
    schedules.require_stages(args, schedules.SCHEDULES)
    torch.set_num_threads(1)
    keep_memory()  # as in all processes of the other ways
    seconds = {}
    # One process before and after: the machine's speed may change meanwhile.
    for way, command in [(ALONE, None), *WAYS.items(), (ALONE, None)]:
        medians = (run(command, args) if command
                   else {1: statistics.median(train_alone(args)[0][1:])})
        for num_split, median in medians.items():
            seconds.setdefault((way, num_split), []).append(median)
    alone = statistics.median(seconds[ALONE, 1])
    rows = [{"way": way, "num_split": num_split, "median_s": statistics.median(times),
             "speedup": alone / statistics.median(times)}
            for (way, num_split), times in seconds.items()]
    print(f"{'':12}  splits  s/batch  times as fast as one process")
    for row in rows:
        print("{way:12}  {num_split:6}  {median_s:7.2f}  {speedup:.2f}".format(**row))
    report.save_metrics(args, {"rows": rows}, backend=None)
    return rows


if __name__ == "__main__":
    main()
