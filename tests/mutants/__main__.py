"""Run the mutants and print who caught each of them, and the score."""

import importlib
import pkgutil
import sys

from tests import mutants


def main(argv=None):
    """Run the mutants of a program, or all; status 1 if one survives."""
    program, part = [*(sys.argv[1:] if argv is None else argv), "", ""][:2]
    names = [module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name != "__main__"]
    if program and program not in names:
        raise SystemExit(f"error: there are mutants of {', '.join(names)}")
    ran = by_check = 0
    survivors = []
    for name in [program] if program else names:
        for mutant in importlib.import_module(f"tests.mutants.{name}").MUTANTS:
            if part in mutant.name:
                line = mutant.caught()
                ran, by_check = ran + 1, by_check + bool(line and not mutant.test)
                print(f"{name}: {mutant.name}\n    {line or 'SURVIVED'}", flush=True)
                survivors += [] if line else [f"{name}: {mutant.name}"]
    print(f"{ran - len(survivors)} of {ran} mutants caught, {by_check} by --check; "
          f"survived: {'; '.join(survivors) or 'none'}")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
