"""The check of `init_methods.py`: the group of every process, its place to meet, and the sum."""

import os
from argparse import Namespace
from types import ModuleType

from common.launch import launch
from common.oracle import Comparison, verdict
from common.recorder import Recorder, gathered

import torch.distributed as dist

from p2p_collectives import init_methods as lesson


def single_process(args: Namespace) -> list[dict[str, list]]:
    """Compute for each rank its group (rank, world size, timeout), its number, and the sum."""
    numbers = [1.0 + rank for rank in range(args.world_size)]
    return [{"group": [rank, args.world_size, args.timeout], "brought": [number],
             "took": [sum(numbers)]} for rank, number in enumerate(numbers)]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print the findings; return `{name: difference}` on the reporting process, None elsewhere."""
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    meetings, of_all_ranks = [], []  # what this rank has recorded of each meeting; and all ranks
    with Recorder() as recorder:
        @recorder.around(dist, "init_process_group")
        def meet(original, backend=None, init_method=None, timeout=None, **options):
            original(backend, init_method=init_method, timeout=timeout, **options)
            address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            where = address if init_method == "env://" else init_method
            meetings.append({"method": init_method.partition("://")[0], "where": where, "group": [
                dist.get_rank(), dist.get_world_size(), timeout.total_seconds()]})

        @recorder.around(dist, "all_reduce")
        def add_up(original, tensor, *place, **options):
            meetings[-1]["brought"] = tensor.tolist()
            original(tensor, *place, **options)
            meetings[-1]["took"] = tensor.tolist()

        @recorder.around(dist, "destroy_process_group")
        def gather_and_leave(leave):
            of_all_ranks.append(gathered(meetings[-1]))
            leave()

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics["meetings"], of_all_ranks, args) if rank == 0 else None


def compare(reported: list[dict], meetings: list[list[dict]], args: Namespace) -> dict:
    """Compare what was reported, and what all ranks have recorded, with a single process."""
    findings, oracle = Comparison(f"{args.world_size} processes"), single_process(args)
    methods = ["env", "tcp", "file"] if args.method == "all" else [args.method]
    met = [[of_rank["method"] for of_rank in meeting] for meeting in meetings]
    findings.holds("methods", met == [[method] * args.world_size for method in methods],
                   f"the ranks met by {met}")
    for method, meeting, row in zip(methods, meetings, reported, strict=False):
        places = {of_rank["where"] for of_rank in meeting}
        given = {f"file://{args.file.absolute()}"} if args.file and method == "file" else places
        findings.holds(f"{method}, place", len(places) == 1 and places == given,
                       f"the ranks met at {', '.join(places)}")
        findings.equal(f"{method}, group and sum",
                       [{name: of_rank.get(name, []) for name in oracle[0]} for of_rank in meeting],
                       oracle, "rank, world size and timeout, its number, the sum", unit="rank")
        findings.equal(f"{method}, reported sums",
                       [[rank["rank"], rank["sum"]] for rank in row["ranks"]],
                       [[of_rank["group"][0], *of_rank["took"]] for of_rank in oracle],
                       "rank and sum", unit="rank")
    return findings.as_dict()
