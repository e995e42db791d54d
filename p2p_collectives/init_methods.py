r"""Three methods by which processes find each other (tutorial 6_4, first cell and last section).

A group needs a store: one place where every process leaves its address and reads the addresses of
the other processes.

    env    MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE in the environment; rank 0 opens the store
           at that port. Programs that start processes use it: torchrun, Slurm, Kubernetes.
    tcp    the same store; its address is an argument, so no environment variables are needed
    file   a file on a shared file system that all processes can write: no port, no address

    python p2p_collectives/init_methods.py --method env          one method
    python p2p_collectives/init_methods.py --world_size 4        all three methods, in turn
    python p2p_collectives/init_methods.py --method tcp --world_size 2 --rank 0 --master_addr HOST
    python p2p_collectives/init_methods.py --method tcp --world_size 2 --rank 1 --master_addr HOST
    torchrun --nproc_per_node 3 p2p_collectives/init_methods.py --method env

It ends with:
    env, tcp, file: 3 ranks found each other 3 times, and their sum is 6 each time
"""

import os
import socket
from argparse import Namespace
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from urllib.parse import urlparse

from common import report
from common.cli import Parser, refuse, require_writable_file
from common.program import role_name, run_program

import torch
import torch.distributed as dist


def run(rank: int, size: int) -> float:
    """Sum over all ranks: the sum is right only if all ranks have met."""
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.item()


def init_process(rank: int, size: int, args: Namespace, backend: str = "gloo") -> str:
    """Meet by environment variables; return what the process had to know."""
    if not dist.is_torchelastic_launched():  # torchrun has set all four variables
        os.environ["MASTER_ADDR"] = args.master_addr
        # Tutorial: the port is always 29500, so two runs at a time would meet each other.
        os.environ["MASTER_PORT"] = str(args.master_ports["env"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=args.timeout))
    names = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def init_file(rank: int, size: int, args: Namespace) -> str:
    """Meet in a file, which is the store; return what the process had to know.

    The file must not exist before, because the ranks would read what an earlier run left in it.
    """
    # The default belongs to this run alone: all ranks have one launcher, which removes the file.
    file = args.file or args.output_dir / f".sharedfile.{parent_process().pid}.tmp"
    init_method = f"file://{file.absolute()}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size,
                            timeout=timedelta(seconds=args.timeout))
    return f"init_method={init_method!r}, rank={rank}, world_size={size}"


def init_tcp(rank: int, size: int, args: Namespace) -> str:
    """Meet at an address that is an argument; return what the process had to know."""
    init_method = f"tcp://{args.master_addr}:{args.master_ports['tcp']}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size,
                            timeout=timedelta(seconds=args.timeout))
    return f"init_method={init_method!r}, rank={rank}, world_size={size}"


METHODS = {"env": init_process, "tcp": init_tcp, "file": init_file}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Meet, sum and leave by each method; rank 0 returns what every rank knew, and the sums."""
    meetings = []
    for method in METHODS if args.method == "all" else [args.method]:
        knew = METHODS[method](rank, world_size, args)
        row = {"rank": rank, "knew": knew, "sum": run(rank, world_size)}
        rows = [None] * world_size if rank == 0 else None
        dist.gather_object(row, rows)
        dist.destroy_process_group()
        meetings.append({"method": method, "ranks": rows})
    return {"meetings": meetings} if rank == 0 else None


def free_port() -> int:
    """Return a port of this machine that is free now. Another program may still take it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/init_methods", __doc__, world_size=3)
    add = parser.add_argument
    add("--method", choices=[*METHODS, "all"], default="all",
        help="how the processes find each other")
    add("--file", type=Path, metavar="FILE", help="the store of --method file, which must not "
        "exist yet (default: a hidden file in --output_dir)")
    return parser


def require_meeting(args: Namespace) -> None:
    """Refuse flags with which the ranks could not meet, before any process starts.

    Raises:
        SystemExit: 2 after one line.
    """
    manual = args.rank is not None
    if dist.is_torchelastic_launched() and args.method != "env":
        refuse(f"--method {args.method} must be env under torchrun, which chooses the "
               "address")
    if manual and args.method == "all":
        refuse(f"--method all must be env, tcp or file with --rank {args.rank}: a manual launch "
               "meets once")
    if manual and args.method == "file" and args.file is None:
        refuse(f"--method file requires --file FILE with --rank {args.rank}: a path that "
               "all ranks share")
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: these tensors are in main memory")
    if args.file is not None:
        require_writable_file("--file", args.file)
        if args.file.exists() and not manual:
            refuse(f"--file {args.file} must be a path where nothing is yet: the ranks would "
                   "read the old store")
        path = str(args.file.absolute())
        if urlparse(f"file://{path}").path != path:
            refuse(f"--file {args.file} must be a path without ?, # and control characters, unlike "
                   f"{path}: the path becomes a part of a URL")


def main(argv: list[str] | None = None) -> dict | None:
    """Run the program, or with `--check` compare it with a single process.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_meeting(args)
    if args.rank is not None:
        args.master_ports = dict.fromkeys(METHODS, args.master_port)
    else:
        args.master_addr = "127.0.0.1"
        args.master_ports = {method: free_port() for method in METHODS}
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, print what each process had to know, and the summary line.

    Returns:
        The complete metrics.

    Raises:
        SystemExit: 1 if a sum is wrong.
    """
    metrics = report.save_metrics(args, metrics, backend="gloo", device="cpu")
    for meeting in metrics["meetings"]:
        print(f"\n--method {meeting['method']}")
        for row in meeting["ranks"]:
            print(f"  rank {row['rank']} knew: {row['knew']}")
    sums = {meeting["method"]: [row["sum"] for row in meeting["ranks"]]
            for meeting in metrics["meetings"]}
    expected = args.world_size * (args.world_size + 1) / 2
    if any(value != expected for values in sums.values() for value in values):
        print(f"\nWRONG: the sums should be {expected:g}: {sums}")
        raise SystemExit(1)
    times, each = ("once", "") if len(sums) == 1 else (f"{len(sums)} times", " each time")
    print(f"\n{', '.join(sums)}: {args.world_size} ranks found each other {times}, and their sum "
          f"is {expected:g}{each}")
    return metrics


if __name__ == "__main__":
    main()
