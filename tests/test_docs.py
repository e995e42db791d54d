"""The READMEs: their flags exist, their links lead somewhere. The tests of each folder run their commands."""

import importlib
import re

import pytest

from tests.helpers import ROOT, commands_in

READMES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
PLACEHOLDERS = {"HOST": "localhost"}


def module_of(path):
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


def documented():
    """Every `python X.py ...` and `torchrun ... X.py ...` of the READMEs: (script, flags), each once."""
    found = {}
    for readme in READMES:
        for command in commands_in(readme) + commands_in(readme, "torchrun "):
            at = next(i for i, word in enumerate(command) if word.endswith(".py"))
            found[" ".join(command)] = (command[at], [PLACEHOLDERS.get(word, word) for word in command[at + 1 :]])
    return found


@pytest.mark.parametrize("command", documented())
def test_flags_exist(command, monkeypatch, tmp_path):
    path, flags = documented()[command]
    monkeypatch.chdir(tmp_path)
    assert module_of(path).build_parser().parse_args(flags)


def test_demo_is_the_documented_command():
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert demo.split() in commands_in("README.md")


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links(readme):
    text = (ROOT / readme).read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            assert (ROOT / readme).parent.joinpath(link).exists(), link
