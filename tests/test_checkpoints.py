"""Nothing lost: each program with `--checkpoint`, killed, on a full disk, in a folder that becomes read-only.

The table of the programs and what disturbs them are in `soak.py`, which does all of this more often.
"""

import contextlib
import random
import re

import pytest
import torch
from common import checkpoint
from common.report import replacing

from tests import soak


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Of each program, one training that nobody interrupts, as soon as a test needs it."""
    known = {}

    def training(program):
        if program not in known:
            known[program] = soak.undisturbed(program, tmp_path_factory.mktemp("undisturbed"))
        return known[program]

    return training


@pytest.mark.parametrize("program", soak.PROGRAMS, ids=str)
def test_killed_at_a_random_moment(program, trainings, tmp_path, capfd):
    """And resumed: every number of the history, every bit of the checkpoint, as if it had never stopped."""
    training, rng = trainings(program), random.Random(0)
    capfd.readouterr()
    for attempt in range(soak.TRIES):  # until the training was not over before
        folder = tmp_path / str(attempt)
        if soak.kill_a_rank(program, training, folder, rng):
            break
    assert re.fullmatch(r"error: rank \d \(\w+\) was killed by SIGKILL; stopped [12] other process(es)?\n",
                        capfd.readouterr().err)
    soak.resume(program, training, folder)


@pytest.mark.parametrize(("spoil", "reason"), [(soak.fill_the_disk, "No space left on device"),
                                               (soak.make_read_only, "Read-only file system")])
@pytest.mark.parametrize("program", soak.PROGRAMS, ids=str)
def test_cannot_be_saved(program, spoil, reason, trainings, tmp_path, capfd):
    """Status 1, and the old checkpoint is what it was (see `soak`); one line says which rank failed, and why."""
    training = trainings(program)
    capfd.readouterr()
    try:
        spoil(program, training, tmp_path / "place", go_on=False)
    except soak.NotHereError as missing:
        pytest.skip(str(missing))
    role, others = program.roles.split()[program.writer], len(program.roles.split()) - 1
    assert capfd.readouterr().err == (
        f"error: rank {program.writer} ({role}) could not write {tmp_path}/place/disk/run.pt: {reason}; "
        f"stopped {others} other process{'es' if others > 1 else ''}\n")


def test_what_differs_is_seen():
    """The comparison of two states that the tests above rely on."""
    def state():
        return {"model": {"w": torch.tensor([0.1, float("nan")])}, "history": [1.0, {"loss": 0.5}]}

    soak._compare(state(), state(), "it")
    others = [state() for _ in range(5)]
    others[0]["model"]["w"][0] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    others[1]["model"]["w"] = others[1]["model"]["w"].double()
    others[2]["history"][1]["loss"] = 0.25
    others[3]["history"].append(2.0)
    del others[4]["model"]["w"]
    for other in others:
        with pytest.raises(soak.LostError, match="it.*differs"):
            soak._compare(state(), other, "it")


def test_half_a_file_is_removed(tmp_path):
    """What was to be written fails half-way: the old file stays, the temporary one does not."""
    path = tmp_path / "run.pt"
    path.write_text("old")
    with contextlib.suppress(KeyError), replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise KeyError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("run.pt", "old")]


def test_not_saved_is_said_in_words(tmp_path):
    class Args:
        example, checkpoint = "lesson", tmp_path / "none" / "run.pt"

    with pytest.raises(checkpoint.NotSavedError) as error:
        checkpoint.save(Args, {"epochs": 1})
    assert str(error.value) == f"could not write {Args.checkpoint}: No such file or directory"


@pytest.mark.parametrize(("lesson", "state"), [
    ("param_server", {"epochs": "3"}), ("param_server", {"epochs": None}), ("p2p_collectives", {"epochs": 1.5}),
    ("p2p_collectives", {"epochs": -1}), ("p2p_collectives", {"epochs": True}), ("ddp_basic", {"history": None}),
    ("rpc_rl", {"history": {"episodes": "3"}}),
], ids=str)
def test_a_counter_that_counts_nothing(lesson, state, tmp_path, capsys):
    """One line, status 2, and the file stays."""
    class Args:
        example, checkpoint, checkpoint_rank, resume, rank = lesson, tmp_path / "run.pt", 0, True, None

    torch.save({"example": lesson, **state}, Args.checkpoint)
    with pytest.raises(SystemExit) as stop:
        checkpoint.inspect(Args, needs=tuple(state))
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --checkpoint {checkpoint.shortened(Args.checkpoint)} is not a whole checkpoint of {lesson}; give another file\n")
