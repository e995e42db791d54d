"""Nothing lost: each program with `--checkpoint`, killed, on a full disk, in a folder that becomes read-only.

The table of the programs and what disturbs them are in `tests/interrupted.py`.
"""

import contextlib
import json
import random
import shutil
from argparse import Namespace

from common import checkpoint
from common.report import replacing

import pytest
import torch

from tests import helpers, interrupted
from tests.test_flags import CHECKPOINTS

# Their variants, which save in the same way and compute in another: (program of the table, variant, its flags).
VARIANTS = (
    ("param_server.main", "param_server.async_server", ""),
    ("p2p_collectives.train_ddp", "p2p_collectives.train", ""),
    ("p2p_collectives.train_ddp", "p2p_collectives.train_flat", ""),
)
OF_TABLE = {program.lesson: program for program in interrupted.PROGRAMS}
ALL = [*interrupted.PROGRAMS, *(OF_TABLE[of]._replace(lesson=lesson, flags=f"{OF_TABLE[of].flags} {flags}")
                                for of, lesson, flags in VARIANTS)]
SHORT = {"rpc_rl.fast": "--max_episodes 15"}  # of the others three epochs
# Each checkpoint stays; and a clock that goes on by one second when it is asked: speeds are exact.
KEEPS = """
import itertools, os, pathlib, shutil, sys
from types import SimpleNamespace

original, saves, seconds = os.replace, itertools.count(1), itertools.count()

def replace(temporary, path):
    original(temporary, path)
    if pathlib.Path(path).name == "run.pt":
        shutil.copy(path, f"{path}.{next(saves)}")

def read():
    return float(next(seconds))

os.replace = replace
for name, module in [*sys.modules.items()]:
    if name.endswith("results"):
        module.time = SimpleNamespace(perf_counter=read, time=read)
"""


def trained(place, program):
    """Train, or go on from the checkpoint in `place`; what is left, and the speed."""
    _, path = helpers.faulty(program.lesson, place, KEEPS)
    done = helpers.run(helpers.script(path, *interrupted.command(place, program)[1:]), place)
    assert (done.returncode, done.stderr) == (0, "")
    metrics = json.loads((place / "out" / "metrics.json").read_text())
    return interrupted.left_in(place, program), next((metrics[name] for name in metrics if name.endswith("_per_s")), None)


@pytest.mark.timeout(600)  # four trainings or five
@pytest.mark.parametrize("program", helpers.slow_but(ALL, "p2p_collectives.train_flat"), ids=lambda program: program.lesson)
def test_stopped_at_each_save(program, tmp_path):
    """And resumed: state, metrics and speed are those of a training that nobody stopped; from the last one, without a step."""
    program = program._replace(flags=f"{program.flags} {SHORT.get(program.lesson, '--epochs 3')}")
    (tmp_path / "0").mkdir()
    whole, speed = trained(tmp_path / "0", program)
    saves = sorted((tmp_path / "0" / "disk").glob("run.pt.*"), key=lambda path: int(path.suffix[1:]))
    assert len(saves) >= 3
    for number, saved in enumerate(saves, 1):
        place = tmp_path / str(number)
        (place / "disk").mkdir(parents=True)
        shutil.copy(saved, place / interrupted.SAVED)
        part, again = trained(place, program)
        interrupted.require_equal(whole, part)
        if program.lesson == "rpc_rl.fast":  # reads its clock when it begins and when it ends: one second
            assert again == speed - torch.load(saved, weights_only=True)["history"]["env_steps"]
        else:
            assert again == (speed if saved != saves[-1] else None)


def test_every_program_is_stopped():
    """All that save to a file."""
    assert {program.lesson for program in ALL} == {name for name in CHECKPOINTS if not name.startswith("benchmarks.")}


@pytest.mark.parametrize("program", helpers.slow_but(interrupted.PROGRAMS, "p2p_collectives.train_ddp"), ids=lambda program: program.lesson)
def test_killed_at_a_random_moment(program, tmp_path):
    """And resumed: every number of the history, every bit of the checkpoint, as if it had never stopped."""
    rng, outcome = random.Random(0), interrupted.LATE
    for attempt in range(20):  # until the training was not over before
        if outcome == interrupted.LATE:
            (place := tmp_path / str(attempt)).mkdir()
            outcome = interrupted.kill(place, program, interrupted.A_RANK, "local", rng)
    assert outcome != interrupted.LATE


@pytest.mark.slow
@pytest.mark.parametrize("program", interrupted.PROGRAMS, ids=lambda program: program.lesson)
def test_killed_while_it_writes_under_torchrun(program, tmp_path):
    """What it was writing is gone when torchrun is."""
    interrupted.kill(tmp_path, program, interrupted.WRITER, "torchrun", random.Random(0))


@pytest.mark.parametrize("what", interrupted.REASONS)
@pytest.mark.parametrize("program", helpers.slow_but(interrupted.PROGRAMS, "p2p_collectives.train_ddp"), ids=lambda program: program.lesson)
def test_cannot_be_saved(program, what, tmp_path):
    """Status 1, and the old checkpoint is what it was; one line says which rank failed, and why."""
    try:
        interrupted.cannot_save(tmp_path, program, what)
    except interrupted.NotHereError as missing:
        pytest.skip(str(missing))


def test_what_differs_is_seen():
    """The comparison of two states that the tests above rely on."""
    def state():
        return {"model": {"w": torch.tensor([0.1, float("nan")])}, "history": [1.0, {"loss": 0.5}]}

    assert interrupted.flat(state()) == interrupted.flat(state())
    others = [state() for _ in range(5)]
    others[0]["model"]["w"][0] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    others[1]["model"]["w"] = others[1]["model"]["w"].double()
    others[2]["history"][1]["loss"] = 0.25
    others[3]["history"].append(2.0)
    del others[4]["model"]["w"]
    for other in others:
        assert interrupted.flat(state()) != interrupted.flat(other)


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
        example, settings, checkpoint = "lesson", {}, tmp_path / "none" / "run.pt"

    with pytest.raises(checkpoint.NotSavedError) as error:
        checkpoint.save(Args, {"epochs": 1})
    assert str(error.value) == f"could not write {Args.checkpoint}: No such file or directory"


def test_a_checkpoint_has_the_flags_of_its_training(tmp_path):
    args = Namespace(example="lesson", settings={"lr": 0.1}, checkpoint=tmp_path / "run.pt", checkpoint_rank=0,
                     resume=True, rank=None)
    model = torch.nn.Linear(2, 1)
    checkpoint.save(args, {"model": model.state_dict(), "epochs": 1})
    state = checkpoint.inspect(args, {"epochs": int}, lambda: model)
    assert (state["epochs"], state["settings"]) == (1, {"lr": 0.1})


@pytest.mark.parametrize("program", helpers.slow_but(interrupted.PROGRAMS, "p2p_collectives.train_ddp", "rpc_rnn.main"), ids=lambda program: program.lesson)
def test_the_table_has_what_is_saved(program):
    """`test_flags.py` takes every part of these away, one at a time."""
    def parts(state):
        if isinstance(state, dict) and not any(isinstance(value, torch.Tensor) for value in state.values()):
            return {name: parts(part) for name, part in state.items() if name not in ("example", "settings", "state")}
        return [parts(state[0])] if isinstance(state, list) and state and isinstance(state[0], dict) else None

    saved = interrupted.undisturbed(program)[1]["checkpoint"]
    assert parts(saved) == parts(CHECKPOINTS[program.lesson]())
