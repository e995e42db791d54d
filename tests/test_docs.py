"""The pages: their commands, links, numbers and cells exist, and both languages say the same."""

import functools
import json
import re
import shlex

from common import ROOT
from common.lessons import lessons, programs

import pytest

from benchmarks import docs, outputs
from tests.helpers import commands_in

pytestmark = pytest.mark.quick
READMES = sorted(path.relative_to(ROOT) for path in docs.pages())
BY_PATH = {program.path: program for program in programs()}
# A command anywhere, up to a comment, a second command or the explanation after two spaces.
COMMAND = re.compile(rf"({'|'.join(lesson.folder for lesson in lessons())})/(\w+)\.py((?: (?! )[^\s`\"|;&#>）。、]+)*)")
PLACEHOLDERS = {"HOST": "localhost", "N": "3", "R": "0", "FILE": "run.pt", "DIR": "out", "NAME": "env"}


def commands():
    """Every command of a lesson that stands anywhere, once: `{"rpc_rl/main.py --world_size 3": the file}`."""
    files = [*docs.pages(), *ROOT.glob("*/*.py"), *ROOT.glob("*/*.toml"), *ROOT.glob("exercises/*/*.toml"), *ROOT.glob("notebooks/*.ipynb"),
             *ROOT.glob("docs/results/*.json"), *ROOT.glob("docs/results/transcripts/*.txt"), ROOT / "Makefile"]
    found = {}
    for file in files:
        if file.parent.name != "tests":
            text = re.sub(r" *\\\n *", " ", file.read_text(encoding="utf-8")).replace("\\n", "\n")
            for folder, name, flags in COMMAND.findall(text):
                if f"{folder}/{name}.py" in BY_PATH and " --" in flags and "--help" not in flags:
                    found.setdefault(f"{folder}/{name}.py{flags}", file.relative_to(ROOT))
    return found


@pytest.mark.parametrize(("command", "file"), commands().items())
def test_a_command_is_one_of_its_program(command, file, monkeypatch, tmp_path):
    """Its flags exist and go together: nothing is refused before a process is started."""
    path, *flags = [PLACEHOLDERS.get(word, word) for word in shlex.split(command) if word != "..."]
    monkeypatch.chdir(tmp_path)
    module = BY_PATH[path].module()
    monkeypatch.setattr(module, "run_program", lambda *_, **__: None, raising=False)
    if path.endswith("single_machine.py") or {"--resume", "--corpus", "--data_dir", "--devices", "--local-rank=0", "--master_addr"} & {*flags}:  # files, GPUs, names
        assert "--local-rank=0" in flags or module.build_parser().parse_known_args(flags)[1] == []
    else:
        module.main(flags)


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_a_table_stands_between_empty_lines(readme):
    """Else the site takes it for a paragraph, or the heading behind it for a row."""
    text = re.sub(r"^```.*?^```", "", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^[^|\n].*\n\|.*|^\|.*\n[^|\n].*", text, re.MULTILINE) == []


def test_demo_is_the_documented_command():
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE).group(1)
    assert demo.split() in commands_in("README.md")


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links(readme):
    """Each leads to a file, and its anchor to a heading there, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)  # code: `stages[0](x)`
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" not in link:
            there = (ROOT / readme).parent / link if link else ROOT / readme
            assert there.exists(), link
            if anchor and there.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = [docs.anchor_of(heading) for heading in headings]
                assert anchor in slugs, f"{link}#{anchor}"


def code_of(text):
    """The lines of some Python, without indentation, comments and empty lines."""
    lines = (re.sub(r"(^|  )#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line not in ("", "...")]


@functools.cache
def our_lines():
    return {line for path in ROOT.glob("*/*.py") for line in code_of(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_an_excerpt_shows_the_code_as_it_is(readme):
    """A listing of which most lines are ours has no other lines; one that is mostly new is the page's own example."""
    ours = our_lines()
    for listing in re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL):
        lines = code_of(listing)
        others = [line for line in lines if line not in ours]
        assert others == [] or len(others) > len(lines) / 3


def test_numbers_and_maps_are_up_to_date():
    stale = [str(path.relative_to(ROOT)) for path in docs.out_of_date()]
    assert stale == [], "python -m benchmarks.docs writes them"


EDITION = json.loads((ROOT / "docs/japanese_edition.json").read_text(encoding="utf-8"))["notebooks"]


@pytest.mark.parametrize("notebook", EDITION, ids=lambda notebook: notebook["chapter"])
def test_every_cell_has_its_row(notebook):
    """In the order of the notebook, with a sentence in both languages; the index stands on top of the page."""
    rows = json.loads((ROOT / f"docs/walk/{notebook['chapter']}.json").read_text(encoding="utf-8"))
    assert [row["cell"] for row in rows] == [*range(notebook["n_cells"])]
    assert [{"cell": row["cell"], "heading": row["heading"]} for row in rows if "heading" in row] == notebook["cells"]
    assert all(row["en"] and row["ja"] for row in rows)
    for language in ("md", "ja.md"):
        page = (ROOT / f"docs/lessons/{notebook['chapter']}.{language}").read_text(encoding="utf-8")
        assert page.index(f"<!-- map {notebook['chapter']} -->") < page.index("\n## ", page.index("<!-- map"))


@pytest.mark.parametrize("path", sorted(outputs.REPLAYS.glob("*.json")), ids=lambda path: path.stem)
def test_a_replay_shows_the_code_as_it_is(path):
    """Beside a message stands the code that sent it: `python -m benchmarks.outputs --replays NAME` records it anew."""
    for place in json.loads(path.read_text(encoding="utf-8"))["places"]:
        lines = (ROOT / place["path"]).read_text(encoding="utf-8").splitlines()
        for number, line in place["code"]:
            assert lines[number - 1].strip() == line.strip(), f"{place['path']}:{number}"


TRANSLATED = [readme for readme in READMES if readme.with_name(f"{readme.stem}.ja.md") in READMES]


@pytest.mark.parametrize("page", TRANSLATED, ids=str)
def test_both_languages_say_the_same(page):
    """The same levels of headings, commands, markers, tests and pictures, each in its language."""
    english, japanese = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).with_name(f"{page.stem}.ja.md").read_text(encoding="utf-8")
    for what in (r"^(#+) ", r"^\$?(python [^#\n]*|torchrun [^#\n]*)", r"<!-- (?:=|code|output|replay|map) ([^>]*?) -->", r"`(test_\w+)`",
                 r"\]\(([^)]*?)(?:\.ja)?\.png\)"):
        pairs = [sorted(re.findall(what, text, re.MULTILINE)) for text in (english, japanese)]
        assert pairs[0] == pairs[1], what
    assert ".ja.png)" not in english
    assert re.findall(r"\]\([^)]*(?<!\.ja)\.png\)", japanese) == []


@pytest.mark.parametrize("page", [page for page in READMES if "README" in page.name], ids=str)
def test_the_tests_that_a_readme_names_exist(page):
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8")):
        assert f"def {name}(" in tests, name
