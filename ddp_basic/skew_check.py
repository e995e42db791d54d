"""The oracle of `skew.py`: every step of both trainings, held against main.py's one process.

Compared are also the delays, that the clocks of all ranks start together, and the times: what is
reported against what was recorded, and who has to wait.
"""

import argparse
import statistics
import time
from types import ModuleType, SimpleNamespace
from unittest import mock

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Barriers, Recorder

import torch

from ddp_basic import skew as lesson
from ddp_basic.check import Seen, compare_steps
from ddp_basic.check import single_process as one_training

LONGEST_DELAY_S = 0.2  # of the slow rank, in a check


class SeenDelays(Seen):
    """Keeps also how a rank is delayed, and whether all ranks had come when it began."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.together, self.delays, self.spans = [], [], []
        self.begin("skew")


def check(program: ModuleType, args: argparse.Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.delay = min(args.delay, LONGEST_DELAY_S)
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson, recorded; rank 0 returns the findings."""
    torch.set_default_dtype(torch.float64)
    with Recorder() as recorder:
        seen, barriers = SeenDelays(recorder), Barriers(recorder)
        everyone = recorder.gather_at_end(lambda: seen)

        @recorder.around(lesson, "timed_steps")
        def timed_steps(original, ddp_model, *given):
            def first_forward(*_):
                seen.together.append(barriers.all_had_come())
                hook.remove()

            def sleep(seconds):
                seen.delays.append(seconds)
                time.sleep(seconds)

            hook = ddp_model.register_forward_pre_hook(first_forward)
            with mock.patch.object(lesson, "time", SimpleNamespace(
                    perf_counter=time.perf_counter, sleep=sleep)):
                seen.spans.append(original(ddp_model, *given))
            return seen.spans[-1]

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def single_process(args: argparse.Namespace) -> list[list[dict]]:
    """Train as main.py's oracle does, without the delay and with it; return each rank's steps."""
    steps, _ = one_training(args)
    return [of_rank * 2 for of_rank in steps]


def compare(metrics: dict, everyone: list[SeenDelays], args: argparse.Namespace) -> dict:
    """Return the findings as a dict, on rank 0; `everyone` has what each rank has seen."""
    findings = Comparison(f"{args.world_size} processes")
    compare_steps(findings, "skew", [one.steps["skew"] for one in everyone], single_process(args))
    together = [one.together for one in everyone]
    findings.holds("skew, the clocks", together == [[True, True]] * args.world_size,
                   "of all ranks start behind one barrier, in both trainings; they did on "
                   f"each rank: {together}")
    findings.equal("skew, delays", [one.delays for one in everyone], [
        [0.0] * args.steps + [args.delay * (rank == args.slow_rank)] * args.steps
        for rank in range(args.world_size)], "--delay on --slow_rank alone", "rank")
    compare_times(findings, metrics, [one.spans for one in everyone], args)
    return findings.as_dict()


def compare_times(findings: Comparison, metrics: dict, recorded: list[list],
                  args: argparse.Namespace) -> None:
    """Hold the times that were measured: they have bounds only, and medians.

    Args:
        recorded: of each rank, the spans of the training without a slow rank, and of that with it.
    """
    medians = [[statistics.median(backward - start for start, backward, _ in spans),
                statistics.median(end - backward for _, backward, end in spans),
                statistics.median(end - start for start, _, end in spans),
                statistics.median(end - start for start, _, end in even_spans)]
               for even_spans, spans in recorded]
    names = ("compute_s", "wait_s", "step_s", "even_step_s")
    reported = [list(of_rank) for of_rank in zip(*map(metrics.get, names), strict=True)]
    findings.equal("skew, reported times", reported, medians,
                   "medians of the recorded times", unit="rank")
    if args.delay < 0.1 or args.world_size == 1:
        return  # too short to be distinguished from a busy machine
    slow, fast = args.slow_rank, [rank for rank in range(args.world_size) if rank != args.slow_rank]
    compute_s, wait_s, even_step_s = map(metrics.get, ("compute_s", "wait_s", "even_step_s"))
    found = (f"a delay of {args.delay:g} s on rank {slow}; ranks compute {compute_s} s, wait "
             f"{wait_s} s, take {even_step_s} s for a step without the delay")
    findings.holds("skew, who computes for long", compute_s[slow] >= args.delay
                   and all(compute_s[rank] < args.delay for rank in fast), found)
    findings.holds("skew, who waits", all(wait_s[rank] > args.delay / 2 for rank in fast)
                   and wait_s[slow] < args.delay, found)
    findings.holds("skew, steps without the delay", max(even_step_s) < args.delay, found)
    ends = [spans[-1][-1] for spans in metrics["spans"]]
    findings.holds("skew, nobody is ahead", min(ends) >= args.steps * args.delay,
                   f"the ranks were done after {ends} s: all wait for the slow one in each step")
