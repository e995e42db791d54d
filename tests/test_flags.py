"""Bad input, whatever the program: status 2 and one line, before any process starts."""

import contextlib
import functools
import importlib
import io
import os
import re
import sys
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import common
from common import data, limits, program, report
from common.vision import import_torchvision

import pytest
import torch

from benchmarks.outputs import folder_of
from ddp_basic import elastic
from p2p_collectives import train as p2p_train
from param_server import data as param_server_data
from param_server import main as param_server
from rpc_rl import main as rpc_rl
from rpc_rnn import data as rpc_rnn_data
from rpc_rnn.data import load_language
from rpc_rnn.saving import LocalRNNModel
from tests.helpers import ROOT, run, slow_but
from tests.test_checks import CHECKS, PLACE
from tests.test_data import write_mnist

# Every program, and what it calls when its input is good, other than `run_program`.
PROGRAMS = {
    **dict.fromkeys(CHECKS, []), "model_parallel_resnet.single_machine": ["train_toy"],
    "benchmarks.one_process": ["measure"],
    "benchmarks.rpc_rl": ["launch"],
}
MEMORY_BYTES = 24_000_000_000  # whatever this machine has
DIGITS, LONG = "9" * 20, "x" * 300
LARGE = "1" + "0" * 12  # an int that tensors could have as their size, but no machine could hold


class Accepted(Exception):
    """The input was good: now the processes would start."""


_written = None  # the paths, while `nothing_written_outside` wants to know


def _note(event, args):
    writes = {"os.mkdir": 0, "os.rename": 1}
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        writes["open"] = 0
    if _written is not None and event in writes:
        path = args[writes[event]]
        if isinstance(path, (str, bytes)):
            _written.append(Path(os.fsdecode(os.path.realpath(path))))


sys.addaudithook(_note)


@contextlib.contextmanager
def nothing_written_outside(folder):
    """Fail for a file or a folder elsewhere; trying to write where nobody can is no offence."""
    global _written
    _written = []
    try:
        yield
    finally:
        written, _written = _written, None
    allowed = (folder, Path("/dev"), Path("/proc"))
    outside = [path for path in written if not any(map(path.is_relative_to, allowed))]
    assert [path for path in outside if "__pycache__" not in path.parts] == []


def outcome(name, argv, folder):
    """Call `main`: "accepted" or "refused", and what it says on stderr."""
    main, out, err = importlib.import_module(name).main, io.StringIO(), io.StringIO()
    with (pytest.raises((Accepted, SystemExit)) as end,
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          nothing_written_outside(folder)):
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


def refusal(name, argv, folder):
    """The one line."""
    verdict, err = outcome(name, argv, folder)
    assert verdict == "refused", (name, argv)
    one_line(err)
    return err


def parser_of(name):
    return importlib.import_module(name).build_parser()


@pytest.mark.parametrize("name", CHECKS)
def test_a_program_writes_into_a_folder_of_its_name(name):
    """The one that the pages show at the end of what it prints."""
    assert str(parser_of(name).get_default("output_dir")) == folder_of(f"{name.replace('.', '/')}.py")


@functools.cache
def digits():
    return data.load_data(SimpleNamespace(dataset="digits"))


@functools.cache
def drawn_language():
    return load_language(SimpleNamespace(corpus=None, seed=0))


def known_hosts(name):
    """Nobody asks a name server."""
    name.encode("idna")  # as Python does first
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", name, re.ASCII):
        raise OSError(-2, "Name or service not known")
    return name


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """A working directory with files of all kinds; what would start processes raises `Accepted`."""

    def accept(*_, **__):
        raise Accepted

    for call in ("launch", "check"):
        monkeypatch.setattr(program, call, accept)
    for name, calls in PROGRAMS.items():
        module = importlib.import_module(name)
        for call in calls:
            monkeypatch.setattr(module, call, accept)
        with contextlib.suppress(ModuleNotFoundError):  # what `--check` calls
            oracle = importlib.import_module(f"{name}_check".replace("main_check", "check"))
            monkeypatch.setattr(oracle, "launch", accept, raising=False)
    monkeypatch.setattr("model_parallel_resnet.single_machine_check.check", accept)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(limits, "memory_bytes", lambda: MEMORY_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("socket.gethostbyname", known_hosts)
    mnist = import_torchvision().datasets.MNIST
    monkeypatch.setattr(mnist, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    # The same data for every call: to draw and to resize them takes a while.
    for module in (param_server_data, param_server, p2p_train, elastic):
        monkeypatch.setattr(module, "load_data", lambda args: digits())
    monkeypatch.setattr(rpc_rnn_data, "load_language", lambda args: (
        drawn_language() if args.corpus is None else load_language(args)))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 200)
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path.resolve()


# --- drawn


VALUES = [
    "", "0", "1", "-1", "2", "3", "1000", "1438", DIGITS, LARGE, "9" * 400, "9" * 5000, "0.5",
    "1e300", "1e-300", "nan", "inf", "-inf", "0x10", "１２", "ünïcødé ☃", LONG, "?", "a?b", "a#b", "a%b",
    "a\tb", "a\nb", "%s", "-", "--", "--seed", "folder", "pipe", "text", "loop", "text/below",
    "/dev/null", "/proc/1/nowhere", "localhost", "127.0.0.1", "::1", "localhost:29500", "cpu",
    "cuda", "cuda:0", "cuda:99", "cuda:9999999999"]


def for_all(parser, max_examples, holds, without=()):
    """Run `holds(argv)` for command lines that are drawn, the same ones each time: a few flags, each with one value or several."""
    import hypothesis  # takes long to import, in each worker
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_input(name, stubbed):
    def accepted_or_one_line(argv):
        verdict, err = outcome(name, argv, stubbed)
        if verdict == "accepted":
            assert err == ""
        else:
            one_line(err)

    for_all(parser_of(name), 20, accepted_or_one_line)


def all_flags():
    """Each flag that takes a value, once, with the first program that has it."""
    found = {}
    for name in PROGRAMS:
        for action in parser_of(name)._actions:
            if action.dest != "help" and action.nargs != 0:
                found.setdefault(action.option_strings[0], name)
    return found


@pytest.mark.parametrize(("flag", "name"), all_flags().items())
def test_every_flag_with_every_value(flag, name, stubbed):
    for value in VALUES:
        verdict, err = outcome(name, [flag, value], stubbed)
        if verdict == "refused":
            one_line(err)


@pytest.fixture
def torchrun(monkeypatch):
    """The environment that torchrun makes; the ranks are for the test to set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")


DISTRIBUTED = [name for name, calls in PROGRAMS.items() if calls in ([], ["launch"])]


@pytest.mark.parametrize("name", slow_but(DISTRIBUTED, "rpc_rl.main", "p2p_collectives.main"))
def test_one_rank_of_torchrun_says_it(name, stubbed, torchrun):
    parser = parser_of(name)
    ranks = parser.get_default("world_size") or 3

    def one_rank_says_it(argv):
        said, verdicts = "", set()
        for rank in range(ranks):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            verdict, err = outcome(name, argv, stubbed)
            said += err
            verdicts.add(verdict)
        if "refused" in verdicts:
            one_line(said)

    # Without MNIST: who does not have it waits for the first rank, which has ended.
    for_all(parser, 10, one_rank_says_it, without=["dataset"])


@pytest.mark.parametrize(("name", "flags"), [
    ("rpc_rl.main", ["--output_dir", "/dev/null"]),
    ("param_server.main", ["--data_dir", "folder", "--dataset", "mnist"]),
])
def test_the_first_rank_of_a_machine_says_what_is_its_machines(name, flags, stubbed, torchrun):
    """Where only the second of two machines is at fault, nobody on the first one can say so."""
    os.environ.update(RANK="2", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert flags[0] in refusal(name, flags, stubbed)


# --- known


@functools.cache
def with_flag(flag):
    """The programs that have it."""
    return [name for name in PROGRAMS if flag in parser_of(name)._option_string_actions]


FILES = ("--checkpoint", "--corpus", "--file")
SIZES = ("--nhid", "--nlayers", "--ninp", "--image_size", "--num_embeddings", "--embedding_dim",
         "--num_classes", "--envs_per_observer", "--sizes")
OTHER_COUNTS = ("--batch_size", "--bptt", "--num_steps", "--epochs", "--steps", "--rounds")
MORE_COUNTS = ("--global_batch_size", "--log_interval", "--max_episodes", "--num_batches", "--num_episode", "--num_repeat",
               "--num_splits", "--num_updates", "--observers", "--ranks_per_machine", "--repeats", "--split_size", "--split_sizes",
               "--total_steps_per_episode", "--world_size")
CHOICES = ("--arch", "--dataset", "--demo", "--envs", "--kind", "--method", "--schedule",
           "--truncation")
NOT_A_FILE = "must be a file, not a folder, a pipe or a device"
SECONDS = "at least 0.01 and at most 10000000"
NO_PORT = "give the port with --master_port, and no IPv6"
KNOWN = [
    *((flag, value, "give a whole number at least") for flag in (*SIZES, *OTHER_COUNTS, *MORE_COUNTS) for value in ("0", "-1")),
    ("--world_size", "２", "'２' is not accepted; give a whole number at least"),
    ("--seed", "1_0", "'1_0' is not accepted; give a whole number at least 0 and at most 2147483647"),
    *((flag, "1.5", "is not accepted; give a whole number") for flag in ("--epochs", "--world_size", "--num_steps")),
    *((flag, value, "at least 0 and at most 1") for flag in ("--dropout", "--gamma") for value in ("-0.1", "1.5", "nan")),
    *((flag, value, "give a number above 0") for flag in ("--lr", "--reward_threshold") for value in ("0", "-0.1", "nan", "inf")),
    ("--lr", "1e38", "--lr 1e+38 must be at most 1e+30"),
    ("--slow_rank", "-1", "at least 0"),
    *((flag, "another", "(choose from ") for flag in CHOICES),
    *(("--seed", value, "at most 2147483647") for value in ("20000000000000", str(2**64), "-1")),
    *(("--timeout", value, SECONDS) for value in ("1e300", "1e-300", "nan", "0", "-1")),
    *(("--delay", value, "at least 0 and at most 10000000") for value in ("1e300", "-1", "inf")),
    *(("--master_port", value, "at least 1 and at most 65535") for value in ("0", "99999", "abc")),
    ("--device", "cuda", "needs a GPU"),
    *((flag, f"{folder}/run.pt", "must be a place where files can be written") for flag in ("--checkpoint", "--file", "--output_dir")
      for folder in ("/dev/null", "/proc/1/none")),
    ("--world_size", DIGITS, "at most 65536"),
    ("--world_size", "1000", "can hold at most 240 processes (memory)"),
    ("--observers", DIGITS, "at most 65535"),
    ("--observers", "1000", "can hold at most 240 processes (memory)"),
    ("--observers", "240", "can hold at most 240 processes (memory)"),
    *((flag, LONG, "too long") for flag in ("--output_dir", *FILES)),
    ("--checkpoint", "y" * 240, "must have a shorter name"),
    *((flag, name, NOT_A_FILE) for flag in FILES for name in ("pipe", "folder", "/dev/null", ".")),
    *((flag, "loop", "too many levels of symbolic links") for flag in FILES),
    ("--output_dir", "pipe", "file exists"),
    ("--output_dir", "text/below", "not a directory"),
    *(("--master_addr", value, NO_PORT) for value in ("::1", "localhost:29500")),
    *(("--master_addr", value, "give a host's name") for value in ("", LONG, "no such host")),
    *(("--file", value, "without ?, # and control characters") for value in ("a?b", "a#b", "a\tb")),
    *((flag, DIGITS, "give a smaller number") for flag in (*SIZES, *OTHER_COUNTS)),
    *((flag, "9" * 400, "is not accepted; give a whole number") for flag in ("--seed", "--epochs")),
    *((flag, LARGE, "GB of memory or more, and this machine has 24 GB") for flag in SIZES),
    ("--num_splits", "1001", "at most 1000"),
    ("--devices", "cuda:9999999999", "cuda:N"),
]


def require_the_bounds(name, argv, line, folder):
    """Hold that what a refusal asks for at least, or at most, is not refused for the same reason."""
    flag = re.search(r"--\w+", line)[0]
    others = re.sub(rf"{flag}( (?!--)\S+)*", "", " ".join(argv)).split()
    for bound, number in re.findall(r"(?:number|must be|and) (at (?:least|most) (?:--\w+ )?([\d.e+]*\d))", line):
        assert bound not in outcome(name, [*others, flag, number], folder)[1]


@pytest.mark.parametrize(
    ("flag", "value", "says"), KNOWN, ids=[f"{flag} {value[:22]}" for flag, value, _ in KNOWN])
def test_known_bad_input(flag, value, says, stubbed):
    more = {"--devices": ["cpu"]}.get(flag, [])  # it takes two
    assert with_flag(flag)
    for name in with_flag(flag):
        line = refusal(name, [flag, value, *more], stubbed)
        assert flag in line
        assert says in line
    require_the_bounds(name, [flag, value, *more], line, stubbed)


# Program, flags, and what the line says: of bounds that other programs do not have, and of flags that do not go together.
REFUSED = [
    *((name, "--world_size 1", "at least 2") for name in (
        "batch_rl.main", "p2p_collectives.deadlock", "p2p_collectives.main", "param_server.batch_update", "param_server.main",
        "rpc_rl.main", "rpc_rnn.main")),
    ("ddp_rpc_hybrid.main", "--world_size 2", "at least 3"),
    *((name, "--num_classes 1", "at least 2") for name in ("ddp_rpc_hybrid.main", "model_parallel_resnet.main")),
    ("rpc_rl.main", "--world_size 12", "--reward_threshold 475 cannot be passed in 454 steps, each observer's share of"),
    ("rpc_rl.main", "--reward_threshold 600", "--reward_threshold 600 cannot be passed in 500 steps, the most that CartPole-v1 has; give less"),
    ("rpc_rl.main", "--reward_threshold 500", "--reward_threshold 500 cannot be passed in 500 steps"),
    ("batch_rl.until_solved", "--num_steps 1000 --reward_threshold 600", "--reward_threshold 600 cannot be passed in 500 steps"),
    ("rpc_rl.main", "--rank 3 --world_size 3 --master_addr 127.0.0.1", "--rank 3 must be below --world_size 3"),
    ("rpc_rl.main", "--rank 1", "--rank 1 requires --master_addr HOST"),
    ("rpc_rl.main", "--master_addr 127.0.0.1", "--master_addr 127.0.0.1 requires --rank R"),
    ("rpc_rl.main", "--learning_rate 1", "unrecognized arguments: --learning_rate 1"),
    ("rpc_rl.main", "--seed x", "argument --seed: 'x' is not accepted; give a whole number"),
    ("rpc_rl.main", "--max 1", "unrecognized arguments: --max 1"),  # not short for --max_episodes
    ("rpc_rl.fast", "--checkpoint none.pt --resume", "--checkpoint none.pt must be an existing file with --resume"),
    ("batch_rl.main", "--observers 2 --world_size 6", "--observers 2 must be 5 with --world_size 6"),
    ("batch_rl.main", "--check --observers 2 5", "--observers 2 5 must be a single number with --check"),
    ("batch_rl.main", "--rank 1 --master_addr 127.0.0.1", "--rank 1 requires --world_size N"),
    ("batch_rl.until_solved", "--num_steps 475", "--num_steps 475 must be above --reward_threshold 475"),
    ("ddp_basic.skew", "--slow_rank 2", "--slow_rank 2 must be below --world_size 2"),
    ("ddp_basic.elastic", "--global_batch_size 1438", "at least 1 and at most 1437"),
    ("ddp_basic.elastic", "--global_batch_size 15", "--global_batch_size 15 must be a multiple of --world_size 2"),
    ("ddp_basic.elastic", "--checkpoint /", "--checkpoint /"),
    ("benchmarks.peers.collectives", "--sizes 8", "--sizes 8 must be a multiple of 16"),
    *(("model_parallel_resnet.main", *row) for row in (
        ("--world_size 4", "--world_size 4 must be 3: one process for each role"),
        ("--num_splits 4 16 --batch_size 8", "--num_splits 16 must be at most --batch_size 8"),
        ("--image_size 31", "at least 32"),
        ("--image_size 32 --batch_size 8", "--image_size 32 must be above 32 with --num_splits 8 and --batch_size 8"))),
    ("model_parallel_resnet.schedules", "--world_size 3", "--world_size 3 must be 2: one process for each role"),
    ("model_parallel_resnet.schedules", "--num_splits 3", "--num_splits 3 must be a divisor of --batch_size 32"),
    ("model_parallel_resnet.schedules", "--batch_size 30 --num_splits 5 --schedule zero_bubble",
     "--num_splits 5 must be even, or 1 or 3, with --schedule zero_bubble"),
    *(("model_parallel_resnet.single_machine", *row) for row in (
        ("--devices cpu tpu", "'tpu' is not accepted; give cpu or cuda:N"),
        ("--devices cuda cuda", "'cuda' is not accepted; give cpu or cuda:N"),
        ("--devices cpu", "expected 2 arguments"),
        ("--devices cuda:98 cuda:99", "--devices cuda:98 cuda:99 must be "),
        ("--devices cpu cpu --device cpu", "--device cpu cannot be given with --devices cpu cpu"),
        ("--split_sizes 1 13", "--split_sizes 13 must be at most --batch_size 12"),
        ("--split_size 13", "--split_size 13 must be at most --batch_size 12"),
        ("--image_size 32", "at least 33"),
        *((f"{flag} 2", f"unrecognized arguments: {flag} 2") for flag in ("--world_size", "--rank", "--timeout")))),
    ("p2p_collectives.deadlock", "--check --mended", "--mended cannot be given with --check"),
    ("p2p_collectives.deadlock", "--check --rank 0 --master_addr 127.0.0.1", "give no --rank, and no torchrun"),
    ("p2p_collectives.init_methods", "--rank 0 --master_addr 127.0.0.1", "--method all must be env, tcp or file"),
    ("p2p_collectives.init_methods", "--rank 0 --master_addr 127.0.0.1 --method file", "--method file requires --file FILE"),
    ("p2p_collectives.init_methods", "--file text", "--file text must be a path where nothing is yet"),
    ("p2p_collectives.ring_allreduce", "--sizes 6", "--sizes 6 must be a multiple of 4"),
    ("p2p_collectives.shared_memory", "--sizes 8", "--sizes 8 must be a multiple of 16"),
    ("p2p_collectives.shared_memory", "--ranks_per_machine 3", "--ranks_per_machine 3 must be a divisor of 4"),
    ("p2p_collectives.shared_memory", "--ranks_per_machine 8", "--ranks_per_machine 8 must be a divisor of 4"),
    ("p2p_collectives.train", "--global_batch_size 3 --world_size 4", "--global_batch_size 3 must be at least --world_size 4"),
    ("p2p_collectives.train", "--world_size 2000 --global_batch_size 2000 --rank 0 --master_addr 127.0.0.1", "must be at most 1437"),
    # Only where rank 0 is: see test_good_input_is_accepted.
    ("p2p_collectives.train", "--resume --checkpoint none.pt --rank 0 --master_addr 127.0.0.1", "--checkpoint none.pt must be an existing"),
    ("param_server.main", "--world_size 1439 --rank 1", "--world_size 1439 must be at most 1438"),
    ("param_server.main", "--rank 3", "--rank 3 must be below --world_size 3"),
    ("param_server.batch_update", "--batch_size 1", "at least 2"),
    ("param_server.batch_update", "--image_size 4", "at least 8"),
    ("rpc_rnn.main", "--world_size 3", "--world_size 3 must be 2, a server and one trainer"),
    ("rpc_rnn.main", "--batch_size 30000", "--batch_size 30000 must be at most 25000"),
    ("rpc_rnn.main", "--corpus none.txt", "--corpus none.txt must be a UTF-8 text of at least 400 characters (no such file)"),
    ("rpc_rnn.main", "--corpus text --batch_size 2000", "at least 40000 characters, or --batch_size 2000 smaller"),
    *((f"transformer_parallel.{name}", "--batch_size 6", "--batch_size 6 must be a multiple of 4 ranks")
      for name in ("main", "zero", "experts", "recompute", "mesh")),
    ("transformer_parallel.main", "--accumulate 5", "--batch_size 24 must be a multiple of 4 ranks x 5 backwards"),
    ("transformer_parallel.main", "--ways zero3", "zero3"),
    ("transformer_parallel.experts", "--experts 6", "--experts 6 must be a multiple of 4 ranks"),
    ("transformer_parallel.mesh", "--row 3", "--row 3 must divide the 4 ranks"),
    ("transformer_parallel.mesh", "--world_size 10 --row 5 --batch_size 20", "10 ranks that share each layer must divide"),
    ("transformer_parallel.mesh", "--blocks 3", "--blocks 3 must be at least 4: one for each stage of --ways pipeline"),
    ("transformer_parallel.mesh", "--blocks 1 --ways data_pipeline", "--blocks 1 must be at least 2: one for each stage"),
    ("transformer_parallel.mesh", "--micro_batches 5", "--micro_batches 5 must divide the 24 rows"),
    ("transformer_parallel.pipeline", "--micro_batches 7", "--batch_size 24 must be a multiple of --micro_batches 7"),
    ("transformer_parallel.pipeline", "--blocks 3", "--blocks 3 must be at least"),
    ("transformer_parallel.pipeline", "--micro_batches 6", "--micro_batches 6 must be a multiple of 4 ranks"),
    ("transformer_parallel.pipeline", "--ways torch_1f1b --micro_batches 2", "--micro_batches 2 must be at least 4, for --ways torch_1f1b"),
    ("transformer_parallel.ring_attention", "--seq_len 60", "--seq_len 60 must be a multiple of 8: the pieces of a row"),
    ("transformer_parallel.tensor_parallel", "--world_size 5", "--world_size 5 must divide the model's 12 heads"),
    ("transformer_parallel.tensor_parallel", "--seq_len 63", "--seq_len 63 must be a multiple of 4 ranks"),
    ("transformer_parallel.tensor_parallel", "--ways dtensor_sequence --seq_len 63", "--seq_len 63 must be a multiple of 4 ranks"),
]


@pytest.mark.parametrize(("name", "flags", "says"), REFUSED, ids=[f"{name} {flags}" for name, flags, _ in REFUSED])
def test_bad_input(name, flags, says, stubbed):
    line = refusal(name, flags.split(), stubbed)
    assert says in line
    require_the_bounds(name, flags.split(), line, stubbed)


@pytest.mark.parametrize(("gpus", "name", "flags", "says"), [
    (1, "ddp_rpc_hybrid.sharded_table", "--device cuda", "--device cuda must be cpu or auto: torch sees 1 GPUs, and here each rank needs"),
    (1, "model_parallel_resnet.single_machine", "--devices cpu cuda:0", "--devices cpu cuda:0 must be two GPUs, or one device twice"),
    *((gpus, "transformer_parallel.ring_attention", f"--ways torch_ring --device {device}", "--ways torch_ring calls a kernel of CPUs: give --device cpu, too")
      for gpus, device in ((4, "auto"), (1, "cuda"))),
])
def test_bad_input_on_a_machine_with_gpus(gpus, name, flags, says, stubbed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert says in refusal(name, flags.split(), stubbed)


def test_bad_input_where_memory_has_a_name(stubbed, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert "needs Linux" in refusal("p2p_collectives.shared_memory", [], stubbed)


@pytest.mark.parametrize("name", with_flag("--resume"))
def test_bad_input_nothing_to_resume(name, stubbed):
    assert "--resume requires --checkpoint " in refusal(name, ["--resume"], stubbed)


def test_bad_input_one_process_under_torchrun(stubbed, torchrun):
    os.environ["WORLD_SIZE"] = "2"
    line = refusal("model_parallel_resnet.single_machine", [], stubbed)
    assert "this example is one process" in line
    assert "not torchrun" in line


# Each copy of this model takes 4 GB to train, and its batch little.
COPIES = ["--world_size", "8", "--batch_size", "8", "--seq_len", "1", "--blocks", "1000"]


@pytest.mark.parametrize(("name", "flags"), [
    ("batch_rl.main", ["--num_steps", LARGE]),
    ("model_parallel_resnet.main", ["--batch_size", LARGE]),
    ("model_parallel_resnet.schedules", ["--batch_size", LARGE]),
    ("model_parallel_resnet.single_machine", ["--batch_size", LARGE]),
    ("param_server.batch_update", ["--batch_size", LARGE]),
    ("rpc_rnn.main", ["--nhid", "1000", "--nlayers", "1000"]),
    ("ddp_rpc_hybrid.main", ["--num_embeddings", "100000000"]),
    ("ddp_rpc_hybrid.sharded_table", ["--num_embeddings", "100000000"]),
    *((f"transformer_parallel.{name}", COPIES) for name in ("main", "zero", "experts", "mesh", "recompute", "ring_attention")),
])
def test_more_than_the_memory(name, flags, stubbed):
    line = refusal(name, flags, stubbed)
    assert flags[-1] in line
    assert "GB of memory or more, and this machine has 24 GB; give smaller numbers" in line
    if name == "ddp_rpc_hybrid.main":  # a rank that is alone may have room
        alone = [*flags, "--rank", "0", "--master_addr", "localhost"]
        assert outcome(name, alone, stubbed) == ("accepted", "")


def test_a_corpus_larger_than_the_memory(stubbed):
    with open("huge", "wb") as file:
        file.truncate(10**12)  # a hole: it takes no room
    assert "--corpus huge would need" in refusal("rpc_rnn.main", ["--corpus", "huge"], stubbed)


@pytest.mark.parametrize("name", with_flag("--dataset"))
def test_no_mnist(name, stubbed):
    """No place for it, an empty one, or half a file there, and nobody from whom it could be fetched."""
    images = write_mnist(Path("half"), {"train": 30, "t10k": 10}) / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    for folder in (LONG, "pipe", "/dev/null", "text/below", "folder", "half"):
        line = refusal(name, ["--dataset", "mnist", "--data_dir", folder], stubbed)
        assert line.startswith(f"error: --data_dir {folder[:30]}")
        assert "--dataset digits" in line


@pytest.mark.parametrize(("name", "flags"), [
    *((name, []) for name in PROGRAMS),
    # What is near to what is refused.
    ("rpc_rl.main", ["--seed", "2147483647"]),
    ("rpc_rl.main", ["--timeout", "10000000"]),
    ("rpc_rl.main", ["--world_size", "33", "--reward_threshold", "100"]),
    ("rpc_rl.main", ["--rank", "1", "--world_size", "1000", "--master_addr", "10.0.0.7", "--reward_threshold", "4"]),
    ("rpc_rl.fast", ["--checkpoint", "y" * 225]),
    ("batch_rl.main", ["--observers", "239"]),
    ("rpc_rnn.main", ["--corpus", "text"]),
    ("rpc_rnn.main", ["--nhid", "4000"]),
    ("rpc_rnn.main", ["--bptt", LARGE]),
    ("param_server.main", ["--batch_size", LARGE]),
    ("p2p_collectives.init_methods", ["--file", "a%b"]),
    ("transformer_parallel.zero", ["--ways", "zero3", *COPIES]),  # all ranks together have the model once
    ("transformer_parallel.pipeline", COPIES),
    ("p2p_collectives.train", ["--resume", "--checkpoint", "none.pt", "--rank", "1", "--master_addr", "10.0.0.7"]),
])
def test_good_input_is_accepted(name, flags, stubbed):
    assert outcome(name, flags, stubbed) == ("accepted", "")


def test_open_files_limit_the_processes(stubbed, monkeypatch):
    monkeypatch.delenv("RPC_TRANSPORTS", raising=False)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64, 1024))
    assert refusal("rpc_rl.main", ["--world_size", "20", "--reward_threshold", "100"], stubbed) == (
        "error: --world_size 20 is too much for this machine, which can hold at most 15 processes "
        "(open files: ulimit -Hn)\n")
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (limits.resource.RLIM_INFINITY,) * 2)
    assert outcome("rpc_rl.main", ["--world_size", "20", "--reward_threshold", "100"], stubbed) == ("accepted", "")


# --- checkpoints


def rnn_state():
    weights = LocalRNNModel(ntoken=10, ninp=32, nhid=64, nlayers=1).state_dict()
    return {"model": weights, "optimizers": [b"state", b"state"], "epochs": [{"loss": 2.0, "val_loss": 2.1}], "initial_val_loss": 2.3,
            "vocabulary": None}


def rl_state():
    policy, kept = rpc_rl.Policy(), {"episodes": 1, "env_steps": 30, "running_reward": 0.8, "rewards": [15.0], "running_rewards": [0.8]}
    return {"policy": policy.state_dict(), "optimizer": torch.optim.Adam(policy.parameters()).state_dict(),
            "generators": [torch.get_rng_state(), torch.get_rng_state()], "history": kept}


def server_state():
    return {"model": param_server.Net().state_dict(), "epochs": 1, "random_numbers": torch.get_rng_state()}


def sgd_state(model, epochs, row):
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), epochs: [row]}


CHECKPOINTS = {  # what each program that saves its training saves of it
    "rpc_rl.fast": rl_state,
    "rpc_rnn.main": rnn_state,
    **{f"param_server.{name}": server_state for name in ("main", "async_server")},
    **{f"p2p_collectives.{name}": lambda: sgd_state(p2p_train.Net(), "epochs", {"loss": 2.3, "loss_per_rank": [2.2, 2.4], "accuracy": 0.5})
       for name in ("train", "train_flat", "train_ddp")},
    "ddp_basic.elastic": lambda: sgd_state(elastic.build_model(0), "history", {"epoch": 1, "loss": 2.3, "accuracy": 0.5}),
}


def test_every_checkpoint_is_tried():
    assert CHECKPOINTS.keys() == {*with_flag("--checkpoint")}


def save_and_resume(name, path, state):
    """Write a checkpoint; the flags with which the program goes on from it."""
    torch.save({"example": parser_of(name).get_default("example"), "settings": {}, **state}, path)
    return ["--checkpoint", path, *(["--resume"] if name in with_flag("--resume") else [])]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_resume_in_a_folder_that_cannot_be_written(name, stubbed, monkeypatch):
    flags = save_and_resume(name, "folder/run.pt", CHECKPOINTS[name]())
    assert outcome(name, flags, stubbed) == ("accepted", "")
    original = tempfile.TemporaryFile

    def read_only(*arguments, dir=None, **options):
        if Path(dir) == Path("folder"):
            raise OSError(30, "Read-only file system")
        return original(*arguments, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert refusal(name, flags, stubbed) == (
        "error: --checkpoint folder/run.pt must be a place where files can be written (folder: "
        "read-only file system)\n")


HOW_LONG_AND_WHERE = {"epochs", "max_episodes", "reward_threshold", "log_interval", "world_size", "corpus", "data_dir",
                      "checkpoint", "resume"}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_training_goes_on_with_its_flags(name, stubbed):
    """Any other one is refused, but for how long it goes on, and where."""
    argv = ["--seed", "3", "--lr", "0.01"]
    parser = parser_of(name)
    settings = parser.parse_args([*argv, "--checkpoint", "other.pt"]).settings
    assert settings.keys() == {action.dest for action in parser._actions} - PLACE - HOW_LONG_AND_WHERE
    flags = save_and_resume(name, "run.pt", {**CHECKPOINTS[name](), "settings": settings})
    assert outcome(name, [*flags, *argv, "--timeout", "9"], stubbed) == ("accepted", "")
    assert refusal(name, [*flags, *argv, "--seed", "4"], stubbed) == (
        "error: --seed 4 must be 3, as in --checkpoint run.pt\n")
    for flag in settings.keys() - {"dataset"}:
        other = {**settings, flag: 12345}
        flags = save_and_resume(name, "run.pt", {**CHECKPOINTS[name](), "settings": other})
        assert "must be 12345, as in --checkpoint run.pt" in refusal(name, [*flags, *argv], stubbed)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_help_says_what_a_checkpoint_fixes(name, stubbed):
    """And so it is: another number of ranks is accepted where the help says so, and refused where it does not."""
    said = re.search("with the same flags: only how long(, on how many ranks)? and where may differ",
                     " ".join(parser_of(name).format_help().split()))
    assert said
    more = ["--world_size", "4"]
    if outcome(name, more, stubbed)[0] == "accepted":
        flags = save_and_resume(name, "run.pt", CHECKPOINTS[name]())
        assert (outcome(name, [*flags, *more], stubbed)[0] == "accepted") == bool(said[1])


def one_row_more(state):
    """A state of the same names, whose model is as if a flag of its sizes had been another one."""
    weights = state.get("model") or state["policy"]
    first = min(weights)
    weights[first] = torch.cat([weights[first], weights[first][:1]])
    return state


NOT_ITS_CHECKPOINT = [  # a program, what is changed in a checkpoint of its own, and what the line says
    *((name, change, "--checkpoint run.pt is not a whole checkpoint of ")
      for name in CHECKPOINTS for change in ("truncated", "text", {"example": "another"}, {"settings": {"lr": torch.ones(2)}})),
    *((name, {"more": more}, "--checkpoint run.pt has numbers that are not finite")
      for name in CHECKPOINTS for more in ({"w": torch.tensor([0.5, float("nan")])}, [float("inf")])),
    *((name, one_row_more, "--checkpoint run.pt is of another model") for name in CHECKPOINTS),
    ("param_server.main", {"model": torch.nn.Linear(3, 3).state_dict()}, "--checkpoint run.pt is of another model"),
    ("rpc_rl.fast", {"generators": [torch.get_rng_state()] * 3}, "--world_size"),
    *((name, change, "--checkpoint run.pt is not a whole checkpoint of ") for name, change in (
        ("rpc_rl.fast", {"generators": {1: torch.get_rng_state(), 7: torch.get_rng_state()}}), ("rpc_rl.fast", {"generators": [torch.ones(2)] * 2}),
        ("param_server.main", {"random_numbers": torch.zeros(7, dtype=torch.uint8)}), ("rpc_rnn.main", {"optimizers": [b"state"]}),
        ("rpc_rnn.main", {"optimizers": [b"state"] * 3}))),
    ("rpc_rnn.main", {"vocabulary": "abcdefghij"}, "--corpus"),
    *((name, {"epochs": epochs}, "--epochs") for name, epochs in (
        ("p2p_collectives.train", [{"loss": 2.3, "loss_per_rank": [2.3], "accuracy": 0.5}] * 11), ("param_server.main", 21),
        ("rpc_rnn.main", [{"loss": 2.0, "val_loss": 2.1}] * 9))),
    ("ddp_basic.elastic", {"history": [{"epoch": 1, "loss": 2.3, "accuracy": 0.5}] * 11}, "--epochs"),
]


@pytest.mark.parametrize(("name", "change", "says"), NOT_ITS_CHECKPOINT)
def test_not_its_checkpoint(name, change, says, stubbed):
    """Refused, also without --resume, which would write over it; and nothing happens to the file."""
    path = Path("run.pt")
    state = CHECKPOINTS[name]()
    state = change(state) if callable(change) else {**state, **(change if isinstance(change, dict) else {})}
    flags = save_and_resume(name, str(path), state)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "text":
        path.write_text("lr = 0.01\n")
    before = path.read_bytes()
    assert says in refusal(name, flags, stubbed)
    if "whole" in says:
        assert says in refusal(name, flags[:2], stubbed)
    assert path.read_bytes() == before


def odd(part):
    """What a part of a checkpoint could be, but is not: each thing in it missing, or what cannot go on; weights are not asked."""
    if isinstance(part, dict) and not any(isinstance(value, torch.Tensor) for value in part.values()):
        for name, value in part.items():
            if name != "epoch":  # a row's own number, which nobody reads
                yield {other: part[other] for other in part if other != name}
                yield from ({**part, name: other} for other in odd(value))
    elif isinstance(part, list) and part and isinstance(part[0], dict):
        yield from ([other] for other in odd(part[0]))
    yield from (other for other in (None, "3", torch.ones(2)) if type(other) is not type(part))
    yield from (-1, True, 1.5) if type(part) is int else ()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_half_a_checkpoint(name, stubbed):
    """A part is missing, or is something else: refused in a line, whatever part it is."""
    state = CHECKPOINTS[name]()
    whole = {"example": parser_of(name).get_default("example"), "settings": {}, **state}
    if "optimizer" in whole:
        whole["optimizer"] = {"param_groups": [], "state": {}}  # what is in them, torch asks
    for half in odd(whole):
        if isinstance(half, dict):
            flags = save_and_resume(name, "run.pt", {})
            torch.save(half, "run.pt")
            verdict, err = outcome(name, flags, stubbed)
            assert verdict == "refused", half
            assert err.startswith("error: --checkpoint run.pt is "), (half, err)


def test_a_checkpoint_that_cannot_be_read(stubbed, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert refusal("rpc_rl.fast", ["--checkpoint", "text", "--resume"], stubbed) == (
        "error: --checkpoint text must be a file that can be read (permission denied)\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_tells_every_default(name, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        parser_of(name).parse_args(["--help"])
    shown = [action for action in parser_of(name)._actions if action.dest != "help" and not action.required]
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).count("(default: ") >= len(shown)
    assert "\nflags that every program has:\n" in printed or "--start_method" not in printed


# --- where the tensors were


@pytest.mark.parametrize(("flag", "where", "device"), [
    ("auto", None, "Some GPU"), ("cuda", None, "Some GPU"), ("cpu", None, "cpu"),
    ("auto", "cpu", "cpu"),
])
def test_device_in_metrics(flag, where, device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
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
    paths = [str(ROOT / f"{name.replace('.', '/')}.py") for name in PROGRAMS]
    (tmp_path / "windows.py").write_text(WINDOWS)
    (here := tmp_path / "here").mkdir()
    result = run([sys.executable, str(tmp_path / "windows.py"), *paths], here)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == len(paths)
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith(f"{path} 2 error: torch has no RPC on Windows; use WSL")
    assert list(here.iterdir()) == []
