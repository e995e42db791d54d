"""Records a run of a program that has no line for it: its functions are wrapped while it runs.

    python -m common.tracing param_server/main.py --epochs 2          with the program's own flags
    torchrun --nproc_per_node 3 -m common.tracing param_server/main.py --epochs 2
    python -m common.tracing outputs/param_server      what a failed run under torchrun has left

Recorded are all messages between the processes (messages.py), and what each of them computes
(work.py). A `shown_first(spans_by_role, args)` in the program's `results.py` chooses what is shown
first.

In the end, also when it fails, the run leaves `replay.html`, `timeline.json` and `timeline.png`.
"""

import contextlib
import importlib
import os
import shutil
import sys
import zlib
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import common.program
import torch.distributed as dist
from common import report
from common.cli import refuse, starts_rank
from common.launcher import watch
from common.recorder import gathered
from common.tracing import merge, messages, page, timeline, work
from torch.distributed import rpc

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
        if args.rank is not None or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
            gather_at_the_end(self.folder, rank)
        try:
            metrics = program.run_worker(rank, world_size, args)
        except BaseException as error:
            messages.failed(error)
            raise
        if rank == 0 and dist.is_torchelastic_launched():
            save(self.folder, self.program, args)
        return metrics


def save(folder: Path, program: str | None = None, args: Namespace | None = None,
         failed: bool = False, failure: watch.Failure | None = None) -> None:
    """Write the page, the trace and the picture of what the processes have recorded in `folder`.

    They stand beside the folder, which is removed.

    Args:
        folder: with the files of the processes; nothing happens if there are none.
        program: the name of its module, whose results choose what is shown first.
        args: the parsed flags.
        failed: whether the run has failed.
        failure: which rank did, and how.
    """
    record = merge.merged(folder)
    if record is not None:
        merge.add_failure(record, failure)
        record["failed"] = failed or any(op["kind"] == "failed" for op in record["ops"])
        choose = getattr(program and results_of(program), "shown_first", shown_first)
        spans, shown = record["spans"], None
        if not record["failed"] and any(spans.values()):
            shown = choose(spans, args)
        page.save(record, folder.parent, shown)
        shutil.rmtree(folder, ignore_errors=True)


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


def gather_at_the_end(folder: Path, rank: int) -> None:
    """Let this process, when it leaves, send its file to rank 0, which may be on another machine.

    Args:
        folder: with the files of the processes.
        rank: of this process.
    """
    leave_rpc, leave_group = rpc.shutdown, dist.destroy_process_group
    done = []

    def exchange(all_gather):
        mine = folder / f"rank-{rank}"
        for name, data in all_gather([mine.name, zlib.compress(mine.read_bytes(), 1)]):
            if rank == 0 and name != mine.name:
                (folder / f"{name}.sent").write_bytes(zlib.decompress(data))
        if rank > 0:
            mine.unlink()
            with contextlib.suppress(OSError):  # others use it, too
                folder.rmdir()
        done.append(True)

    def shutdown(*args, **kwargs):
        # What shutdown() itself waits with, twice: nobody has anything left to do, and now the
        # files. Names of torch without a promise; the test of the timelines uses them.
        with messages.quiet():
            rpc.api._all_gather(None, timeout=0)
            exchange(lambda mine: rpc.api._all_gather(mine, timeout=0).values())
        leave_rpc(*args, **kwargs)

    def destroy_process_group(*args, **kwargs):
        # With RPC, which has the processes outside of the group too, there is nothing to do here.
        if not done and not rpc.api._is_current_rpc_agent_set():
            with messages.quiet():
                exchange(gathered)
        leave_group(*args, **kwargs)

    rpc.shutdown, dist.destroy_process_group = shutdown, destroy_process_group


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
        return save(Path(path, RECORD), failed=True)
    file = timeline.lesson_file(str(Path(path).resolve()))
    program = (file or "").removesuffix(".py").replace("/", ".")
    if not is_program(program):
        refuse("give a program of a lesson, such as param_server/main.py, and its flags", None)
    module = importlib.import_module(program)
    launch = common.program.launch

    def traced(run_worker, args, role_name):
        folder, failed, failures = args.output_dir / RECORD, True, []
        if starts_rank(args, 0):  # what an earlier run has left
            for left in folder.glob("rank-*"):
                left.unlink(missing_ok=True)
        tell = watch.report
        watch.report = lambda failure, *more: (failures.append(failure), tell(failure, *more))
        try:
            result = launch(Traced(program, folder), args, role_name)
            failed = False
            return result
        finally:
            watch.report = tell
            if not dist.is_torchelastic_launched() and args.rank in (None, 0):
                save(folder, program, args, failed, *failures)

    common.program.launch = traced
    try:
        return module.main(flags)
    finally:
        common.program.launch = launch
