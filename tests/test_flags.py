"""Bad input, whatever the program: status 2 and one whole sentence, before any process starts."""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import stat
import sys
import tempfile
import textwrap
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import common
import hypothesis
import pytest
import torch
from common import cli, report
from common.vision import import_torchvision
from hypothesis import strategies

from ddp_basic import elastic
from model_parallel_resnet import schedules
from p2p_collectives import init_methods, ring_allreduce
from p2p_collectives import main as p2p
from p2p_collectives import train as p2p_train
from param_server import main as param_server
from rpc_rnn import main as rpc_rnn
from rpc_rnn.single_process import LocalRNNModel
from tests.helpers import ROOT, run

# Every program, and what it calls when its input is good.
PROGRAMS = {
    "batch_rl.main": ["launch"],
    "benchmarks.batch_rl": ["launch"],
    "benchmarks.ddp_rpc_hybrid": ["train"],
    "benchmarks.model_parallel_resnet": ["keep_memory"],
    "benchmarks.param_server": ["launch"],
    "benchmarks.rpc_rl": ["launch"],
    "benchmarks.rpc_rl_seeds": ["train"],
    "benchmarks.rpc_rnn": ["launch"],
    "ddp_basic.elastic": ["launch"],
    "ddp_basic.main": ["launch"],
    "ddp_rpc_hybrid.main": ["launch"],
    "model_parallel_resnet.main": ["launch"],
    "model_parallel_resnet.schedules": ["launch"],
    "model_parallel_resnet.single_machine": ["train_toy", "check"],
    "p2p_collectives.init_methods": ["launch"],
    "p2p_collectives.main": ["launch"],
    "p2p_collectives.ring_allreduce": ["launch"],
    "p2p_collectives.train": ["launch"],
    "param_server.batch_update": ["launch"],
    "param_server.main": ["launch"],
    "rpc_rl.main": ["launch"],
    "rpc_rnn.main": ["launch"],
}
MEMORY_BYTES = 24_000_000_000  # whatever this machine has
DIGITS, LONG = "9" * 20, "x" * 300
LARGE = "1" + "0" * 12  # an int that tensors could have as their size, but no machine could hold
HANG_S = 20  # for one call of `main`, on a machine that has much else to do


class Accepted(Exception):
    """The input was good: now the processes would start."""


class Hang(BaseException):
    """No part of a program catches this one."""


class Outside(AssertionError):
    """Something was written where nothing may be."""


@contextlib.contextmanager
def within(seconds):
    """Raise `Hang` in what takes longer."""

    def late(*_):
        raise Hang(f"longer than {seconds} s")

    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's
        signal.signal(signal.SIGALRM, handler)


_written = None  # paths, while somebody wants to know


def _note(event, args):
    if _written is not None and event in ("open", "os.mkdir", "os.rename"):
        path = args[1] if event == "os.rename" else args[0]
        if isinstance(path, (str, bytes)) and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            _written.append(os.path.realpath(path))


sys.addaudithook(_note)


@contextlib.contextmanager
def nothing_written_outside(folder):
    """Raise `Outside` for a file or a folder elsewhere; trying to write where nobody can is no offence."""
    global _written
    _written = []
    try:
        yield
        outside = {os.fsdecode(path) for path in _written if not Path(os.fsdecode(path)).is_relative_to(folder)}
        outside = [path for path in outside if not path.startswith(("/dev/", "/proc/")) and "__pycache__" not in path]
        if outside:
            raise Outside(outside)
    finally:
        _written = None


def outcome(name, argv, folder):
    """Call `main`: "accepted", or "refused" and what it says on stderr."""
    main, err = importlib.import_module(name).main, io.StringIO()
    with (pytest.raises((Accepted, SystemExit)) as end, within(HANG_S), nothing_written_outside(folder),
          contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err)):
        main(list(argv))
    if end.type is Accepted:
        return "accepted", err.getvalue()
    assert end.value.code == 2
    return "refused", err.getvalue()


def one_line(err):
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err) < 1000


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """The working directory, with files of all kinds; whoever would start processes raises `Accepted`."""

    def accept(*_, **__):
        raise Accepted

    for name, calls in PROGRAMS.items():
        module = importlib.import_module(name)
        for call in calls:
            monkeypatch.setattr(module, call, accept)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(cli, "memory_bytes", lambda: MEMORY_BYTES)
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    monkeypatch.setattr("socket.gethostbyname", known_hosts)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 200)
    (tmp_path / "loop").symlink_to("loop")
    # The same data for every call: to draw and to resize them takes a while.
    for name in ("load_data", "load_language"):
        honest, known = load_once(name)
        for module in (rpc_rnn, param_server, p2p_train, elastic):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda args, honest=honest, known=known: (
                    known if args.corpus is None else honest(args)) if honest else known)
    return tmp_path.resolve()


_loaded = {}


def load_once(name):
    """What loads a text, or None; and the digits, or the language that is drawn."""
    if name not in _loaded:
        args = SimpleNamespace(corpus=None, dataset="digits", seed=0)
        _loaded[name] = (rpc_rnn.load_language, rpc_rnn.load_language(args)) if name == "load_language" else (
            None, p2p_train.load_data(args))
    return _loaded[name]


def known_hosts(name):
    """Nobody asks a name server."""
    name.encode("idna")  # as Python does first
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name, re.ASCII):
        raise OSError(-2, "Name or service not known")
    return name


# --- drawn


VALUES = [
    "", "0", "1", "-1", "2", "3", "1000", "1438", DIGITS, LARGE, "9" * 5000, "1e300", "1e-300", "nan", "inf", "-inf",
    "0.5", "0x10", "１２", "ünïcødé ☃", LONG, "?", "a?b", "a#b", "a%b", "a\tb", "a\nb", "%s", "-", "--", "--seed",
    "folder", "pipe", "text", "loop", "text/below", "/dev/null", "/proc/1/nowhere",
    "localhost", "127.0.0.1", "::1", "localhost:29500", "cpu", "cuda", "cuda:0", "cuda:99", "cuda:9999999999"]
LETTERS = strategies.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/.-")


def values(action):
    """Values of a flag, as texts: of its type and of others."""
    numbers = strategies.integers(1, 64) | strategies.integers() | strategies.floats()
    any_value = strategies.sampled_from(VALUES) | numbers.map(str) | strategies.text(LETTERS, max_size=20)
    if action.choices:
        any_value = strategies.sampled_from(sorted(map(str, action.choices))) | any_value
    if action.nargs == 0:
        return strategies.just([])
    return strategies.lists(any_value, min_size=1, max_size=1 if action.nargs is None else 3)


@strategies.composite
def command_lines(draw, parser, without=()):
    """A few flags of a parser, each with one value or several."""
    actions = [action for action in parser._actions if action.dest not in ("help", *without)]
    chosen = draw(strategies.lists(strategies.sampled_from(actions), unique=True, min_size=1, max_size=5))
    return [word for action in chosen for word in (action.option_strings[0], *draw(values(action)))]


def for_all(max_examples, given, property_of):
    """Run `property_of(argv)` for drawn command lines, the same ones each time."""
    hypothesis.configuration.set_hypothesis_home_dir(Path.cwd() / ".hypothesis")
    settings = hypothesis.settings(
        max_examples=max_examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck))
    settings(hypothesis.given(given)(property_of))()


def any_input(name, folder, max_examples):
    parser = importlib.import_module(name).build_parser()

    def accepted_or_one_line(argv):
        verdict, err = outcome(name, argv, folder)
        if verdict == "accepted":
            assert err == ""
        else:
            one_line(err)

    for_all(max_examples, command_lines(parser), accepted_or_one_line)


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_input(name, stubbed):
    any_input(name, stubbed, max_examples=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_input_for_longer(name, stubbed):
    any_input(name, stubbed, max_examples=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_with_every_value(name, stubbed):
    for action in importlib.import_module(name).build_parser()._actions:
        for value in VALUES if action.dest != "help" and action.nargs != 0 else ():
            verdict, err = outcome(name, [action.option_strings[0], value], stubbed)
            assert verdict == "accepted" or not one_line(err), (action.dest, value)


def under_torchrun(name, folder, max_examples):
    parser = importlib.import_module(name).build_parser()
    ranks = parser.get_default("world_size") or 3

    def one_rank_says_it(argv):
        said, verdicts = "", set()
        for rank in range(ranks):
            here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({key: str(number) for key, number in here.items()})
            verdict, err = outcome(name, argv, folder)
            said += err
            verdicts.add(verdict)
        if "refused" in verdicts:
            one_line(said)

    # Who does not have MNIST waits for the first rank, which has ended.
    for_all(max_examples, command_lines(parser, without=["dataset"]), one_rank_says_it)


DISTRIBUTED = [name for name in PROGRAMS if name not in (
    "benchmarks.ddp_rpc_hybrid", "benchmarks.rpc_rl_seeds", "benchmarks.model_parallel_resnet")]


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_one_rank_of_torchrun_says_it(name, stubbed, monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(variable, "0")
    under_torchrun(name, stubbed, max_examples=10)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_one_rank_of_torchrun_says_it_for_longer(name, stubbed, monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(variable, "0")
    under_torchrun(name, stubbed, max_examples=60)


def test_the_first_rank_of_each_machine_says_what_is_its_machines(stubbed, monkeypatch, capsys):
    """Where only the second of two machines is at fault, its own first rank says so."""
    for variable, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"),
                            ("RANK", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, value)
    for name, flags in (("rpc_rl.main", ["--output_dir", "/dev/null"]), ("rpc_rnn.main", ["--corpus", "nowhere"]),
                        ("param_server.main", ["--dataset", "mnist"]),
                        ("ddp_basic.main", ["--local_batch_size", LARGE])):
        verdict, err = outcome(name, flags, stubbed)
        assert verdict == "refused"
        one_line(err)
        assert flags[0] in err or "--data_dir" in err


# --- known


def with_flag(flag):
    """The programs that have it."""
    return [name for name in PROGRAMS if flag in importlib.import_module(name).build_parser()._option_string_actions]


KNOWN = [
    *(("--seed", value, "at most 2147483647") for value in ("20000000000000", str(2**64), "1e3", "-1")),
    *(("--timeout", value, "at least 0.01 and at most 10000000") for value in ("1e300", "1e-300", "nan", "0")),
    ("--delay", "1e300", "at most 10000000"),
    ("--world_size", DIGITS, "at most 65536"),
    ("--world_size", "1000", "can hold at most 240 processes (memory)"),
    ("--observers", DIGITS, "at most 65535"),
    ("--observers", "1000", "can hold at most 240 processes (memory)"),
    *((flag, LONG, "too long") for flag in ("--output_dir", "--checkpoint", "--corpus", "--file")),
    ("--checkpoint", "y" * 240, "must have a shorter name"),
    *((flag, name, "must be a file, not a folder, a pipe or a device")
      for flag in ("--checkpoint", "--corpus", "--file") for name in ("pipe", "folder", "/dev/null", ".")),
    *((flag, "loop", "too many levels of symbolic links") for flag in ("--checkpoint", "--corpus", "--file")),
    ("--output_dir", "pipe", "file exists"),
    ("--output_dir", "text/below", "not a directory"),
    *(("--master_addr", value, "give the port with --master_port, and no IPv6")
      for value in ("::1", "localhost:29500")),
    ("--master_addr", "", "''"),
    ("--master_addr", LONG, "give a host's name"),
    *(("--file", value, "without ?, # and control characters") for value in ("a?b", "a#b", "a\tb")),
    *((flag, DIGITS, "is not accepted; give a smaller one") for flag in (
        "--nhid", "--nlayers", "--ninp", "--batch_size", "--bptt", "--image_size", "--num_embeddings",
        "--embedding_dim", "--num_classes", "--envs_per_observer", "--num_steps", "--sizes", "--local_batch_size",
        "--epochs", "--steps")),
    *((flag, LARGE, "GB of memory") for flag in (
        "--nhid", "--nlayers", "--ninp", "--image_size", "--num_embeddings", "--embedding_dim", "--num_classes",
        "--envs_per_observer", "--sizes", "--local_batch_size")),
    ("--num_splits", "1001", "at most 1000"),
    ("--devices", "cuda:9999999999", "cuda:N"),
]


@pytest.mark.parametrize(("flag", "value", "says"), KNOWN, ids=[f"{flag} {value[:22]}" for flag, value, _ in KNOWN])
def test_known_bad_input(flag, value, says, stubbed):
    programs = with_flag(flag)
    assert programs
    for name in programs:
        if (name, flag) == ("benchmarks.rpc_rl_seeds", "--seed"):
            continue
        # Without --rank, --master_addr is bad by itself; a batch of one image needs no larger ones.
        more = {"--master_addr": ["--rank", "0"], "--devices": ["cpu"]}.get(flag, [])
        verdict, err = outcome(name, [flag, value, *more], stubbed)
        assert verdict == "refused", name
        one_line(err)
        assert flag in err
        assert says in err


@pytest.mark.parametrize(("name", "flags"), [
    ("batch_rl.main", ["--num_steps", LARGE]),
    ("model_parallel_resnet.main", ["--batch_size", LARGE]),
    ("model_parallel_resnet.schedules", ["--batch_size", LARGE]),
    ("model_parallel_resnet.single_machine", ["--batch_size", LARGE]),
    ("param_server.batch_update", ["--batch_size", LARGE]),
    ("rpc_rnn.main", ["--nhid", "1000", "--nlayers", "1000"]),
    ("ddp_rpc_hybrid.main", ["--num_embeddings", "100000000"]),
    ("ddp_basic.main", ["--world_size", "50", "--local_batch_size", "200000"]),
])
def test_more_than_the_memory(name, flags, stubbed):
    verdict, err = outcome(name, flags, stubbed)
    assert verdict == "refused"
    one_line(err)
    assert "GB of memory or more, and this machine has 24 GB" in err
    # A rank that is alone on its machine may have room.
    if name in ("ddp_rpc_hybrid.main", "ddp_basic.main"):
        assert outcome(name, [*flags, "--rank", "0", "--master_addr", "localhost"], stubbed)[0] == "accepted"


def test_a_corpus_larger_than_the_memory(stubbed):
    with open(stubbed / "huge", "wb") as file:
        file.truncate(10**12)  # a hole: it takes no room
    verdict, err = outcome("rpc_rnn.main", ["--corpus", "huge"], stubbed)
    assert verdict == "refused"
    one_line(err)
    assert "--corpus huge would need" in err


@pytest.mark.parametrize("name", with_flag("--dataset"))
def test_no_place_for_mnist(name, stubbed):
    for folder in (LONG, "pipe", "/dev/null", "text/below"):
        verdict, err = outcome(name, ["--dataset", "mnist", "--data_dir", folder], stubbed)
        assert verdict == "refused"
        one_line(err)
        assert err.startswith(f"error: --data_dir {folder[:30]}")
        assert "--dataset digits" in err


def test_good_input_is_accepted(stubbed):
    """What is near to what is refused."""
    for name, *flags in (("p2p_collectives.init_methods", "--file", "a%b"), ("rpc_rl.main", "--seed", "2147483647"),
                         ("rpc_rl.main", "--timeout", "10000000"), ("rpc_rl.main", "--world_size", "33"),
                         ("batch_rl.main", "--observers", "20"), ("rpc_rnn.main", "--corpus", "text"),
                         ("rpc_rl.main", "--checkpoint", "y" * 225), ("rpc_rnn.main", "--nhid", "4000"),
                         ("rpc_rl.main", "--rank", "1", "--world_size", "1000", "--master_addr", "10.0.0.7"),
                         ("rpc_rnn.main", "--bptt", LARGE), ("param_server.main", "--batch_size", LARGE),
                         *((name,) for name in PROGRAMS)):
        assert outcome(name, flags, stubbed) == ("accepted", ""), (name, flags)


def test_open_files_limit_the_processes(stubbed, monkeypatch):
    monkeypatch.setattr(cli.resource, "getrlimit", lambda _: (64, 64))
    verdict, err = outcome("rpc_rl.main", ["--world_size", "20"], stubbed)
    assert verdict == "refused"
    assert err == ("error: --world_size 20 is too much for this machine, which can hold at most 16 processes (open "
                   "files: ulimit -n)\n")
    monkeypatch.setattr(cli.resource, "getrlimit", lambda _: (cli.resource.RLIM_INFINITY,) * 2)
    assert outcome("rpc_rl.main", ["--world_size", "20"], stubbed)[0] == "accepted"


# --- checkpoints


CHECKPOINTS = {
    "rpc_rl.main": lambda: {"generators": {1: 0, 2: 0}},
    "rpc_rnn.main": lambda: {"model": LocalRNNModel(10, 32, 64, 1).state_dict(), "vocabulary": None, "epochs": []},
    "param_server.main": lambda: {"model": param_server.Net().state_dict(), "epochs": 1},
    "p2p_collectives.train": lambda: {"model": p2p_train.Net().state_dict(), "epochs": []},
    "ddp_basic.elastic": lambda: {"model": elastic.build_model(0).state_dict(), "settings": {
        "dataset": "digits", "global_batch_size": 32, "lr": 0.02, "seed": 0}},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_resume_in_a_folder_that_cannot_be_written(name, stubbed, monkeypatch):
    example = importlib.import_module(name).build_parser().get_default("example")
    torch.save({"example": example, **CHECKPOINTS[name]()}, stubbed / "folder" / "run.pt")
    flags = ["--checkpoint", "folder/run.pt", *(["--resume"] if name != "ddp_basic.elastic" else [])]
    assert outcome(name, flags, stubbed) == ("accepted", "")
    honest = tempfile.TemporaryFile

    def read_only(*arguments, dir=None, **options):
        if Path(dir) == Path("folder"):
            raise OSError(30, "Read-only file system")
        return honest(*arguments, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    verdict, err = outcome(name, flags, stubbed)
    assert verdict == "refused"
    assert err == ("error: --checkpoint folder/run.pt must be a place where files can be written (folder: "
                   "read-only file system)\n")


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS])
def test_half_a_state_is_no_checkpoint(name, stubbed):
    example = importlib.import_module(name).build_parser().get_default("example")
    torch.save({"example": example, "model": [1, 2]}, "run.pt")
    flags = ["--checkpoint", "run.pt", *(["--resume"] if name != "ddp_basic.elastic" else [])]
    verdict, err = outcome(name, flags, stubbed)
    assert verdict == "refused"
    one_line(err)
    assert "--checkpoint run.pt is" in err


def test_a_checkpoint_that_cannot_be_read(stubbed, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "load", denied)
    verdict, err = outcome("rpc_rl.main", ["--checkpoint", "text", "--resume"], stubbed)
    assert verdict == "refused"
    assert err == "error: --checkpoint text must be a file that can be read (permission denied)\n"


# --- where the tensors were


def plausible(backend):
    """What `launch` of some programs returns, as far as their `main` reads it."""
    row = {"bytes": 4, "median_s": 1.0, "bus_GBps": 1.0, "vs_all_reduce": 1.0}
    return {"backend": backend, "operations": [], "meetings": [], "losses": [1.0, 0.5], "windows": [[(0.0, 1.0)]],
            "spans": {"stage0": [], "stage1": []}, "wall_s": 1.0,
            "rows": [{**row, "algorithm": name} for name in ("RingAllReduce", "ring_naive")]}


@pytest.mark.parametrize(("module", "flags", "backend", "device"), [
    (p2p, [], "gloo", "cpu"), (p2p, [], "nccl", "Some GPU"),
    (schedules, ["--num_splits", "1"], "gloo", "cpu"), (schedules, ["--num_splits", "1"], "nccl", "Some GPU"),
    (ring_allreduce, ["--world_size", "1", "--sizes", "4"], "gloo", "cpu"), (init_methods, [], "gloo", "cpu"),
])
def test_metrics_say_where_the_tensors_were(module, flags, backend, device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(module, "launch", lambda *_: plausible(backend))
    module.main([*flags, "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "metrics.json").read_text())["device"] == device


def test_device_in_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    for flag, where, device in (("auto", None, "Some GPU"), ("cuda", None, "Some GPU"), ("cpu", None, "cpu"),
                                ("auto", "cpu", "cpu")):
        args = SimpleNamespace(device=flag, output_dir=tmp_path, example="x", world_size=1, seed=0)
        assert report.save_metrics(args, {}, "gloo", where)["device"] == device


# --- where nothing can run


@pytest.mark.parametrize(("place", "torchs", "says"), [
    ({"platform": "win32"}, "2.13.0", "use WSL"),
    ({"python": (3, 10)}, "2.13.0", "Python 3.10 is too old; use 3.11 or newer"),
    ({}, "2.9.1+cu121", "torch 2.9.1+cu121 is too old; use 2.11 or newer"),
    ({}, "1.13", "torch 1.13 is too old"),
    ({}, None, "torch is missing; run `pip install -r requirements.txt`"),
    *(({}, version, None) for version in ("2.11.0", "2.13.0+cpu", "2.15.0a0+git123", "3.0")),
])
def test_why_not(place, torchs, says, monkeypatch):
    def version(package):
        if torchs is None:
            raise PackageNotFoundError(package)
        return torchs

    monkeypatch.setattr(common, "version", version)
    reason = common.why_not(**place)
    assert reason is None if says is None else says in reason


def test_why_not_here():
    assert common.why_not() is None
    assert common.why_not(platform="darwin") is None


WINDOWS = """
import importlib, io, runpy, sys
from contextlib import redirect_stderr
import gymnasium, torch, torch.distributed, torch.distributed.autograd  # before this is Windows
sys.platform = "win32"
for module in ("fcntl", "resource", "termios", "pwd", "grp"):  # which are not there
    sys.modules[module] = None
def windows(path):
    for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
        del sys.modules[name]
    sys.argv, err = [path], io.StringIO()
    try:
        with redirect_stderr(err):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        assert stop.code == 2, stop.code
    lines = err.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: torch has no RPC on Windows; use WSL"), (path, lines)
for path in sys.argv[1:]:
    windows(path)
    print("ok")
"""


def test_windows_is_told_about_wsl(tmp_path):
    paths = [str(ROOT / f"{name.replace('.', '/')}.py") for name in PROGRAMS]
    result = run([sys.executable, "-c", textwrap.dedent(WINDOWS), *paths], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "ok\n" * len(PROGRAMS)


def test_windows_for_real(tmp_path):
    """The README's command, on a system that says it is Windows."""
    start = ("import gymnasium, runpy, sys, torch; sys.platform = 'win32'; sys.argv = sys.argv[1:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')")
    result = run([sys.executable, "-c", start, str(ROOT / "rpc_rl/main.py")], tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "use WSL" in result.stderr
    assert stat.S_ISDIR(tmp_path.stat().st_mode)
    assert list(tmp_path.iterdir()) == []
