"""Each program: a short run says what lesson.toml says, and a longer one learns.

Bad input ends with status 2 and one line, before any process starts.
"""

import contextlib
import functools
import io
import json
import os
import re
import sys
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import common
from common import ROOT, data, limits
from common.lessons import programs
from common.vision import import_torchvision

import pytest
import torch

from tests.helpers import run, slow_but, write_mnist

BY_NAME = {str(program): program for program in programs()}
quick = pytest.mark.quick
each_program = pytest.mark.parametrize("program", programs(), ids=str)
MEMORY_BYTES = 24_000_000_000  # whatever this machine has
DIGITS, LONG = "9" * 20, "x" * 300
LARGE = "1" + "0" * 12  # an int that tensors could have as their size, but no machine could hold


# --- a short run


@functools.cache
def words_of_all_readers():
    """All words of the pages, the checks and what makes the pages: the readers of metrics.json."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/lessons/*.md"), *ROOT.glob("*/*check.py"), *ROOT.glob("*/*results.py"),
             *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("exercises/*.toml"), *ROOT.glob("exercises/*.py"), *ROOT.glob("*/lesson.toml")]
    return set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in paths)))


def with_results():
    """The programs; one whose summary line an earlier one of the lesson has shares the code that saves and prints, and is slow."""
    earlier = set()
    for program in programs():
        marks = pytest.mark.slow if (program.folder, program.says) in earlier else ()
        earlier.add((program.folder, program.says))
        yield pytest.param(program, marks=marks, id=str(program))


@pytest.mark.parametrize("program", [*with_results()])
def test_a_short_run(program, tmp_path, capfd):
    """Its summary line, its results, and nothing else on stderr; each number of metrics.json has a reader."""
    program.module().main([*program.short.split(), "--output_dir", str(tmp_path)])
    out, err = capfd.readouterr()
    assert err == ""
    *_, summary, results = out.splitlines()
    assert results == f"results: {tmp_path}"
    assert re.fullmatch(program.says, summary), summary
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["example"] == str(program.path).removesuffix("/main.py").removesuffix(".py")
    assert not set(program.saves.get("same", [])) - metrics.keys()
    assert metrics.keys() <= words_of_all_readers()


SERVER, TABLE = "--epochs 2 --batch_size 16 --lr 0.04", "--epochs 60"
UPDATES = "--world_size 3 --num_updates 15 --arch resnet18 --image_size 32 --batch_size 16 --num_classes 5"
EPISODES = "--envs_per_observer 8 --num_steps 60 --lr 0.01 --reward_threshold 45"
LEARNS = [  # flags that make it short, and what then holds: by chance, digits have 0.1 and classes of the table 1/8
    ("p2p_collectives.train", "", lambda run: run["test_accuracy"] >= 0.94),
    ("param_server.main", SERVER, lambda run: run["test_accuracy"] > 0.8),
    ("param_server.async_server", SERVER, lambda run: run["test_accuracy"] > 0.8 and 0.5 < run["staleness"]["mean"] < 1.5),
    ("param_server.batch_update", UPDATES, lambda run: sum(run["loss"][-3:]) < 0.8 * sum(run["loss"][:3])),
    ("batch_rl.until_solved", EPISODES, lambda run: run["solved"]),
    ("ddp_rpc_hybrid.main", TABLE, lambda run: run["epochs"][-1]["accuracy"] > 3 / 8),
    ("ddp_rpc_hybrid.sharded_table", TABLE, lambda run: run["epochs"][-1]["accuracy"] > 3 / 8),
]


@pytest.mark.slow  # test_rpc_rl.py and test_rpc_rnn.py have one of every day
@pytest.mark.parametrize(("name", "flags", "learns"), LEARNS, ids=[name for name, *_ in LEARNS])
def test_a_program_learns(name, flags, learns, tmp_path):
    metrics = BY_NAME[name].module().main([*flags.split(), "--output_dir", str(tmp_path)])
    assert learns(metrics)


@quick
@each_program
def test_it_writes_into_a_folder_of_its_name(program):
    folder = program.module().build_parser().get_default("output_dir")
    assert str(folder) == f"outputs/{program.path}".removesuffix("/main.py").removesuffix(".py")


@quick
@each_program
def test_help_tells_every_default(program, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        program.module().main(["--help"])
    printed = capsys.readouterr().out
    flags = re.findall(r"^  (--\w+)", printed, re.MULTILINE)
    assert " ".join(printed.split()).count("(default: ") >= len(flags)


# --- bad input


class AcceptedError(Exception):
    """The input was good: now the processes would start."""


@functools.cache
def digits():
    return data.load_data(SimpleNamespace(dataset="digits"))


def known_hosts(name):
    """Nobody asks a name server."""
    name.encode("idna")  # as Python does first
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name, re.ASCII):
        raise OSError(-2, "Name or service not known")
    return name


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """A working directory with files of all kinds; what would start processes raises `AcceptedError`."""

    def accept(*_, **__):
        raise AcceptedError

    for program in programs():  # single_machine.py starts no processes, and runs by itself
        runs = "run_program" if hasattr(program.module(), "run_program") else "train_toy"
        monkeypatch.setattr(program.module(), runs, accept)
    monkeypatch.setattr("common.program.check", accept)
    for name, module in [*sys.modules.items()]:  # the same data for every call: to resize them takes a while
        if name.split(".")[0] in {program.folder for program in programs()} and hasattr(module, "load_data"):
            monkeypatch.setattr(module, "load_data", lambda args: digits())
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(limits, "memory_bytes", lambda: MEMORY_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("socket.gethostbyname", known_hosts)
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 200, encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path.resolve()


def outcome(program, argv):
    """Call `main`: "accepted" or "refused", and what it says on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (pytest.raises((AcceptedError, SystemExit)) as end,
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        program.module().main(list(argv))
    if end.type is AcceptedError:
        return "accepted", err.getvalue()
    assert end.value.code == 2
    return "refused", err.getvalue()


def one_line(err):
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err) < 1000


def refusal(program, argv):
    """The one line."""
    verdict, err = outcome(program, argv)
    assert verdict == "refused", (str(program), argv)
    one_line(err)
    return err


def require_the_bounds(program, argv, line):
    """Hold that what a refusal asks for at least, or at most, is not refused for the same reason."""
    flag = re.search(r"--\w+", line)[0]
    others = re.sub(rf"{flag}( (?!--)\S+)*", "", " ".join(argv)).split()
    for bound, number in re.findall(r"(?:number|must be|and) (at (?:least|most) (?:--\w+ )?([\d.e+]*\d))", line):
        assert bound not in outcome(program, [*others, flag, number])[1]


@quick
@pytest.mark.parametrize(("program", "flags", "says"), [
    pytest.param(program, flags, says, id=f"{program} {flags}")
    for program in programs() for flags, says in program.refused.items()])
def test_what_a_program_refuses(program, flags, says, stubbed):
    line = refusal(program, flags.split())
    assert says in line
    require_the_bounds(program, flags.split(), line)


# Flags of all programs, and of several: one program that has the flag, a value, what the line says.
NOT_A_FILE = "must be a file, not a folder, a pipe or a device"
SECONDS = "at least 0.01 and at most 10000000"
COMMON = [
    *(("rpc_rl.main", "--world_size", value, "give a whole number at least") for value in ("0", "２", "1.5")),
    ("rpc_rl.main", "--world_size", DIGITS, "at most 65536"),
    ("rpc_rl.main", "--world_size", "1000", "can hold at most 240 processes (memory)"),
    ("batch_rl.main", "--observers", "240", "can hold at most 240 processes (memory)"),
    *(("rpc_rl.main", "--seed", value, "2147483647") for value in ("1_0", "20000000000000", "-1")),
    *(("rpc_rl.main", "--lr", value, "give a number above 0") for value in ("0", "nan", "inf")),
    ("rpc_rl.main", "--lr", "1e38", "--lr 1e+38 must be at most 1e+30"),
    *(("rpc_rl.main", "--timeout", value, SECONDS) for value in ("1e300", "1e-300", "nan")),
    *(("rpc_rl.main", "--master_port", value, "at least 1 and at most 65535") for value in ("0", "99999")),
    ("rpc_rl.main", "--device", "cuda", "needs a GPU"),
    ("rpc_rl.main", "--output_dir", "pipe", "file exists"),
    ("rpc_rl.main", "--output_dir", "text/below", "not a directory"),
    ("rpc_rl.main", "--output_dir", LONG, "too long"),
    *(("rpc_rl.main", "--master_addr", value, "give the port with --master_port, and no IPv6") for value in ("::1", "localhost:29500")),
    *(("rpc_rl.main", "--master_addr", value, "give a host's name") for value in ("", LONG, "no such host")),
    ("rpc_rl.main", "--master_addr", "127.0.0.1", "--master_addr 127.0.0.1 requires --rank R"),
    ("rpc_rl.main", "--rank", "1", "--rank 1 requires --master_addr HOST"),
    ("rpc_rl.main", "--learning_rate", "1", "unrecognized arguments: --learning_rate 1"),
    ("rpc_rl.main", "--max", "1", "unrecognized arguments: --max 1"),  # not short for --max_episodes
    ("rpc_rl.main", "--max_episode", "1", "did you mean --max_episodes?"),
    ("rpc_rl.main", "--local-rank", "0", "torchrun"),  # what torch.distributed.launch adds
    *(("rpc_rl.fast", "--checkpoint", name, NOT_A_FILE) for name in ("pipe", "folder", "/dev/null", ".")),
    ("rpc_rl.fast", "--checkpoint", "loop", "too many levels of symbolic links"),
    ("rpc_rl.fast", "--checkpoint", "y" * 240, "must have a shorter name"),
    *(("rpc_rl.fast", "--checkpoint", f"{folder}/run.pt", "must be a place where files can be written") for folder in ("/dev/null", "/proc/1/none")),
    *(("p2p_collectives.init_methods", "--file", value, "without ?, # and control characters") for value in ("a?b", "a#b", "a\tb")),
    ("rpc_rnn.main", "--epochs", "9" * 400, "is not accepted; give a whole number"),
    ("rpc_rnn.main", "--nhid", DIGITS, "give a smaller number"),
    ("rpc_rnn.main", "--nhid", LARGE, "GB of memory or more, and this machine has 24 GB; give smaller numbers"),
]


@quick
@pytest.mark.parametrize(("name", "flag", "value", "says"), COMMON, ids=[f"{flag} {value[:22]}" for _, flag, value, _ in COMMON])
def test_what_every_program_refuses(name, flag, value, says, stubbed):
    line = refusal(BY_NAME[name], [flag, value])
    assert flag in line
    assert says in line
    require_the_bounds(BY_NAME[name], [flag, value], line)


VALUES = [
    "", "0", "1", "-1", "2", "3", "1000", "1438", DIGITS, LARGE, "9" * 400, "9" * 5000, "0.5",
    "1e300", "1e-300", "nan", "inf", "-inf", "0x10", "１２", "ünïcødé ☃", LONG, "?", "a?b", "a#b", "a%b",
    "a\tb", "a\nb", "%s", "-", "--", "--seed", "folder", "pipe", "text", "loop", "text/below",
    "/dev/null", "/proc/1/nowhere", "localhost", "127.0.0.1", "::1", "localhost:29500", "cpu",
    "cuda", "cuda:0", "cuda:99", "cuda:9999999999"]


def for_all(parser, max_examples, holds, without=()):
    """Run `holds(argv)` for command lines that are drawn, the same ones each time: a few flags, each with one value or several."""
    hypothesis = pytest.importorskip("hypothesis", reason="no hypothesis here: pip install -r requirements-dev.txt")
    from hypothesis import strategies

    actions = [action for action in parser._actions if action.dest not in ("help", *without)]
    letters = strategies.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/.-")
    numbers = strategies.integers(1, 64) | strategies.integers() | strategies.floats()
    any_value = strategies.sampled_from(VALUES) | numbers.map(str) | strategies.text(letters, max_size=20)

    def values(action):
        """Of its type and of others, as texts."""
        if action.nargs == 0:
            return strategies.just([])
        value = strategies.sampled_from(sorted(map(str, action.choices))) | any_value if action.choices else any_value
        return strategies.lists(value, min_size=1, max_size=1 if action.nargs is None else 3)

    @strategies.composite
    def command_lines(draw):
        some = strategies.lists(strategies.sampled_from(actions), unique=True, min_size=1, max_size=5)
        flags = [(action.option_strings[0], *draw(values(action))) for action in draw(some)]
        return [word for flag in flags for word in flag]

    hypothesis.configuration.set_hypothesis_home_dir(Path.cwd() / ".hypothesis")
    settings = hypothesis.settings(max_examples=max_examples, derandomize=True, deadline=None,
                                   database=None, suppress_health_check=hypothesis.HealthCheck)
    settings(hypothesis.given(command_lines())(holds))()


@each_program
def test_any_input(program, stubbed):
    def accepted_or_one_line(argv):
        verdict, err = outcome(program, argv)
        if verdict == "accepted":
            assert err == ""
        else:
            one_line(err)

    for_all(program.module().build_parser(), 20, accepted_or_one_line)


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that torchrun makes; the ranks are for the test to set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("program", slow_but([program for program in programs() if program.name != "single_machine"],
                                             "rpc_rl.main", "p2p_collectives.main"), ids=str)
def test_one_rank_of_torchrun_says_it(program, stubbed, torchrun):
    ranks = program.module().build_parser().get_default("world_size") or 3

    def one_rank_says_it(argv):
        said, verdicts = "", set()
        for rank in range(ranks):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            verdict, err = outcome(program, argv)
            said += err
            verdicts.add(verdict)
        if "refused" in verdicts:
            one_line(said)

    # Without MNIST: who does not have it waits for the first rank, which has ended.
    for_all(program.module().build_parser(), 10, one_rank_says_it, without=["dataset"])


@pytest.mark.parametrize(("name", "flags"), [
    ("rpc_rl.main", ["--output_dir", "/dev/null"]),
    ("param_server.main", ["--data_dir", "folder", "--dataset", "mnist"]),
])
def test_the_first_rank_of_a_machine_says_what_is_its_machines(name, flags, stubbed, torchrun):
    """Where only the second of two machines is at fault, nobody on the first one can say so."""
    os.environ.update(RANK="2", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert flags[0] in refusal(BY_NAME[name], flags)


def test_one_process_under_torchrun(stubbed, torchrun):
    os.environ["WORLD_SIZE"] = "2"
    assert "not torchrun" in refusal(BY_NAME["model_parallel_resnet.single_machine"], [])


@quick
@pytest.mark.parametrize(("name", "flags"), [
    ("ddp_rpc_hybrid.sharded_table", "--device cuda"),
    ("model_parallel_resnet.single_machine", "--devices cpu cuda:0"),
    ("transformer_parallel.ring_attention", "--ways torch_ring --device cuda"),
])
def test_what_is_refused_on_a_machine_with_gpus(name, flags, stubbed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "--device" in refusal(BY_NAME[name], flags.split())


# Each copy of this model takes 4 GB to train, and its batch little.
COPIES = "--world_size 8 --batch_size 8 --seq_len 1 --blocks 1000"


@pytest.mark.parametrize(("name", "flags"), [
    ("batch_rl.main", f"--num_steps {LARGE}"),
    ("model_parallel_resnet.main", f"--batch_size {LARGE}"),
    ("param_server.batch_update", f"--batch_size {LARGE}"),
    ("rpc_rnn.main", "--nhid 1000 --nlayers 1000"),
    ("transformer_parallel.main", COPIES),
])
def test_more_than_the_memory(name, flags, stubbed):
    line = refusal(BY_NAME[name], flags.split())
    assert flags.split()[-1] in line
    assert "GB of memory or more, and this machine has 24 GB; give smaller numbers" in line


def test_a_corpus_larger_than_the_memory(stubbed):
    with open("huge", "wb") as file:
        file.truncate(10**12)  # a hole: it takes no room
    assert "--corpus huge would need" in refusal(BY_NAME["rpc_rnn.main"], ["--corpus", "huge"])


def test_no_mnist(stubbed):
    """No place for it, an empty one, or half a file there, and nobody from whom it could be fetched."""
    images = write_mnist(Path("half"), {"train": 30, "t10k": 10}) / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    for folder in (LONG, "pipe", "/dev/null", "text/below", "folder", "half"):
        line = refusal(BY_NAME["param_server.main"], ["--dataset", "mnist", "--data_dir", folder])
        assert line.startswith(f"error: --data_dir {folder[:30]}")
        assert "--dataset digits" in line


@quick
@pytest.mark.parametrize(("name", "flags"), [
    *((name, "") for name in BY_NAME),
    # What is near to what is refused.
    ("rpc_rl.main", "--seed 2147483647 --timeout 10000000"),
    ("rpc_rl.main", "--world_size 33 --reward_threshold 100"),
    ("rpc_rl.main", "--rank 1 --world_size 1000 --master_addr 10.0.0.7 --reward_threshold 4"),
    ("rpc_rl.fast", f"--checkpoint {'y' * 225}"),
    ("batch_rl.main", "--observers 239"),
    ("rpc_rnn.main", f"--corpus text --bptt {LARGE}"),
    ("rpc_rnn.main", "--nhid 4000"),
    ("p2p_collectives.init_methods", "--file a%b"),
    ("p2p_collectives.train", "--resume --checkpoint none.pt --rank 1 --master_addr 10.0.0.7"),  # rank 0 has the file
    ("transformer_parallel.zero", f"--ways zero3 {COPIES}"),  # all ranks together have the model once
])
def test_good_input_is_accepted(name, flags, stubbed):
    assert outcome(BY_NAME[name], flags.split()) == ("accepted", "")


def test_open_files_limit_the_processes(stubbed, monkeypatch):
    monkeypatch.delenv("RPC_TRANSPORTS", raising=False)
    twenty = ["--world_size", "20", "--reward_threshold", "100"]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64, 1024))
    assert "at most 15 processes (open files: ulimit -Hn)" in refusal(BY_NAME["rpc_rl.main"], twenty)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (limits.resource.RLIM_INFINITY,) * 2)
    assert outcome(BY_NAME["rpc_rl.main"], twenty) == ("accepted", "")


# --- where nothing can run


@pytest.mark.parametrize(("place", "torchs", "says"), [
    ({"platform": "win32"}, "2.13.0", "use WSL"),
    ({"python": (3, 10)}, "2.13.0", "Python 3.10 is too old; use 3.11 or newer"),
    ({}, "2.9.1+cu121", "torch 2.9.1+cu121 is too old; use 2.11 or newer"),
    ({}, None, "torch is missing; run `pip install -r requirements.txt`"),
    *(({}, version, None) for version in ("2.11.0", "2.13.0+cpu", "2.15.0a0+git123", "3.0")),
    ({"platform": "darwin"}, "2.13.0", None),
])
def test_why_not(place, torchs, says, monkeypatch):
    def version(package):
        if torchs is None:
            raise PackageNotFoundError(package)
        return torchs

    monkeypatch.setattr("importlib.metadata.version", version)
    reason = common.why_not(**place)
    assert reason is None if says is None else says in reason


# A system that says it is Windows, from when torch and what it needs have been imported.
WINDOWS = """
import gymnasium, io, runpy, sys, torch, torch.distributed, torch.distributed.autograd, torch.distributed.checkpoint
from contextlib import redirect_stderr

sys.platform = "win32"
for module in ("fcntl", "resource", "termios", "pwd", "grp"):  # which are not there
    sys.modules[module] = None
for path in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
        del sys.modules[name]
    err = io.StringIO()
    try:
        with redirect_stderr(err):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        print(path, stop.code, err.getvalue(), end="")
"""


def test_windows_is_refused_in_words(tmp_path):
    paths = [str(program.file) for program in programs()]
    (tmp_path / "windows.py").write_text(WINDOWS, encoding="utf-8")
    (here := tmp_path / "here").mkdir()
    result = run([sys.executable, str(tmp_path / "windows.py"), *paths], here)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == len(paths)
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith(f"{path} 2 error: torch has no RPC on Windows; use WSL")
    assert list(here.iterdir()) == []
