"""The oracle of `init_methods.py`: how each process asks for its group, what it gets, what it adds.

Recorded on every rank, at each meeting: the arguments of `init_process_group` and the environment,
the group that came of it, what the rank brought to the sum and what it took away.
"""

import os
from unittest import mock

import torch.distributed as dist
from common.launcher import launch
from common.oracle import Comparison, verdict

from p2p_collectives import init_methods as lesson


def single_process(args):
    """For each rank: its group (rank, world size, timeout), its number, the sum of all numbers."""
    numbers = [1.0 + rank for rank in range(args.world_size)]
    return [{"group": [rank, args.world_size, args.timeout], "brought": [number],
             "took": [sum(numbers)]} for rank, number in enumerate(numbers)]


def record(rank, world_size, args):
    """Run the lesson with a recorder; rank 0 returns the findings."""
    everyone, recorded = [], []
    init, add_up, leave = dist.init_process_group, dist.all_reduce, dist.destroy_process_group

    def recorded_init(backend=None, init_method=None, timeout=None, **options):
        init(backend, init_method=init_method, timeout=timeout, **options)
        known = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        recorded.append({"method": (init_method or "env://").partition("://")[0],
                         "place": init_method, "environment": known,
                         "group": [dist.get_rank(), dist.get_world_size(), timeout.total_seconds()],
                         "backend": dist.get_backend()})

    def recorded_sum(tensor, *place, **options):
        recorded[-1]["brought"] = tensor.tolist()
        add_up(tensor, *place, **options)
        recorded[-1]["took"] = tensor.tolist()

    def gather_and_leave():
        of_ranks = [None] * world_size
        dist.all_gather_object(of_ranks, recorded[-1])
        everyone.append(of_ranks)
        leave()

    with (mock.patch.object(dist, "init_process_group", recorded_init),
          mock.patch.object(dist, "all_reduce", recorded_sum),
          mock.patch.object(dist, "destroy_process_group", gather_and_leave)):
        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def check(program, args):
    """Print what was compared; `{what: difference}` where it is reported, None elsewhere."""
    return verdict(launch(record, args, program.role_name))


def compare(metrics, everyone, args):
    """The findings as a dict, on rank 0; `everyone` has each meeting of each rank."""
    findings = Comparison(f"{args.world_size} processes")
    methods = ["env", "tcp", "file"] if args.method == "all" else [args.method]
    met = [[of_rank["method"] for of_rank in meeting] for meeting in everyone]
    findings.holds("methods", met == [[method] * args.world_size for method in methods],
                   f"the ranks met by {met}")
    oracle = single_process(args)
    for method, meeting, reported in zip(methods, everyone, metrics["meetings"], strict=False):
        findings.equal(f"{method}, group and sum",
                       [{name: of_rank.get(name, []) for name in oracle[0]} for of_rank in meeting],
                       oracle, "rank, world size and timeout, its number, the sum", unit="rank")
        findings.equal(f"{method}, reported sums", [row["sum"] for row in reported["ranks"]],
                       [of_rank["took"][0] for of_rank in oracle], "the same sum", unit="rank")
        findings.equal(f"{method}, reported ranks", [row["rank"] for row in reported["ranks"]],
                       list(range(args.world_size)), "in their order", unit="rank")
        compare_words(findings, method, meeting, reported, args)
    return findings.as_dict()


def compare_words(findings, method, meeting, reported, args):
    """What the lesson says each process knew, against what it called `init_process_group` with."""
    places = {of_rank["place"] for of_rank in meeting}
    where = next(iter(places)) or ""
    expected, alike = [], len(places) == 1 and reported["method"] == method
    for rank, of_rank in enumerate(meeting):
        address, port = of_rank["environment"].values()
        if method == "env":
            place = f"MASTER_ADDR={address} MASTER_PORT={port} RANK={rank}"
            expected.append(f"{place} WORLD_SIZE={args.world_size}")
        else:
            expected.append(f"init_method={where!r}, rank={rank}, world_size={args.world_size}")
        alike = alike and of_rank["backend"] == "gloo"
    if not dist.is_torchelastic_launched():
        place = f"{args.master_addr}:{args.master_ports[method]}"
        if method == "env":
            alike = alike and expected[0].startswith("MASTER_ADDR={} MASTER_PORT={} ".format(
                *place.rsplit(":", 1)))
        elif method == "tcp":
            alike = alike and where == f"tcp://{place}"
        elif args.file is not None:
            alike = alike and where == f"file://{args.file.absolute()}"
    knew = [row["knew"] for row in reported["ranks"]]
    findings.holds(f"{method}, place", alike and knew == expected,
                   f"all ranks meet at one place, over gloo, and know of it {knew}")
