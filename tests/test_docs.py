"""The pages: their commands, links, numbers, maps and tests exist, and both languages say the same."""

import ast
import functools
import importlib
import json
import re
import shlex

import pytest

from benchmarks import docs, outputs
from tests.helpers import ROOT, commands_in

PAGES = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
READMES = sorted(page for page in PAGES
                 if page.parts[0] != "outputs" and not any(part.startswith(".") for part in page.parts))
PLACEHOLDERS = {"HOST": "localhost"}


def module_of(path):
    name = path.removesuffix(".py").replace("/", ".")
    return importlib.import_module(name if (ROOT / path).exists() else f"{name}.__main__")


@functools.cache
def documented():
    """Every `python X.py ...`, `python -m X ...` and `torchrun ... X.py ...`, once: (script, flags)."""
    found = {}
    for commands in ([commands_in(readme) + commands_in(readme, "torchrun ") for readme in READMES]
                     + [commands_of(script) for script in sorted(ROOT.glob("*/*.py")) if script.parent.name != "tests"]):
        for command in commands:
            if command[1:3] == ["-m", "tracing"]:  # it runs a program with that program's flags
                del command[1:3]
            if command[1] == "-m":
                command[1:3] = [command[2].replace(".", "/") + ".py"]
            at = next(i for i, word in enumerate(command) if word.endswith(".py"))
            found[" ".join(command)] = (command[at], [PLACEHOLDERS.get(word, word) for word in command[at + 1 :]])
    return found


def commands_of(script):
    """The commands of a program's docstring; what they do stands behind them, after two spaces."""
    text = script.read_text()
    doc = (ast.get_docstring(ast.parse(text)) or "").replace("\\\n", " ") if "def build_parser" in text else ""
    commands = re.findall(r"^    ((?:python|torchrun) .*?)(?:   *[^- ].*)?$", doc, re.MULTILINE)
    return [shlex.split(command) for command in commands if "/" in command]


@pytest.mark.parametrize("command", documented())
def test_flags_exist(command, monkeypatch, tmp_path):
    """And go together: nothing is refused before a process is started."""
    path, flags = documented()[command]
    flags = [str(tmp_path / flag) if flag == "DIR" else flag for flag in flags]  # a folder that is made at once
    monkeypatch.chdir(ROOT)
    module = module_of(path)
    if hasattr(module, "run_program") and "--resume" not in flags:  # of a checkpoint that is there
        monkeypatch.setattr(module, "run_program", lambda *_, **__: None)
        module.main(flags)
    else:
        assert module.build_parser().parse_args(flags)


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_a_table_stands_between_empty_lines(readme):
    """Else the site takes it for a paragraph, or the heading behind it for a row."""
    text = re.sub(r"^```.*?^```", "", (ROOT / readme).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^[^|\n].*\n\|.*|^\|.*\n[^|\n].*", text, re.MULTILINE) == []


def test_demo_is_the_documented_command():
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert demo.split() in commands_in("README.md")


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links(readme):
    """Each leads to a file, and its anchor to a heading there, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", (ROOT / readme).read_text(), flags=re.MULTILINE | re.DOTALL)  # code: `stages[0](x)`
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" not in link:
            there = (ROOT / readme).parent / link if link else ROOT / readme
            assert there.exists(), link
            if anchor and there.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                slugs = [docs.anchor_of(heading) for heading in headings]
                assert anchor in slugs, f"{link}#{anchor}"


def test_numbers_and_maps_are_up_to_date():
    stale = [str(path.relative_to(ROOT)) for path in docs.out_of_date()]
    assert stale == [], "python -m benchmarks.docs writes them"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/lessons").glob("6_*.md")), ids=lambda path: path.name)
def test_every_cell_leads_to_its_section(page):
    """But for cell 0, the title."""
    maps = "".join(block[3] for block in docs.MARKED.findall(page.read_text()) if block[1] == "map")
    rows = re.findall(r"^\| (\[?\d.*?) \|", maps, re.MULTILINE)
    assert len(rows) > 1
    assert {row for row in rows if "](#" not in row} <= {"0"}


@pytest.mark.parametrize("name", outputs.COMMANDS)
def test_a_transcript_is_that_of_its_command(name):
    assert outputs.path_of(name).read_text().startswith(f"$ {outputs.COMMANDS[name]}\n")


@pytest.mark.parametrize("name", outputs.REPLAYS)
def test_a_replay_shows_the_code_as_it_is(name):
    """Beside a message stands the code that sent it: `python -m benchmarks.outputs --replays NAME` records it anew."""
    for place in json.loads(outputs.replay_of(name).read_text())["places"]:
        lines = (ROOT / place["path"]).read_text().splitlines()
        for number, line in place["code"]:
            assert lines[number - 1].strip() == line.strip(), f"{place['path']}:{number}"


TRANSLATED = [readme for readme in READMES if readme.with_name(f"{readme.stem}.ja.md") in READMES]


@pytest.mark.parametrize("page", TRANSLATED, ids=str)
def test_both_languages_say_the_same(page):
    """The same levels of headings, commands, markers, tests and pictures, each in its language."""
    english, japanese = (ROOT / page).read_text(), (ROOT / page).with_name(f"{page.stem}.ja.md").read_text()
    for what in (r"^(#+) ", r"^\$?(python [^#\n]*|torchrun [^#\n]*)", r"<!-- (?:=|code|output|replay|map) ([^>]*?) -->", r"`(test_\w+)`",
                 r"\]\(([^)]*?)(?:\.ja)?\.png\)"):
        pairs = [sorted(re.findall(what, text, re.MULTILINE)) for text in (english, japanese)]
        assert pairs[0] == pairs[1], what
    assert ".ja.png)" not in english
    assert re.findall(r"\]\([^)]*(?<!\.ja)\.png\)", japanese) == []


@pytest.mark.parametrize("page", [page for page in READMES if "README" in page.name], ids=str)
def test_the_tests_of_what_was_mended_exist(page):
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text()):
        assert f"def {name}(" in tests, name
