"""Kill, fill up and start the programs, again and again: is anything lost?

    python -m benchmarks.soak                             `make soak`: 18 minutes and a last trial
    python -m benchmarks.soak --minutes 1 --page page.md  as many trials as fit into a minute

Writes what it has found into docs/reliability.md, which says what is tried and what "lost" means;
`tests/test_checkpoints.py` tries once for each program what is repeated here.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import io
import itertools
import json
import os
import platform
import random
import re
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from common import report
from common.cli import Parser, PlainParser, bounded
from common.launcher import launch
from common.launcher.start import PRELOAD
from common.program import role_name
from common.session import group_options

from tests import helpers
from tests.fault_table import KILLED, OF_A_RANK

PAGE = helpers.ROOT / "docs" / "reliability.md"
WAYS = ("local", "torchrun", "manual")
A_RANK, LAUNCHER, WRITER = "a rank", "the launcher", "the rank that writes"
FULL_DISK, READ_ONLY = "full disk", "read-only folder"
REASONS = {FULL_DISK: "No space left on device", READ_ONLY: "Read-only file system"}
# What a trial comes to, if not to the end that it should have.
EARLY, LATE = "before the first checkpoint", "over before it could be killed"
NOT_HERE, LOST = "not possible here", "lost"
STARTS = 10  # in this process, in each round
AT_ONCE, AT_ONCE_LIMIT_S = 12, 600
# At once with trainings: each compares its numbers with those of a single process.
CHECKS = ("batch_rl/main.py", "ddp_rpc_hybrid/main.py", "model_parallel_resnet/schedules.py",
          "ddp_basic/main.py", "p2p_collectives/main.py", "param_server/batch_update.py")


class Program(NamedTuple):
    """Describes a program that saves its training."""

    lesson: str  # module
    flags: str  # for a training of a few seconds, with several checkpoints
    roles: tuple[str, ...]  # of its ranks
    writer: int  # the rank that saves
    numbers: str  # the metrics that are the same whenever the training is repeated
    resume: str = "--resume"


PROGRAMS = (
    Program("rpc_rl.fast", "--max_episodes 40 --log_interval 5 --reward_threshold 499",
            ("agent", "observer1", "observer2"), 0,
            "rewards running_rewards running_reward env_steps"),
    # Its text is one that nobody edits meanwhile: with another one, all would be lost.
    Program("rpc_rnn.main", "--epochs 6 --dropout 0.2 --nhid 32 "
            f"--corpus {helpers.ROOT}/docs/japanese_edition.json",
            ("ps", "trainer"), 1, "epochs initial_val_loss perplexity sample"),
    # One trainer: with several, no two trainings have their updates in the same order.
    Program("param_server.main", "--world_size 2 --epochs 2 --batch_size 100",
            ("parameter_server", "trainer1"), 0, "epochs test_accuracy"),
    # Three ranks: the sum of two numbers is the same in any order.
    Program("p2p_collectives.train_ddp", "--world_size 3 --epochs 4",
            ("rank0", "rank1", "rank2"), 0, "epochs test_accuracy"),
    Program("ddp_basic.elastic", "--world_size 3 --epochs 5 --global_batch_size 33",
            ("rank0", "rank1", "rank2"), 0, "history loss test_accuracy", resume=""),
)


class LostError(Exception):
    """Tells what has been lost."""


class NotHereError(Exception):
    """Tells why something cannot be tried on this machine."""


# --- a training, and what it leaves

SAVED = Path("disk", "run.pt")  # the checkpoint, in the folder of a training


class Ended(NamedTuple):
    """Tells how a training has ended."""

    statuses: list[int]  # of its commands: one, or in a manual launch one for each rank
    errors: list[str]  # what each of them has printed to stderr
    times: list[float]  # when each checkpoint was there, in seconds since all ranks were
    first: bytes | None  # checkpoint


def command(place: Path, program: Program, seed: int = 0) -> list[str]:
    """Return the script and the flags of a training, which goes on from its checkpoint, if any."""
    saved = place / SAVED
    saved.parent.mkdir(exist_ok=True)
    flags = f"{program.flags} {program.resume if saved.exists() else ''} --seed {seed}"
    return [program.lesson.replace(".", "/") + ".py", *flags.split(), "--checkpoint", str(saved),
            "--output_dir", str(place / "out")]


def ranks_of(runs: list, way: str) -> list[int]:
    """Return the process ids of the ranks that have started."""
    with contextlib.suppress(OSError, psutil.Error):  # some process has just ended
        if way == "torchrun":  # each has a process that watches it
            return [pid for pid in helpers.children(runs[0].pid) if helpers.children(pid)]
        return [pid for run in runs for pid in helpers.workers(run)]
    return []


def train(place: Path, program: Program, way: str = "local", seed: int = 0, path: str = "",
          cold: bool = False, deed: Callable | None = None, after: int = 0,
          delay_s: float = 0.0) -> Ended:
    """Run a training to its end, and disturb it in the middle.

    Args:
        place: for its files; if there is a checkpoint, it goes on from that.
        program: which.
        way: of `WAYS`.
        seed: of the training.
        path: of another script than the program's own.
        cold: with a Python that is started anew, not forked (`tests.warm`).
        deed: `deed(processes of the commands, process ids of the ranks)`, called once,
        after: when so many checkpoints were there,
        delay_s: so many seconds later.

    Raises:
        LostError: it does not end.
        AssertionError: a process or a temporary file is left.
    """
    own_path, *flags = command(place, program, seed)
    lines = helpers.commands(way, len(program.roles), path or own_path, *flags)
    saved, limit = place / SAVED, time.monotonic() + helpers.LIMIT_S
    version, since, times, first = saved.exists() and saved.stat().st_mtime_ns, None, [], None
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(helpers.running(line, place, stdout=subprocess.DEVNULL,
                                                    cold=cold)) for line in lines]
        while any(run.poll() is None for run in runs):
            now = time.monotonic()
            if now > limit:
                raise LostError(f"still running after {helpers.LIMIT_S} s")
            if since is None:
                ranks = ranks_of(runs, way)
                since = now if len(ranks) == len(program.roles) else None
            elif saved.exists() and version != (version := saved.stat().st_mtime_ns):
                times.append(now - since)
                first = first or saved.read_bytes()
            if (deed and since and len(times) >= after
                    and now - since >= [0.0, *times][after] + delay_s):
                deed(runs, ranks)
                deed = None
            time.sleep(0.003)
        helpers.nothing_left(runs[0], place, *runs[1:])
        errors = [run.stderr.read() for run in runs]
    return Ended([run.returncode for run in runs], errors, times, first)


@functools.cache
def undisturbed(program: Program, seed: int) -> tuple[Ended, dict]:
    """Train once without an interruption; return how it has ended, and what it has left."""
    with tempfile.TemporaryDirectory() as place:
        ended = train(Path(place), program, seed=seed)
        if ended.statuses != [0]:
            raise LostError(f"not even undisturbed: {ended.errors[0]}")
        return ended, left_in(Path(place), program)


def left_in(place: Path, program: Program) -> dict:
    """Return the numbers that a training has reported, and the state in its last checkpoint."""
    metrics = json.loads((place / "out" / "metrics.json").read_text())
    return {"checkpoint": torch.load(place / SAVED, weights_only=True),
            **{name: metrics[name] for name in program.numbers.split()}}


def go_on(place: Path, program: Program, way: str = "local", cold: bool = False) -> None:
    """Train, from what a failure has left if there is something, and compare."""
    ended = train(place, program, way, cold=cold)
    if any(ended.statuses) or (any(ended.errors) and way != "torchrun"):  # which itself warns
        raise LostError(f"ended with status {ended.statuses}: {ended.errors}")
    compare(place, program)


def compare(place: Path, program: Program, seed: int = 0) -> None:
    """Raise `LostError` unless a training is, bit by bit, the one that nobody interrupted."""
    require_equal(undisturbed(program, seed)[1], left_in(place, program))


def require_equal(whole: dict, part: dict) -> None:
    """Raise `LostError` unless an interrupted training has left (`left_in`) what another has."""
    # param_server reports the epochs since it was resumed.
    whole = flat({name: value[len(value) - len(part[name]):] if isinstance(value, list) else value
                  for name, value in whole.items()})
    part = flat(part)
    places = [place for place in whole | part if whole.get(place) != part.get(place)]
    if places:
        raise LostError(f"{places[0]} differs, and {len(places) - 1} other numbers or tensors")


def flat(value: object, where: str = "") -> dict[str, tuple]:
    """Return all that is in nested containers, by its place; == then compares every bit."""
    if isinstance(value, torch.Tensor):
        bits = value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {where: (value.dtype, value.shape, bits)}
    if isinstance(value, bytes):  # a file of torch.save in the file: optimizers of other ranks
        value = torch.load(io.BytesIO(value), weights_only=True)
    if not isinstance(value, dict | list | tuple):
        return {where: (type(value), repr(value))}
    found = {where: (type(value), len(value))}
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found |= flat(part, f"{where}[{key!r}]")
    return found


# --- trials: each has a new folder, and raises an exception if something is lost

DIES_WRITING = """
import itertools, os, pathlib, signal

original, writes = os.replace, itertools.count(1)

def replace(temporary, path):
    if pathlib.Path(path).name == "run.pt" and next(writes) == {write}:
        os.truncate(temporary, os.path.getsize(temporary) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    original(temporary, path)

os.replace = replace
"""


def kill(place: Path, program: Program, whom: str, way: str, rng: random.Random) -> str | None:
    """SIGKILL at a random moment of a training, which then goes on; `EARLY` or `LATE` if it was so.

    Args:
        place: a new folder.
        program: which.
        whom: `A_RANK`, `LAUNCHER`, or `WRITER`, which has half of a checkpoint on the disk.
        way: of `WAYS`.
        rng: for the moment.

    Raises:
        LostError: another end than docs/faults.md promises, or another training in the end.
    """
    rank, times = rng.randrange(len(program.roles)), undisturbed(program, 0)[0].times
    after = rng.randrange(len(times))
    delay_s = rng.uniform(0, times[after] - [0.0, *times][after])

    def deed(runs, ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank] if whom == A_RANK else runs[rank % len(runs)].pid, signal.SIGKILL)

    if whom == WRITER:
        rank, when = program.writer, f"in the middle of checkpoint {after + 1}"
        _, path = helpers.faulty(program.lesson, place, DIES_WRITING.format(write=after + 1))
        ended = train(place, program, way, path=path)
    else:
        when = f"{delay_s:.2f} s after checkpoint {after}"
        ended = train(place, program, way, deed=deed, after=after, delay_s=delay_s)
        if not any(ended.statuses):
            return LATE
    early, statuses = not (place / SAVED).exists(), [1] * len(ended.statuses)
    line = (rf"error: rank {rank} \({program.roles[rank]}\) "
            rf"{OF_A_RANK['SIGKILL'].expected(way)}(; stopped .*)?")
    if whom == LAUNCHER:
        statuses[rank % len(statuses)], line = KILLED, r"(.|\n)*"
    lines = ["\n".join(re.findall("^error:.*", errors, re.MULTILINE)) for errors in ended.errors]
    try:
        if ended.statuses != statuses or not all(re.fullmatch(line, found) for found in lines):
            raise LostError(f"ended with status {ended.statuses}: {ended.errors}")
        go_on(place, program, way)
    except LostError as error:
        raise LostError(f"rank {rank} killed {when}: {error}") from None
    return EARLY if early else None


def cannot_save(place: Path, program: Program, what: str, resume: bool = True) -> None:
    """Train where the first checkpoint is, and no other one can be written; then, where it can.

    Args:
        place: a new folder; a small disk is mounted there.
        program: which.
        what: of `REASONS`; the disk becomes read-only when the ranks are there.
        resume: whether to go on when the disk can be written again.
    """
    first, saved = undisturbed(program, 0)[0].first, place / SAVED
    large = f"size={len(first) * 10}"
    size = f"size={len(first) * 3 // 2}" if what == FULL_DISK else large
    line = (f"error: rank {program.writer} ({program.roles[program.writer]}) could not write "
            f"{saved}: {REASONS[what]}; stopped ")

    def deed(*_):
        if what == READ_ONLY:
            mount("-o", "remount,ro", saved.parent)

    saved.parent.mkdir()
    mount("-t", "tmpfs", "-o", size, "tmpfs", saved.parent)
    try:
        saved.write_bytes(first)
        ended = train(place, program, deed=deed)
        if ended.statuses != [1] or not ended.errors[0].startswith(line):
            raise LostError(f"ended with status {ended.statuses}: {ended.errors}")
        if os.listdir(saved.parent) != ["run.pt"] or saved.read_bytes() != first:
            raise LostError(f"the checkpoint was changed, or not alone: {os.listdir(saved.parent)}")
        if resume:
            mount("-o", f"remount,rw,{large}", saved.parent)
            go_on(place, program)
    finally:
        subprocess.run(["umount", "-l", saved.parent], check=True)


def mount(*arguments: str | Path) -> None:
    """Mount, which only root may; `NotHereError` where this user cannot."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotHereError(f"needs root, to mount a small disk ({done.stderr.strip()})")


def at_once(place: Path) -> None:
    """Start many commands at the same moment: trainings and checks, each with a seed of its own."""
    turns = itertools.chain.from_iterable(
        zip(itertools.cycle(PROGRAMS), itertools.cycle(CHECKS), strict=False))
    mix = [(place / str(seed), seed, what)
           for seed, what in enumerate(itertools.islice(turns, AT_ONCE))]
    for here, seed, what in mix:
        here.mkdir()
        if isinstance(what, Program):
            undisturbed(what, seed)
    with contextlib.ExitStack() as stack:
        lines = [command(here, what, seed) if isinstance(what, Program)
                 else [what, "--check", "--seed", seed] for here, seed, what in mix]
        runs = [stack.enter_context(helpers.running(helpers.script(*line), here,
                                                    stdout=subprocess.DEVNULL))
                for line, (here, _, _) in zip(lines, mix, strict=True)]
        for run, (here, seed, what) in zip(runs, mix, strict=True):
            status, errors = run.wait(AT_ONCE_LIMIT_S), run.stderr.read()
            helpers.nothing_left(run, here)
            if status or errors:
                raise LostError(f"the one of seed {seed} ended with status {status}: {errors}")
            if isinstance(what, Program):
                compare(here, what, seed)


def meet(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Join a group, wait until all have, and leave it."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()
    return {} if rank == 0 else None


def starts(place: Path) -> None:
    """Start two ranks that meet in a barrier, again and again, from this process."""
    args, held = Parser("soak", __doc__, 2).parse_args(["--output_dir", str(place)]), []
    for _ in range(STARTS):
        launch(meet, args, role_name)
        gc.collect()
        processes = [os.getpid(), *helpers.descendants(os.getpid())]  # also the fork server
        held.append({
            "processes": processes, "temporary files": sorted(os.listdir(tempfile.gettempdir())),
            "open files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes),
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in processes),
            "listening": sorted(helpers.listening(processes))})
    if held[1] != held[-1]:  # the first one may have started the fork server
        raise LostError(f"there are {held[-1]}, after the second start {held[1]}")


# --- all of it


def trials(rng: random.Random) -> Iterator[tuple]:
    """Yield what to try, for ever: a row and a column of the page, a function, its arguments."""
    for number in itertools.count():
        for turn, program in enumerate(PROGRAMS, number):  # in time, each whom in each way
            whom, way = (A_RANK, LAUNCHER, WRITER, A_RANK)[turn % 4], WAYS[turn % 3]
            yield f"{whom} killed, {way}", program.lesson, kill, program, whom, way, rng
        program, way = PROGRAMS[number % 5], WAYS[number % 3]
        yield f"not disturbed, {way}", program.lesson, go_on, program, way, True
        yield f"{STARTS} starts in one Python process", "others", starts
        if number == 0:
            for what, program in itertools.product(REASONS, PROGRAMS):
                yield what, program.lesson, cannot_save, program, what
        if number == 1:
            yield f"{AT_ONCE} commands at once", "others", at_once


def soak(minutes: float, seed: int, folder: Path) -> tuple[dict[str, Counter], list[str]]:
    """Try one thing after the other; no trial begins after so many minutes.

    Returns:
        The rows of the page, and in words what was lost.
    """
    began, shared, rows, lost = time.monotonic(), set(os.listdir("/dev/shm")), {}, []
    for row, column, function, *arguments in trials(random.Random(seed)):
        if time.monotonic() > began + 60 * minutes:
            break
        # The name of a Unix socket in it must not be long.
        with tempfile.TemporaryDirectory(dir=folder, prefix="") as place:
            try:
                result = function(Path(place), *arguments)
                words = result or "nothing lost"
            except NotHereError as reason:
                result, words = NOT_HERE, f"{NOT_HERE}: {reason}"
            except (Exception, SystemExit) as error:
                if getattr(error, "code", None) == 130:  # Ctrl-C
                    raise
                # An assertion has no words: its line has.
                words = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
                result, words = LOST, " ".join(f"LOST: {type(error).__name__}: {words}".split())
                lost.append(f"{row}, {column}: {words[:1000]}")
        rows.setdefault(row, Counter()).update([column, result])
        minute = (time.monotonic() - began) / 60
        report.log("soak", f"{minute:4.1f} min: {row}, {column}: {words}")
    deadline = time.monotonic() + 10  # other programs of this machine may use it for a while
    while (left := set(os.listdir("/dev/shm")) - shared) and time.monotonic() < deadline:
        time.sleep(0.1)
    return rows, lost + [f"left in shared memory: {sorted(left)}"] * bool(left)


def summary(rows: dict[str, Counter], lost: list[str], where: str) -> str:
    """Return all that was found, in Markdown."""
    columns = [*(program.lesson for program in PROGRAMS), "others", EARLY, LATE, NOT_HERE, LOST]
    table = [["", *columns], ["---"] * (1 + len(columns)),
             *([row, *(counts.get(column, "") for column in columns)]
               for row, counts in sorted(rows.items()))]
    trials = sum(counts[column] for counts in rows.values() for column in columns[:-4])
    trials -= sum(counts[NOT_HERE] for counts in rows.values())
    return "\n".join([
        f"Lost: **{len(lost) or 'nothing'}**; {trials} trials on {where}.", "",
        *(f"- {what}" for what in lost), *[""] * bool(lost),
        *(f"| {' | '.join(map(str, cells))} |" for cells in table), "", "The trainings:", "",
        *(f"- `{program.lesson}`: `{program.flags}`".replace(f"{helpers.ROOT}/", "")
          for program in PROGRAMS),
        "", f"At once with them: `--check` of {', '.join(f'`{path}`' for path in CHECKS)}."])


def build_parser() -> PlainParser:
    """Return the parser: how long, and where the page goes."""
    parser = PlainParser(__doc__)
    parser.set_defaults(device="cpu")
    add = parser.add_argument
    add("--minutes", type=bounded(float, above=0), default=18.0, metavar="M",
        help="no trial begins later")
    add("--seed", type=bounded(int, at_least=0), default=0, help="of the random moments")
    add("--page", type=Path, default=PAGE, metavar="FILE", help="what to write")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Do all trials and write them into the page; SystemExit(1) if anything was lost."""
    args, began = build_parser().parse_args(argv), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or commands and disks would stay
    PRELOAD.append("tests.fault_table")  # what the ranks of `starts` import with this file
    util.get_temp_dir()  # now: it stays until the end of this process
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = f"{folder}/tmp"
        os.mkdir(tempfile.tempdir)
        try:
            rows, lost = soak(args.minutes, args.seed, Path(folder))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    where = (f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, "
             f"{(time.monotonic() - began) / 60:.0f} minutes with `--seed {args.seed}` on "
             f"{report.machine(args)['cpu_count']} cores, {platform.system()}, "
             f"Python {platform.python_version()}, torch {torch.__version__}")
    before, begin, after = PAGE.read_text().partition("<!-- soak -->\n")
    _, end, after = after.partition("\n<!-- end -->")
    with report.replacing(args.page) as temporary:
        temporary.write_text(before + begin + summary(rows, lost, where) + end + after)
    print(f"lost: {len(lost) or 'nothing'}; all trials are in {args.page}")
    raise SystemExit(bool(lost))


if __name__ == "__main__":
    main()
