"""Records a run of a program that has no line for it: its functions are wrapped while it runs.

    python -m tracing param_server/main.py --epochs 2          with the program's own flags
    torchrun --nproc_per_node 3 -m tracing param_server/main.py --epochs 2
    python -m tracing outputs/trace/param_server      what a failed run under torchrun has left

Recorded are all messages between the processes (messages.py), and what each of them computes
(work.py). A `shown_first(spans_by_role, args)` in the program's `results.py` chooses what is shown
first.

In the end, also when it fails, the run leaves `replay.html`, `timeline.json` and `timeline.png` in
`outputs/trace/param_server`, or in the folder of `--output_dir`, beside the results of the run. A
rank that torchrun or a terminal has started ends at once when the run fails; then the third command
makes these files.
"""

import atexit
import importlib
import os
import sys
import zlib
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from unittest import mock

import common.program
from common import report
from common.cli import refuse, starts_rank
from common.launch import Failure, RunFailedError, end_now
from common.recorder import gathered

import torch.distributed as dist

from tracing import merge, messages, page, timeline, work

RECORD = "record"  # the folder in which the processes of a run leave what they have recorded
STEPS_SHOWN = 3  # at first: the last ones
BARS_SHOWN = 16  # at first, of a process: the last ones, where steps are long


class Traced:
    """Runs the `run_worker` of a program and records it; `launch` takes it to each process.

    Args:
        program: the name of its module, "param_server.main".
        folder: for the files of the processes.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder

    def __call__(self, rank: int, world_size: int, args: Namespace) -> dict | None:
        """Run it; see `launch`."""
        program = importlib.import_module(self.program)
        roles = [program.role_name(rank, world_size) for rank in range(world_size)]
        title = f"{self.program.replace('.', '/')}.py, {world_size} ranks"
        work.start()
        messages.start(self.folder, rank, roles, title, report.machine(args))
        try:
            metrics = program.run_worker(rank, world_size, args)
        except BaseException as error:
            messages.failed(error)
            raise
        if args.rank is not None or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
            gather(self.folder, rank, world_size)
        return metrics


def gather(folder: Path, rank: int, world_size: int) -> None:
    """Bring the files of all processes to rank 0, which may be on another machine.

    Args:
        folder: for the files of the processes.
        rank: of this process.
        world_size: number of processes.
    """
    mine = {path.name: zlib.compress(path.read_bytes(), 1) for path in folder.glob(f"*rank-{rank}")}
    clear(folder, rank)
    with messages.quiet():
        store, _, _ = next(dist.rendezvous(os.environ["INIT_METHOD"], rank, world_size))
        dist.init_process_group("gloo", store=dist.PrefixStore("tracing", store), rank=rank,
                                world_size=world_size)
        everyone = gathered(mine)
        dist.destroy_process_group()
    if rank == 0:
        folder.mkdir(exist_ok=True)
        for files in everyone:
            for name, data in files.items():
                (folder / name).write_bytes(zlib.decompress(data))


def save(folder: Path, program: str | None = None, args: Namespace | None = None,
         failed: bool = False, failure: Failure | None = None) -> Path | None:
    """Write the page, the trace and the picture of what the processes have recorded in `folder`.

    They stand beside the folder, which is removed.

    Args:
        folder: with the files of the processes.
        program: the name of its module, whose results choose what is shown first.
        args: the parsed flags.
        failed: whether the run has failed.
        failure: which rank did, and how.

    Returns:
        The path of the page; None if there is nothing in the folder.
    """
    record = merge.merged(folder)
    if record is None:
        return None
    merge.add_failure(record, failure)
    record["failed"] = failed or any(op["kind"] == "failed" for op in record["ops"])
    choose = getattr(program and results_of(program), "shown_first", shown_first)
    spans, shown = record["spans"], None
    if not record["failed"] and any(spans.values()):
        shown = choose(spans, args)
    page.save(record, folder.parent, shown)
    clear(folder)
    return folder.parent / "replay.html"


def clear(folder: Path, rank: int | str = "*") -> None:
    """Remove the files of a process, or of all; and the folder if nothing else is in it."""
    for path in folder.glob(f"*rank-{rank}"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def is_program(name: str) -> bool:
    """Return whether a module, "param_server.main", is a program of a lesson."""
    path = timeline.ROOT / f"{name.replace('.', '/')}.py"
    return (path.is_file() and path.with_name("results.py").is_file()
            and hasattr(importlib.import_module(name), "run_worker"))


def results_of(program: str) -> ModuleType:
    """Import the results of a program, "param_server.main": its own, or those of its folder."""
    path = timeline.ROOT / f"{program.replace('.', '/')}.py"
    module = importlib.import_module(program)
    if getattr(module, "finish", None) and module.finish.__module__ != program:
        return sys.modules[module.finish.__module__]
    results = common.program.belonging_to(path, "results")
    return importlib.import_module(f"{program.partition('.')[0]}.{results}")


def shown_first(spans_by_role: dict[str, list[dict]],
                args: Namespace | None = None) -> dict[str, tuple[float, float]] | None:
    """Choose the window of the last steps that all trainers make, or the end of it.

    Args:
        spans_by_role: `{role: spans}`.
        args: the parsed flags.

    Returns:
        `{caption: (start, end)}`, or None, which is everything.
    """
    of_roles = [[span for span in spans if span["kind"] == "step"]
                for spans in spans_by_role.values()]
    # Of the role that is the first to be through: until then, all others train, too.
    steps = min(filter(None, of_roles), key=lambda steps: steps[-1]["end"], default=[])
    ends = [span["end"] for span in steps if (span["where"], span["labels"])
            == (steps[-1]["where"], steps[-1]["labels"])][-STEPS_SHOWN - 1 :]

    def until(time):  # all roles have made the step that ends about then
        return max(min((span["end"] for span in of_role), key=lambda end: abs(end - time))
                   for of_role in of_roles if of_role)

    if not ends:
        return None
    start, end = until(ends[0]) if len(ends) > 1 else 0, until(ends[-1])
    for spans in spans_by_role.values():
        starts = sorted(span["start"] for span in spans if start <= span["start"] < end)
        start = starts[-BARS_SHOWN] if len(starts) > BARS_SHOWN else start
    return {"": (start, end)} if 0 < start < end else None


def main(argv: list[str] | None = None) -> dict | None:
    """Run a program and record it; return what its own `main` returns.

    With a folder of results in the place of a program, write the pages of a run that could not do
    so itself any more: one under torchrun that failed.
    """
    path, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if path in ("-h", "--help"):
        return print(__doc__)
    if Path(path, RECORD).is_dir():
        return tell(save(Path(path, RECORD), failed=True))
    file = timeline.lesson_file(str(Path(path).resolve()))
    program = (file or "").removesuffix(".py").replace("/", ".")
    if not is_program(program):
        refuse("give a program of a lesson, such as param_server/main.py, and its flags", None)
    module = importlib.import_module(program)
    launch, build_parser, pages = common.program.launch, module.build_parser, []

    def with_own_folder():
        parser = build_parser()
        default = parser.get_default("output_dir").relative_to("outputs")
        parser.set_defaults(output_dir=Path("outputs", "trace", default))
        return parser

    def traced(run_worker, args, role_name):
        folder, failed, failure = args.output_dir / RECORD, True, None
        started_here = args.rank is None and not dist.is_torchelastic_launched()
        if started_here:
            clear(folder)  # what an earlier run has left
        else:
            atexit.register(end_now, 0)  # as `common.program` does for a rank
            if starts_rank(args, 0):
                print(f"after a failure: python -m tracing {args.output_dir}", flush=True)
        try:
            result = launch(Traced(program, folder), args, role_name)
            failed = False
            return result
        except RunFailedError as error:
            failure = error.failure
            raise
        finally:
            if starts_rank(args, 0):
                pages.append(save(folder, program, args, failed, failure))

    with (mock.patch.object(common.program, "launch", traced),
          mock.patch.object(module, "build_parser", with_own_folder)):
        try:
            return module.main(flags)
        finally:
            for path in pages:
                tell(path)


def tell(path: Path | None) -> None:
    """Print where the page is."""
    if path is not None:
        print(f"replay: {path}", flush=True)
