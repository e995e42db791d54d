"""Run the `--check` of a program, and leave its result as data for a program that judges it.

    python -m common.judged RESULT.json rpc_rl.main --world_size 3

RESULT.json holds `{"passed": 12}`, the number of comparisons; or `{"findings": [...]}`, those that
do not hold (`oracle.CheckFailedError`); or `{"failure": "rank 1 (observer1) ...", "kind": 2}` if a
rank has failed (`launch.Failure`). Without a file, the program has ended in another way.
"""

import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path

from common.launch import RunFailedError
from common.oracle import CheckFailedError


def main(result: str, module: str, *flags: str) -> None:
    """Run, write the result, and end as the program does."""
    faulthandler.register(signal.SIGUSR1)  # on request, show where this process is
    found = {}
    try:
        differences = importlib.import_module(module).main(["--check", *flags])
        found = {"passed": len(differences)}
    except CheckFailedError as error:
        found = {"findings": error.findings}
        raise
    except RunFailedError as error:
        found = {"failure": f"rank {error.failure.rank} {error.failure.what}",
                 "kind": error.failure.kind}
        raise
    finally:
        if found:
            Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
