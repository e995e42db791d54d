"""What ends a run, and how it is told: every program, every role, every fault.

A new lesson is one more row in PROGRAMS.
"""

import ast
import importlib
import math
import os
import pickle
import re
import signal
import threading
import time
from typing import NamedTuple

import pytest
from common import cli
from common.launcher import launch, start, watch

from tests import sabotage
from tests.fault_table import AWAY, OF_A_RANK, STANDSTILL
from tests.helpers import SOON_S, errors_of, processes

TIMEOUT_S = 4.0
NOTED = 60.0  # seconds, at most: the note comes as soon as every rank has stood still for long enough
PATIENT_S = 40.0  # of those who wait for a rank that will raise, or be killed: the machine is busy
in_turns = pytest.mark.xdist_group("faults in turns")  # beside many others, a healthy rank would be silent, too


class Program(NamedTuple):
    """One program, and how to disturb it."""

    lesson: str  # module
    flags: str  # that make it run for ever
    roles: str  # of its ranks; of several with one name and a number, the last is disturbed too
    raises: dict  # role -> a function or method that it calls again and again: there it fails

    def __str__(self):
        return self.lesson

    def command(self, folder, timeout_s=TIMEOUT_S):
        """The flags."""
        return [*self.flags.split(), "--timeout", str(timeout_s), "--output_dir", str(folder)]

    def slowed(self):
        """What makes a pause before each call, so that a run that is to be disturbed leaves the cores to others."""
        return list(self.raises.values())

    def sabotaged(self, role=None, fault=None):
        """The arguments of tests/sabotage.py, with which `fault` happens in `role`, or else nothing."""
        rank, what = (self.roles.split().index(role), f"{self.raises[role]}:{fault}") if fault else (0, "-")
        return [self.lesson, str(rank), what, ",".join(self.slowed())]


PROGRAMS = [
    Program("rpc_rl.main", "--max_episodes 100000 --reward_threshold 499", "agent observer1 observer2",
            {"agent": "rpc_rl.main:Agent.finish_episode", "observer1": "rpc_rl.main:Observer.run_episode"}),
    Program("batch_rl.main", "--observers 1 --num_episode 100000 --num_steps 20", "agent observer1",
            {"agent": "batch_rl.main:Agent.finish_episode", "observer1": "batch_rl.main:Observer.run_episode"}),
    Program("ddp_rpc_hybrid.main", "--epochs 100000", "trainer0 trainer1 master ps",
            {"trainer1": "ddp_rpc_hybrid.main:HybridModel.forward", "ps": "torch.nn:EmbeddingBag.forward"}),
    Program("ddp_rpc_hybrid.sharded_table", "--epochs 100000", "trainer0 trainer1",
            {"trainer1": "ddp_rpc_hybrid.sharded_table:AllToAllTable.forward"}),
    Program("param_server.main", "--epochs 100000", "parameter_server trainer1 trainer2",
            {"parameter_server": "param_server.main:ParameterServer.forward",
             "trainer2": "param_server.main:TrainerNet.forward"}),
    Program("param_server.batch_update", "--arch resnet18 --image_size 32 --batch_size 4 --world_size 3 --num_updates 100000",
            "parameter_server trainer1 trainer2",
            {"parameter_server": "param_server.batch_update:BatchUpdateParameterServer.update_and_fetch_model",
             "trainer2": "param_server.batch_update:Trainer.set_model"}),
    Program("rpc_rnn.main", "--epochs 100000", "ps trainer",
            {"ps": "rpc_rnn.main:EmbeddingTable.forward", "trainer": "rpc_rnn.main:RNNModel.forward"}),
    Program("model_parallel_resnet.main", "--arch resnet18 --image_size 64 --batch_size 4 --num_splits 2 --num_batches 100000",
            "master worker1 worker2",
            {"master": "model_parallel_resnet.main:DistResNet50.forward",
             "worker2": "model_parallel_resnet.main:ResNetShard2.forward"}),
    Program("model_parallel_resnet.schedules", "--arch resnet18 --image_size 64 --batch_size 4 --num_splits 2 --num_batches 100000",
            "stage0 stage1", {"stage1": "model_parallel_resnet.schedules:Pipeline.train_step"}),
    Program("ddp_basic.main", "--demo basic --steps 10000000", "rank0 rank1",
            {"rank1": "ddp_basic.main:report.require_finite"}),
    Program("ddp_basic.skew", "--steps 10000000", "rank0 rank1", {"rank1": "ddp_basic.skew:report.require_finite"}),
    Program("ddp_basic.elastic", "--epochs 100000", "rank0 rank1", {"rank1": "ddp_basic.elastic:train_epoch"}),
    Program("ddp_basic.pitfalls", "--kind batchnorm --mended --steps 1000000", "rank0 rank1",
            {"rank1": "ddp_basic.pitfalls:BatchNormOfAllRanks.forward"}),
    Program("p2p_collectives.main", "--demo collectives --world_size 3", "rank0 rank1 rank2",
            {"rank2": "p2p_collectives.main:numbers"}),
    Program("p2p_collectives.train", "--epochs 100000", "rank0 rank1",
            {"rank1": "p2p_collectives.train:average_gradients"}),
    Program("p2p_collectives.train_flat", "--epochs 100000", "rank0 rank1",
            {"rank1": "p2p_collectives.train_flat:average_gradients"}),
    Program("p2p_collectives.train_ddp", "--epochs 100000", "rank0 rank1",
            {"rank1": "p2p_collectives.train:Net.forward"}),
    Program("p2p_collectives.ring_allreduce", "--sizes 65536 --repeats 1000000 --world_size 2", "rank0 rank1",
            {"rank1": "p2p_collectives.fast_ring:RingAllReduce.__call__"}),
    Program("p2p_collectives.shared_memory", "--sizes 65536 --repeats 1000000 --world_size 2", "rank0 rank1",
            {"rank1": "p2p_collectives.shared_memory:SharedMemory.all_reduce"}),
    Program("p2p_collectives.init_methods", "--method file --world_size 2", "rank0 rank1",
            {"rank1": "tests.sabotage:nothing"}),
    Program("transformer_parallel.main", "--ways overlap --steps 100000 --world_size 2 --batch_size 4", "rank0 rank1",
            {"rank1": "transformer_parallel.main:Overlap.finish_gradients"}),
    Program("transformer_parallel.zero", "--ways zero3 --steps 100000 --world_size 2 --batch_size 4", "rank0 rank1",
            {"rank1": "transformer_parallel.zero:ShardedUnit.free"}),
    Program("transformer_parallel.tensor_parallel", "--ways sequence --steps 100000 --world_size 2 --batch_size 4",
            "rank0 rank1", {"rank1": "transformer_parallel.tensor_parallel:vocabulary_loss"}),
    Program("transformer_parallel.ring_attention", "--ways zigzag --steps 100000 --world_size 2 --batch_size 4",
            "rank0 rank1", {"rank1": "transformer_parallel.ring_attention:passed_on"}),
    Program("transformer_parallel.experts", "--ways experts --steps 100000 --world_size 2 --batch_size 4", "rank0 rank1",
            {"rank1": "transformer_parallel.experts:exchanged"}),
    Program("transformer_parallel.mesh", "--ways torch --steps 100000 --batch_size 4", "rank0 rank1 rank2 rank3",
            {"rank3": "transformer_parallel.mesh:TorchMesh.part"}),
    Program("transformer_parallel.recompute", "--ways recompute --steps 100000 --world_size 2 --batch_size 4", "rank0 rank1",
            {"rank1": "transformer_parallel.recompute:Recompute.through"}),
    Program("transformer_parallel.pipeline", "--ways 1f1b --steps 100000 --world_size 2", "rank0 rank1",
            {"rank1": "transformer_parallel.pipeline:Pipeline.backward"}),
]


def named(lesson):
    """The program of a lesson."""
    return next(program for program in PROGRAMS if program.lesson == lesson)


class Run:
    """A program in this very process, in a thread, so that several can be disturbed at the same time.

    Args:
        program: which.
        folder: for its output.
        fault: what `role` does to itself (`sabotage.FAULTS`), or a signal that it is sent.
        role: of the rank that fails.
        signals: what is sent afterwards: (seconds, role, signal), each some seconds after the one before; NOTED in
            place of the seconds waits until the launcher has printed its note of a standstill.
        row: of tests/fault_table.py; by default that of the fault.
        timeout_s: of `--timeout`.
        pause_s: before each call of `program.slowed()`.
    """

    def __init__(self, program, folder, fault, role, signals=(), row=None, timeout_s=None, pause_s=sabotage.PAUSE_S):
        self.program, self.roles, self.fault, self.signals = program, program.roles.split(), fault, list(signals)
        self.rank, self.processes = self.roles.index(role), {}
        self.folder = folder / f"{program}{fault}{role}{len(self.signals)}{pause_s}".replace(" ", "")
        self.noted = threading.Event()
        self.status, self.seconds = None, None  # from the fault to the end
        self.row = row or OF_A_RANK.get(fault)
        by_silence = self.row is not None and self.row.by_silence
        self.timeout_s = timeout_s or (TIMEOUT_S if by_silence else PATIENT_S)
        self.after_s = sum(seconds for seconds, *_ in self.signals)  # it may end by the last one only
        self.raises = None
        if fault in sabotage.FAULTS:
            self.raises = [self.rank, f"{program.raises[role]}:{fault}"]
        elif fault.startswith("SIG"):
            self.signals.insert(0, (0, role, fault))
        self.slowed, self.pause_s = program.slowed(), pause_s

    def expected(self):
        """Its one line, as a pattern."""
        return line(self.rank, self.roles, self.row, timeout_s=self.timeout_s)

    def disturb(self):
        """Start it, let the fault happen, wait for its end."""
        _here.run = self
        try:
            importlib.import_module(self.program.lesson).main(self.program.command(self.folder, self.timeout_s))
        except SystemExit as stop:
            ended, moment = time.monotonic(), self.folder / "moment"
            began = float(moment.read_text()) if moment.exists() else self.disturbed
            self.status, self.seconds = stop.code, ended - began
        finally:
            _here.run = None

    def started(self, processes):
        """Called by the launcher."""
        self.processes, self.disturbed = processes, math.inf
        if self.signals:
            threading.Thread(target=self.send_signals, daemon=True).start()

    def send_signals(self):
        """In the middle of the run, or of its beginning; or after what the rank has done to itself."""
        begun, moment = time.monotonic(), self.folder / "moment"
        while self.status is None and (time.monotonic() < begun + 2 if self.raises is None else not moment.exists()):
            time.sleep(0.01)
        self.disturbed = time.monotonic()
        for pause, role, name in self.signals:
            self.noted.wait(pause) if pause == NOTED else time.sleep(pause)
            pid = self.processes[self.roles.index(role)].pid
            if self.status is None and processes(lambda process, pid=pid: process.pid == pid):
                os.kill(pid, getattr(signal, name))


def line(rank, roles, fault, stopped=None, way="local", timeout_s=TIMEOUT_S):
    """The one line of a launcher, as a pattern.

    Args:
        rank, roles: who failed, of whom.
        fault: of OF_A_RANK, or another row.
        stopped: other processes, by default all others.
        way: local, manual or torchrun.
        timeout_s: of `--timeout`.
    """
    others = len(roles) - 1 if stopped is None else stopped
    suffix = f"; stopped {others} other process{'es' if others > 1 else ''}" if others else ""
    row = OF_A_RANK[fault] if isinstance(fault, str) else fault
    who = r"rank \d+ \(\w+\)" if row.of_who_waits else rf"rank {rank} \({roles[rank]}\)"
    return f"error: {who} {filled(row.expected(way), rank, roles, timeout_s)}{suffix}"


def filled(pattern, rank, roles, timeout_s):
    """A pattern of tests/fault_table.py, of a certain rank."""
    return pattern.format(timeout=f"{timeout_s:g}", rank=rank, role=roles[rank])


_here = threading.local()
_original_start = start.Processes.start
_original_note = watch.Decider.note_standstill


def _note_standstill(self):
    """In place of the launcher's, which prints: let the run know that it has."""
    _original_note(self)
    if self.noted and getattr(_here, "run", None):
        _here.run.noted.set()


def _start(self, run_worker, *more):
    """In place of the launcher's: run the lesson for ever, and know its processes."""
    run = getattr(_here, "run", None)
    if run is None:  # `warm_up`
        return _original_start(self, run_worker, *more)
    args = self.args
    args.lesson, args.raises, args.moment = run.program.lesson, run.raises, str(run.folder / "moment")
    args.slowed, args.pause_s = run.slowed, run.pause_s
    _original_start(self, sabotage.for_ever, *more)
    return run.started({rank: process.process for rank, process in self.by_rank.items()})


_literal_eval, _alone = ast.literal_eval, threading.Lock()


def _parse_alone(text):
    """In place of `ast.literal_eval`, with which numpy reads a header: before Python 3.11.8 and 3.12.2, threads disturb each other."""
    with _alone:
        return _literal_eval(text)


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Temporary files go to a folder of the test, and nothing may be left there, nor in shared memory."""
    warm_up(tmp_path)  # before: the name of the fork server's socket would be too long there
    monkeypatch.setattr(start.Processes, "start", _start)
    monkeypatch.setattr(watch.Decider, "note_standstill", _note_standstill)
    # As it starts a process, multiprocessing asks how all others have ended, also those of other threads. The fork
    # server tells it once: who asks second reads 255, and the line would be "died".
    monkeypatch.setattr("multiprocessing.process._cleanup", lambda: None)
    monkeypatch.setattr("ast.literal_eval", _parse_alone)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    yield
    # But for the fork server's socket, which serves the next test too, and torch's cache.
    left = [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith(("pymp-", "torchinductor_"))]
    assert left == []
    assert list(tmp_path.rglob(".*.tmp")) == []


@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("SIGSTOP", marks=in_turns), "SIGTERM", "exception"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_fault_of_a_rank(program, fault, clean, tmp_path, capfd):
    """Whoever fails, however: the run ends everywhere, and names the role at fault."""
    roles = program.raises if fault == "exception" else program.roles.split()
    pause_s = 0.5 if fault == "SIGSTOP" else sabotage.PAUSE_S  # the others train until it is noticed
    ends([Run(program, tmp_path, fault, role, pause_s=pause_s) for role in roles], capfd)


ENDS = ("os._exit(0)", "sys.exit(0)", "segmentation fault")


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_end_of_a_rank(program, clean, tmp_path, capfd):
    """It ends in the middle of its work, with status 0 or in C++: in its main thread, or in a call over RPC."""
    runs = [Run(program, tmp_path, fault, role) for number, role in enumerate(program.raises)
            for fault in (ENDS if number == 0 else ENDS[:2])]
    ends(runs, capfd)


@pytest.mark.parametrize("faults", [
    ["sys.exit(3)", "KeyboardInterrupt"], ["SIGSEGV", "SIGABRT"], ["lock held"], ["long traceback"]], ids=" ".join)
@pytest.mark.parametrize("lesson", ["rpc_rl.main", "param_server.main", "ddp_rpc_hybrid.main", "p2p_collectives.train"])
def test_rarer_end_of_a_rank(lesson, faults, clean, tmp_path, capfd):
    """Where a role works in its main thread, where in calls over RPC, whose traceback goes to the caller first."""
    program = named(lesson)
    ends([Run(program, tmp_path, fault, role) for fault in faults for role in program.raises], capfd)


@pytest.mark.parametrize(("lesson", "fault"), [
    ("p2p_collectives.train", "destroyed group"), ("ddp_basic.elastic", "aborted group")])
def test_end_of_a_group(lesson, fault, clean, tmp_path, capfd):
    """A rank leaves its process group in the middle of its work, and goes on."""
    ends([Run(named(lesson), tmp_path, fault, "rank1", row=OF_A_RANK["destroyed group"])], capfd)


@in_turns
@pytest.mark.parametrize("runs", [
    [("ddp_rpc_hybrid.main", "trainer1", "lock"), ("ddp_rpc_hybrid.main", "ps", "lock"),
     ("param_server.main", "parameter_server", "lock")],
    [("model_parallel_resnet.main", "worker2", "lock"),
     ("model_parallel_resnet.schedules", "stage1", "lock")],
    [("ddp_rpc_hybrid.sharded_table", "trainer1", "lock"), ("ddp_basic.elastic", "rank1", "lock")],
    # Not the ring: its receives have no limit of their own.
    # The mesh: groups that torch makes by itself have the limit, too.
    [("p2p_collectives.main", "rank2", "lock"), ("p2p_collectives.shared_memory", "rank1", "lock"),
     ("transformer_parallel.mesh", "rank3", "lock")],
    [("p2p_collectives.train", "rank1", fault) for fault in ("lock", "loop", "lone barrier", "send without recv")],
], ids=lambda runs: runs[0][0])
def test_only_waiting_tells(runs, clean, tmp_path, capfd):
    """The rank that waits is reported as one that waits, with where the other one is: nobody has failed."""
    ends([Run(named(lesson), tmp_path, fault, role) for lesson, role, fault in runs], capfd)


LONGER_S = 10.0  # a busy machine lets a healthy rank be silent for half of TIMEOUT_S, too


@in_turns
@pytest.mark.parametrize("lesson", ["rpc_rl.main", "p2p_collectives.train", "param_server.main", "ddp_basic.elastic"])
@pytest.mark.parametrize("frozen_s", [LONGER_S - 0.5, LONGER_S + 0.5], ids=["shorter", "longer"])
def test_frozen_for_a_while(frozen_s, lesson, clean, tmp_path, capfd):
    """A rank stops for about --timeout, and goes on: it is named, or the run goes on, and is then ended by a signal."""
    row = OF_A_RANK["SIGSTOP"]._replace(line=f"({AWAY}|{OF_A_RANK['SIGKILL'].line})")
    ends([Run(named(lesson), tmp_path, "SIGSTOP", role,
              [(frozen_s, role, "SIGCONT"), (LONGER_S + 6 - frozen_s, role, "SIGKILL")], row, LONGER_S, pause_s=0.5)
          for role in named(lesson).roles.split()], capfd)


SECOND_FAILURES = [  # the row that names the first, what that does to itself, what is sent afterwards
    ("exception", "exception", [(0.05, "second", "SIGKILL")]),
    ("SIGKILL", "SIGKILL", [(0.05, "second", "SIGSTOP")]),
    ("SIGKILL", "none", [(0, "second", "SIGSTOP"), (0.05, "first", "SIGKILL")]),
]


@in_turns
@pytest.mark.parametrize("lesson", ["rpc_rl.main", "param_server.batch_update", "p2p_collectives.main"])
def test_second_failure(lesson, clean, tmp_path, capfd):
    """While one failure is being handled, there is another one: the first is named, and nothing stays."""
    program = named(lesson)
    roles = {"first": [*program.raises][-1]}
    roles["second"] = [role for role in program.roles.split() if role != roles["first"]][-1]
    ends([Run(program, tmp_path, fault, roles["first"], [(pause, roles[who], name) for pause, who, name in signals],
              OF_A_RANK[row], pause_s=0.5) for row, fault, signals in SECOND_FAILURES], capfd)


@in_turns
@pytest.mark.parametrize("stuck", [
    [("rpc_rl.main", "agent"), ("rpc_rl.main", "observer1")],
    [("batch_rl.main", "observer1"), ("model_parallel_resnet.main", "master")],
], ids=lambda stuck: stuck[0][0])
@pytest.mark.parametrize("fault", ["lock", "loop"])
def test_standstill(fault, stuck, clean, tmp_path, capfd):
    """Nobody comes back from a call that has no limit: the run tells so once, and goes on until a signal ends it."""
    patient_s = 2 * TIMEOUT_S  # who computes for ever takes a core from those who answer
    runs = [Run(named(lesson), tmp_path, fault, role, [(NOTED, role, "SIGKILL")], OF_A_RANK["SIGKILL"],
                patient_s) for lesson, role in stuck]
    _, err = ends(runs, capfd)
    notes = [text for text in err.splitlines() if text.startswith("note:")]
    assert len(notes) == len(runs), err
    for run in runs:
        expected = filled(STANDSTILL, run.rank, run.roles, patient_s)
        assert any(re.fullmatch(expected, note) for note in notes), (expected, notes)
        who = f"rank {run.rank} ({run.roles[run.rank]})"
        assert any(f"{who} is at tests/sabotage.py:" in note for note in notes), notes
        if fault == "loop" and run.rank == 0:  # in its main thread, whose time is looked at
            assert any(f"moved but {who}: {who} is at" in note for note in notes), notes


@in_turns
@pytest.mark.parametrize("runs", [
    [("rpc_rl.main", 0.5), ("batch_rl.main", 0.5), ("param_server.main", 0.1)],  # the last: its trainers wait for each other
    [("ddp_rpc_hybrid.main", 0.5), ("ddp_rpc_hybrid.main", 3.0)],
    [("param_server.batch_update", 0.5)],
], ids=lambda runs: runs[0][0])
def test_no_standstill(runs, clean, tmp_path, capfd):
    """Neither is that main threads wait for a whole training, nor that steps are slow: a signal must end the run."""
    started = []
    for lesson, pause_s in runs:
        program = named(lesson)
        role = program.roles.split()[-1]
        if pause_s > 1:  # on the trainers alone, or calls would take as long as --timeout
            program = program._replace(raises={"trainer1": program.raises["trainer1"]})
        started.append(Run(program, tmp_path, "none", role, [(TIMEOUT_S + 9 + 2 * pause_s, role, "SIGKILL")],
                           OF_A_RANK["SIGKILL"], TIMEOUT_S, pause_s))
    _, err = ends(started, capfd)
    assert "note:" not in err


@in_turns
@pytest.mark.parametrize("timeout_s", [0.5, 1.0])
def test_short_timeout(timeout_s, clean, tmp_path, capfd):
    """A rank that waits for nobody is not silent, however slow its steps are: beats come from a thread."""
    program = named("p2p_collectives.train")
    program = program._replace(flags=f"{program.flags} --world_size 1", roles="rank0",
                               raises={"rank0": program.raises["rank1"]})
    ends([Run(program, tmp_path, "none", "rank0", [(4.0, "rank0", "SIGKILL")], OF_A_RANK["SIGKILL"], timeout_s)], capfd)


def spawned(program):
    """A program whose ranks `mp.spawn` starts."""
    return program._replace(flags=f"{program.flags} --start_method spawn")


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_spawn(program, clean, tmp_path, capfd):
    """Ranks that `mp.spawn` starts: each prints, and one of them fails."""
    out, _ = ends([Run(spawned(program), tmp_path, "exception", [*program.raises][-1])], capfd)
    assert sorted(re.findall(r"rank (\d+) prints", out)) == [str(rank) for rank in range(len(program.roles.split()))]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_spawn_can_send(program, tmp_path, monkeypatch):
    """Of any program, what a rank runs and its flags can be pickled, as `mp.spawn` does."""

    class SentError(Exception):
        pass

    def start(self, run_worker, *more):
        assert pickle.loads(pickle.dumps((run_worker, self.args))) == (run_worker, self.args)
        raise SentError

    monkeypatch.setattr("common.launcher.start.Processes.start", start)
    with pytest.raises(SentError):
        importlib.import_module(program.lesson).main(spawned(program).command(tmp_path))


def complete(runs):
    """Let them all happen at the same time, to their ends."""
    threads = [threading.Thread(target=run.disturb, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)  # ranks that `mp.spawn` starts import torch, each for itself
    hanging = [run for run, thread in zip(runs, threads, strict=True) if thread.is_alive()]
    for process in (process for run in hanging for process in run.processes.values()):
        process.kill()
    assert [run.roles[run.rank] for run in hanging] == []


def ends(runs, capfd):
    """Every run, all at the same time, ends everywhere, in time, and names the role at fault and no other, once.

    Returns:
        What was printed to stdout, and to stderr.
    """
    complete(runs)
    out, err = capfd.readouterr()
    lines = errors_of(err)
    patterns = [run.expected() for run in runs]
    for run, expected in zip(runs, patterns, strict=True):
        assert run.status == 1, (run.roles[run.rank], err)
        assert run.seconds < run.row.within_s(run.timeout_s) + run.after_s, (run.fault, run.seconds)
        found = sum(bool(re.fullmatch(expected, text)) for text in lines)
        # A line of those who wait names all others, and so matches several patterns.
        assert found == patterns.count(expected) or (run.row.of_who_waits and found), f"{expected}\n{err}"
        assert not any(process.is_alive() for process in run.processes.values())
    assert len(lines) == len(runs), err
    # One for each cause; that of an exception that came over RPC has several in it.
    tracebacks = sum(run.row.traceback for run in runs)
    assert len(re.findall("^Traceback ", err, re.MULTILINE)) >= tracebacks if tracebacks else "Traceback" not in err, err
    return out, err


@in_turns
@pytest.mark.parametrize(("lesson", "role", "function"), [
    ("batch_rl.main", "observer1", "gymnasium.wrappers:TimeLimit.step"),
    ("param_server.batch_update", "trainer2", "param_server.batch_update:Trainer.set_model"),
])
def test_slow_role(lesson, role, function, clean, tmp_path, capfd):
    """A rank that lives, beats and keeps the others waiting is named, and not as one that has failed; nor is who waits."""
    program = named(lesson)
    if lesson == "batch_rl.main":  # another observer, to be kept waiting
        program = program._replace(flags=f"{program.flags} --observers 2", roles=f"{program.roles} observer2")
    run = Run(program._replace(raises={role: function}), tmp_path, "sleep", role, timeout_s=TIMEOUT_S)
    run.disturb()
    err = capfd.readouterr().err
    assert run.status == 1
    slow = rf"rank {program.roles.split().index(role)} \({role}\) is at \S+:\d+"
    line = rf"error: rank \d \(\w+\) has waited for {TIMEOUT_S:g} s at \S+:\d+, `.*`; (.*; )?{slow}.*; stopped \d other processes"
    assert re.fullmatch(line, err.splitlines()[-1]), err


def warm_up(folder):
    """Start the fork server, if it is not there yet."""
    launch(sabotage.nothing, cli.Parser("test", "", 1).parse_args(["--output_dir", str(folder)]), lambda *_: "nothing")


def wait_for(path, seconds=SOON_S):
    """The text of a file that another process will write."""
    deadline = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return path.read_text()
