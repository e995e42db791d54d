"""Tutorial 6_3 today: ddp_basic/fsdp.py."""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks import soak
from ddp_basic import fsdp, fsdp_checkpoint

EPOCHS, DIES_IN = 3, 2  # the epoch in which a rank is killed
ORIGINAL = fsdp.run_worker
RANKS = 2
FLAGS = ["--sharding", "full", "--width", 10, "--epochs", EPOCHS, "--world_size", RANKS, "--global_batch_size", 64]


def train(folder, *flags):
    """In this process; SystemExit if it fails."""
    where = ["--checkpoint", folder / "run", "--output_dir", folder]
    return fsdp.main(list(map(str, [*FLAGS, *where, *flags])))


def state_of(folder, scratch):
    """What a checkpoint holds, put together: plain tensors."""
    dcp_to_torch_save(folder, scratch / "whole.pt")
    return torch.load(scratch / "whole.pt", weights_only=True)


# --- what it computes


def test_what_a_run_shows(tmp_path, capfd):
    metrics = fsdp.main(["--width", "128", "--epochs", "1", "--global_batch_size", "256",
                         "--output_dir", str(tmp_path)])
    out, err = capfd.readouterr()
    assert err == ""  # a normal run prints no warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "sharding.png"]
    assert metrics["parameters"] == 11 * 128 + 7 * 129 * 128 + 5 * 129
    assert re.fullmatch(r"117,\d{3} parameters on 4 ranks: a rank holds at most 1.88 MB \(replicas\), .*; "
                        r"it sends in a step .*", out.splitlines()[-2])


# --- what a kill leaves


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A training that nobody disturbs: its folder and its metrics."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, train(folder)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_writing(rank, world_size, args):
    """With half of its own file written, while the others write theirs."""
    original = filesystem.FileSystemWriter.write_data

    def half(self, plan, planner):
        written = original(self, plan, planner)
        if rank == 1 and self.path.name == f".epoch{DIES_IN:05}.tmp":
            file = self.path / f"__{rank}_0.distcp"
            os.truncate(file, file.stat().st_size // 2)
            die()
        return written

    filesystem.FileSystemWriter.write_data = half
    return ORIGINAL(rank, world_size, args)


def dies_while_it_removes(rank, world_size, args):
    """The new checkpoint is there; of the older one, a file is gone."""
    original = shutil.rmtree

    def dying(folder, **options):
        if folder.name == f".epoch{DIES_IN - 1:05}.tmp":
            next(folder.iterdir()).unlink()
            die()
        original(folder, **options)

    shutil.rmtree = dying
    return ORIGINAL(rank, world_size, args)


MOMENTS = {dies_while_writing: (1, DIES_IN - 1), dies_while_it_removes: (0, DIES_IN)}


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_killed(moment, undisturbed, tmp_path, monkeypatch, capfd):
    """Resumed from the last whole checkpoint, it ends with every bit of a training that nobody interrupted."""
    whole, metrics = undisturbed
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(fsdp, "run_worker", moment)
        with pytest.raises(SystemExit, match="^1$"):
            train(tmp_path)
    rank, last = MOMENTS[moment]
    assert capfd.readouterr().err == f"error: rank {rank} (rank{rank}) was killed by SIGKILL; stopped 1 other process\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"epoch{last:05}"]
    left = tmp_path / "run" / f".epoch{DIES_IN:05}.tmp"  # as if the launcher had been killed, too
    left.mkdir()
    (left / "__7_0.distcp").write_text("half")
    resumed = train(tmp_path, "--resume")
    assert resumed["rows"][0]["losses"] == metrics["rows"][0]["losses"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"epoch{EPOCHS:05}"]
    names = [sorted(path.name for path in (folder / "run" / f"epoch{EPOCHS:05}").iterdir())
             for folder in (tmp_path, whole)]
    assert names[0] == names[1]
    ours, theirs = (state_of(folder / "run" / f"epoch{EPOCHS:05}", tmp_path) for folder in (tmp_path, whole))
    soak.require_equal(theirs, ours)
    assert sum(len(entry) == 3 for entry in soak.flat(theirs).values()) == 4 * 18  # tensors: weights, moments, counters


def has_no_room(rank, world_size, args):
    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    filesystem.FileSystemWriter.write_data = full
    return ORIGINAL(rank, world_size, args)


def test_a_full_disk_is_said_in_words(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fsdp, "run_worker", has_no_room)
    with pytest.raises(SystemExit, match="^1$"):
        train(tmp_path)
    assert re.fullmatch(rf"error: rank \d \(rank\d\) could not use {tmp_path}/run/.epoch00001.tmp: No space left on "
                        r"device; stopped 1 other process\n", capfd.readouterr().err)
    assert list((tmp_path / "run").iterdir()) == []


# --- what can go wrong


class Dangerous:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it was executed",)


DAMAGE = {"truncated": "no whole checkpoint", "dangerous": "no whole checkpoint", "another example": "no whole checkpoint",
          "no history": "no whole checkpoint", "no settings": "no whole checkpoint", "--seed": "--seed 0 must be 3", "--width": "--width 10 must be 20",
          "without --resume": f"has a training of {EPOCHS} epochs; give --resume", "all epochs": f"--epochs {EPOCHS} must be above {EPOCHS}"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_not_this_trainings_checkpoint(kind, undisturbed, tmp_path, refused):
    """Refused before any process starts; and nothing in it is executed, removed or changed."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed[0] / "run", run)
    last = run / f"epoch{EPOCHS:05}"
    about = json.loads((last / fsdp_checkpoint.ABOUT).read_text())
    if kind == "truncated":
        part = last / "__1_0.distcp"
        os.truncate(part, part.stat().st_size - 1)
    elif kind == "dangerous":
        (last / ".metadata").write_bytes(pickle.dumps(Dangerous()))
    elif kind == "another example":
        about["example"] = "rpc_rl"
    elif kind.startswith("no "):
        del about[kind.removeprefix("no ")]
    elif kind.startswith("--"):
        about["settings"][kind.removeprefix("--")] = {"--seed": 3, "--width": 20}[kind]
    (last / fsdp_checkpoint.ABOUT).write_text(json.dumps(about))
    before = {path: path.read_bytes() for path in last.iterdir()}
    more = [] if kind == "without --resume" else ["--resume"]
    refused(fsdp.main, list(map(str, [*FLAGS, "--checkpoint", run, *more])), ["--checkpoint", DAMAGE[kind]])
    assert {path: path.read_bytes() for path in last.iterdir()} == before
    assert not Path("it was executed").exists()


def test_values_are_read_as_weights_only(tmp_path):
    """Also what is not a tensor, in the files that dcp itself would unpickle whatever it is."""
    torch.save(Dangerous(), tmp_path / "value")
    with contextlib.chdir(tmp_path), pytest.raises(pickle.UnpicklingError):
        fsdp_checkpoint.PlainValues().load_bytes(None, (tmp_path / "value").open("rb"))
    assert not (tmp_path / "it was executed").exists()
