"""The check of `init_methods.py`: the group of every process, and the sum."""

from argparse import Namespace
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder

import torch.distributed as dist

from p2p_collectives import init_methods as lesson


def single_process(args: Namespace) -> list[list[float]]:
    """Compute for each rank what it should know of its group: rank, world size, timeout, sum."""
    total = sum(1.0 + rank for rank in range(args.world_size))
    return [[rank, args.world_size, args.timeout, total] for rank in range(args.world_size)]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    meeting = {}  # the present one
    with Recorder() as recorder:
        everyone = recorder.gather_at_end(lambda: meeting)  # of each meeting in turn

        @recorder.around(dist, "init_process_group")
        def meet(original, backend=None, init_method=None, timeout=None, **options):
            original(backend, init_method=init_method, timeout=timeout, **options)
            meeting.update(method=init_method.partition("://")[0], group=[
                dist.get_rank(), dist.get_world_size(), timeout.total_seconds()])

        @recorder.around(lesson, "run")
        def run(original, *given):
            meeting["sum"] = original(*given)
            return meeting["sum"]

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics["meetings"], everyone, args) if rank == 0 else None


def compare(reported: list[dict], everyone: list[dict], args: Namespace) -> dict:
    """Compare what all ranks recorded of each meeting, and what is reported, with one process."""
    findings, oracle = Comparison(f"{args.world_size} processes"), single_process(args)
    methods = ["env", "tcp", "file"] if args.method == "all" else [args.method]
    met = [of_rank["method"] for of_rank in everyone]
    findings.holds("methods", met == [method for method in methods for _ in oracle],
                   f"the ranks met by {met}")
    for method, meeting in zip(methods, reported, strict=True):
        findings.equal(f"{method}, reported sums", [of_rank["sum"] for of_rank in meeting["ranks"]],
                       [total for *_, total in oracle], "of each rank", unit="rank")
        run = [[*of_rank["group"], of_rank["sum"]] for of_rank in everyone
               if of_rank["method"] == method]
        findings.equal(f"{method}, group and sum", run, oracle,
                       "rank, world size, timeout and sum", unit="rank")
    return findings.as_dict()
