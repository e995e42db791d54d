"""Checkpoints: a stopped training goes on bit for bit, nothing half-written stays, another one's file is refused.

The programs and their trainings are those with `saves` in lesson.toml.
"""

import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from common import checkpoint
from common.lessons import programs
from common.report import replacing

import pytest
import torch

from tests import helpers

SAVING = [program for program in programs() if program.saves]
BY_DAY = ("p2p_collectives.train_ddp", "rpc_rl.fast", "ddp_basic.elastic")
# Written whole, a checkpoint has replaced the one before it: this keeps a copy of each.
KEEPS = """
import itertools, os, pathlib, shutil

original, saves = os.replace, itertools.count(1)

def replace(temporary, path):
    original(temporary, path)
    if pathlib.Path(path).name == "run.pt":
        shutil.copy(path, f"{path}.{next(saves)}")

os.replace = replace
"""
DIES_WRITING = """
import os, pathlib, signal

original = os.replace

def replace(temporary, path):
    if pathlib.Path(path).name == "run.pt":
        os.truncate(temporary, os.path.getsize(temporary) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    original(temporary, path)

os.replace = replace
"""


class Ended(NamedTuple):
    """What a training has left: its numbers, its last checkpoint, all its checkpoints."""

    metrics: dict
    state: dict
    checkpoints: list[Path]


def flags_of(program):
    return program.saves["flags"].split()


def resume_of(program):
    """elastic.py goes on by itself if there is a checkpoint."""
    return ["--resume"] if "--resume" in program.module().build_parser().format_help() else []


def command(place, program, patch=KEEPS):
    """Train, or go on from `place/run.pt` if it exists; `patch` is in force in each process."""
    place.mkdir(parents=True, exist_ok=True)
    saved = place / "run.pt"
    return [*helpers.faulty(program.module_name, place, patch), *flags_of(program),
            *(resume_of(program) if saved.exists() else []), "--checkpoint", str(saved), "--output_dir", str(place / "out")]


def train(place, program):
    done = helpers.run(command(place, program), place)
    assert (done.returncode, done.stderr) == (0, "")
    metrics = json.loads((place / "out/metrics.json").read_text(encoding="utf-8"))
    return Ended({name: metrics[name] for name in program.saves["same"]}, torch.load(place / "run.pt", weights_only=True),
                 sorted(place.glob("run.pt.*"), key=lambda path: int(path.suffix[1:])))


@functools.cache
def whole(program_name):
    """Train once without an interruption; the folder lives as long as this process."""
    folder = tempfile.mkdtemp(prefix="whole-", dir=os.environ.get("PYTEST_WHOLE"))
    return train(Path(folder), next(program for program in SAVING if str(program) == program_name))


@pytest.fixture(scope="module", autouse=True)
def folder_of_whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_WHOLE", str(tmp_path_factory.mktemp("whole")))
        yield


def bits(value, where=""):
    """Everything in nested containers by its place; == then compares every bit."""
    if isinstance(value, torch.Tensor):
        return {where: (value.dtype, value.shape, value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())}
    if isinstance(value, bytes):  # a file of torch.save in the file: optimizers of other ranks
        value = torch.load(io.BytesIO(value), weights_only=True)
    if not isinstance(value, dict | list | tuple):
        return {where: (type(value), repr(value))}
    found = {where: (type(value), len(value))}
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found |= bits(part, f"{where}[{key!r}]")
    return found


def require_equal(all_at_once, in_parts):
    assert bits(in_parts.state) == bits(all_at_once.state)
    for name, value in in_parts.metrics.items():
        if isinstance(value, list):  # some programs report only the epochs since they were resumed
            assert value == all_at_once.metrics[name][-len(value):] if value else True, name
        else:
            assert value == all_at_once.metrics[name], name


@pytest.mark.timeout(600)  # four trainings or more
@pytest.mark.parametrize("program", helpers.slow_but(SAVING, *BY_DAY), ids=str)
def test_stopped_at_each_save_and_resumed(program, tmp_path):
    """State and metrics are those of a training that nobody stopped; from the last save, without a step."""
    at_once = whole(str(program))
    assert len(at_once.checkpoints) >= 3
    for number, saved in enumerate(at_once.checkpoints):
        (place := tmp_path / str(number)).mkdir()
        shutil.copy(saved, place / "run.pt")
        require_equal(at_once, train(place, program))


@pytest.mark.parametrize("program", helpers.slow_but(SAVING, "p2p_collectives.train_ddp"), ids=str)
def test_killed_while_it_writes(program, tmp_path):
    """The file before it stays, half a file does not, and the training goes on."""
    at_once = whole(str(program))
    shutil.copy(at_once.checkpoints[0], tmp_path / "run.pt")
    done = helpers.run(command(tmp_path, program, DIES_WRITING), tmp_path)
    assert done.returncode == 1
    assert "was killed by SIGKILL" in done.stderr.splitlines()[-1]
    assert (tmp_path / "run.pt").read_bytes() == at_once.checkpoints[0].read_bytes()
    assert list(tmp_path.glob(".*.tmp")) == []
    require_equal(at_once, train(tmp_path, program))


@pytest.mark.parametrize("program", helpers.slow_but(SAVING, "p2p_collectives.train_ddp"), ids=str)
def test_a_full_disk(program, tmp_path):
    """One line says which rank could not write, and why; the file before it is as it was."""
    at_once = whole(str(program))
    shutil.copy(at_once.checkpoints[0], tmp_path / "run.pt")

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails instead

    done = helpers.run(command(tmp_path, program, ""), tmp_path, preexec_fn=full)
    assert done.returncode == 1
    assert f"could not write {tmp_path / 'run.pt'}: File too large" in done.stderr.splitlines()[-1]
    assert (tmp_path / "run.pt").read_bytes() == at_once.checkpoints[0].read_bytes()
    assert list(tmp_path.glob(".*.tmp")) == []


def refused(program, path, flags, capfd):
    """The line with which a program refuses a checkpoint."""
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="^2$"):
        program.module().main([*flags_of(program), "--checkpoint", str(path), "--output_dir", str(path.parent / "out"), *flags])
    (line,) = capfd.readouterr().err.splitlines()
    assert path.read_bytes() == before  # also without --resume, which would write over it
    return line


def changed(state, change):
    """A checkpoint as bytes, with a change that makes it useless."""
    file = io.BytesIO()
    if change == "another lesson's":
        state = {**state, "example": "another"}
    if change == "not finite":
        state = {**state, "more": torch.tensor(float("nan"))}
    if change == "another model's":
        weights = state.get("model") or state["policy"]
        first = min(weights)
        weights[first] = torch.cat([weights[first], weights[first][:1]])
    torch.save(state, file)
    return file.getvalue()[:-100] if change == "truncated" else b"lr = 0.01\n" if change == "a text" else file.getvalue()


@pytest.mark.parametrize("program", helpers.slow_but(SAVING, *BY_DAY), ids=str)
def test_what_is_refused(program, tmp_path, capfd):
    path, state = tmp_path / "run.pt", whole(str(program)).checkpoints[-1]
    for change, says in (("truncated", "is not a whole checkpoint of"), ("a text", "is not a whole checkpoint of"),
                         ("another lesson's", "is not a whole checkpoint of"), ("not finite", "has numbers that are not finite"),
                         ("another model's", "is of another model")):
        path.write_bytes(changed(torch.load(state, weights_only=True), change))
        for flags in ([], resume_of(program)):
            assert f"error: --checkpoint {path}"[:40] in (line := refused(program, path, flags, capfd))
            assert says in line
    shutil.copy(state, path)
    assert "must be 0, as in --checkpoint" in (line := refused(program, path, [*resume_of(program), "--seed", "3"], capfd))
    assert "--seed 3" in line
    assert "must be" in refused(program, path, [*resume_of(program), "--lr", "0.000123"], capfd)


@pytest.mark.parametrize("program", SAVING, ids=str)
def test_nothing_to_resume(program, tmp_path, capfd):
    if resume_of(program):
        for flags, says in ((["--resume"], "--resume requires --checkpoint FILE"),
                            (["--resume", "--checkpoint", str(tmp_path / "none.pt")], "must be an existing file with --resume")):
            with pytest.raises(SystemExit, match="^2$"):
                program.module().main([*flags, "--output_dir", str(tmp_path)])
            assert says in capfd.readouterr().err


def test_half_a_file_is_removed(tmp_path):
    path = tmp_path / "run.pt"
    path.write_text("old", encoding="utf-8")
    with contextlib.suppress(KeyError), replacing(path) as temporary:
        temporary.write_text("half of the n", encoding="utf-8")
        raise KeyError
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("run.pt", "old")]


def test_a_checkpoint_has_the_flags_of_its_training(tmp_path):
    args = Namespace(example="lesson", settings={"lr": 0.1}, checkpoint=tmp_path / "run.pt", checkpoint_rank=0,
                     resume=True, rank=None)
    model = torch.nn.Linear(2, 1)
    checkpoint.save(args, {"model": model.state_dict(), "epochs": 1})
    state = checkpoint.inspect(args, lambda: model)
    assert (state["epochs"], state["settings"]) == (1, {"lr": 0.1})
