"""Trainings that are killed, or whose disk is full or read-only: is anything lost?

`test_checkpoints.py` tries it with each program of the table here. *Lost* is a training whose
result is not bitwise identical to that of a training that nobody interrupted: every number of its
history, every tensor of its last checkpoint. Also lost would be a process that still runs, and a
temporary file that is left.
"""

import contextlib
import functools
import io
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tests import helpers

A_RANK, WRITER = "a rank", "the rank that writes"
FULL_DISK, READ_ONLY = "full disk", "read-only folder"
REASONS = {FULL_DISK: "No space left on device", READ_ONLY: "Read-only file system"}
LATE = "over before it could be killed"


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

    statuses: list[int]  # of its commands
    errors: list[str]  # what each of them has printed to stderr
    times: list[float]  # when each checkpoint was there, in seconds since all ranks were
    first: bytes | None  # checkpoint


def command(place: Path, program: Program) -> list[str]:
    """Return the script and the flags of a training, which goes on from its checkpoint, if any."""
    saved = place / SAVED
    saved.parent.mkdir(exist_ok=True)
    flags = f"{program.flags} {program.resume if saved.exists() else ''}"
    return [program.lesson.replace(".", "/") + ".py", *flags.split(), "--checkpoint", str(saved),
            "--output_dir", str(place / "out")]


def ranks_of(runs: list, way: str) -> list[int]:
    """Return the process ids of the ranks that have started."""
    with contextlib.suppress(OSError, psutil.Error):  # some process has just ended
        if way == "torchrun":
            return helpers.children(runs[0].pid)
        return [pid for run in runs for pid in helpers.workers(run)]
    return []


def train(place: Path, program: Program, way: str = "local", path: str = "",
          deed: Callable | None = None, after: int = 0, delay_s: float = 0.0) -> Ended:
    """Run a training to its end, and disturb it in the middle.

    Args:
        place: for its files; if there is a checkpoint, it goes on from that.
        program: which.
        way: "local" or "torchrun".
        path: of another script than the program's own.
        deed: `deed(processes of the commands, process ids of the ranks)`, called once,
        after: when so many checkpoints were there,
        delay_s: so many seconds later.

    Raises:
        LostError: it does not end.
        AssertionError: a process or a temporary file is left.
    """
    own_path, *flags = command(place, program)
    lines = helpers.commands(way, len(program.roles), path or own_path, *flags)
    saved, limit = place / SAVED, time.monotonic() + helpers.LIMIT_S
    version, since, times, first = saved.exists() and saved.stat().st_mtime_ns, None, [], None
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(helpers.running(line, place, stdout=subprocess.DEVNULL))
                for line in lines]
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
def undisturbed(program: Program) -> tuple[Ended, dict]:
    """Train once without an interruption; return how it has ended, and what it has left."""
    with tempfile.TemporaryDirectory() as place:
        ended = train(Path(place), program)
        if ended.statuses != [0]:
            raise LostError(f"not even undisturbed: {ended.errors[0]}")
        return ended, left_in(Path(place), program)


def left_in(place: Path, program: Program) -> dict:
    """Return the numbers that a training has reported, and the state in its last checkpoint."""
    metrics = json.loads((place / "out" / "metrics.json").read_text())
    return {"checkpoint": torch.load(place / SAVED, weights_only=True),
            **{name: metrics[name] for name in program.numbers.split()}}


def go_on(place: Path, program: Program, way: str) -> None:
    """Train, from what a failure has left if there is something, and compare."""
    ended = train(place, program, way)
    if any(ended.statuses) or (any(ended.errors) and way != "torchrun"):  # which itself warns
        raise LostError(f"ended with status {ended.statuses}: {ended.errors}")
    require_equal(undisturbed(program)[1], left_in(place, program))


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


# --- what disturbs it: each has a new folder, and raises an exception if something is lost

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
    """SIGKILL at a random moment of a training, which then goes on; `LATE` if it was so.

    Args:
        place: a new folder.
        program: which.
        whom: `A_RANK`, or `WRITER`, which has half of a checkpoint on the disk.
        way: "local" or "torchrun".
        rng: for the moment.

    Raises:
        LostError: another end than docs/faults.md promises, or another training in the end.
    """
    rank, times = rng.randrange(len(program.roles)), undisturbed(program)[0].times
    after = rng.randrange(len(times))
    delay_s = rng.uniform(0, times[after] - [0.0, *times][after])

    def deed(runs, ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank], signal.SIGKILL)

    if whom == WRITER:
        rank, when = program.writer, f"in the middle of checkpoint {after + 1}"
        _, path = helpers.faulty(program.lesson, place, DIES_WRITING.format(write=after + 1))
        ended = train(place, program, way, path=path)
    else:
        when = f"{delay_s:.2f} s after checkpoint {after}"
        ended = train(place, program, way, deed=deed, after=after, delay_s=delay_s)
        if not any(ended.statuses):
            return LATE
    named = {"local": rf"^error: rank {rank} \({program.roles[rank]}\) was killed by SIGKILL",
             "torchrun": rf"rank +: {rank} \(local_rank: {rank}\)\s+exitcode +: -9 "}[way]
    found = [re.search(named, errors, re.MULTILINE) for errors in ended.errors]
    try:
        if set(ended.statuses) != {1} or not all(found):
            raise LostError(f"ended with status {ended.statuses}: {ended.errors}")
        go_on(place, program, way)
    except LostError as error:
        raise LostError(f"rank {rank} killed {when}: {error}") from None
    return None


def cannot_save(place: Path, program: Program, what: str) -> None:
    """Train where the first checkpoint is, and no other one can be written.

    Args:
        place: a new folder; a small disk is mounted there.
        program: which.
        what: of `REASONS`; the disk becomes read-only when the ranks are there.
    """
    first, saved = undisturbed(program)[0].first, place / SAVED
    size = f"size={len(first) * 3 // 2 if what == FULL_DISK else len(first) * 10}"
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
    finally:
        subprocess.run(["umount", "-l", saved.parent], check=True)


def mount(*arguments: str | Path) -> None:
    """Mount, which only root may; `NotHereError` where this user cannot."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotHereError(f"needs root, to mount a small disk ({done.stderr.strip()})")
