"""The layout: lesson.toml and the folders name the same programs, and imports point one way."""

import ast
import functools
import graphlib
import importlib
import pkgutil
import re

from common import ROOT
from common.lessons import lessons, programs
from common.program import belonging_to

import pytest

from tests import mutants

pytestmark = pytest.mark.quick
FOLDERS = [lesson.folder for lesson in lessons()]
FILES = sorted(str(path.relative_to(ROOT)) for folder in (*FOLDERS, "common", "tracing", "benchmarks", "exercises")
               for path in (ROOT / folder).rglob("*.py")
               if not re.match(r"exercises/\d\d_", str(path.relative_to(ROOT))))  # a learner's own
TEXTS = ("README.md", "README.ja.md")
each_program = pytest.mark.parametrize("program", programs(), ids=str)
each_folder = pytest.mark.parametrize("folder", FOLDERS)


def parsed(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def functions_of(path):
    """The functions of a file, its own and those it imports by name."""
    body = parsed(path).body
    return ({node.name for node in body if isinstance(node, ast.FunctionDef)}
            | {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names})


def imported(tree):
    """The names of the modules that a file imports at its top, and anywhere."""
    def names(nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    return set(names(tree.body)), set(names(ast.walk(tree)))


@functools.cache
def programs_with_mutants():
    """The programs of whose mistakes there is a table, apart from the generated one."""
    tables = [module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name not in ("__main__", "flags")]
    return {mutant.program or mutant.file for name in tables for mutant in importlib.import_module(f"tests.mutants.{name}").MUTANTS}


# --- what a lesson is


def test_a_folder_with_a_main_is_a_lesson():
    assert sorted(path.parent.name for path in ROOT.glob("*/main.py")) == sorted(FOLDERS)


@each_folder
def test_lesson_toml_names_the_programs_of_its_folder(folder):
    """A program is a file with `build_parser` and `main`."""
    programs_there = {path.stem for path in (ROOT / folder).glob("*.py") if "\ndef build_parser(" in path.read_text(encoding="utf-8")}
    (lesson,) = [lesson for lesson in lessons() if lesson.folder == folder]
    assert {program.name for program in lesson.programs} == programs_there
    assert all((ROOT / f"docs/lessons/{chapter}{language}.md").exists() for chapter in lesson.chapters for language in ("", ".ja"))


@each_folder
def test_both_readmes_name_every_program(folder):
    for readme in TEXTS:
        text = (ROOT / folder / readme).read_text(encoding="utf-8")
        assert not [path.name for path in (ROOT / folder).glob("*.py")
                    if "\ndef build_parser(" in path.read_text(encoding="utf-8") and path.name not in text], readme


@each_program
def test_a_program_has_its_parts(program):
    assert {"build_parser", "main"} <= functions_of(program.path)
    check = f"{program.folder}/{belonging_to(program.file, 'check')}.py"
    other = "check" in functions_of(check) and imported(parsed(check))[0] & {f"{program.folder}.check"}
    assert {"check", "single_process"} <= functions_of(check) or other
    assert program.check, "lesson.toml has no row for its --check"
    # deadlock.py is itself the mistake that it shows.
    assert program.path in programs_with_mutants() or program.name == "deadlock", "tests/mutants/ has no mistake of this program"


# --- what a program is not


@each_program
def test_a_program_has_no_reference_and_no_plots(program):
    """Nor do its results import them at their top."""
    top, anywhere = imported(parsed(program.path))
    results = f"{program.folder}/{belonging_to(program.file, 'results')}.py"
    names = [*top, *(imported(parsed(results))[0] if (ROOT / results).exists() else [])]
    assert not [name for name in names if re.search(r"(^|[._])(check|oracle)$", name)]
    assert not {name.split(".")[0] for name in anywhere} & {"matplotlib", "pandas"}
    assert not [name for name in anywhere if name.startswith("common.picture")]
    assert "mallopt" not in program.file.read_text(encoding="utf-8")


@each_program
def test_joining_and_leaving_are_in_plain_sight(program):
    """In the program, or in the one that it imports from."""
    _, anywhere = imported(parsed(program.path))
    files = [program.file, *((ROOT / f"{name.replace('.', '/')}.py") for name in anywhere)]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    if "distributed" in text and program.module().build_parser().distributed:
        assert ("rpc.init_rpc(" in text and "rpc.shutdown(" in text) or (
            "dist.init_process_group(" in text and "dist.destroy_process_group(" in text)


# --- imports


@each_folder
def test_a_folder_imports_only_common_and_itself(folder):
    others = {*FOLDERS, "tests", "benchmarks", "exercises", "tracing"} - {folder}
    for path in (ROOT / folder).glob("*.py"):
        _, anywhere = imported(parsed(path))
        assert not {name.split(".")[0] for name in anywhere} & others, path


@pytest.mark.parametrize("folder", ["benchmarks", "exercises", "tracing", "common"])
def test_the_tools_import_no_other_tool(folder):
    """But benchmarks.outputs, which keeps what tracing has written."""
    others = {"tests", "benchmarks", "exercises", "tracing"} - {folder}
    for path in (ROOT / folder).rglob("*.py"):
        _, anywhere = imported(parsed(path))
        found = {name.split(".")[0] for name in anywhere} & others
        assert not found - ({"tracing"} if path.name == "outputs.py" else set()), path


def own_imports(folder):
    """For each module of a folder, the modules of the same folder that it imports, anywhere."""
    graph = {}
    for path in (ROOT / folder).glob("*.py"):
        _, anywhere = imported(parsed(path))
        graph[path.stem] = {name.removeprefix(f"{folder}.").split(".")[0] for name in anywhere if name.startswith(f"{folder}.")}
    return {name: {other for other in others if other in graph} for name, others in graph.items()}


@pytest.mark.parametrize("folder", [*FOLDERS, "common", "tracing", "benchmarks", "exercises"])
def test_imports_point_one_way(folder):
    """A variant imports main, never the other way round; no two files import each other, however indirectly."""
    list(graphlib.TopologicalSorter(own_imports(folder)).static_order())  # CycleError


@each_program
def test_the_single_process_is_independent(program):
    """It calls nothing of the lesson but classes: of initial weights, of environments."""
    tree = parsed(f"{program.folder}/{belonging_to(program.file, 'check')}.py")
    source = next((node for node in tree.body if isinstance(node, ast.ImportFrom)
                   and "single_process" in {alias.name for alias in node.names}), None)
    if source:
        tree = parsed(f"{source.module.replace('.', '/')}.py")
    elif "single_process" not in functions_of(f"{program.folder}/{belonging_to(program.file, 'check')}.py"):
        tree = parsed(f"{program.folder}/check.py")  # a variant's check may use the main program's
    lesson = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              and (node.module or "").split(".")[0] in FOLDERS and not node.module.endswith("check")
              for alias in node.names}
    (single,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "single_process"]
    called = {re.sub(r"\(.*", "", ast.unparse(node.func)) for node in ast.walk(single) if isinstance(node, ast.Call)}
    taken = [name.split(".") for name in called if name.split(".")[0] in lesson]
    assert not [name for name in taken if not name[-1][0].isupper()]
