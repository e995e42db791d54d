"""Realistic mistakes, one at a time in a copy of the repository: does `--check`, or a test, notice?

    python -m tests.mutants                         all (an hour)
    python -m tests.mutants rpc_rl                  those of one program
    python -m tests.mutants rpc_rl zero_grad        those of its mutants whose name contains this

Each module here has the mutants of one program.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider"]
LIMIT_S = 300  # for one mutant: a run that hangs is ended by its test after 180
NOT_COPIED = shutil.ignore_patterns(".*", "outputs", "results", "lessons", "__pycache__", "*.egg-info")  # of docs/ what is large


@dataclasses.dataclass
class Mutant:
    """One mistake.

    Args:
        name: the mistake in words: "zero_grad forgotten".
        file: the file that has it, from the root.
        old, new: the text that is there, exactly once, and what stands there instead.
        check: a regular expression of the name of a finding that must not hold, or of how a rank
            fails: "error: rank 1".
        test: the test that must fail, where `--check` cannot see it: "tests/test_rpc_rl.py::test_it".
        flags: of the program, beside `--check`.
        program: the script; by default the file itself.
    """

    name: str
    file: str
    old: str
    new: str
    check: str = ""
    test: str = ""
    flags: tuple = ()
    program: str = ""

    def caught(self):
        """Run it; the line that caught it, or None if it survived."""
        with copied() as (tree, environ):
            path = tree / self.file
            text = path.read_text(encoding="utf-8")
            assert text.count(self.old) == 1, f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times"
            path.write_text(text.replace(self.old, self.new), encoding="utf-8")
            return self._caught_by_test(tree, environ) if self.test else self._caught_by_check(tree, environ)

    def _caught_by_check(self, tree, environ):
        program, result = (self.program or self.file).removesuffix(".py").replace("/", "."), tree / "result.json"
        command = [sys.executable, "-m", "common.judged", str(result), program, *map(str, self.flags), "--output_dir", str(tree / "outputs")]
        status, _ = _run(command, tree, environ)
        found = json.loads(result.read_text(encoding="utf-8")) if status == 1 and result.exists() else {}
        names = [finding["what"] for finding in found.get("findings", [])]
        names += [f"error: {found['failure']}"] if "failure" in found else []
        return next((name for name in names if re.search(self.check, name)), None)

    def _caught_by_test(self, tree, environ):
        status, output = _run([*PYTEST, "-n", "0", "-x", self.test], tree, environ)
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "E  "))]
        return f"{self.test}: {failed[0].strip()}" if status == 1 and failed else None


@contextlib.contextmanager
def copied():
    """A copy of the repository, and an environment in which Python imports from there."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        yield tree, {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def failing(tests, at_once):
    """The lines of those of these tests that fail in a copy without a mistake: they would catch any."""
    with copied() as (tree, environ):
        status, output = _run([*PYTEST, "-n", str(at_once), "-rfE", *tests], tree, environ, limit_s=len(tests) * LIMIT_S)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed if status == 0 or failed else output.splitlines()[-5:]


def _run(command, folder, environ, limit_s=LIMIT_S):
    """The status and output of a command; a mistake that hangs has the status 1 of what is caught by a limit."""
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, encoding="utf-8", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return None, output
