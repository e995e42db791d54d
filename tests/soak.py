"""Kill, fill up and start the programs, again and again: is anything lost? Writes docs/reliability.md.

    python -m tests.soak                  all of it, about 20 minutes on 2 quiet cores: make soak
    python -m tests.soak --quick          a few of each; prints the page instead of writing it

`test_checkpoints.py` does the same once for each program, with the table and the functions of this file.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import io
import itertools
import json
import multiprocessing.util
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import joblib
import torch
import torch.distributed as dist
from common import report
from common.cli import Parser
from common.launcher import launch, start
from common.session import group_options

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
LIMIT_S = 600  # for one command among many
TRIES = 20  # to kill a training before it is over
QUICK = {"kills": 3, "mixed": 6, "starts": 10, "commands": 2}
# In mixed runs, with --check: each compares its numbers with those of a single process.
OTHERS = ("batch_rl/main.py", "ddp_rpc_hybrid/main.py", "model_parallel_resnet/schedules.py",
          "ddp_basic/main.py", "p2p_collectives/main.py", "param_server/batch_update.py")
SHARED_MEMORY = Path("/dev/shm")


class Program(NamedTuple):
    """One program that saves its training."""

    lesson: str  # module
    flags: str  # for a training of a few seconds, with several checkpoints
    roles: str  # of its ranks
    writer: int  # the rank that saves
    numbers: str  # the metrics that are the same whenever the training is repeated
    resume: str = "--resume"

    def __str__(self):
        return self.lesson

    def command(self, folder, seed=0, resume=False):
        """The flags of a training whose files are in `folder`."""
        flags = f"{self.flags} {self.resume if resume else ''} --seed {seed}"
        return [*flags.split(), "--checkpoint", str(folder / "run.pt"), "--output_dir", str(folder / "out")]


PROGRAMS = [
    Program("rpc_rl.fast", "--max_episodes 40 --log_interval 5 --reward_threshold 499",
            "agent observer1 observer2", 0, "rewards running_rewards running_reward env_steps"),
    Program("rpc_rnn.main", f"--epochs 6 --dropout 0.2 --nhid 32 --corpus {ROOT}/README.md",
            "ps trainer", 1, "epochs initial_val_loss perplexity sample"),
    # One trainer: with several, no two trainings have their updates in the same order.
    Program("param_server.main", "--world_size 2 --epochs 2 --batch_size 100",
            "parameter_server trainer1", 0, "epochs test_accuracy"),
    # Three ranks: the sum of two numbers is the same in any order.
    Program("p2p_collectives.train_ddp", "--world_size 3 --epochs 4",
            "rank0 rank1 rank2", 0, "epochs test_accuracy"),
    Program("ddp_basic.elastic", "--world_size 3 --epochs 5 --global_batch_size 33",
            "rank0 rank1 rank2", 0, "history loss test_accuracy", resume=""),
]


class LostError(Exception):
    """What has been lost, in words."""


class NotHereError(Exception):
    """Why something cannot be tried on this machine, in words."""


# --- a training in this process, and what it leaves


class Training(NamedTuple):
    """What a training has left that nobody interrupted."""

    metrics: dict
    state: dict  # of its last checkpoint
    early: bytes  # its first checkpoint
    times: list  # when each checkpoint was there, in seconds since the ranks had been started


def train(program, folder, seed=0, resume=False):
    """The metrics of a training; SystemExit if it fails."""
    return importlib.import_module(program.lesson).main(program.command(folder, seed, resume))


def undisturbed(program, folder, seed=0):
    """A `Training`."""
    saved, early = folder / "run.pt", []
    watcher = Watcher(saved, 1, action=lambda _: early.append(saved.read_bytes()))
    with started(watcher.begin):
        metrics = train(program, folder, seed)
    watcher.end()
    return Training(metrics, torch.load(saved, weights_only=True), early[0], watcher.times)


def resume(program, training, folder):
    """Go on with what a failure has left, if there is something; then `compare`."""
    metrics = train(program, folder, resume=(folder / "run.pt").exists())
    compare(program, training, metrics, folder)


def compare(program, training, metrics, folder):
    """Raise `LostError` unless this training is, number by number, the one that nobody interrupted."""
    for name in program.numbers.split():
        whole, part = training.metrics[name], metrics[name]
        if isinstance(whole, list):  # param_server reports the epochs since it was resumed
            whole = whole[len(whole) - len(part):]
        _compare(whole, part, name)
    _compare(training.state, torch.load(folder / "run.pt", weights_only=True), "the checkpoint")
    nothing_half_written(folder)


def _compare(whole, other, where):
    """Raise `LostError` at the first thing that differs, be it by a bit."""
    same, parts = type(whole) is type(other), ()
    if same and isinstance(whole, torch.Tensor):
        same = whole.dtype == other.dtype and whole.shape == other.shape and _bits(whole) == _bits(other)
    elif same and isinstance(whole, dict):
        same, parts = whole.keys() == other.keys(), whole
    elif same and isinstance(whole, list | tuple):
        same, parts = len(whole) == len(other), range(len(whole))
    elif same and isinstance(whole, bytes):  # a file of torch.save in the file: optimizers of other ranks
        _compare(*(torch.load(io.BytesIO(file), weights_only=True) for file in (whole, other)), where)
    elif same:
        same = whole == other
    if not same:
        words = [text if len(text) < 80 else f"{text[:60]}..." for text in map(str, (other, whole))]
        raise LostError(f"{where} differs: {words[0]} instead of {words[1]}")
    for part in parts:
        _compare(whole[part], other[part], f"{where}[{part!r}]")


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def nothing_half_written(folder):
    """Raise `LostError` if there is a temporary file."""
    if half := [path.name for path in folder.rglob(".*.tmp")]:
        raise LostError(f"left behind: {half}")


# --- how it is disturbed


@contextlib.contextmanager
def started(then, instead=None, **more):
    """Where the launcher starts its ranks, call `then(processes)`, `{rank: process}`.

    Args:
        then: a function.
        instead: what the ranks run in place of the lesson's `run_worker`, which is then in `args.honest`.
        more: to be put into `args`.
    """
    original_start = start.Processes.start

    def start_them(self, run_worker, *where):
        vars(self.args).update(more)
        if instead is not None:
            self.args.honest, run_worker = run_worker, instead
        original_start(self, run_worker, *where)
        then({rank: process.process for rank, process in self.by_rank.items()})

    start.Processes.start = start_them
    try:
        yield
    finally:
        start.Processes.start = original_start


class Watcher:
    """Sees, in a thread, when a file is written, and at a given moment does something once.

    Args:
        path: of the file.
        writes: after so many of them, `action(processes)`; it can return False if there was nothing to do.
        delay: seconds in between.
        action: a function.
    """

    def __init__(self, path, writes=0, delay=0.0, action=None):
        self.path, self.writes, self.delay, self.action = path, writes, delay, action
        self.times, self.done, self.error, self.over = [], False, None, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, processes=None):
        """The training has been started."""
        self.processes, self.began, self.version = processes, time.monotonic(), self._version()
        self.thread.start()

    def end(self):
        """The training is over; whether the action had been done."""
        self.over.set()
        if self.thread.ident is not None:
            self.thread.join()
        if self.error:
            raise self.error
        return self.done

    def _version(self):
        with contextlib.suppress(OSError):
            status = self.path.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _watch(self):
        over = False
        while not over:
            over = self.over.wait(0.001)
            if (version := self._version()) != self.version:
                self.version = version
                self.times.append(time.monotonic() - self.began)
            if self.action and len(self.times) >= self.writes and not self.over.wait(self.delay):
                action, self.action = self.action, None
                try:
                    self.done = action(self.processes) is not False
                except Exception as error:
                    self.error = error


def some_moment(training, rng):
    """At random: after how many checkpoints, and how many seconds after the last of these."""
    moment = rng.uniform(0, len(training.times))
    edges = [0.0, *training.times]
    writes = int(moment)
    return writes, (moment - writes) * (edges[writes + 1] - edges[writes])


def fails(program, folder, watcher, instead=None, **more):
    """Train while `watcher` disturbs it; whether it did so before all was over. Then, the status must be 1."""
    with started(watcher.begin, instead, **more):
        status = status_of(train, program, folder)
    done = watcher.end()
    if status != 0 and not (status == 1 and (done or instead)):
        raise LostError(f"ended with status {status}")
    nothing_half_written(folder)
    return status == 1


def status_of(function, *arguments):
    """That a program ends with."""
    try:
        function(*arguments)
    except SystemExit as stop:
        if stop.code == 130:
            raise KeyboardInterrupt from None
        return stop.code
    return 0


def kill_a_rank(program, training, folder, rng):
    """SIGKILL any of them, at any moment; in words which and when, None if the training was over before."""
    rank, (writes, delay) = rng.randrange(len(program.roles.split())), some_moment(training, rng)

    def kill(processes):
        try:
            os.kill(processes[rank].pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    if not fails(program, folder, Watcher(folder / "run.pt", writes, delay, kill)):
        return None
    return f"rank {rank} killed {delay:.2f} s after checkpoint {writes}"


def kill_while_writing(program, training, folder, rng):
    """SIGKILL the rank that saves, when half of a checkpoint is on the disk; in words when."""
    write = rng.randint(1, len(training.times))
    if not fails(program, folder, Watcher(folder / "run.pt"), die_while_writing, fatal_write=write):
        raise LostError(f"there was no checkpoint {write}")
    return f"rank {program.writer} killed in the middle of writing checkpoint {write}"


def die_while_writing(rank, world_size, args):
    """In a rank: the lesson, until a checkpoint is about to take the place of the one before."""
    honest_replace, writes = os.replace, itertools.count(1)

    def replace(temporary, path):
        if Path(path) == args.checkpoint and next(writes) == args.fatal_write:
            os.truncate(temporary, os.path.getsize(temporary) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        honest_replace(temporary, path)

    os.replace = replace
    return args.honest(rank, world_size, args)


def kill_the_launcher(program, training, folder, rng):
    """SIGKILL it, at any moment; in words when, None if the training was over before."""
    writes, delay = some_moment(training, rng)
    watcher = Watcher(folder / "run.pt", writes, delay, lambda process: process.kill())
    process = start_command(script_of(program), program.command(folder), folder)
    watcher.begin(process)
    status, out, err = finish(process, folder)
    watcher.end()
    if status == 0:
        return None
    if status != -signal.SIGKILL:
        raise LostError(f"ended with status {status}: {out} {err}")
    nothing_half_written(folder)
    return f"launcher killed {delay:.2f} s after checkpoint {writes}"


KILLS = {"a rank": kill_a_rank, "the launcher": kill_the_launcher, "the rank that writes": kill_while_writing}


# --- disks


@contextlib.contextmanager
def disk(folder, size):
    """Mount a small disk in memory; `NotHereError` where this user cannot."""
    folder.mkdir(parents=True)
    _mount("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield
    finally:
        _mount("umount", "-l", folder)


def _mount(*command):
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    except OSError as error:
        raise NotHereError(f"needs {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NotHereError(f"needs root, to mount a small disk ({done.stderr.strip()})")


def fill_the_disk(program, training, folder, go_on=True):
    """Train where there is room for one checkpoint, not for the next one beside it; then, with more room, go on."""
    place, size = folder / "disk", len(training.early)
    with disk(place, size * 3 // 2):
        _spoil(program, training, place)
        if go_on:
            _mount("mount", "-o", f"remount,size={size * 10}", place)
            _go_on(program, training, place)


def make_read_only(program, training, folder, go_on=True):
    """Train where, once the ranks are there, nothing can be written any more; then, when it can again, go on."""
    place = folder / "disk"
    with disk(place, len(training.early) * 10):
        _spoil(program, training, place, lambda _: _mount("mount", "-o", "remount,ro", place))
        if go_on:
            _mount("mount", "-o", "remount,rw", place)
            _go_on(program, training, place)


def _on_disk(program, place, resume):
    """The output is somewhere else."""
    command = program.command(place, resume=resume)
    command[-1] = str(place.parent / "out")
    return importlib.import_module(program.lesson).main(command)


def _spoil(program, training, place, then=lambda _: None):
    saved = place / "run.pt"
    saved.write_bytes(training.early)
    with started(then):
        status = status_of(_on_disk, program, place, True)
    if status != 1:
        raise LostError(f"ended with status {status}, though nothing could be saved")
    if saved.read_bytes() != training.early:
        raise LostError("the checkpoint is not what it was")
    if os.listdir(place) != ["run.pt"]:
        raise LostError(f"left behind: {sorted(os.listdir(place))}")


def _go_on(program, training, place):
    compare(program, training, _on_disk(program, place, True), place)


# --- commands, and what they leave


def script_of(program):
    """Its path."""
    return program.lesson.replace(".", "/") + ".py"


def start_command(path, flags, folder):
    """Start a script in a session of its own; its temporary files go to `folder/tmp`."""
    return start_python([str(ROOT / path), *flags], folder)


def start_python(arguments, folder):
    """The same with anything that Python can run."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        process = subprocess.Popen([sys.executable, *arguments], cwd=folder, stdout=output, stderr=errors,
                                   stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
    _commands.append(process)
    return process


_commands = []  # all that were started and have not been seen to end


def stop(process):
    """End all of a command's session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _commands.remove(process)


def finish(process, folder):
    """The status of a command, and what it has printed to its two streams; `LostError` if anything of it is left."""
    # Here: the ranks import this file, and need not import pytest.
    from tests.helpers import nothing_left

    try:
        process.wait(LIMIT_S)
        nothing_left(process, folder)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        raise LostError(" ".join(str(error).split())) from None
    finally:
        stop(process)
    return process.returncode, (folder / "output").read_text(), (folder / "errors").read_text()


# --- starts


def role_name(rank, world_size):
    """The name of a rank in messages."""
    return f"worker{rank}"


def meet(rank, world_size, args):
    """What the ranks of a tiny world do."""
    dist.init_process_group(**group_options(args), rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()
    return {} if rank == 0 else None


def start_once(folder="."):
    """Start a tiny world."""
    launch(meet, Parser("soak", __doc__, world_size=2).parse_args(["--output_dir", str(folder)]), role_name)


def start_here(folder):
    """Start a tiny world in this process, and see that nothing of it is left."""
    processes = {}
    with started(processes.update):
        start_once(folder)
    alive = [process.pid for process in processes.values() if process.is_alive()]
    # But for the fork server's, which serves the next start too, and torch's cache.
    files = [path.name for path in Path(tempfile.gettempdir()).iterdir()
             if not path.name.startswith(("pymp-", "torchinductor_"))]
    if alive or files:
        raise LostError(f"left behind: processes {alive}, files {files}")


def start_as_command(folder):
    """The same as a command of its own."""
    status, out, err = finish(start_python(["-c", "from tests import soak; soak.start_once()"], folder), folder)
    if (status, out, err) != (0, "", ""):
        raise LostError(f"status {status}: {out} {err}")


def held_here():
    """What this process and its fork server hold: open files, threads, sockets that listen on a port."""
    from tests.helpers import listening

    gc.collect()
    processes = [pid for pid in (os.getpid(), start.forkserver._forkserver._forkserver_pid) if pid]
    return {"open files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes),
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in processes),
            "listening sockets": len(listening(processes))}


# --- all of it


class Soak:
    """All trials, and what came of them.

    Args:
        args: the parsed flags.
        folder: for everything that is written.
        terminal: where a human looks.
    """

    def __init__(self, args, folder, terminal):
        self.args, self.folder, self.terminal = args, folder, terminal
        self.rng, self.lost, self.log, self.trials = random.Random(args.seed), [], folder / "log", 0
        in_mixed = len([what for what, *_ in self.mix()])
        trainings = len([what for what, *_ in self.mix() if isinstance(what, Program)])
        total = len(PROGRAMS) * (1 + args.kills + 2) + trainings + in_mixed + args.starts + args.commands
        self.bar = report.Bar(total=total, unit="trial", file=terminal, smoothing=0.05, dynamic_ncols=True)

    def trial(self, what, function, *arguments):
        """Do it, with what is printed out of the way; what it returns, or None if something was lost."""
        self.bar.set_postfix_str(what)
        self.trials += 1
        try:
            with captured(self.log):
                return function(*arguments)
        except NotHereError:
            self.trials -= 1
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code == 130:
                raise KeyboardInterrupt from None
            word = str(error) if isinstance(error, LostError) else f"{type(error).__name__}: {error}"
            self.lost.append(f"{what}: {' '.join(word.split())[:300]}".replace(str(self.folder), "..."))
            self.bar.write(f"lost: {self.lost[-1]}\n{self.log.read_text()[-2000:]}", file=self.terminal)
            return None
        finally:
            self.bar.update()

    def place(self, name):
        """A new folder."""
        return Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{name}-"))

    def kills(self, program, training):
        """Kill and resume; a row of the page."""
        # Of four, two ranks, one launcher, one rank that writes.
        kinds, lost = itertools.cycle([*KILLS, "a rank"]), len(self.lost)
        row = {**dict.fromkeys(KILLS, 0), "before the first checkpoint": 0}

        def kill_and_resume(kind):
            for _ in range(TRIES):
                place = self.place(f"{program}")
                if how := KILLS[kind](program, training, place, self.rng):
                    break
            else:
                raise LostError(f"{TRIES} times over before it could be killed")
            row[kind] += 1
            row["before the first checkpoint"] += not (place / "run.pt").exists()
            try:
                resume(program, training, place)
            except LostError as error:
                raise LostError(f"{how}: {error}") from None

        for number, kind in zip(range(self.args.kills), kinds, strict=False):
            self.trial(f"{program}, kill {number + 1}", kill_and_resume, kind)
        return [f"`{program}`", len(training.times), *row.values(), len(self.lost) - lost]

    def disks(self, program, training):
        """A full disk, a read-only folder; a row of the page."""
        row = [f"`{program}`"]
        for what, spoil in (("full disk", fill_the_disk), ("read-only folder", make_read_only)):
            lost = len(self.lost)
            try:
                self.trial(f"{program}, {what}", spoil, program, training, self.place(program))
                row.append(len(self.lost) - lost)
            except NotHereError as reason:
                row.append(f"not tried: {reason}")
        return row

    def mix(self):
        """What runs at once, and its seed: trainings and others in turns."""
        turns = [what for both in itertools.zip_longest(PROGRAMS, OTHERS) for what in both if what]
        return [(what, seed) for seed, what in zip(range(1, self.args.mixed + 1), itertools.cycle(turns), strict=False)]

    def mixed(self):
        """Many commands at once; their names."""
        alone = {seed: self.trial(f"{what} --seed {seed}, alone", undisturbed, what, self.place("alone"), seed)
                 for what, seed in self.mix() if isinstance(what, Program)}
        runs = []
        for what, seed in self.mix():
            place = self.place("mixed")
            command = ((script_of(what), what.command(place, seed)) if isinstance(what, Program)
                       else (what, ["--check", "--seed", str(seed)]))
            runs.append((what, seed, place, start_command(*command, place)))

        def outcome(what, seed, place, process):
            status, out, err = finish(process, place)
            if status != 0 or err:
                raise LostError(f"status {status}: {err[-300:]}")
            if isinstance(what, Program):
                compare(what, alone[seed], json.loads((place / "out" / "metrics.json").read_text()), place)

        for what, seed, *run in runs:
            self.trial(f"{what} --seed {seed}, one of {len(runs)}", outcome, what, seed, *run)
        names = [f"`{script_of(what) if isinstance(what, Program) else f'{what} --check'}`" for what, _ in self.mix()]
        return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]

    def starts(self):
        """A tiny world, again and again; what was held by this process and its fork server early and late, in words."""
        shared, held = self.shared_memory(), []
        for number in range(self.args.starts):
            self.trial(f"start {number + 1}", start_here, self.folder)
            if number == 1 or number == self.args.starts - 1:
                held.append(held_here())
        if held and held[0] != held[-1]:
            self.lost.append(f"starts: held after the second {held[0]}, in the end {held[-1]}")
        for number in range(self.args.commands):
            self.trial(f"start {number + 1} of a command", start_as_command, self.place("start"))
        deadline = time.monotonic() + 10  # other programs of this machine may use it for a while
        while (left := self.shared_memory() - shared) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.lost.append(f"starts: left in {SHARED_MEMORY}: {sorted(left)}")
        return [", ".join(f"{number} {what}" for what, number in of_start.items()) for of_start in held]

    @staticmethod
    def shared_memory():
        """The names of what there is."""
        return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()

    def run(self):
        """Do everything; the page."""
        began, killed, spoiled = time.monotonic(), [], []
        for program in PROGRAMS:
            training = self.trial(f"{program}, undisturbed", undisturbed, program, self.place(program))
            if training is not None:
                killed.append(self.kills(program, training))
                spoiled.append(self.disks(program, training))
        mixed, held = self.mixed(), self.starts()
        self.bar.close()
        return self.page(killed, spoiled, mixed, held, time.monotonic() - began)

    def page(self, killed, spoiled, mixed, held, seconds):
        """All that was found, in Markdown."""
        where = (f"{joblib.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
                 f"torch {torch.__version__}")
        return TEXT.format(
            **vars(self.args),
            summary=table(["", ""], [
                ["lost", f"**{len(self.lost) or 'nothing'}**"],
                ["trials", f"{self.trials}, `--seed {self.args.seed}`"],
                ["when", f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, for {seconds / 60:.0f} minutes"],
                ["where", where]]),
            killed=table(["program", "checkpoints in a training", *(f"killed: {kind}" for kind in KILLS),
                          "of these before the first checkpoint", "lost"], killed),
            flags="\n".join(f"- `{program}`: `{program.flags.replace(f'{ROOT}/', '')}`" for program in PROGRAMS),
            spoiled=table(["program", "full disk: lost", "read-only folder: lost"], spoiled),
            mix=", ".join(mixed), held=", in the end ".join(held),
            lost="\n".join(f"- {what}" for what in self.lost) or "Nothing.")


TEXT = """\
# Reliability: what was tried, and what was lost

Written by `make soak` (`tests/soak.py`) from its own numbers.

{summary}

## Killed and resumed

SIGKILL at a random moment of the training: of any rank; of the launcher; of the rank that saves, when half of a
checkpoint was on the disk. Then the same command with `--resume` (without it where there was no checkpoint yet). *Lost*
is a training whose result is not bitwise identical to that of a training that nobody interrupted: every number of its
history, every tensor of its last checkpoint. Also lost would be a process that still runs, or a temporary file that is
left.

{killed}

The trainings:

{flags}

## A full disk, a read-only folder

The folder of the checkpoint is on a small disk. It has room for one checkpoint, but not for the next one beside it; or
it becomes read-only while the training runs. The run must end with status 1, the old checkpoint must be what it was,
byte by byte, and nothing else may be there. Then the disk gets more room, or becomes writable again, and the training
goes on with `--resume`, as above. Each is tried once.

{spoiled}

## Many programs at once

{mixed} commands started at the same moment, each with a seed of its own: {mix}.

Each must end with status 0, print no warning, and bring the numbers of its own seed: a training those of the same
training alone, bitwise; `--check` those of a single process.

## Starts in a row

{starts} launches of two ranks that meet in a barrier, in one Python process, and {commands} as a command of their own.
After each, no process and no temporary file was to be left; after all, no shared memory, and the process and its fork
server were to hold what they had held after the second. They held {held}.

## What was lost

{lost}

## What this does not show

- A power cut, a network drive and a GPU were not tried.
- Several trainers of `param_server/main.py`, and those of `rpc_rnn/several_trainers.py` with dropout, which the server draws in
  the order of their calls: no two of these trainings are alike, so there is nothing to compare.
"""


def table(head, rows):
    """In Markdown."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


@contextlib.contextmanager
def captured(path):
    """What this process and those that it starts print goes to a file."""
    streams, kept = (sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    try:
        with path.open("w") as file:
            for stream in streams:
                stream.flush()
                os.dup2(file.fileno(), 2 if stream is sys.stderr else 1)
        yield
    finally:
        for stream, descriptor, copy in zip(streams, (1, 2), kept, strict=True):
            stream.flush()
            os.dup2(copy, descriptor)
            os.close(copy)


def main(argv=None):
    """Do all trials; SystemExit(1) if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="for each program with a checkpoint")
    parser.add_argument("--mixed", type=int, default=12, help="commands at once")
    parser.add_argument("--starts", type=int, default=100, help="of a tiny world, in one process")
    parser.add_argument("--commands", type=int, default=20, help="of a tiny world, each a command")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--quick", action="store_true", help=f"few of each: {QUICK}")
    parser.add_argument("--page", type=Path, help=f"what to write (default: {PAGE.relative_to(ROOT)}; "
                                                  "with --quick, nothing)")
    args = parser.parse_args(argv)
    vars(args).update(QUICK if args.quick else {})
    args.page = args.page or (None if args.quick else PAGE)
    multiprocessing.util.get_temp_dir()  # now: it stays until the end of this process
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, os.fdopen(os.dup(2), "w") as terminal:
        os.environ["TMPDIR"] = tempfile.tempdir = f"{folder}/tmp"
        os.mkdir(tempfile.tempdir)
        soak = Soak(args, Path(folder), terminal)
        try:
            page = soak.run()
        except KeyboardInterrupt:
            soak.bar.close()
            print(f"\ninterrupted after {soak.trials} trials, lost: {len(soak.lost) or 'nothing'}", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            for process in list(_commands):
                stop(process)
    if args.page:
        args.page.write_text(page)
    else:
        print(page)
    print(f"{soak.trials} trials, lost: {len(soak.lost) or 'nothing'}")
    raise SystemExit(bool(soak.lost))


if __name__ == "__main__":
    # Not this very module, which is __main__: the ranks must find its functions.
    from tests import soak

    soak.main()
