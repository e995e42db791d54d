"""Record a run of a program that has no line for it: its functions are wrapped while it runs.

    python -m tracing param_server/main.py --epochs 2          with the program's own flags
    torchrun --nproc_per_node 3 -m tracing param_server/main.py --epochs 2
    python -m tracing outputs/trace/param_server      what a failed run under torchrun has left

The record holds every message between the processes and what each process computes. At the end,
also after a failure, the run writes `replay.html` and `timeline.png` into
`outputs/trace/param_server` or the folder of `--output_dir`, beside its results. If torchrun or a
terminal started the ranks, they end at once when the run fails; then the third command writes
these files.

The clock is `time.time()`, which all processes of a machine share. The clocks of two machines often
differ by milliseconds.
"""

import atexit
import functools
import importlib
import marshal
import os
import sys
import zlib
from argparse import Namespace
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import common.launch
from common import ROOT, report
from common.cli import refuse, starts_rank
from common.launch import Failure, RunFailedError, end_now

import torch.distributed as dist

from tracing import merge, messages, places, replay, timeline, work
from tracing.timeline import Window

RECORD = "record"  # folder in which the processes of a run leave what they have recorded
STEPS_SHOWN = 3  # in the picture: the last ones
BARS_SHOWN = 16  # in the picture, of each process, if the steps have more: the last ones


def main(argv: list[str] | None = None) -> dict | None:
    """Run a program and record it; return what the program's own `main` returns."""
    path, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if path in ("-h", "--help"):
        return print(__doc__)
    if Path(path, RECORD).is_dir():
        return say(save(Path(path, RECORD), failed=True))
    file = places.lesson_file(str(Path(path).resolve()))
    program = (file or "").removesuffix(".py").replace("/", ".")
    if not is_program(program):
        refuse("give a program of a lesson, such as param_server/main.py, and its flags", None)
    module = importlib.import_module(program)
    launch, build_parser, pages = common.launch.launch, module.build_parser, []

    def parser_with_own_folder():
        parser = build_parser()
        default = parser.get_default("output_dir").relative_to("outputs")
        parser.set_defaults(output_dir=Path("outputs", "trace", default))
        return parser

    def launch_recorded(run_worker, args, role_name):
        folder, failed, failure = args.output_dir / RECORD, True, None
        if args.rank is None and not dist.is_torchelastic_launched():
            remove(folder)  # what an earlier run has left
        else:
            atexit.register(end_now, 0)  # as `common.program` ends a rank
            if starts_rank(args, 0):
                print(f"after a failure: python -m tracing {args.output_dir}", flush=True)
        try:
            result = launch(functools.partial(run_recorded, program, folder), args, role_name)
            failed = False
            return result
        except RunFailedError as error:
            failure = error.failure
            raise
        finally:
            if starts_rank(args, 0):
                pages.append(save(folder, program, args, failed, failure))

    with ExitStack() as stack:
        stack.callback(lambda: say(pages[-1] if pages else None))  # after all that the program says
        stack.enter_context(mock.patch.object(module, "build_parser", parser_with_own_folder))
        for owner in [*sys.modules.values()]:  # wherever it has been imported
            if getattr(owner, "__dict__", {}).get("launch") is launch:
                stack.enter_context(mock.patch.object(owner, "launch", launch_recorded))
        return module.main(flags)


def is_program(name: str) -> bool:
    """Return whether a module, "param_server.main", is a program of a lesson."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    return (path.is_file() and path.with_name("results.py").is_file()
            and hasattr(importlib.import_module(name), "run_worker"))


def run_recorded(program: str, folder: Path, rank: int, world_size: int,
                 args: Namespace) -> dict | None:
    """Run the `run_worker` of a program, "param_server.main", in a process, and record it."""
    module = importlib.import_module(program)
    roles = [module.role_name(rank, world_size) for rank in range(world_size)]
    ranks = f"{world_size} rank" + ("s" if world_size > 1 else "")
    work.start()
    messages.start(folder, rank, roles, f"{program.replace('.', '/')}.py, {ranks}",
                   report.machine(args))
    try:
        metrics = module.run_worker(rank, world_size, args)
    except BaseException as error:
        messages.failed(error)
        raise
    if args.rank is not None or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        gather(folder, rank, world_size)
    return metrics


def gather(folder: Path, rank: int, world_size: int) -> None:
    """Move the files of all ranks to rank 0, which may run on another machine."""
    files = {path.name: path.read_bytes() for path in folder.glob(f"*rank-{rank}")}
    remove(folder, rank)
    store, _, _ = next(dist.rendezvous(os.environ["INIT_METHOD"], rank, world_size))
    store.set(f"tracing {rank}", zlib.compress(marshal.dumps(files), 1))
    for other in range(world_size if rank == 0 else 0):
        folder.mkdir(exist_ok=True)
        for name, data in marshal.loads(zlib.decompress(store.get(f"tracing {other}"))).items():
            (folder / name).write_bytes(data)


def save(folder: Path, program: str | None = None, args: Namespace | None = None,
         failed: bool = False, failure: Failure | None = None) -> Path | None:
    """Write the page and the picture of what the processes have recorded, beside the folder.

    Args:
        folder: Folder with the files of the processes. It is removed.
        program: Name of the program's module. Its folder's results may have a function
            `shown_first(spans_by_role, args)` that chooses what the picture shows.
        args: Parsed flags.
        failed: Whether the run has failed.
        failure: Which rank has failed, and how.

    Returns:
        Path of the page, or None if the folder is empty.
    """
    record = merge.merged(folder)
    if record is None:
        return None
    merge.add_failure(record, failure)
    record["failed"] = failed or any(op["kind"] == "failed" for op in record["ops"])
    windows = None
    if not record["failed"] and any(record["spans"].values()):
        results = program and importlib.import_module(f"{program.partition('.')[0]}.results")
        windows = getattr(results, "shown_first", shown_first)(record["spans"], args)
    timeline.save(record, folder.with_name("timeline.png"), windows)
    replay.save(record, folder.with_name("replay.html"))
    remove(folder)
    return folder.with_name("replay.html")


def remove(folder: Path, rank: int | str = "*") -> None:
    """Remove the files of a rank, or of all ranks, and the folder if it is empty then."""
    for path in folder.glob(f"*rank-{rank}"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def shown_first(spans_by_role: dict[str, list[dict]],
                args: Namespace | None = None) -> dict[str, Window] | None:
    """Choose the window of the last optimizer steps, or its end if that holds many bars.

    Returns:
        `{caption: (start, end)}`, or None, which stands for the whole run.
    """
    of_roles = [[span["end"] for span in spans if span["kind"] == "step"]
                for spans in spans_by_role.values()]
    # Of the role that finishes first: until then, all other roles train, too.
    ends = min(filter(None, of_roles), key=lambda ends: ends[-1], default=[])[-STEPS_SHOWN - 1 :]
    if len(ends) < 2:
        return None
    start, end = ends[0], ends[-1]
    for spans in spans_by_role.values():
        starts = sorted(span["start"] for span in spans if start <= span["start"] < end)
        start = starts[-BARS_SHOWN] if len(starts) > BARS_SHOWN else start
    return {"": (start, end)}


def say(page: Path | None) -> None:
    """Print where the page is."""
    if page is not None:
        print(f"replay: {page}", flush=True)
