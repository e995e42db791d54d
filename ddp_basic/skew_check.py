"""Oracle of `skew.py`: every step of both training runs, compared with main.py's single process.

Each rank also records its delays, and whether all ranks had reached the barrier when its clock
started. The check compares one property of the times only: the fast ranks wait for the slow one.
"""

import argparse
import time
from types import ModuleType, SimpleNamespace

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Barriers, Recorder

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import skew as lesson
from ddp_basic.check import compare_steps, record_steps, single_process

LONGEST_DELAY_S, SHORTEST_DELAY_S = 0.2, 0.1  # below, a delay looks like a busy machine


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0, None elsewhere."""
    torch.set_default_dtype(torch.float64)
    models, together, delays = [], [], []

    def first_forward(module, inputs):
        if isinstance(module, DDP) and module not in models:
            models.append(module)
            together.append(barriers.all_had_come())

    def sleep(seconds):
        delays.append(seconds)
        time.sleep(seconds)

    with Recorder() as recorder:
        trainings, barriers = record_steps(recorder), Barriers(recorder)
        recorder.on_forward(before=first_forward)
        recorder.put(lesson, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep))
        everyone = recorder.gather_at_end(lambda: (sum(trainings, []), together, delays))
        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def compare(metrics: dict, everyone: list[tuple], args: argparse.Namespace) -> dict:
    """Return the findings about `everyone`, which is what each rank recorded."""
    findings = Comparison(f"{args.world_size} processes")
    steps, together, delays = map(list, zip(*everyone, strict=True))
    oracle, _ = single_process(args)
    compare_steps(findings, "skew", steps, [of_rank * 2 for of_rank in oracle])  # two trainings
    findings.holds("skew, the clocks", together == [[True, True]] * args.world_size,
                   "of all ranks start after one barrier, in both trainings; they did on "
                   f"each rank: {together}")
    findings.equal("skew, delays", delays, [
        [0.0] * args.steps + [args.delay * (rank == args.slow_rank)] * args.steps
        for rank in range(args.world_size)], "--delay on --slow_rank alone", "rank")
    wait_s = metrics["wait_s"]
    fast = [wait for rank, wait in enumerate(wait_s) if rank != args.slow_rank]
    if fast and args.delay >= SHORTEST_DELAY_S:
        findings.holds("skew, who waits",
                       min(fast) > args.delay / 2 and wait_s[args.slow_rank] < args.delay,
                       f"the ranks wait {wait_s} s for rank {args.slow_rank}, which takes "
                       f"{args.delay:g} s longer")
    return findings.as_dict()


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print each comparison; return `{what: difference}` on the reporting process, else None."""
    args.delay = min(args.delay, LONGEST_DELAY_S)
    return verdict(launch(record, args, program.role_name))
