"""Checkpoints: a stopped training goes on bit for bit, nothing half-written stays, another one's file is refused.

The programs and their trainings are those with `saves` in lesson.toml.
"""

import contextlib
import functools
import importlib
import io
import itertools
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

from common.lessons import programs
from common.report import replacing

import pytest
import torch

from tests.helpers import slow_but

SAVING = {str(program): program for program in programs() if program.saves}


def by_day(*names):
    """All programs that save; the training of another than these shows the same of its own state, and is slow."""
    return slow_but(SAVING.values(), *names)


BY_DAY = by_day("p2p_collectives.train_ddp", "rpc_rl.fast", "ddp_basic.elastic")
each_program = pytest.mark.parametrize("program", BY_DAY, ids=str)


def patched(rank, world_size, args):
    """The `run_worker` of a program, in whose process a patch is in force."""
    program, patch = os.environ["PATCHED"].split()
    globals()[patch]()
    return importlib.import_module(program).run_worker(rank, world_size, args)


def keeps(original=os.replace):
    """Written whole, a checkpoint has replaced the one before it: keep a copy of each."""
    saves = itertools.count(1)

    def replace(temporary, path):
        original(temporary, path)
        if Path(path).name == "run.pt":
            shutil.copy(path, f"{path}.{next(saves)}")

    os.replace = replace


def dies_writing(original=os.replace):
    """End this process where a checkpoint is half written."""
    def replace(temporary, path):
        if Path(path).name == "run.pt":
            os.truncate(temporary, os.path.getsize(temporary) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        original(temporary, path)

    os.replace = replace


def fills_the_disk():
    """Let this process write little: a line that it prints, but no checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails instead


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


def train(place, program, patch=keeps):
    """Train, or go on from `place/run.pt` if it exists; `patch` is in force in each rank."""
    saved = place / "run.pt"
    flags = [*flags_of(program), *(resume_of(program) if saved.exists() else []), "--checkpoint", str(saved)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PATCHED", f"{program} {patch.__name__}")
        monkeypatch.setattr(program.module(), "run_worker", patched)
        metrics = program.module().main([*flags, "--output_dir", str(place / "out")])
    return Ended({name: metrics[name] for name in program.saves["same"]}, torch.load(saved, weights_only=True),
                 sorted(place.glob("run.pt.*"), key=lambda path: int(path.suffix[1:])))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`whole(name)`: what a program's training leaves that nobody interrupts; it runs once."""
    return functools.cache(lambda name: train(tmp_path_factory.mktemp("whole"), SAVING[name]))


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


@each_program
def test_stopped_and_resumed(program, whole, tmp_path, capfd):
    """State and metrics are those of a training that nobody stopped; from the last save, without a step."""
    at_once = whole(str(program))
    assert len(at_once.checkpoints) >= 3
    for saved in (at_once.checkpoints[1], at_once.checkpoints[-1]):
        (place := tmp_path / saved.name).mkdir()
        shutil.copy(saved, place / "run.pt")
        require_equal(at_once, train(place, program))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("patch", "says"), [
    (dies_writing, "was killed by SIGKILL"), (fills_the_disk, "could not write {}: File too large")], ids=["killed", "full disk"])
@pytest.mark.parametrize("program", by_day("p2p_collectives.train_ddp"), ids=str)
def test_half_written(program, patch, says, whole, tmp_path, capfd):
    """One line says why; the file before it stays, half a file does not, and the training goes on."""
    at_once, path = whole(str(program)), tmp_path / "run.pt"
    shutil.copy(at_once.checkpoints[0], path)
    with pytest.raises(SystemExit, match="^1$"):
        train(tmp_path, program, patch)
    assert says.format(path) in capfd.readouterr().err.splitlines()[-1]
    assert path.read_bytes() == at_once.checkpoints[0].read_bytes()
    assert list(tmp_path.glob(".*.tmp")) == []
    require_equal(at_once, train(tmp_path, program))


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


@each_program
def test_what_is_refused(program, whole, tmp_path, capfd):
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


def test_half_a_file_is_removed(tmp_path):
    path = tmp_path / "run.pt"
    path.write_text("old", encoding="utf-8")
    with contextlib.suppress(KeyError), replacing(path) as temporary:
        temporary.write_text("half of the n", encoding="utf-8")
        raise KeyError
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("run.pt", "old")]
