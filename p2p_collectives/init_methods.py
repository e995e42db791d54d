r"""Three ways for processes to find each other (tutorial 6_4, its first cell and its last section).

A group needs one place where every process leaves its address and reads those of the others: a
store.

    env    MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE in the environment; rank 0 opens the store
           at that port. For those who start processes by a program: torchrun, Slurm, Kubernetes
    tcp    the same store, its address in the call: no environment variables needed
    file   a file that all can write, on a shared file system: no port, no address

    python p2p_collectives/init_methods.py --method env          one of them
    python p2p_collectives/init_methods.py --world_size 4        all three, one after the other
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
    """Add up over all ranks; only if all have met can the sum be right."""
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.item()


def init_process(rank: int, size: int, args: Namespace, backend: str = "gloo") -> str:
    """Meet by what is in the environment; return what the process had to know."""
    if not dist.is_torchelastic_launched():  # torchrun has set all four
        os.environ["MASTER_ADDR"] = args.master_addr
        # Tutorial: 29500, which two runs side by side would share.
        os.environ["MASTER_PORT"] = str(args.master_ports["env"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=args.timeout))
    names = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def init_file(rank: int, size: int, args: Namespace) -> str:
    """Meet in a file, which is the store; return what the process had to know.

    It must not exist before: what an earlier run left would be read.
    """
    # By default one of this run alone: all ranks have one launcher, which removes what is left.
    file = args.file or args.output_dir / f".sharedfile.{parent_process().pid}.tmp"
    init_method = f"file://{file.absolute()}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size,
                            timeout=timedelta(seconds=args.timeout))
    return f"init_method={init_method!r}, rank={rank}, world_size={size}"


def init_tcp(rank: int, size: int, args: Namespace) -> str:
    """Meet at an address, which is an argument; return what the process had to know."""
    init_method = f"tcp://{args.master_addr}:{args.master_ports['tcp']}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size,
                            timeout=timedelta(seconds=args.timeout))
    return f"init_method={init_method!r}, rank={rank}, world_size={size}"


METHODS = {"env": init_process, "tcp": init_tcp, "file": init_file}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Meet, add up, part, with each method; rank 0 returns what everyone knew and the sums."""
    meetings = []
    for method in METHODS if args.method == "all" else [args.method]:
        knew = METHODS[method](rank, world_size, args)
        row = {"rank": rank, "knew": knew, "sum": run(rank, world_size)}
        everyone = [None] * world_size if rank == 0 else None
        dist.gather_object(row, everyone)
        dist.destroy_process_group()
        meetings.append({"method": method, "ranks": everyone})
    return {"meetings": meetings} if rank == 0 else None


def free_port() -> int:
    """Find a port of this machine that is free now; another program could take it before rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("p2p_collectives/init_methods", __doc__, world_size=3)
    add = parser.add_argument
    add("--method", choices=[*METHODS, "all"], default="all", help="how the processes meet")
    add("--file", type=Path, metavar="FILE", help="the store of --method file; must not exist yet "
        "(default: a hidden one in --output_dir, of this run alone)")
    return parser


def require_meeting(args: Namespace) -> None:
    """Refuse what the ranks could not meet by, before any process starts.

    Raises:
        SystemExit: 2 after one line.
    """
    manual = args.rank is not None
    if dist.is_torchelastic_launched() and args.method != "env":
        refuse(f"--method {args.method} must be env under torchrun, which says where to meet")
    if manual and args.method == "all":
        refuse(f"--method all must be env, tcp or file with --rank {args.rank}: a manual launch "
               "meets once")
    if manual and args.method == "file" and args.file is None:
        refuse(f"--method file requires --file FILE with --rank {args.rank}, a path that all share")
    if args.device == "cuda":
        refuse("--device cuda must be cpu or auto: what is added up here is in main memory")
    if args.file is not None:
        require_writable_file("--file", args.file)
        if args.file.exists() and not manual:
            refuse(f"--file {args.file} must be a path where nothing is yet: an old store would "
                   "confuse the new run")
        path = str(args.file.absolute())
        if urlparse(f"file://{path}").path != path:
            refuse(f"--file {args.file} must be a path without ?, # and control characters, unlike "
                   f"{path}: it becomes a part of a URL")


def main(argv: list[str] | None = None) -> dict | None:
    """Meet, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_meeting(args)
    if args.rank is not None:
        args.master_ports = dict.fromkeys(METHODS, args.master_port)
    else:
        args.master_addr = "127.0.0.1"
        args.master_ports = {method: free_port() for method in METHODS}
    return run_program(run_worker, args, role_name, finish)


def finish(metrics: dict, args: Namespace) -> dict:
    """Write metrics.json, print what each process had to know, and the line of numbers.

    Returns:
        The whole metrics.

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
