"""Every `--check` holds under the rows of its lesson.toml, and these rows vary every flag that could matter.

What a program takes from its default, and not from its flag, differs from the single process under such a row.
"""

import importlib
import re

from common.lessons import programs
from common.program import belonging_to

import pytest

QUICK = ("ddp_basic.main", "p2p_collectives.main", "rpc_rnn.main")
# Where and how the processes run, which no row varies.
PLACE = {"help", "check", "rank", "master_addr", "master_port", "start_method", "timeout", "device", "output_dir"}
NOT_COMPARED = {
    "--checkpoint": "test_checkpoints.py",
    "--resume": "test_checkpoints.py",
    "--dataset": "test_common.py",
    "--data_dir": "test_common.py",
    "--log_interval": "how often a line is printed",
}


def marks(program, row):
    """The first row of a program runs by day, and of three programs in `make quick`."""
    if row != program.check[0] and not program.check_all_by_day:
        return pytest.mark.slow
    return pytest.mark.quick if str(program) in QUICK else ()


@pytest.mark.parametrize(("program", "row"), [
    pytest.param(program, row, marks=marks(program, row), id=f"{program} {row}")
    for program in programs() for row in program.check])
def test_check_passes(program, row, tmp_path, capfd):
    differences = program.module().main(["--check", "--output_dir", str(tmp_path), *row.split()])
    out, err = capfd.readouterr()
    assert out.count(": ok\n") == len(differences) > 1
    assert err == ""
    assert list(tmp_path.iterdir()) == []


class ReachedError(Exception):
    """Carries the flags with which a check was about to start its ranks."""


def reached(program, row, monkeypatch):
    """The flags with which the ranks of a check start; the given ones, if it starts none itself."""
    def launch(_, args, *others):
        raise ReachedError(args)

    module = program.module()
    args = module.build_parser().parse_args(["--check", *row.split()])
    check = importlib.import_module(f"{program.folder}.{belonging_to(program.file, 'check')}").check
    if "launch" not in check.__globals__:
        return args
    monkeypatch.setitem(check.__globals__, "launch", launch)
    with pytest.raises(ReachedError) as stop:
        check(module, args)
    return stop.value.args[0]


def flags_of(program):
    """The flags of a program that could change what it computes."""
    return {*re.findall(r"^  (--\w+)", program.module().build_parser().format_help(), re.MULTILINE)} - {f"--{name}" for name in PLACE}


@pytest.mark.quick
@pytest.mark.parametrize("program", programs(), ids=str)
def test_every_flag_is_compared(program, monkeypatch):
    """At least one row gives it a value that is not its default, and the ranks start with that value."""
    known = NOT_COMPARED | program.not_compared
    usual, *rows = (reached(program, row, monkeypatch) for row in ["", *program.check])
    flags = flags_of(program)
    for flag in flags - known.keys():
        assert any(vars(row)[flag[2:]] != vars(usual)[flag[2:]] for row in rows), f"no row of {program} varies {flag}"
    assert not program.not_compared.keys() - flags, "not_compared names a flag that is gone"
