"""The tour: both languages have the same code, nothing of a run is kept in git, and every cell of it runs."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.docs import anchor_of
from tests.helpers import ROOT, all_end
from tests.test_docs import BY_PATH
from tests.test_layout import FOLDERS

MISSING = "no Jupyter here: pip install -r requirements-dev.txt"
nbclient = pytest.importorskip("nbclient", reason=MISSING)
nbformat = pytest.importorskip("nbformat", reason=MISSING)

ENGLISH, JAPANESE = (ROOT / "notebooks" / name for name in ("tour.ipynb", "tour.ja.ipynb"))
BOTH = pytest.mark.parametrize("path", [ENGLISH, JAPANESE], ids=lambda path: path.name)
TRACED = "-m tracing "  # before the program of a command
COMMAND = re.compile(r"^(?:# )?!python (.*)$", re.MULTILINE)  # with a #: for the reader to try
CHECKED = re.compile(r'^check\("(.*)"\)$')
COLAB = "https://colab.research.google.com/"
LINK = r"\]\(([^)]*)\)"


def cells_of(path, kind=None):
    """The cells of a notebook, or those of a kind: "code" or "markdown"."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if kind in (None, cell.cell_type)]


@BOTH
def test_only_what_was_written_is_kept(path):
    """Cells with ids (nbformat 4.5), and no outputs, counts or metadata of a run; no long lines."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        lines = "".join(cell["source"]).splitlines()
        assert max(len(re.sub(LINK, "]()", line)) for line in lines) <= 100


def test_both_languages_are_one_tour():
    """The same code but for the pictures' language; texts in pairs, of the same headings, code words and links."""
    pairs = list(zip(cells_of(ENGLISH), cells_of(JAPANESE), strict=True))
    for english, japanese in pairs:
        assert (english.id, english.cell_type) == (japanese.id, japanese.cell_type)
        if english.cell_type == "code":
            in_english = japanese.source.replace(".ja.png", ".png").replace('os.environ["PICTURE_LANGUAGES"] = "ja"\n', "")
            assert english.source == in_english
            assert (english.source == japanese.source) != bool(re.match("(.*-picture|setup-clone)$", english.id))
            continue
        assert english.source != japanese.source
        for what in (r"^(#+) ", r"<a name=\"(\w+)\"", r"^\| (6_\d+) ", r"`([^`]+)`", LINK):
            found = [[re.sub(r"(\.md)#.*", r"\1", there.replace(".ja.", "."))  # anchors are headings, in their language
                      for there in re.findall(what, cell.source, re.MULTILINE)]
                     for cell in (english, japanese)]
            assert sorted(found[0]) == sorted(found[1]), what


@BOTH
def test_links(path):
    """To files of the repository, to sections of the tour, to notebooks of the Japanese edition, and to Colab."""
    edition = json.loads((ROOT / "docs/japanese_edition.json").read_text(encoding="utf-8"))
    outside = {edition["site"]} | {f"{edition['source']}/blob/main/{book['file']}" for book in edition["notebooks"]}
    texts = "\n".join(cell.source for cell in cells_of(path, "markdown"))
    names = re.findall(r"<a name=\"(\w+)\"></a>\n## ", texts)
    links = re.findall(LINK, texts)
    assert sorted(link[1:] for link in links if link.startswith("#")) == sorted(names)
    for link in links:
        if "://" not in link and not link.startswith("#"):
            page, _, anchor = link.partition("#")
            assert (path.parent / page).exists(), link
            if anchor:
                headings = re.findall(r"^#+ (.*)", (path.parent / page).read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in map(anchor_of, headings), link
            assert (".ja." in link) == (path == JAPANESE) or link.startswith("tour."), link
        elif "://" in link and not link.startswith(COLAB):
            assert link in outside, link


@BOTH
def test_the_badge_opens_this_notebook(path):
    """Where the repository has an address, the badge and the cell that clones it know the same."""
    texts, code = ("\n".join(cell.source for cell in cells_of(path, kind)) for kind in ("markdown", "code"))
    (repository,) = re.findall(r'^REPOSITORY = "(.*?)"', code, re.MULTILINE)
    (badge,) = [link for link in re.findall(LINK, texts) if link.startswith(COLAB) and not link.endswith(".svg")]
    there = repository.removeprefix("https://").removesuffix(".git").replace("github.com", "github")
    assert badge == COLAB + (f"{there}/blob/main/notebooks/{path.name}" if there else "")


@pytest.mark.quick
def test_every_lesson_has_its_section():
    """In the order of the map: a section with its chapter, a command of the pages, `--check`, a picture, a question."""
    sections = re.findall(r"\| (6_\d+) \| \[(\w+)\]", cells_of(ENGLISH)[0].source)
    by_id = {cell.id: cell.source for cell in cells_of(ENGLISH)}
    order = []
    for chapter, name in sections:
        assert re.search(rf"^## {chapter}\b.*\n\nNotebook: \[{chapter} .*/{chapter}_", by_id[name], re.MULTILINE)
        run = COMMAND.fullmatch(by_id[f"{name}-run"])[1].removeprefix(TRACED)
        assert CHECKED.fullmatch(by_id[f"{name}-check"])[1] == run.split()[0]
        assert by_id[f"{name}-code"].startswith('code("')
        assert by_id[f"{name}-picture"].startswith("Image(")
        assert "<details><summary>Answer</summary>" in by_id[f"{name}-try"]
        order.append((chapter, run.split()[0]))
    table = re.findall(r"^\| \d+ \| \[(6_\d+)\].*`python (\S+\.py)`", (ROOT / "docs/map.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table
    assert [step for step in order if step in table] == table
    assert {path.split("/")[0] for _, path in order} == set(FOLDERS) - {"transformer_parallel"}  # after 6_9


def as_run(notebook, short, lessons=""):
    """Let a command that fails fail its cell; leave out the installation.

    A `short` form has the short flags of lesson.toml, behind the cell's own, and no checks. Commands and pictures are
    those of the sections that match `lessons`.
    """
    cells = []
    for cell in notebook.cells:
        command = COMMAND.search(cell.source)
        if cell.id == "setup-pip":
            cell.source = re.sub("^!pip .*$", "", cell.source, flags=re.MULTILINE)
        elif CHECKED.match(cell.source) and short or re.search("-(run|picture)$", cell.id) and not re.match(lessons, cell.id):
            continue
        elif command and not cell.source.startswith("#"):
            program = BY_PATH[command[1].removeprefix(TRACED).split()[0]]
            cell.source = f"{command[0]} {program.short if short else ''}\nassert _exit_code == 0"
        cells.append(cell)
    notebook.cells = cells
    return notebook


@pytest.fixture
def at_hand(tmp_path, monkeypatch):
    """A folder `notebooks` in a repository whose outputs are its own, and an environment for the kernel."""
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name in ("notebooks", "kernel", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "kernel"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "kernel"))
    return tmp_path / "notebooks"


def execute(notebook, folder, limit_s):
    """Run a notebook in a kernel of its own, in `folder`; what its cells printed, and their pictures."""
    import traitlets.config

    # Sockets that are files: no port is open to others. Their names must have less than 108 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        config = traitlets.config.Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        nbclient.NotebookClient(notebook, kernel_name="python3", config=config, timeout=limit_s,
                                resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return printed, [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def runs_quietly(folder, capfd, limit_s=300, **form):
    """Execute the Japanese tour in this form (`as_run`): all pictures, no warning, no clone, and neither process nor file is left."""
    notebook = as_run(nbformat.read(JAPANESE, as_version=4), **form)
    printed, pictures = execute(notebook, folder, limit_s)
    assert len(pictures) == len([cell for cell in notebook.cells if cell.source.startswith("Image(")])
    assert f"{folder.parent}\n" in printed  # the repository at hand
    assert not re.search("warning|deprecated|traceback|error", printed, re.IGNORECASE)
    assert capfd.readouterr() == ("", "")  # the kernel's own
    all_end(lambda process: Path(process.cwd()).is_relative_to(folder.parent))
    assert [path for path in (folder.parent / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []
    return printed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lessons", [
    pytest.param("p2p_collectives-", id="one lesson"),
    pytest.param("", id="all lessons", marks=pytest.mark.slow)])
def test_it_runs(lessons, at_hand, capfd):
    runs_quietly(at_hand, capfd, short=True, lessons=lessons)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_runs_as_it_stands(at_hand, capfd):
    """All commands, all checks: `pytest -n 0 -m slow -k stands tests/test_notebooks.py`, 10 to 20 minutes on 2 cores."""
    printed = runs_quietly(at_hand, capfd, limit_s=900, short=False)  # CartPole takes as long as it takes
    assert "CartPole-v1 solved in" in printed
    assert "FAIL" not in printed


def test_it_clones(at_hand):
    """Where the repository is not at hand, its first cell fetches it and goes there; also when run once more."""
    away, there = at_hand / "away", at_hand / "tutorials.git"
    (at_hand.parent / "rpc_rl").unlink()
    (there / "rpc_rl").mkdir(parents=True)
    (there / "rpc_rl/main.py").touch()
    away.mkdir()
    git = ["git", "-C", str(there), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "a"]):
        subprocess.run([*git, *command], check=True)
    (cell,) = [cell for cell in cells_of(JAPANESE, "code") if cell.id == "setup-clone"]
    cell.source = cell.source.replace('REPOSITORY = ""', f'REPOSITORY = "file://{there}"')
    again = nbformat.v4.new_code_cell(cell.source)
    printed, _ = execute(nbformat.v4.new_notebook(cells=[cell, again]), away, limit_s=60)
    assert printed.count(f"{away / 'tutorials'}\n") == 2
