"""The oracle of `init_methods.py`: how each process asks for its group, what it gets, what it adds.

Recorded on every rank, at each meeting: the arguments of `init_process_group` and the environment,
the group that came of it, what the rank brought to the sum and what it took away.
"""

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


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the lesson, recorded; return the findings on rank 0."""
    everyone, meetings = [], []
    with Recorder() as recorder:
        @recorder.around(dist, "init_process_group")
        def meet(original, backend=None, init_method=None, timeout=None, **options):
            original(backend, init_method=init_method, timeout=timeout, **options)
            known = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
            group = [dist.get_rank(), dist.get_world_size(), timeout.total_seconds()]
            meetings.append({"method": (init_method or "env://").partition("://")[0],
                             "place": init_method, "environment": known, "group": group,
                             "backend": dist.get_backend()})

        @recorder.around(dist, "all_reduce")
        def add_up(original, tensor, *place, **options):
            meetings[-1]["brought"] = tensor.tolist()
            original(tensor, *place, **options)
            meetings[-1]["took"] = tensor.tolist()

        @recorder.around(dist, "destroy_process_group")
        def gather_and_leave(leave):
            everyone.append(gathered(meetings[-1]))
            leave()

        metrics = lesson.run_worker(rank, world_size, args)
    return compare(metrics, everyone, args) if rank == 0 else None


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    return verdict(launch(record, args, program.role_name))


def compare(metrics: dict, everyone: list[list[dict]], args: Namespace) -> dict:
    """Hold a run, of which `everyone` has each meeting of each rank, against one process."""
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


def compare_words(findings: Comparison, method: str, meeting: list[dict], reported: dict,
                  args: Namespace) -> None:
    """Hold what each process knew, as it was reported, against what `init_process_group` got."""
    environments = [of_rank["environment"].values() for of_rank in meeting]
    places = ([":".join(map(str, environment)) for environment in environments] if method == "env"
              else [of_rank["place"] for of_rank in meeting])
    agreed = f"{args.master_addr}:{args.master_ports[method]}"
    if dist.is_torchelastic_launched() or (method == "file" and args.file is None):
        agreed = places[0]  # nobody has said where
    elif method != "env":
        agreed = f"tcp://{agreed}" if method == "tcp" else f"file://{args.file.absolute()}"
    expected = [f"init_method={agreed!r}, rank={rank}, world_size={args.world_size}"
                for rank in range(args.world_size)]
    if method == "env":
        expected = ["MASTER_ADDR={} MASTER_PORT={} RANK={} WORLD_SIZE={}".format(
            *environment, rank, args.world_size) for rank, environment in enumerate(environments)]
    alike = ({*places} == {agreed} and reported["method"] == method
             and all(of_rank["backend"] == "gloo" for of_rank in meeting))
    knew = [row["knew"] for row in reported["ranks"]]
    findings.holds(f"{method}, place", alike and knew == expected,
                   f"all ranks meet at one place, over gloo, and know of it {knew}")
