"""Prints what `predict` returns for each argument of the command, its keyword arguments in JSON.

In the copy, the learner's function stands here.
"""

import json
import math
import sys


def predict(**arguments: int | float | str) -> int | float:
    """Return a number; the learner's function does."""
    raise NotImplementedError


def main() -> None:
    """Print, at the end, a list in JSON: each number, or the text of what was returned instead."""
    numbers = [predict(**json.loads(arguments)) for arguments in sys.argv[1:]]
    shown = [number if isinstance(number, int | float) and math.isfinite(number) else repr(number)
             for number in numbers]
    print(f"\npredicted: {json.dumps(shown)}")


if __name__ == "__main__":
    main()
