"""A mistake in each program, and who says so; `python -m tests.mutants` tries all of them."""

import importlib
import pkgutil
from collections import Counter

import pytest

from tests import mutants
from tests.helpers import slow_but
from tests.mutants import ROOT

NAMES = sorted(module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name != "__main__")


def table_of(name):
    return importlib.import_module(f"tests.mutants.{name}").MUTANTS


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_the_table(name):
    """Enough of them, most of a program's for `--check`, and each still fits to its file."""
    table = table_of(name)
    assert len({mutant.name for mutant in table}) == len(table) >= 6
    of_programs = Counter(mutant.program or mutant.file for mutant in table if name.startswith("transformer"))
    assert all(number >= 8 for program, number in of_programs.items()), of_programs
    assert sum(bool(mutant.check) for mutant in table) >= 0.8 * len(table) or name == "resume"
    for mutant in table:
        assert bool(mutant.check) != bool(mutant.test), mutant.name
        if mutant.test:
            file, name = mutant.test.partition("[")[0].split("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), mutant.name
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name


@pytest.mark.parametrize("name", slow_but(NAMES, "ddp_basic", "flags"))
def test_check_sees_it(name):
    """Or a test, where the table has none for `--check`."""
    table = table_of(name)
    mutant = next((mutant for mutant in table if mutant.check), table[0])
    assert mutant.caught(), mutant.name
