"""The READMEs: their commands run, their flags exist, their links lead somewhere."""

import importlib
import re
import sys

import pytest

from tests.helpers import ROOT, commands_in, run

READMES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
SHORT = ["--max_episodes", "1"]  # the run that trains until solved is `make demo`
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


@pytest.mark.parametrize("command", [
    command for command in commands_in("README.md") if "HOST" not in command and "--check" not in command
], ids=" ".join)
def test_command_of_the_first_page(command, tmp_path):
    _, path, *flags = command
    result = run([sys.executable, str(ROOT / path), *flags, *SHORT], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "environment steps at" in result.stdout.splitlines()[-1]


def test_demo_is_the_documented_command():
    demo = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert demo.split() in commands_in("README.md")


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links(readme):
    text = (ROOT / readme).read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            assert (ROOT / readme).parent.joinpath(link).exists(), link
