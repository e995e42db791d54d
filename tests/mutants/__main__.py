"""Run the mutants and print who caught each of them, and the score."""

import importlib
import pkgutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests import mutants

AT_ONCE = 3  # on two cores: they wait for each other's ranks, too
KINDS = ("flags", "races", "resume")  # modules; all others have numerics


def main(argv=None):
    """Run the mutants of a program, or all; status 1 if one survives."""
    program, part = [*(sys.argv[1:] if argv is None else argv), "", ""][:2]
    names = [module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name != "__main__"]
    if program and program not in names:
        raise SystemExit(f"error: there are mutants of {', '.join(names)}")
    chosen = [(name, mutant) for name in ([program] if program else names)
              for mutant in importlib.import_module(f"tests.mutants.{name}").MUTANTS if part in mutant.name]
    if (tests := sorted({mutant.test for _, mutant in chosen if mutant.test})) and (failed := mutants.failing(tests, AT_ONCE)):
        raise SystemExit("\n".join(["error: what is to catch a mistake fails without one:", *failed]))
    tried, caught, by_check, survivors = Counter(), Counter(), 0, []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (name, mutant), line in zip(chosen, pool.map(lambda one: one[1].caught(), chosen), strict=True):
            kind = name if name in KINDS else "numerics"
            tried[kind] += 1
            caught[kind] += bool(line)
            by_check += bool(line and not mutant.test)
            survivors += [] if line else [f"{name}: {mutant.name}"]
            print(f"{name}: {mutant.name}\n    {line or 'SURVIVED'}", flush=True)
    for kind in tried:
        print(f"{kind}: {caught[kind]} of {tried[kind]} caught")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught, {by_check} by --check; "
          f"survived: {'; '.join(survivors) or 'none'}")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
