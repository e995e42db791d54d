"""The layout: what every lesson's folder has, and what its main program never has."""

import ast
import graphlib
import json
import os
import re

from common.program import belonging_to

import pytest

from tests.helpers import ROOT
from tests.test_checks import CHECKS

# All but those whose oracle is another program's.
PROGRAMS = [f"{name.replace('.', '/')}.py" for name in CHECKS
            if name != "model_parallel_resnet.schedules"]
FOLDERS = sorted({program.split("/")[0] for program in PROGRAMS})
FILES = sorted(str(path.relative_to(ROOT)) for folder in (*FOLDERS, "common", "tracing", "benchmarks", "exercises")
               for path in (ROOT / folder).rglob("*.py")
               if not re.match(r"exercises/\d\d_", str(path.relative_to(ROOT))))  # a learner's own
RPC = ["rpc_rl/main.py", "rpc_rnn/main.py", "param_server/main.py", "param_server/batch_update.py",
       "model_parallel_resnet/main.py", "batch_rl/main.py", "ddp_rpc_hybrid/main.py"]
VARIANTS = {  # of programs that join their group
    "p2p_collectives/train_flat.py", "p2p_collectives/train_ddp.py",
    "transformer_parallel/zero.py", "transformer_parallel/tensor_parallel.py", "transformer_parallel/pipeline.py",
    "transformer_parallel/ring_attention.py", "transformer_parallel/experts.py",
    "transformer_parallel/mesh.py",
    "transformer_parallel/recompute.py",
}
GROUPS = [program for program in PROGRAMS if program not in VARIANTS
          and (program.startswith(("ddp_basic", "p2p", "transformer")) or "hybrid" in program)]
PLOTTING = {"matplotlib", "pandas"}


def imported(tree):
    """The names of the modules that a file imports at its top, and anywhere."""
    def names(nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    return set(names(tree.body)), set(names(ast.walk(tree)))


def parsed(path):
    return ast.parse((ROOT / path).read_text())


def check_of(program):
    return f"{program.split('/')[0]}/{belonging_to(ROOT / program, 'check')}.py"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_its_functions(program):
    functions = {node.name for node in parsed(program).body if isinstance(node, ast.FunctionDef)}
    assert {"build_parser", "main"} <= functions
    assert "run_worker" in functions or program == "model_parallel_resnet/single_machine.py"
    of_check = {node.name for node in parsed(check_of(program)).body if isinstance(node, ast.FunctionDef)}
    of_check |= {alias.name for node in parsed(check_of(program)).body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {"check", "single_process"} <= of_check


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_no_oracle_and_no_plots(program):
    """Nor has it by way of its results, at its start."""
    top, anywhere = imported(parsed(program))
    results = f"{program.split('/')[0]}/{belonging_to(ROOT / program, 'results')}.py"
    assert not {name.split(".")[0] for name in anywhere} & PLOTTING
    assert not [name for name in [*top, *imported(parsed(results))[0]] if re.search(r"(^|[._])(check|oracle)$", name)]
    text = (ROOT / program).read_text()
    assert "mallopt" not in text
    assert not [name for name in anywhere if name.startswith("common.picture")]


@pytest.mark.parametrize(("program", "joins", "leaves"), [
    *((program, "rpc.init_rpc(", "rpc.shutdown()") for program in RPC),
    *((program, "dist.init_process_group(", "dist.destroy_process_group()") for program in GROUPS),
])
def test_joining_and_leaving_are_in_plain_sight(program, joins, leaves):
    text = (ROOT / program).read_text()
    assert joins in text
    assert leaves in text


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_common_and_itself(folder):
    others = {*FOLDERS, "tests", "benchmarks", "exercises"} - {folder}
    for path in (ROOT / folder).glob("*.py"):
        _, anywhere = imported(ast.parse(path.read_text()))
        assert not {name.split(".")[0] for name in anywhere} & others, path


def own_imports(folder):
    """For each module of a folder, the modules of the same folder that it imports, anywhere."""
    graph, place = {}, f"{folder.replace('/', '.')}."
    for path in (ROOT / folder).glob("*.py"):
        _, anywhere = imported(ast.parse(path.read_text()))
        graph[path.stem] = {name.removeprefix(place).split(".")[0] for name in anywhere if name.startswith(place)}
    return {name: {other for other in others if other in graph} for name, others in graph.items()}


@pytest.mark.parametrize("folder", [*FOLDERS, "common", "tracing"])
def test_imports_point_one_way(folder):
    """A variant imports main, never the other way round: no two files import each other, however indirectly."""
    graph = own_imports(folder)
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError


@pytest.mark.parametrize("folder", FOLDERS)
def test_main_imports_no_variant(folder):
    """What runs is what stands in main.py: it imports no other program, nor what imports one."""
    graph, found = own_imports(folder), set()
    todo = {"main"}
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= graph[name] - found
    programs = {path.stem for path in (ROOT / folder).glob("*.py") if "\ndef build_parser(" in path.read_text()}
    assert found & programs == {"main"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_oracle_is_independent(program):
    """What computes in one process calls nothing of the lesson but what makes its initial weights."""
    tree = parsed(check_of(program))
    if expected := next((node for node in tree.body if getattr(node, "module", "") == f"{program.split('/')[0]}.expected"), None):
        tree = parsed(f"{expected.module.replace('.', '/')}.py")
    lesson = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              and (node.module or "").split(".")[0] in FOLDERS and not node.module.endswith("check")
              for alias in node.names}
    (single,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "single_process"]
    called = {re.sub(r"\(.*", "", ast.unparse(node.func)) for node in ast.walk(single) if isinstance(node, ast.Call)}
    taken = [name.split(".") for name in called if name.split(".")[0] in lesson]
    assert not [name for name in taken if not name[-1][0].isupper()], "only classes: of weights, of environments"


def test_every_cell_has_its_row():
    """And what is not here says why; benchmarks.docs, which makes the tables, finds what does not exist."""
    edition = json.loads((ROOT / "docs/japanese_edition.json").read_text())
    rows = {}
    for walk in (ROOT / "docs/walk").glob("*.json"):
        chapter = re.match(r"6_\d+", walk.stem)[0]
        for row in json.loads(walk.read_text()):
            rows.setdefault((chapter, row["cell"]), []).append(row)
            assert all(row.get("names", {}).values()) or row["left_out"], row
    for notebook in edition["notebooks"]:
        for cell in notebook["cells"]:
            found = rows.get((notebook["chapter"], cell["cell"]))
            assert found, (notebook["chapter"], cell)
            if "heading" in cell:
                assert cell["heading"] in [row.get("heading") for row in found]
            else:
                named = {name for row in found for name in row.get("names", {})}
                assert set(cell["defines"]) <= named, (notebook["chapter"], cell)


def test_groups_are_kept(request):
    """With some versions, pytest-xdist forgets them and says nothing: what must run in turns (tests/conftest.py) would not."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@test_layout.py")
