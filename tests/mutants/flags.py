"""Each flag ignored once, wherever a lesson takes it: its default stands in its place.

Generated: `args.lr` becomes 0.01, and so on. Each is run with the rows of lesson.toml.
"""

import ast
import re
from pathlib import Path

from common.lessons import programs

from tests.mutants import ROOT, Mutant
from tests.test_checks import NOT_COMPARED, flags_of

ELSEWHERE = ("check", "comparison", "results", "require", "parse", "main", "finish")  # files and functions
# What stands in a line whose flag changes no number: a bar, threads, what is made and not used, a shorter
# way, a rate that each epoch sets anew or that a checkpoint brings, what torch decides by itself; and the
# synthetic text of rpc_rnn, which its check takes as it is (tests/test_rpc_rnn.py has its seeds).
NO_NUMBER = ("= MarkovChain(", "chain.draw(",
             "report.progress(", "report.log(", "Rounds(", "count_batches(", "share = range(", "-(-len(share)", "rpc_options(", "patterns =",
             "self.all_have_joined =", "make_schedule(", "self.n_trainers =", "bucket_cap_mb=",
             "optim.AdamW(self.parameters(), lr=self.args.lr)", "self.mesh = mesh_of(model, args.row)", "optim.SGD(net.parameters(), lr=args.lr, momentum=MOMENTUM,")


class Ignored(Mutant):
    """Is tried with each row of flags that has the one that is ignored."""

    def caught(self):
        for row in self.rows:
            self.flags = row
            if line := super().caught():
                return line
        return None


def places(text, names):
    """Where a lesson takes a flag in what its ranks run: (name, number of the line, what stands there)."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and not any(word in function.name for word in ELSEWHERE):
            for node in ast.walk(function):
                if (isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load)
                        and ast.unparse(node.value) in ("args", "self.args")
                        and not any(word in text.splitlines()[node.lineno - 1] for word in NO_NUMBER)):
                    yield node.attr, node.lineno - 1, ast.unparse(node)


def replaced(text, number, source, value):
    """The line with `value` in place of `source`, and as it is, both with as much before it as makes it unique."""
    lines = text.splitlines(keepends=True)
    first = next(first for first in range(number, -1, -1) if text.count("".join(lines[first : number + 1])) == 1)
    line = re.sub(rf"\b{re.escape(source)}\b", repr(value), lines[number])
    return "".join(lines[first : number + 1]), "".join([*lines[first:number], line])


def mutants_of(program):
    """The mutants of a program, in its own file; of a main.py, in the other files of its folder, too."""
    defaults, path = vars(program.module().build_parser().parse_args([])), Path(program.path)
    others = [other.relative_to(ROOT) for other in sorted((ROOT / path).parent.glob("*.py"))
              if path.stem == "main" and f"{path.parent}.{other.stem}" not in PROGRAMS
              and not any(word in other.stem for word in ELSEWHERE)]
    compared = {flag[2:] for flag in flags_of(program) - {*NOT_COMPARED, *program.not_compared} if defaults[flag[2:]] is not None}
    for file in [path, *others]:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name, number, source in dict.fromkeys(places(text, compared)):
            mutant = Ignored(f"{program}: --{name} ignored in line {number + 1} of {file.name}", str(file),
                             *replaced(text, number, source, defaults[name]), check=".", program=str(path))
            mutant.rows = [row.split() for row in program.check if f"--{name} " in f"{row} "]
            yield mutant


PROGRAMS = {str(program) for program in programs()}
MUTANTS = [mutant for program in programs() for mutant in mutants_of(program)]
